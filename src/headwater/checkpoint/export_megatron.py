"""A checkpoint as a Megatron `torch_dist` folder; needs neither megatron-core nor a GPU.

decoder.layers.mlp.linear_fc2.weight            [layers, rows, columns], a box for each layer
optimizer.state.exp_avg.decoder.layers...       the same, as Megatron's `fully_reshardable` has it
common.pt                                       the optimizer's groups and its step, the iteration
metadata.json                                   which format this is
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from headwater.bridge.registry import find_family, folder_config
from headwater.bridge.torch_dist import Key, Parameter, parameters
from headwater.checkpoint.dtypes import DTYPES
from headwater.checkpoint.export import new_output, stored_bytes, write_dcp
from headwater.checkpoint.export_hf import require_own_model
from headwater.checkpoint.foreign.megatron import COMMON_NAME
from headwater.checkpoint.reader import Checkpoint, ComponentReader, OnBytes
from headwater.config.schema import OptimizerConfig
from headwater.errors import UserError
from headwater.models.resolve import shorten

_STATE = "optimizer.state."
_STATES = ("param", "exp_avg", "exp_avg_sq")
# As Megatron packs one: a list, since a key may stand for several.
_EMPTY_OBJECT = [None]
# Layers that Megatron saves an object with, which is empty unless they compute in 8 bits. Without it a load refuses.
_WITH_OBJECT = re.compile(r"(.*\.linear_(?:qkv|proj|fc1|fc2))\.weight")


def export_megatron(
    checkpoint: Checkpoint, component: str, output: Path, model: Path, on_bytes: OnBytes | None = None
) -> int:
    """Write a component, optimizer state included, for `megatron.core.dist_checkpointing.load`; returns its tensors.

    model: folder of the model that was trained, for its configuration. Weights are as stored; the vocabulary is padded
    as for one rank. One parameter of Megatron's at a time is in memory. on_bytes: called with the number of bytes
    written since the last call. Raises UserError where the weights are not exactly those of the model, the checkpoint
    is corrupt, or `new_output` does.
    """
    reader = checkpoint.component(component)
    require_own_model(checkpoint, model)
    planner = _Planner(reader, _fitting(checkpoint, reader, model), on_bytes)
    needed = stored_bytes(reader, reader.names())
    with new_output(output, checkpoint.folder, needed) as folder:
        write_dcp(planner, folder, output)
        torch.save(_common(checkpoint, component, reader, planner.has_state), folder / COMMON_NAME)
        described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        described |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(described))
    return planner.tensors


def _fitting(checkpoint: Checkpoint, reader: ComponentReader, model: Path) -> list[Parameter]:
    """The model's parameters. Raises UserError that lists what the checkpoint does not hold as they need it."""
    config = folder_config(model, trust_remote_code=False)
    family = find_family(config)
    needed = list(parameters(family, config))
    shapes = {piece.name: piece.global_shape for parameter in needed for piece in parameter.pieces}
    stored = {name: reader.boxes(name)[0].global_shape for name in reader.names() if not name.startswith(_STATE)}
    faults = [
        ("missing", [name for name in shapes if name not in stored]),
        ("unexpected", [name for name in stored if name not in shapes]),
        ("misshapen", [name for name in shapes if stored.get(name, shapes[name]) != shapes[name]]),
    ]
    found = [f"{what} {shorten(names)}" for what, names in faults if names]
    if found:
        raise UserError(f"{checkpoint.folder} does not hold the weights of {model} ({family.name}): {'; '.join(found)}")
    return needed


@dataclass(frozen=True)
class _Part:
    """A parameter, or a state of its optimizer, at its place in Megatron's tensor."""

    parameter: Parameter
    state: str | None

    def source(self, name: str) -> str:
        """The name in the checkpoint of what belongs to a weight."""
        return f"{_STATE}{self.state}.{name}" if self.state else name


class _Planner(DefaultSavePlanner):
    """Plans one box for each layer and expert, and puts each together when it is to be written."""

    def __init__(self, reader: ComponentReader, needed: list[Parameter], on_bytes: OnBytes | None) -> None:
        super().__init__()
        self._reader, self._on_bytes = reader, on_bytes
        self._stored = set(reader.names())
        self.has_state = any(name.startswith(f"{_STATE}exp_avg.") for name in self._stored)
        self._parts: dict[MetadataIndex, _Part] = {}
        items: list[WriteItem] = []
        of_experts = any(".local_experts." in parameter.name for parameter in needed)
        for parameter in needed:
            for state in (None, *(_STATES if self.has_state else ())):
                for key in _written_keys(parameter, of_experts):
                    items.append(self._item(_Part(parameter, state), key))
            items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in _objects(parameter)]
        self._items = items
        self.tensors = len({item.index.fqn for item in items if item.type == WriteItemType.SHARD})

    def _item(self, part: _Part, key: Key) -> WriteItem:
        parameter = part.parameter
        dtype = torch.float32 if part.state else DTYPES[self._reader.boxes(parameter.pieces[0].name)[0].dtype]
        name = f"{_STATE}{part.state}.{key.name}" if part.state else key.name
        offset = torch.Size((*key.index, *(0 for _ in parameter.shape)))
        index = MetadataIndex(name, offset)
        self._parts[index] = part
        chunk = ChunkStorageMetadata(offset, torch.Size((*(1 for _ in key.index), *parameter.shape)))
        whole = torch.Size((*key.stacked, *parameter.shape))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, TensorProperties(dtype), whole))

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items, planner_data={})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.plan = new_plan
        return new_plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        part = self._parts.get(dataclasses.replace(index, index=None))
        return _EMPTY_OBJECT if part is None else self._tensor(part)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        assert write_item.tensor_data is not None, "an item that is no object is a tensor"
        tensor = object.view(write_item.tensor_data.chunk.sizes)
        if self._on_bytes:
            self._on_bytes(tensor.nbytes)
        return tensor

    def _tensor(self, part: _Part) -> torch.Tensor:
        """Zeros where the optimizer has not touched a parameter, and where the vocabulary is padded."""
        out: torch.Tensor | None = None
        whole: dict[str, torch.Tensor] = {}
        for piece in part.parameter.pieces:
            if piece.name not in whole:
                whole[piece.name] = self._read(part, piece.name, piece.global_shape)
            tensor = whole[piece.name]
            if out is None:
                out = tensor.new_zeros(part.parameter.shape)
            out[piece.rows] = tensor[piece.index].view(out[piece.rows].shape)
        assert out is not None, "a parameter has pieces"
        return out

    def _read(self, part: _Part, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        source = part.source(name)
        if part.state is None or source in self._stored:
            return self._reader.read(source)
        if part.state == "param":  # in fp32 a weight is its own master
            return self._reader.read(name).float()
        return torch.zeros(shape)


def _written_keys(parameter: Parameter, of_experts: bool) -> list[Key]:
    """The stacked one. The norm before experts has two names, by what computes it, and is written under both."""
    both = of_experts and parameter.name.endswith("pre_mlp_layernorm.weight")
    return parameter.keys[: 2 if both else 1]


def _objects(parameter: Parameter) -> Iterator[str]:
    """Names of the empty objects that belong to a parameter."""
    key = parameter.keys[0]
    match = _WITH_OBJECT.fullmatch(key.name)
    if match:
        place = f"{'.'.join(map(str, key.index))}_{'.'.join(map(str, key.stacked))}"
        yield f"{match[1]}._extra_state/shard_{place}"


def _common(checkpoint: Checkpoint, component: str, reader: ComponentReader, has_state: bool) -> dict[str, Any]:
    """What Megatron keeps beside the tensors: the iteration, and the optimizer's groups with their one step."""
    common: dict[str, Any] = {"iteration": checkpoint.manifest.step, "checkpoint_version": 3.0}
    if not has_state:
        return common
    steps = [reader.read(name) for name in reader.names() if name.startswith(f"{_STATE}step.")]
    settings = _optimizer_settings(checkpoint, component)
    group = {
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": settings.lr,
        "min_lr": None,
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "step": max((float(step) for step in steps), default=0.0),
    }
    groups = [{**group, "wd_mult": scale, "weight_decay": settings.weight_decay * scale} for scale in (1.0, 0.0)]
    common["optimizer"] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    return common


def _optimizer_settings(checkpoint: Checkpoint, component: str) -> OptimizerConfig:
    """The run's own, or the defaults where the checkpoint carries no configuration."""
    entry = next((file for file in checkpoint.manifest.files if file.path == "config.yaml"), None)
    if entry is None:
        return OptimizerConfig()
    try:
        return OptimizerConfig(**yaml.safe_load(checkpoint.read_file(entry))[component]["optimizer"])
    except (yaml.YAMLError, LookupError, TypeError, ValueError):
        raise UserError(f"{checkpoint.folder / entry.path} has no {component}.optimizer that can be read") from None
