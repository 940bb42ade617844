"""A checkpoint as a Hugging Face model folder.

Weights come from the checkpoint as they are stored, the tokenizer too, and adapters are merged into the model's. What
describes the model, its configuration and generation defaults, is copied from the model's own folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from headwater.bridge.folder import WeightFolder
from headwater.checkpoint.adapters import adapted_matrices, recorded_config
from headwater.checkpoint.dtypes import DTYPES
from headwater.checkpoint.export import new_output, stored_bytes
from headwater.checkpoint.export_peft import MergedWeights
from headwater.checkpoint.reader import Checkpoint, ComponentReader, OnBytes
from headwater.errors import BlockedError, UserError
from headwater.models.resolve import model_identity, read_config, remote_code, resolve, shorten
from headwater.models.weights import WeightShapes, weight_shapes

MAX_SHARD_BYTES = 5_000_000_000
_OPTIMIZER = "optimizer."
_UNKNOWN_MODEL = "unknown"
# What a state dict's weights may be called by: as they are, or under {"model": ...}, as FSDP programs save them.
_PREFIXES = ("", "model.")
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_TOKENIZER_FILES += ("chat_template*", "*.model", "*.tiktoken")


def export_hf(
    checkpoint: Checkpoint,
    component: str,
    output: Path,
    model: Path,
    on_bytes: OnBytes | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Write a component's weights as a folder for `AutoModelForCausalLM.from_pretrained`; returns their number.

    model: folder of the model that was trained; nothing but its description is taken from it, unless adapters were
    trained: they are merged into its weights.
    on_bytes: called with the number of bytes read since the last call. One shard is in memory at a time.
    Raises UserError where the weights are not exactly those of the model, the checkpoint is corrupt, or `new_output`
    does. The names are checked without running code that ships with a model: for such a model, not at all.
    """
    reader = checkpoint.component(component)
    _require_identity(checkpoint, model)
    with ExitStack() as reading:
        if adapted_matrices(reader):
            opened = reading.enter_context(WeightFolder(model).opened())
            weights = MergedWeights(checkpoint, component, model, opened)
            dtype = str(weights.dtype).removeprefix("torch.")
        else:
            weights = _StoredWeights(reader, _weights(checkpoint, reader, model))
            dtype = _common_dtype(reader, weights.stored)
        needed = sum(weights.size(name) for name in weights.names)
        with new_output(output, checkpoint, needed) as folder:
            _copy_description(model, folder, dtype)
            _copy_tokenizer(checkpoint, model, folder)
            try:
                _write_weights(folder, weights, on_bytes, max_shard_bytes)
            except SafetensorError as error:
                raise UserError(f"{output}: cannot be written: {' '.join(str(error).split())}") from error
            if isinstance(weights, MergedWeights):
                weights.require_the_base()
        return len(weights.names)


class _StoredWeights:
    """Weights as the checkpoint has them. stored: the name there of each."""

    def __init__(self, reader: ComponentReader, stored: Mapping[str, str]) -> None:
        self._reader = reader
        self.stored = stored
        self.names = list(stored)

    def size(self, name: str) -> int:
        return stored_bytes(self._reader, [self.stored[name]])

    def read(self, name: str) -> torch.Tensor:
        return self._reader.read(self.stored[name])


def weights_bytes(checkpoint: Checkpoint, component: str, model: Path) -> int:
    """How many bytes an export reads, for a progress bar."""
    reader = checkpoint.component(component)
    if adapted_matrices(reader):
        return sum(file.stat().st_size for file in model.glob("model*.safetensors"))
    return stored_bytes(reader, [name for name in reader.names() if not name.startswith(_OPTIMIZER)])


def trained_model(checkpoint: Checkpoint, component: str, name: str | None) -> Path:
    """The folder of the model that a component was trained from.

    name: as `policy.model_name` takes it, or a folder with a config.json; None asks the run's configuration.
    Looks in the caches first, so that no network is needed for what is there.
    Raises UserError with the remedy where neither tells, or as `models.resolve` does.
    """
    remedy = ""
    trusted = False
    if name is None:
        name, trusted = _configured(checkpoint, component)
        remedy = f" ({component}.model_name of the run; --model MODEL names another place of it)"
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    try:
        try:
            return resolve(name, trust_remote_code=trusted, offline=True)
        except BlockedError:
            return resolve(name, trust_remote_code=trusted)
    except (UserError, BlockedError) as error:
        raise type(error)(f"{error}{remedy}") from None


def _configured(checkpoint: Checkpoint, component: str) -> tuple[str, bool]:
    entry = next((file for file in checkpoint.manifest.files if file.path == "config.yaml"), None)
    if entry is None:
        raise UserError(f"{checkpoint.folder} has no config.yaml that names its model: give --model MODEL")
    section = recorded_config(checkpoint, component)
    if "model_name" not in section:
        where = checkpoint.folder / entry.path
        raise UserError(f"{where} has no {component}.model_name: give --model MODEL")
    return str(section["model_name"]), section.get("trust_remote_code") is True


def _require_identity(checkpoint: Checkpoint, model: Path) -> None:
    identity, given = checkpoint.manifest.model_identity, model_identity(model)
    if identity not in (given, _UNKNOWN_MODEL):
        raise UserError(f"{checkpoint.folder} is a checkpoint of {identity}, {model} is {given}: give its own model")


def _weights(checkpoint: Checkpoint, reader: ComponentReader, model: Path) -> dict[str, str]:
    """The name in the checkpoint of each weight, by its name in the model. Raises UserError if they do not fit."""
    stored = {name: reader.boxes(name)[0].global_shape for name in reader.names() if not name.startswith(_OPTIMIZER)}
    if remote_code(model):
        return {name: name for name in stored}
    expected = weight_shapes(model)
    prefix = next((prefix for prefix in _PREFIXES if all(prefix + name in stored for name in expected.required)), "")
    problems = _misfits({name.removeprefix(prefix): shape for name, shape in stored.items()}, expected)
    if problems:
        raise UserError(f"{checkpoint.folder} does not hold the weights of {model}: {problems}")
    return {name: prefix + name for name in expected.required}


def _misfits(stored: Mapping[str, tuple[int, ...]], expected: WeightShapes) -> str:
    missing = [name for name in expected.required if name not in stored]
    extra = [name for name in stored if name not in expected.all]
    misshapen = [name for name in stored if stored[name] != expected.all.get(name, stored[name])]
    found = (("missing", missing), ("unexpected", extra), ("misshapen", misshapen))
    return "; ".join(f"{what} {shorten(names)}" for what, names in found if names)


def _common_dtype(reader: ComponentReader, names: Mapping[str, str]) -> str | None:
    """torch's name of the dtype that most weights have: what transformers loads them in by default."""
    counts: Counter[torch.dtype] = Counter()
    for name in names.values():
        box = reader.boxes(name)[0]
        if DTYPES[box.dtype].is_floating_point:
            counts[DTYPES[box.dtype]] += torch.Size(box.global_shape).numel()
    return str(counts.most_common(1)[0][0]).removeprefix("torch.") if counts else None


def _copy_description(model: Path, folder: Path, dtype: str | None) -> None:
    config = read_config(model)
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    _write_json(folder / "config.json", config)
    extra = [model / "generation_config.json", *(sorted(model.glob("*.py")) if remote_code(model) else [])]
    for path in extra:
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())


def _copy_tokenizer(checkpoint: Checkpoint, model: Path, folder: Path) -> None:
    """The checkpoint's own; a checkpoint without one gets the model's."""
    entries = [file for file in checkpoint.manifest.files if file.path.startswith("tokenizer/")]
    for entry in entries:
        path = folder / PurePosixPath(entry.path).relative_to("tokenizer")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:  # never over the configuration
            file.write(checkpoint.read_file(entry))
    if not entries:
        for path in {path for pattern in _TOKENIZER_FILES for path in model.glob(pattern) if path.is_file()}:
            (folder / path.name).write_bytes(path.read_bytes())


def _write_weights(
    folder: Path, weights: _StoredWeights | MergedWeights, on_bytes: OnBytes | None, max_shard_bytes: int
) -> None:
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name in weights.names:
        size = weights.size(name)
        if shards[-1] and sizes[-1] + size > max_shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        )
    for file, shard in zip(files, shards, strict=True):
        tensors: dict[str, torch.Tensor] = {}
        for name in shard:
            tensors[name] = weights.read(name)
            if on_bytes:
                on_bytes(tensors[name].nbytes)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # safetensors makes files that nobody else can read.
        (folder / file).chmod((folder / "config.json").stat().st_mode & 0o777)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
