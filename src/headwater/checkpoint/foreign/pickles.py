"""Others' pickles, read without importing or calling anything that they name.

A pickle names classes and functions to call. Here each name stands for an inert class of this module, so that a
pickle can build records and nothing else; the real torch classes are never handed out, since a pickle could alter them.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headwater.checkpoint.foreign.archive import BadArchiveError, entry_range, open_archive
from headwater.errors import UserError

_LARGEST_PICKLE = 1 << 28
_LARGEST_METADATA = 1 << 30  # the plans of thousands of ranks take some hundred megabytes
_LONGEST_PATH = 4096
_MOST_DIMENSIONS = 64
_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
    "torch.distributed._shard.sharded_tensor.metadata",
    "megatron.core.dist_checkpointing.strategies.torch",
)
_METADATA_CLASSES = (
    "Metadata",
    "MCoreMetadata",  # megatron-core 0.15's own, with fields more
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
_LARGEST_TENSOR_PICKLE = 1 << 16
_TENSOR_STORAGES = {"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
_STORAGE_DTYPES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
}


# No pickle of a checkpoint needs these. None would be run, but who finds them should hear of it.
_RUNNERS = ("os", "posix", "nt", "subprocess", "pty", "runpy", "importlib", "ctypes", "socket", "shutil", "sys", "code")
_RUNNING_BUILTINS = ("eval", "exec", "compile", "__import__", "open")


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


def _checked(opcode: int, keys: slice) -> Callable[[Any], None]:
    """How an opcode is carried out, after a look at those of the stack's objects that become keys."""
    load: Callable[[Any], None] = pickle._Unpickler.dispatch[opcode]

    def run(unpickler: Any) -> None:
        _check_keys(unpickler.stack[keys])
        load(unpickler)

    return run


class _BoundedUnpickler(pickle._Unpickler):
    """pickle's own Python implementation: it allocates no more than the file is long.

    The C one makes room for whatever index or length a damaged pickle names, which can be tens of gigabytes.
    Keys are checked before they are hashed: Python's hash of a tuple recurses into it without a limit, so that one
    nested deeply enough kills the process, and one that holds itself twice at each level takes for ever.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]},
        pickle.SETITEM[0]: _checked(pickle.SETITEM[0], slice(-2, -1)),
        pickle.SETITEMS[0]: _checked(pickle.SETITEMS[0], slice(None, None, 2)),
        pickle.DICT[0]: _checked(pickle.DICT[0], slice(None, None, 2)),
        pickle.ADDITEMS[0]: _checked(pickle.ADDITEMS[0], slice(None)),
        pickle.FROZENSET[0]: _checked(pickle.FROZENSET[0], slice(None)),
    }


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        for part in key if type(key) is tuple else (key,):
            if part is not None and not isinstance(part, str | bytes | int | float | Record | type):
                raise RefusedPickleError("a key of a dictionary or set in it is nested")


def _empty(items: tuple[Any, ...]) -> OrderedDict[Any, Any]:
    """A pickle sets the items of what it makes one by one, where the keys are checked."""
    if items:
        raise RefusedPickleError("an OrderedDict in it is made with items")
    return OrderedDict()


def _shape(values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple) or len(values) > _MOST_DIMENSIONS:
        raise RefusedPickleError("a shape in it is none")
    return tuple(values)


def _path(parts: tuple[Any, ...]) -> str:
    if not all(isinstance(part, str) for part in parts) or sum(map(len, parts)) > _LONGEST_PATH:
        raise RefusedPickleError("a path in it is none")
    return "/".join(parts)


def _shown(module: str, name: str) -> str:
    """What a pickle names, fit for one line of a message."""
    return f"{module}.{name}"[:100].encode("unicode_escape").decode()


class _MetadataUnpickler(_BoundedUnpickler):
    """Admits the metadata classes of torch.distributed.checkpoint and the values that they are made of."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _METADATA_MODULES and name in _METADATA_CLASSES:
            return _inert(name)
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        # Made anew for each name: a pickle can set attributes of a function, and these end with the load.
        values: dict[tuple[str, str], Any] = {
            ("torch", "Size"): lambda values=(): _shape(values),
            ("torch.serialization", "_get_layout"): lambda layout: layout,
            ("collections", "OrderedDict"): lambda *items: _empty(items),
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
            return lambda *parts: _path(parts)
        raise RefusedPickleError(f"it names {_shown(module, name)}, which no metadata needs; nothing of it was run")

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedPickleError("it refers to objects outside of itself")


def load_metadata(path: Path) -> Record:
    """The `Metadata` of a torch.distributed.checkpoint folder as an inert record.

    Raises RefusedPickleError, in one line with the path, where the file cannot be read, is damaged, or names anything
    but metadata.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
            raise RefusedPickleError("not a regular file")
        if path.stat().st_size > _LARGEST_METADATA:
            raise RefusedPickleError(f"larger than {_LARGEST_METADATA >> 20} MiB")
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except RefusedPickleError as error:
        raise RefusedPickleError(f"{path}: refused: {error}") from None
    except OSError as error:
        raise RefusedPickleError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a damaged pickle raises whatever its half-built objects raise
        raise RefusedPickleError(f"{path}: not a readable pickle ({type(error).__name__})") from None
    if not isinstance(found, Record) or found.kind not in ("Metadata", "MCoreMetadata"):
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
            return lambda *items: _empty(items)
        if module.split(".")[0] in _RUNNERS or (module == "builtins" and name in _RUNNING_BUILTINS):
            raise RefusedPickleError(f"it names {_shown(module, name)}, which could run code; nothing of it was run")
        return _inert(name)

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def _number(self, storage: Any, offset: Any = 0, size: Any = (0,), *_: Any) -> Any:
        kind, key = getattr(storage[1], "kind", ""), storage[2]
        dtype = np.dtype(_STORAGE_DTYPES[kind]) if kind in _STORAGE_DTYPES else None
        entry = self._entries.get(key) if isinstance(key, str) else None
        numbers = (offset, *_shape(size))
        if dtype is None or entry is None or not all(type(n) is int and n >= 0 for n in numbers):
            return None
        if math.prod(numbers[1:]) != 1:
            return None
        first, last = entry_range(self._descriptor, self._begin, entry)
        at = first + offset * dtype.itemsize
        if at + dtype.itemsize > last:
            return None
        return np.frombuffer(os.pread(self._descriptor, dtype.itemsize, at), dtype)[0].item()


def load_values(path: Path, begin: int, end: int) -> Any:
    """What a small `torch.save` archive in bytes begin..end of a file holds, inert: see `_ValuesUnpickler`.

    None where it cannot be read. Raises RefusedPickleError, in one line with the path, for one that names what could
    run code.
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
    except RefusedPickleError as error:
        raise RefusedPickleError(f"{path}: refused: {error}") from None
    except Exception:  # a damaged pickle raises whatever its half-built objects raise
        return None
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class TensorLayout:
    """Where an archive's only tensor lies in the file: bytes begin..end are its storage.

    dtype: safetensors name. offset, strides: in elements of the storage.
    """

    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    end: int


class _LayoutUnpickler(_BoundedUnpickler):
    """Admits a tensor as `torch.save` writes one, and makes nothing of it but (storage, offset, shape, strides)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: (storage, offset, _shape(shape), _shape(strides))
        if (module, name) == ("collections", "OrderedDict"):
            return lambda *items: _empty(items)
        if module == "torch" and name in _TENSOR_STORAGES:
            return _inert(name)
        raise RefusedPickleError(f"it names {_shown(module, name)}, which no tensor needs; nothing of it was run")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def load_layout(descriptor: int, begin: int, end: int) -> TensorLayout:
    """Of the tensor that the `torch.save` archive in bytes begin..end of an open file holds.

    Raises RefusedPickleError for an archive of anything else, BadArchiveError for a damaged one, OSError.
    """
    with open_archive(descriptor, begin, end) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickled = [name for name in entries if name.endswith("/data.pkl")]
        orders = [name for name in entries if name.endswith("/byteorder")]
        read = [entries[name] for name in (*pickled, *orders)]
        if len(pickled) != 1 or len(orders) > 1 or any(entry.file_size > _LARGEST_TENSOR_PICKLE for entry in read):
            raise BadArchiveError("not an archive of one tensor")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in read):
            raise BadArchiveError("compressed, which torch.save does not do")
        raw = archive.read(pickled[0])
        if any(archive.read(name) != b"little" for name in orders):
            raise RefusedPickleError("its bytes are not in little-endian order")
    try:
        storage, offset, shape, strides = _LayoutUnpickler(io.BytesIO(raw)).load()
        _, kind, key, *_ = storage
        entry = entries[pickled[0].removesuffix("data.pkl") + f"data/{key}"]
        dtype = _TENSOR_STORAGES[kind.kind]
    except RefusedPickleError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its half-built objects raise
        raise BadArchiveError(f"not an archive of one tensor ({type(error).__name__})") from None
    if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)) or len(shape) != len(strides):
        raise BadArchiveError("its shape is none")
    first, last = entry_range(descriptor, begin, entry)
    if not begin <= first <= last <= end:
        raise BadArchiveError(f"its entry {entry.filename} leads out of it")
    return TensorLayout(dtype, offset, shape, strides, first, last)
