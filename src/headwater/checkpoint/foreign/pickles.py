"""Others' pickles, read without importing or calling anything that they name.

A pickle names classes and functions to call. Here each name stands for an inert class of this module, so that a
pickle can build records and nothing else; the real torch classes are never handed out, since a pickle could alter them.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headwater.checkpoint.foreign.archive import entry_range, open_archive
from headwater.errors import UserError

_LARGEST_PICKLE = 1 << 28
_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
    "torch.distributed._shard.sharded_tensor.metadata",
    "megatron.core.dist_checkpointing.strategies.torch",
)
_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
    "MEM_FORMAT_ENCODING",
    "_StorageInfo",
    "_StoragePrefix",
    # Megatron keeps the plans of all ranks in its metadata.
    "SavePlan",
    "MCoreSavePlan",
    "WriteItem",
    "WriteItemType",
    "TensorWriteData",
    "BytesIOWriteData",
)
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0FNU",
    "complex64": "C64",
    "complex128": "C128",
}
_STORAGE_DTYPES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
}


class RefusedPickleError(UserError):
    """A pickle that names something beyond what its kind of file may hold, or that is damaged."""


class Record:
    """An inert object of a pickle: `kind` is the class that it was written as, its state becomes plain attributes."""

    kind = ""
    arguments: tuple[Any, ...] = ()

    def __new__(cls, *arguments: Any, **_: Any) -> Record:
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state

    def __call__(self, *_: Any, **__: Any) -> Record:
        return self

    def append(self, _: Any) -> None:
        """A pickle may fill what it takes for a list; nothing is kept of it."""

    def extend(self, _: Any) -> None:
        """See `append`."""

    def __setitem__(self, _: Any, __: Any) -> None:
        """A pickle may fill what it takes for a dict; nothing is kept of it."""


def _inert(kind: str) -> type[Record]:
    """A class of its own for each load, so that a pickle that alters it reaches no other load."""
    return type("Record", (Record,), {"kind": kind})


class _BoundedUnpickler(pickle._Unpickler):
    """pickle's own Python implementation: it allocates no more than the file is long.

    The C one makes room for whatever index or length a damaged pickle names, which can be tens of gigabytes.
    """

    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }


class _MetadataUnpickler(_BoundedUnpickler):
    """Admits the metadata classes of torch.distributed.checkpoint and the values that they are made of."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _METADATA_MODULES and name in _METADATA_CLASSES:
            return _inert(name)
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        # Made anew for each name: a pickle can set attributes of a function, and these end with the load.
        values: dict[tuple[str, str], Any] = {
            ("torch", "Size"): lambda values=(): tuple(values),
            ("torch.serialization", "_get_layout"): lambda layout: layout,
            ("collections", "OrderedDict"): OrderedDict,
            # An enumeration's member, as some versions of Python pickle it; the stand-in looks nothing up.
            ("builtins", "getattr"): lambda _, member: member,
        }
        if (module, name) in values:
            return values[module, name]
        if module.split(".")[0] == "pathlib" and name in (
            "PosixPath",
            "PurePosixPath",
            "WindowsPath",
            "PureWindowsPath",
        ):
            return lambda *parts: "/".join(map(str, parts))
        raise RefusedPickleError(f"it names {module}.{name}, which no metadata needs; nothing of it was run")

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedPickleError("it refers to objects outside of itself")


def load_metadata(path: Path) -> Record:
    """The `Metadata` of a torch.distributed.checkpoint folder as an inert record.

    Raises RefusedPickleError, in one line with the path, where the file cannot be read, is damaged, or names anything
    but metadata.
    """
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except RefusedPickleError as error:
        raise RefusedPickleError(f"{path}: refused: {error}") from None
    except OSError as error:
        raise RefusedPickleError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a damaged pickle raises whatever its half-built objects raise
        raise RefusedPickleError(f"{path}: not a readable pickle ({type(error).__name__})") from None
    if not isinstance(found, Record) or found.kind != "Metadata":
        raise RefusedPickleError(f"{path}: not the metadata of torch.distributed.checkpoint")
    return found


class _ValuesUnpickler(_BoundedUnpickler):
    """Plain values and one-element tensors (as numbers); everything else becomes an inert record."""

    def __init__(self, file: io.BytesIO, descriptor: int, begin: int, entries: dict[str, Any]) -> None:
        super().__init__(file)
        self._descriptor, self._begin, self._entries = descriptor, begin, entries

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._number
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return _inert(name)

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def _number(self, storage: Any, offset: Any = 0, size: Any = (0,), *_: Any) -> Any:
        kind, key = getattr(storage[1], "kind", ""), storage[2]
        dtype = np.dtype(_STORAGE_DTYPES[kind]) if kind in _STORAGE_DTYPES else None
        entry = self._entries.get(str(key))
        if dtype is None or entry is None or int(np.prod(size)) != 1 or offset < 0:
            return None
        first, last = entry_range(self._descriptor, self._begin, entry)
        at = first + offset * dtype.itemsize
        if at + dtype.itemsize > last:
            return None
        return np.frombuffer(os.pread(self._descriptor, dtype.itemsize, at), dtype)[0].item()


def load_values(path: Path, begin: int, end: int) -> Any:
    """What a small `torch.save` archive in bytes begin..end of a file holds, inert: see `_ValuesUnpickler`.

    None where it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        with open_archive(descriptor, begin, end) as archive:
            names = {entry.filename: entry for entry in archive.infolist()}
            (pickled,) = (name for name in names if name.endswith("/data.pkl"))
            entries = {name.rpartition("/")[2]: entry for name, entry in names.items() if "/data/" in name}
            if names[pickled].file_size > _LARGEST_PICKLE:
                return None
            raw = archive.read(pickled)
        return _ValuesUnpickler(io.BytesIO(raw), descriptor, begin, entries).load()
    except Exception:  # a damaged pickle raises whatever its half-built objects raise
        return None
    finally:
        os.close(descriptor)
