"""One save through NVRx: what it is to hold, whether it may be read again, and the proof that it was written."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.digest import digest_all
from headwater.checkpoint.dtypes import dtype_name
from headwater.checkpoint.manifest import ChunkEntry
from headwater.checkpoint.ranks import NVRX_FOLDER
from headwater.checkpoint.save_order import SaveOrder
from headwater.checkpoint.snapshot import check_chunks
from headwater.checkpoint.strategies.nvrx_agent import REPORT_NAME
from headwater.checkpoint.strategies.nvrx_items import Items
from headwater.checkpoint.strategies.nvrx_writer import WriterLostError
from headwater.checkpoint.write_request import difference_text
from headwater.errors import HeadwaterError


@dataclass(frozen=True)
class Part:
    """What a manifest says of a chunk but where it lies, and its live digest."""

    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    digest: int

    def entry(self, file: str, begin: int, end: int) -> ChunkEntry:
        """At its place in a file."""
        return ChunkEntry(file=file, begin=begin, end=end, **vars(self))


class Reading:
    """Whether a save may be read from live tensors again. Its fence waits while it is, and then it may no more."""

    def __init__(self, items: Items) -> None:
        self.lock = threading.Lock()
        self.passed = False
        self._items = items

    def wait(self, timeout: float) -> None:
        if not self.lock.acquire(timeout=timeout):
            raise HeadwaterError(f"a save that NVRx's writer lost is not staged again after {timeout:g} s")
        self.passed = True
        self._items.drop_live()  # memory that is freed now must really be free
        self.lock.release()


@dataclass
class Save:
    """One save until it has ended. folder: of the latest attempt, which nobody else sees."""

    token: str
    order: SaveOrder
    parts: list[Part]
    items: Items
    reading: Reading
    attempts: int = 0
    folder: Path = Path()
    started: float = field(default_factory=time.perf_counter)
    staged_at: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether it has tensors that training may change."""
        return bool(self.items.identity)


def parts_of(chunks: Mapping[str, Sequence[Chunk]]) -> list[Part]:
    """With the digests of the live tensors, before anyone has copied them. Raises as `snapshot` does."""
    for parts in chunks.values():
        check_chunks(parts)
    flat = [(component, chunk) for component, parts in chunks.items() for chunk in parts]
    live = digest_all([chunk.tensor for _, chunk in flat])
    return [
        Part(c, k.name, dtype_name(k.tensor.dtype), tuple(k.tensor.shape), k.global_shape, k.offset, digest)
        for (c, k), digest in zip(flat, live, strict=True)
    ]


def read_report(folder: Path) -> dict[str, Any]:
    """What NVRx's process says of a save; see `WriteAndProve`.

    Raises WriterLostError where it says nothing, OSError where the file system refused, HeadwaterError else.
    """
    try:
        report = json.loads((folder / REPORT_NAME).read_bytes())
    except FileNotFoundError:
        raise WriterLostError("NVRx's writer process ended without a word") from None
    if report.get("errno") is not None:
        raise OSError(report["errno"], report["error"])
    if "error" in report:
        raise HeadwaterError(f"NVRx could not write the checkpoint: {report['error']}")
    return report


def proven(save: Save, report: dict[str, Any]) -> tuple[list[ChunkEntry], dict[str, tuple[int, int]]]:
    """Entries of all chunks; size and checksum of each file by its name. Raises HeadwaterError where one differs."""
    told = Counter({(name, tuple(offset)): len(digests) for name, offset, _, _, digests in report["items"]})
    if +told != Counter(place.item for place in save.items.places):
        raise HeadwaterError(f"saving step {save.order.step} failed: NVRx tells of other tensors than it was given")
    found = {
        (name, tuple(offset)): (path, begin, iter(digests)) for name, offset, path, begin, digests in report["items"]
    }
    entries, differing = [], []
    for part, place in zip(save.parts, save.items.places, strict=True):
        path, begin, digests = found[place.item]
        if next(digests) != part.digest:
            differing.append(f"{part.component} {part.name}")
        entries.append(part.entry(f"{NVRX_FOLDER}/{path}", begin + place.begin, begin + place.end))
    if differing:
        raise HeadwaterError(difference_text(Path(f"of step {save.order.step}"), differing))
    return entries, {path: (size, checksum) for path, size, checksum in report["files"]}
