"""A checkpoint as a Hugging Face model folder.

Weights come from the checkpoint as they are stored, the tokenizer too; what describes the model, its configuration
and generation defaults, is copied from the model's own folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import torch

from headwater.bridge.folder import WeightFolder
from headwater.checkpoint.adapters import adapted_matrices, recorded_config
from headwater.checkpoint.dtypes import DTYPES
from headwater.checkpoint.export import new_output, stored_bytes
from headwater.checkpoint.export_peft import MergedWeights
from headwater.checkpoint.reader import Checkpoint, ComponentReader, OnBytes
from headwater.checkpoint.weight_files import MAX_SHARD_BYTES, Weight, write_json, write_weights
from headwater.errors import BlockedError, UserError
from headwater.models.resolve import model_identity, read_config, remote_code, resolve, shorten
from headwater.models.weights import WeightShapes, weight_shapes

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
    on_bytes: called with the number of bytes read since the last call. One tensor at a time is in memory.
    Raises UserError where the weights are not exactly those of the model, the checkpoint is corrupt, or `new_output`
    does. The names are checked without running code that ships with a model: for such a model, not at all.
    """
    reader = checkpoint.component(component)
    require_own_model(checkpoint, model)
    with ExitStack() as reading:
        merged = None
        if adapted_matrices(reader):
            merged = MergedWeights(checkpoint, component, model, reading.enter_context(WeightFolder(model).opened()))
            weights = {name: merged.weight(name) for name in merged.names}
            tensors = ((name, merged.read(name)) for name in merged.names)
        else:
            names = _weights(checkpoint, reader, model)
            boxes = {name: reader.boxes(stored)[0] for name, stored in names.items()}
            weights = {name: Weight(box.dtype, box.global_shape) for name, box in boxes.items()}
            tensors = ((name, reader.read(stored)) for name, stored in names.items())
        with new_output(output, checkpoint.folder, sum(weight.nbytes for weight in weights.values())) as folder:
            copy_description(model, folder, weights.values())
            _copy_tokenizer(checkpoint, model, folder)
            write_weights(folder, weights, _counted(tensors, on_bytes), max_shard_bytes)
            if merged is not None:
                merged.require_the_base()
    return len(weights)


def weights_bytes(checkpoint: Checkpoint, component: str, model: Path) -> int:
    """How many bytes an export reads, for a progress bar."""
    reader = checkpoint.component(component)
    if adapted_matrices(reader):
        return sum(file.stat().st_size for file in model.glob("model*.safetensors"))
    return stored_bytes(reader, [name for name in reader.names() if not name.startswith(_OPTIMIZER)])


def _counted(
    tensors: Iterable[tuple[str, torch.Tensor]], on_bytes: OnBytes | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        if on_bytes:
            on_bytes(tensor.nbytes)
        yield name, tensor


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
    return local_model(name, trusted, remedy)


def local_model(name: str, trusted: bool = False, remedy: str = "") -> Path:
    """The folder of a model by its name. remedy: added to what is said where there is none. See `trained_model`."""
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


def _weights(checkpoint: Checkpoint, reader: ComponentReader, model: Path) -> dict[str, str]:
    """The name in the checkpoint of each weight, by its name in the model. Raises UserError if they do not fit."""
    stored = {name: reader.boxes(name)[0].global_shape for name in reader.names() if not name.startswith(_OPTIMIZER)}
    if remote_code(model):
        return {name: name for name in stored}
    expected = weight_shapes(model)
    prefix = next((prefix for prefix in _PREFIXES if all(prefix + name in stored for name in expected.required)), "")
    problems = _misfits({name.removeprefix(prefix): shape for name, shape in stored.items()}, expected)
    if problems and stored == _shapes_in_files(model):  # experts by themselves, as Megatron trains them
        return {name: name for name in stored}
    if problems:
        raise UserError(f"{checkpoint.folder} does not hold the weights of {model}: {problems}")
    return {name: prefix + name for name in expected.required}


def _shapes_in_files(model: Path) -> dict[str, tuple[int, ...]]:
    """Of a model folder's tensors; none where its weights are not there, which a description may lack."""
    try:
        with WeightFolder(model).opened() as opened:
            return {name: opened.shape(name) for name in opened.names}
    except UserError:
        return {}


def require_own_model(checkpoint: Checkpoint, model: Path) -> None:
    """Raise UserError for a checkpoint of another model, as far as it says of which it is."""
    identity, given = checkpoint.manifest.model_identity, model_identity(model)
    if identity not in (given, _UNKNOWN_MODEL):
        raise UserError(f"{checkpoint.folder} is a checkpoint of {identity}, {model} is {given}: give its own model")


def _misfits(stored: Mapping[str, tuple[int, ...]], expected: WeightShapes) -> str:
    missing = [name for name in expected.required if name not in stored]
    extra = [name for name in stored if name not in expected.all]
    misshapen = [name for name in stored if stored[name] != expected.all.get(name, stored[name])]
    found = (("missing", missing), ("unexpected", extra), ("misshapen", misshapen))
    return "; ".join(f"{what} {shorten(names)}" for what, names in found if names)


def _common_dtype(weights: Iterable[Weight]) -> str | None:
    """torch's name of the dtype that most weights have: what transformers loads them in by default."""
    counts: Counter[torch.dtype] = Counter()
    for weight in weights:
        if DTYPES[weight.dtype].is_floating_point:
            counts[DTYPES[weight.dtype]] += weight.numel
    return str(counts.most_common(1)[0][0]).removeprefix("torch.") if counts else None


def copy_description(model: Path, folder: Path, weights: Iterable[Weight]) -> None:
    """What describes a model, but for its tokenizer, with the dtype that most weights have."""
    config, dtype = read_config(model), _common_dtype(weights)
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    write_json(folder / "config.json", config)
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
        copy_tokenizer(model, folder)


def copy_tokenizer(model: Path, folder: Path) -> None:
    """A model's tokenizer."""
    for path in {path for pattern in _TOKENIZER_FILES for path in model.glob(pattern) if path.is_file()}:
        (folder / path.name).write_bytes(path.read_bytes())
