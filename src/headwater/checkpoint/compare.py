"""Which stored chunks of one folder repeat, byte for byte, in another.

Ranges are read in parallel with pread and compared piece by piece. A pair is given up at its first difference, except
for Adam's moments: of those a part that repeats is evidence too, so they are read to the end. Nothing is unpickled, no
model is built.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from headwater.checkpoint.foreign.archive import BadArchiveError, storage_range
from headwater.checkpoint.foreign.folder import read_folder
from headwater.checkpoint.foreign.record import ByteRange, StoredChunk
from headwater.checkpoint.freshness import Pair, Repeat, Verdict, in_part_counts, judge, pair_up
from headwater.errors import UserError

PIECE = 1 << 20
_SEGMENT = 32 * PIECE
_THREADS = 8
_STALL_SECONDS = 300.0
_EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "BF16": ("<u2", 0xFF << 7),
    "F16": ("<u2", 31 << 10),
}
# Of a healthy second moment one element in some ten thousand repeats by chance, so 16 in a row of 64 do not.
_RUN = 64
_RUN_LIVE = 16

OnBytes = Callable[[int], None]
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def check_freshness(old: Path, new: Path) -> Verdict:
    """Whether the checkpoint folder `new` is newer than `old`, by the rules of `judge`.

    Raises UserError, in one line, where a folder is no known checkpoint, is damaged, or cannot be read.
    """
    before, after = read_folder(old), read_folder(new)
    return judge(before, after, find_repeats(pair_up(before, after)))


def bytes_to_compare(pairs: Iterable[Pair]) -> int:
    """How many bytes `find_repeats` looks at, at most."""
    return sum(chunk.bytes.end - chunk.bytes.begin for pair in pairs for chunk in (pair.old, pair.new))


@dataclass
class _Comparison:
    """One pair's state; the last three only ever go from False to True, so threads need no lock."""

    pair: Pair
    differs: bool = False
    live: bool = False
    in_part: bool = False

    @property
    def decided(self) -> bool:
        return self.differs and (self.in_part or not in_part_counts(self.pair.new))


@dataclass(frozen=True)
class _Segment:
    comparison: _Comparison
    begin: int
    end: int


def find_repeats(pairs: Sequence[Pair], on_bytes: OnBytes | None = None) -> dict[tuple[object, ...], Repeat]:
    """For each pair, by its chunks' place, whether the bytes repeat.

    on_bytes: called from the calling thread with the number of bytes done since the last call.
    Raises UserError where they cannot be read.
    """
    comparisons = [_Comparison(pair) for pair in pairs]
    for _ in _parallel(_locate, comparisons, "finding tensors"):
        pass
    segments = [segment for comparison in comparisons for segment in _segments(comparison)]
    for segment in _parallel(_compare, segments, "comparing tensors"):
        if on_bytes:
            on_bytes(2 * (segment.end - segment.begin))
    return {c.pair.old.place: Repeat(not c.differs, c.live, c.differs and c.in_part) for c in comparisons}


def _locate(comparison: _Comparison) -> None:
    comparison.pair = Pair(_payload(comparison.pair.old), _payload(comparison.pair.new))


def _payload(chunk: StoredChunk) -> StoredChunk:
    """The chunk with the range of the tensor's own bytes."""
    stored = chunk.bytes
    if not stored.archive:
        return chunk
    try:
        descriptor = os.open(stored.path, os.O_RDONLY)
        try:
            begin, end = storage_range(descriptor, stored.begin, stored.end)
        finally:
            os.close(descriptor)
    except BadArchiveError as error:
        raise UserError(f"{stored.path}: {chunk.key} at byte {stored.begin}: {error}") from None
    except OSError as error:
        raise UserError(f"{stored.path}: cannot be read ({error.strerror})") from None
    return replace(chunk, bytes=ByteRange(stored.path, begin, end))


def _segments(comparison: _Comparison) -> Iterator[_Segment]:
    old, new = comparison.pair.old.bytes, comparison.pair.new.bytes
    size = old.end - old.begin
    if size != new.end - new.begin:
        comparison.differs = True
        return
    for begin in range(0, size, _SEGMENT):
        yield _Segment(comparison, begin, min(begin + _SEGMENT, size))


_buffers = threading.local()


def _compare(segment: _Segment) -> _Segment:
    comparison = segment.comparison
    old, new = comparison.pair.old, comparison.pair.new
    if comparison.decided:
        return segment
    if not hasattr(_buffers, "pair"):
        _buffers.pair = np.empty(PIECE, np.uint8), np.empty(PIECE, np.uint8)
    first, second = _buffers.pair
    try:
        a = os.open(old.bytes.path, os.O_RDONLY)
        try:
            b = os.open(new.bytes.path, os.O_RDONLY)
            try:
                for begin in range(segment.begin, segment.end, PIECE):
                    size = min(PIECE, segment.end - begin)
                    _read(a, old.bytes.begin + begin, first[:size])
                    _read(b, new.bytes.begin + begin, second[:size])
                    _judge_piece(comparison, first[:size], second[:size])
                    if comparison.decided:
                        break
            finally:
                os.close(b)
        finally:
            os.close(a)
    except OSError as error:
        raise UserError(f"{new.key}: cannot be read from {old.bytes.path} and {new.bytes.path} ({error})") from None
    return segment


def _judge_piece(comparison: _Comparison, old: np.ndarray, new: np.ndarray) -> None:
    """Sets flags, and never clears one that another thread may have set."""
    chunk = comparison.pair.new
    if not _same(old, new):
        comparison.differs = True
    elif not comparison.live and is_live(new, chunk.dtype):
        comparison.live = True
    if in_part_counts(chunk) and not comparison.in_part and has_still_run(old, new, chunk.dtype):
        comparison.in_part = True


def _read(descriptor: int, offset: int, into: np.ndarray) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:].data], offset + done)
        if count == 0:
            raise OSError("the file ends early")
        done += count


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    whole = len(a) // 8 * 8
    return bool(np.array_equal(a[:whole].view("<u8"), b[:whole].view("<u8"))) and bool((a[whole:] == b[whole:]).all())


def is_live(data: np.ndarray, dtype: str) -> bool:
    """Whether a piece (uint8) of a tensor has an element that decay would change: a normal, finite number.

    Zeros stay zero, infinities and NaNs stay what they are, and a subnormal number times 0.999 rounds to itself: they
    repeat in the healthiest run. For dtypes that are no plain floats every non-zero byte counts.
    """
    if dtype not in _EXPONENTS:
        return bool(data.any())
    kind, mask = _EXPONENTS[dtype]
    elements = data[: len(data) // np.dtype(kind).itemsize * np.dtype(kind).itemsize].view(kind)
    for start, end in ((0, 4096), (4096, len(elements))):  # the first page tells, in almost every chunk
        exponents = elements[start:end] & np.array(mask, kind)
        if ((exponents != 0) & (exponents != mask)).any():
            return True
    return False


def has_still_run(old: np.ndarray, new: np.ndarray, dtype: str) -> bool:
    """Whether 64 neighbours of two pieces (uint8, of one plain float dtype) repeat, 16 normal numbers among them."""
    kind, mask = _EXPONENTS[dtype]
    whole = len(new) // np.dtype(kind).itemsize * np.dtype(kind).itemsize
    before, after = old[:whole].view(kind), new[:whole].view(kind)
    still = before == after
    if np.count_nonzero(still) < _RUN_LIVE:
        return False
    rows = still[: len(still) // _RUN * _RUN].reshape(-1, _RUN)
    found = np.flatnonzero(rows.all(axis=1))
    exponents = after[: rows.size].reshape(-1, _RUN)[found] & np.array(mask, kind)
    return bool((((exponents != 0) & (exponents != mask)).sum(axis=1) >= _RUN_LIVE).any())


def _parallel(work: Callable[[_In], _Out], items: Sequence[_In], what: str) -> Iterator[_Out]:
    """The results of `work` as they come, by daemon threads: a file system that hangs must not hang the exit too.

    Raises the first error of `work`, and UserError when nothing comes back for a long time.
    """
    todo: queue.SimpleQueue[_In] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[_Out | None, BaseException | None]] = queue.SimpleQueue()
    stop = threading.Event()
    for item in items:
        todo.put(item)

    def run() -> None:
        while not stop.is_set():
            try:
                done.put((work(todo.get_nowait()), None))
            except queue.Empty:
                return
            except BaseException as error:
                done.put((None, error))

    for number in range(min(_THREADS, len(items))):
        threading.Thread(target=run, name=f"{what} {number}", daemon=True).start()
    try:
        for _ in items:
            try:
                result, error = done.get(timeout=_STALL_SECONDS)
            except queue.Empty:
                raise UserError(f"{what}: nothing was read for {_STALL_SECONDS:.0f} s; is the disk there?") from None
            if error is not None:
                raise error
            yield result  # pyright: ignore[reportReturnType]
    finally:
        stop.set()
