"""The families that the bridge knows. Add yours here; docs/add-a-model-family.md is a worked example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.bridge.families import llama, mixtral, qwen2, qwen3, qwen_moe
from headwater.bridge.family import Family
from headwater.errors import UserError

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    mixtral.FAMILY,
    qwen_moe.QWEN2_MOE,
    qwen_moe.QWEN3_MOE,
)


def find_family(config: Any, name: str | None = None) -> Family:
    """Of a model. config: its transformers configuration. name: of the family to take whatever the model calls itself.

    Raises UserError that lists the known ones.
    """
    for family in FAMILIES:
        if family.name == name or (name is None and config.model_type in family.model_types):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    what = f"policy.megatron_cfg.converter_type={name}" if name is not None else f"a {config.model_type} model"
    raise UserError(f"the bridge to Megatron has no map for {what}; it knows {known}: see docs/add-a-model-family.md")


def folder_config(path: Path, trust_remote_code: bool) -> Any:
    """The transformers configuration of a folder's text model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=trust_remote_code
    ).get_text_config()
