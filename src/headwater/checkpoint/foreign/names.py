"""What a tensor of a checkpoint is, from its name alone.

Three ways to name an optimizer's state are known:

    optim.state.<parameter>.exp_avg              torch's get_state_dict / optimizer.state_dict
    optimizer.state.exp_avg.<parameter>          Headwater, Megatron's fully_reshardable
    ...gbuf_idx_0.dtype_(..).bucket_idx_0.exp_avg    Megatron's dp_reshardable: a flat bucket of many parameters

Everything else with a floating dtype and a dimension is taken for a weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from headwater.checkpoint.foreign.record import Role, StoredChunk

_ROLES: dict[str, Role] = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "param": "param",
    "master_param": "param",
    "master_weight": "param",
    "fp32_param": "param",
}
# Maxima and other buffers may repeat in a healthy run, so they are no evidence.
_OTHER_STATES = ("max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "prev", "eta")
_STEP = "step"
_ALIGNMENT = 64
_BUCKET = re.compile(r"(?P<prefix>.*?)(?P<parameter>gbuf_idx_\d+\.dtype_.*?\.bucket_idx_\d+)\.(?P<state>[a-z_]+)")
_STATE = re.compile(r"(?P<prefix>(?:[^.]+\.)*?)state\.(?P<rest>.+)")
_OPTIMIZER_WORD = re.compile(r"(?:^|_)opt(?:im(?:izer)?s?)?(?:_states?)?(?=_|$)")
_NOT_OF_A_MODEL = re.compile(r"(?:^|\.)(?:[a-z0-9]+_)*(?:optim(?:izer)?s?|optim(?:izer)?_states?|param_groups)\.")
_NO_WEIGHT = re.compile(r"(?:^|[._])(?:rng|cuda_rng|rng_state|rng_tracker_states|dataloader|lr_scheduler)")
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class Meaning:
    """role: "step" for an optimizer's step. component: empty where the name says none. parameter: see StoredChunk."""

    role: Role | Literal["step"]
    component: str
    parameter: str


def classify(key: str, dtype: str) -> Meaning:
    """What the tensor `key` of a dtype (safetensors name) is."""
    bucket = _BUCKET.fullmatch(key)
    if bucket:
        role = _ROLES.get(bucket["state"], "other")
        return Meaning(role, _component(bucket["prefix"]), bucket["prefix"] + bucket["parameter"])
    state = _STATE.fullmatch(key)
    found = _state_and_parameter(state["rest"]) if state else None
    if state and found:
        name, parameter = found
        role = _STEP if name == _STEP else _ROLES.get(name, "other")
        return Meaning(role, _component(state["prefix"]), parameter)
    if dtype not in FLOATS or _NO_WEIGHT.search(key) or _NOT_OF_A_MODEL.search(key):
        return Meaning("other", "", key)
    return Meaning("weight", "", key)


def is_padding(key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box of a bucket lies between its parameters, which Megatron begins at multiples of 64 elements.

    Megatron stores such a box as it finds it: memory that nobody wrote.
    """
    return bool(_BUCKET.fullmatch(key)) and len(shape) == 1 and shape[0] < _ALIGNMENT and offset[0] % _ALIGNMENT != 0


def _state_and_parameter(rest: str) -> tuple[str, str] | None:
    """Split what follows `state.`; the torch order is tried first, since parameters are seldom named like a state."""
    states = {*_ROLES, *_OTHER_STATES, _STEP}
    parameter, _, last = rest.rpartition(".")
    if parameter and last in states - {"param"}:
        return last, parameter
    first, _, parameter = rest.partition(".")
    if parameter and first in states:
        return first, parameter
    return None


def _component(prefix: str) -> str:
    """`policy.optimizer.` and `policy_optim.` are of the component policy, `optimizer.chained_0.` of the nameless."""
    words = [_OPTIMIZER_WORD.sub("", word).strip("_") for word in prefix.rstrip(".").split(".")]
    dropped = re.compile(r"chained_\d+|dp_group_idx_\d+|distributed|")
    return ".".join(word for word in words if not dropped.fullmatch(word))


def assign_weights(chunks: Iterable[StoredChunk]) -> tuple[StoredChunk, ...]:
    """Give each weight the component and the parameter of the optimizer state that belongs to it.

    A weight `model.layer.weight` belongs to the parameter `layer.weight`; one without optimizer state (frozen, or a
    buffer) to the component whose name it begins with, or to the only one there is.
    """
    chunks = tuple(chunks)
    trained: dict[str, set[str]] = {}
    for chunk in chunks:
        if chunk.role in ("param", "exp_avg", "exp_avg_sq"):
            trained.setdefault(chunk.parameter, set()).add(chunk.component)
    components = {component for owners in trained.values() for component in owners}
    return tuple(_assigned(chunk, trained, components) if chunk.role == "weight" else chunk for chunk in chunks)


def _assigned(chunk: StoredChunk, trained: dict[str, set[str]], components: set[str]) -> StoredChunk:
    if not chunk.shape:  # a loss scale, a learning rate: what changes at every step would hide stale weights
        return replace(chunk, role="other")
    words = chunk.key.split(".")
    for start in range(len(words)):
        parameter = ".".join(words[start:])
        owners = trained.get(parameter)
        if owners:
            named = {owner for owner in owners if _begins_with(chunk.key, owner)} or owners
            return replace(chunk, component=max(named, key=len), parameter=parameter)
    named = {component for component in components if component and _begins_with(chunk.key, component)}
    if not named and len(components) == 1:
        named = components
    return replace(chunk, component=max(named, key=len, default=""))


def _begins_with(key: str, component: str) -> bool:
    return key.startswith((f"{component}.", f"{component}_"))
