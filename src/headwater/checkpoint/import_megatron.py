"""A Megatron `torch_dist` checkpoint as a Hugging Face model folder; needs neither megatron-core nor a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from headwater.bridge.registry import find_family, folder_config
from headwater.bridge.torch_dist import Key, Parameter, parameters
from headwater.checkpoint.export import new_output
from headwater.checkpoint.export_hf import copy_description, copy_tokenizer
from headwater.checkpoint.foreign.folder import read_folder
from headwater.checkpoint.foreign.record import StoredChunk
from headwater.checkpoint.foreign.tensors import StoredTensor
from headwater.checkpoint.reader import OnBytes
from headwater.checkpoint.weight_files import MAX_SHARD_BYTES, Weight, write_weights
from headwater.errors import UserError
from headwater.models.resolve import shorten

# As programs around megatron-core name the model, or one chunk of it.
_PREFIX = re.compile(r"(?:(?:model|module)\d*\.)*")
_DTYPES = ("F64", "F32", "F16", "BF16")


class MegatronFolder:
    """The weights in a `torch_dist` folder, as they fit a model. model: a folder with its config.json.

    Raises UserError for a folder of another format, and one that lists what does not fit the model.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        contents = read_folder(folder)
        if contents.kind != "Megatron torch_dist":
            raise UserError(f"{folder}: a checkpoint of {contents.kind}, not a torch_dist one of Megatron")
        config = folder_config(model, trust_remote_code=False)
        family = find_family(config)
        stored, twice = _by_key(chunk for chunk in contents.chunks if chunk.role == "weight")
        missing, misshapen, used = [], list[str](), set[str]()
        self._found: list[tuple[Parameter, Key]] = []
        self._stored = stored
        for parameter in parameters(family, config):
            key = next((key for key in parameter.keys if key.name in stored), None)
            if key is None:
                missing.append(parameter.keys[0].name)
                continue
            used.update(other.name for other in parameter.keys if other.index == key.index)
            self._found.append((parameter, key))
            if problem := _misfit(parameter, key, stored[key.name]):
                misshapen.append(problem)
        extra = [*twice, *(tensor.key for name, tensor in stored.items() if name not in used)]
        faults = (("missing", missing), ("unexpected", extra), ("misshapen", misshapen))
        found = [f"{what} {shorten(list(dict.fromkeys(names)))}" for what, names in faults if names]
        if found:
            raise UserError(f"{folder} does not hold the weights of {model} ({family.name}): {'; '.join(found)}")

    @property
    def weights(self) -> dict[str, Weight]:
        """Of each Hugging Face tensor, in the order of `tensors`."""
        return {
            piece.name: Weight(self._stored[key.name].dtype, piece.global_shape)
            for parameter, key in self._found
            for piece in parameter.pieces
        }

    @property
    def rows_left_out(self) -> int:
        """Of the embedding, beyond the model's vocabulary: padding, or tokens that were added to another model."""
        return max(
            self._stored[key.name].shape[len(key.stacked)] - parameter.pieces[0].shape[0]
            for parameter, key in self._found
            if parameter.padded
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face's names and tensors; those of one Megatron parameter at a time are in memory.

        Raises UserError for a tensor that is not covered by its boxes, or damaged.
        """
        for parameter, key in self._found:
            rows = self._stored[key.name].read(key.index)
            whole: dict[str, torch.Tensor] = {}
            for piece in parameter.pieces:
                if piece.name not in whole:
                    whole[piece.name] = rows.new_empty(piece.global_shape)
                whole[piece.name][piece.index] = rows[piece.rows].view(piece.shape)
            yield from whole.items()


def import_megatron(
    folder: Path, model: Path, output: Path, on_bytes: OnBytes | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[int, int]:
    """Write the weights of a `torch_dist` folder as a folder for `AutoModelForCausalLM.from_pretrained`.

    Weights are as stored, in their dtype, without the rows that pad the vocabulary. Configuration and tokenizer are
    those of the folder `model`. Returns the number of tensors, and that of rows left out since the model has no such
    tokens. on_bytes: called with the bytes since the last call.
    Raises UserError as `MegatronFolder` and `new_output` do.
    """
    source = MegatronFolder(folder, model)
    weights = source.weights

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in source.tensors():
            if on_bytes:
                on_bytes(tensor.nbytes)
            yield name, tensor

    with new_output(output, folder, sum(weight.nbytes for weight in weights.values())) as temporary:
        copy_description(model, temporary, weights.values())
        copy_tokenizer(model, temporary)
        write_weights(temporary, weights, tensors(), max_shard_bytes)
    return len(weights), source.rows_left_out


def _by_key(chunks: Iterator[StoredChunk]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Tensors by their key without the model's prefix, and keys that mean one that is there already."""
    of_key: dict[str, list[StoredChunk]] = {}
    for chunk in chunks:
        of_key.setdefault(chunk.key, []).append(chunk)
    stored: dict[str, StoredTensor] = {}
    twice = []
    for key, boxes in of_key.items():
        name = key[_prefix_length(key) :]
        if name in stored:
            twice.append(key)
        else:
            stored[name] = StoredTensor(boxes)
    return stored, twice


def _prefix_length(key: str) -> int:
    match = _PREFIX.match(key)
    return match.end() if match else 0


def _misfit(parameter: Parameter, key: Key, tensor: StoredTensor) -> str | None:
    """What is wrong with a stored tensor. More rows than there are tokens are padding, however many."""
    stacked, shape = tensor.shape[: len(key.stacked)], tensor.shape[len(key.stacked) :]
    fewest = parameter.pieces[0].shape[0] if parameter.padded else parameter.shape[0]
    fits = (stacked, shape[1:]) == (key.stacked, parameter.shape[1:]) and len(shape) == len(parameter.shape)
    fits = fits and (shape[0] >= fewest if parameter.padded else shape[0] == fewest)
    if not fits:
        rows = f"at least {fewest}" if parameter.padded else str(fewest)
        wanted = ", ".join([*map(str, key.stacked), rows, *map(str, parameter.shape[1:])])
        return f"{tensor.key} {tensor.shape} instead of ({wanted})"
    return None if tensor.dtype in _DTYPES else f"{tensor.key} of {tensor.dtype}"
