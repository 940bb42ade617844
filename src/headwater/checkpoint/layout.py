"""Where each chunk lies in a safetensors file; shared by all who write one. Needs no torch.

The header is padded so that the data begins on a page, and chunks go by falling element size, so that all are
aligned and there are no holes. Readers compare headers byte for byte, so another layout is another format version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.checkpoint.dtype_sizes import ITEMSIZES

PAGE = 4096


@dataclass(frozen=True)
class Box:
    """What a file says of a chunk: its name, safetensors dtype, and its place in the global tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]

    @property
    def name_in_file(self) -> str:
        """The chunk's own name, with the offset behind it if it is a part."""
        return self.name if self.shape == self.global_shape else f"{self.name}@{','.join(map(str, self.offset))}"


@dataclass(frozen=True)
class FileLayout:
    """header: the file's first bytes. order: indices of the boxes as they lie in the file.
    ranges: of each box as given, its first byte in the file and the one behind its last. size: of the whole file.
    """

    header: bytes
    order: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    size: int


def lay_out(boxes: Sequence[Box]) -> FileLayout:
    """The safetensors file that holds these boxes. Raises ValueError when two would have one name in it."""
    order = sorted(range(len(boxes)), key=lambda index: -ITEMSIZES[boxes[index].dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places = [(0, 0)] * len(boxes)
    position = 0
    for index in order:
        box = boxes[index]
        name = box.name_in_file
        if name in entries:
            raise ValueError(f"two chunks would be called {name} in one file")
        places[index] = (position, position + box.nbytes)
        entries[name] = {"dtype": box.dtype, "shape": list(box.shape), "data_offsets": list(places[index])}
        position += box.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    header = len(text).to_bytes(8, "little") + text
    ranges = tuple((len(header) + begin, len(header) + end) for begin, end in places)
    return FileLayout(header, tuple(order), ranges, len(header) + position)
