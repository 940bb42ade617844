"""The safetensors files of a Hugging Face folder, written one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwater.checkpoint.dtype_sizes import ITEMSIZES
from headwater.checkpoint.dtypes import dtype_name

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Weight:
    """dtype: safetensors name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]


def write_weights(
    folder: Path,
    weights: Mapping[str, Weight],
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `model.safetensors`, or several files with their index. tensors: those of `weights`, in the same order."""
    shards: list[dict[str, Weight]] = [{}]
    for name, weight in weights.items():
        if shards[-1] and sum(w.nbytes for w in shards[-1].values()) + weight.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = weight
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        write_json(folder / "model.safetensors.index.json", index)
    remaining = iter(tensors)
    for file, shard in zip(files, shards, strict=True):
        with open(folder / file, "xb") as out:
            out.write(_header(shard))
            for expected, weight in shard.items():
                name, tensor = next(remaining)
                assert (name, dtype_name(tensor.dtype), tuple(tensor.shape)) == (expected, weight.dtype, weight.shape)
                out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _header(weights: Mapping[str, Weight]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, weight in weights.items():
        end = at + weight.nbytes
        header[name] = {"dtype": weight.dtype, "shape": list(weight.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def write_json(path: Path, content: Any) -> None:
    """Indented and sorted, as Hugging Face's tools write theirs."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
