"""Small random models of every family that the bridge knows. A new family is one more entry, and is tested by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 11  # needs padding at every tensor-parallel size
_MOE = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 4},
    "mixtral": {**_MOE, "num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": {**_MOE, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_MOE, "num_experts": 4, "moe_intermediate_size": 8, "norm_topk_prob": True, "head_dim": 4},
}
MOE = ("mixtral", "qwen2_moe", "qwen3_moe")


def make_model(family: str, folder: Path) -> Path:
    """Saved as a Hugging Face folder, once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / family
    if not path.exists():
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        }
        config = AutoConfig.for_model(family.removesuffix("-tied"), **sizes | FAMILIES[family])
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(path)
    return path
