"""The bridge's rules, without megatron-core: which box of a Hugging Face tensor each row of a parameter is."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from headwater.bridge.adapters import with_adapters
from headwater.bridge.family import ParameterMap
from headwater.bridge.folder import WeightFolder
from headwater.bridge.pieces import Dimensions, Piece, Place, Slot, padded_vocabulary
from headwater.bridge.registry import FAMILIES, find_family
from headwater.config.load import load_config
from headwater.errors import UserError

DIMS = Dimensions(
    hidden=6,
    heads=4,
    query_groups=2,
    head_size=3,
    vocabulary=130,
    feed_forward=8,
    expert_feed_forward=4,
    shared_expert_feed_forward=8,
    experts=4,
)
QKV = "decoder.layers.5.self_attention.linear_qkv.weight"


def pieces(parameter: str, rank: int, size: int = 2) -> list[Piece]:
    (llama,) = [family for family in FAMILIES if family.name == "llama"]
    return ParameterMap(llama, DIMS, Place(Slot(size, rank), Slot(), Slot(size, rank))).pieces(parameter)


def test_queries_keys_and_values_lie_by_group() -> None:
    found = [(p.name.rsplit(".", 2)[1], p.offset, p.shape, p.row) for p in pieces(QKV, 1)]
    assert found == [("q_proj", (6, 0), (6, 6), 0), ("k_proj", (3, 0), (3, 6), 6), ("v_proj", (3, 0), (3, 6), 9)]
    assert all(".layers.5." in p.name for p in pieces(QKV, 1))


def test_gate_and_up_are_stacked_and_each_is_cut() -> None:
    found = [
        (p.name.rsplit(".", 2)[1], p.offset, p.shape, p.row)
        for p in pieces("decoder.layers.0.mlp.linear_fc1.weight", 1)
    ]
    assert found == [("gate_proj", (4, 0), (4, 6), 0), ("up_proj", (4, 0), (4, 6), 4)]


def test_an_output_projection_is_cut_by_columns() -> None:
    (piece,) = pieces("decoder.layers.0.mlp.linear_fc2.weight", 1)
    assert (piece.global_shape, piece.offset, piece.shape) == ((6, 8), (0, 4), (6, 4))


def test_tokens_that_pad_the_vocabulary_are_nobodys() -> None:
    assert padded_vocabulary(130, 2) == 256
    assert [p.shape for p in pieces("output_layer.weight", 0)] == [(128, 6)]
    assert [(p.offset, p.shape) for p in pieces("output_layer.weight", 1)] == [((128, 0), (2, 6))]
    assert pieces("output_layer.weight", 3, size=4) == []


def test_what_every_rank_holds_is_saved_by_the_first() -> None:
    assert [pieces("decoder.final_layernorm.weight", rank)[0].saved for rank in (0, 1)] == [True, False]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_ranks_boxes_are_each_tensor_once(family) -> None:
    for rule in family.rules:
        covered: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for rank in range(2):
            place = Place(Slot(2, rank), Slot(), Slot(2, rank))
            for piece in ParameterMap(family, DIMS, place).pieces(rule.megatron.format(layer=1, expert=2)):
                assert len(piece.offset) == len(piece.shape) == len(piece.global_shape)
                if piece.saved:
                    covered[piece.name] = covered.get(piece.name, 0) + math.prod(piece.shape)
                    shapes[piece.name] = piece.global_shape
        assert covered == {name: math.prod(shape) for name, shape in shapes.items()}
        assert len(covered) == len(rule.hugging_face)


def test_a_parameter_without_a_rule_is_named() -> None:
    with pytest.raises(
        UserError, match=r"llama has no rule for Megatron's parameter decoder\.layers\.0\.extra\.weight"
    ):
        pieces("decoder.layers.0.extra.weight", 0)


def test_a_parameter_of_another_shape_is_named() -> None:
    (llama,) = [family for family in FAMILIES if family.name == "llama"]
    with pytest.raises(UserError, match=r"linear_qkv.weight is \(12, 5\), of which .*q_proj.weight is \(6, 6\)"):
        ParameterMap(llama, DIMS, Place(Slot(2, 0))).check({QKV: (12, 5)})


def test_a_family_that_is_not_known_lists_those_that_are() -> None:
    assert find_family(SimpleNamespace(model_type="llama")).name == "llama"
    assert find_family(SimpleNamespace(model_type="new"), "qwen3").name == "qwen3"
    with pytest.raises(UserError, match="no map for a new model; it knows llama, qwen2, qwen3, mixtral"):
        find_family(SimpleNamespace(model_type="new"))


def test_a_box_is_read_and_a_tensor_of_another_shape_refused(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(4, 6)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    with WeightFolder(tmp_path).opened() as folder:
        assert torch.equal(folder.box(Piece("a", (4, 6), (1, 2), (2, 3))), tensor[1:3, 2:5])
        with pytest.raises(UserError, match=r"a has the shape \(4, 6\), the model's configuration says \(5, 6\)"):
            folder.box(Piece("a", (5, 6), (0, 0), (5, 6)))


def test_keys_of_megatron_need_it_enabled() -> None:
    with pytest.raises(UserError, match="tensor_model_parallel_size is read only with enabled=true"):
        load_config("grpo_tiny", ["policy.megatron_cfg.tensor_model_parallel_size=2"])


def adapter_pieces(parameter: str, rank: int) -> list[Piece]:
    (llama,) = [family for family in FAMILIES if family.name == "llama"]
    family = with_adapters(llama, ["linear_qkv", "linear_fc2"], rank=2)
    return ParameterMap(family, DIMS, Place(Slot(2, rank))).pieces(f"decoder.layers.5.{parameter}")


def test_adapters_of_stacked_matrices_have_an_a_each_and_rows_of_b_as_the_matrix_has() -> None:
    (a,) = adapter_pieces("self_attention.linear_qkv.adapter.lora_A.1", 1)
    assert (a.name, a.global_shape) == ("model.layers.5.self_attn.k_proj.lora_A.weight", (2, 6))
    assert (a.offset, a.shape, a.saved) == ((0, 0), (2, 6), False)  # rank 0 of the two saves it
    b = adapter_pieces("self_attention.linear_qkv.adapter.lora_B", 1)
    assert [(p.name.split(".")[4], p.offset, p.shape, p.row) for p in b] == [
        ("q_proj", (6, 0), (6, 2), 0),
        ("k_proj", (3, 0), (3, 2), 6),
        ("v_proj", (3, 0), (3, 2), 9),
    ]
    assert all(p.name.endswith("_proj.lora_B.weight") and p.saved for p in b)


def test_adapters_of_a_matrix_cut_by_columns_have_their_a_cut() -> None:
    (a,) = adapter_pieces("mlp.linear_fc2.adapter.lora_A.0", 1)
    assert (a.name, a.global_shape) == ("model.layers.5.mlp.down_proj.lora_A.weight", (2, 8))
    assert (a.offset, a.shape, a.saved) == ((0, 4), (2, 4), True)
    (b,) = adapter_pieces("mlp.linear_fc2.adapter.lora_B", 1)
    assert (b.global_shape, b.shape, b.saved) == ((6, 2), (6, 2), False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("enabled=true", "peft.rank=4"), "policy.megatron_cfg.peft: rank is read only with enabled=true"),
        (("peft.enabled=true",), "policy.megatron_cfg: peft is read only with enabled=true"),
        (("enabled=true", "peft.enabled=true", "peft.target_modules=[q_proj]"), "linear_qkv"),
        (("enabled=true", "peft.enabled=true", "peft.target_modules=[]"), "target_modules is empty"),
        (("enabled=true", "peft.enabled=true", "peft.rank=0"), "policy.megatron_cfg.peft.rank"),
    ],
)
def test_settings_of_adapters_that_cannot_be_are_one_line(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as raised:
        load_config("grpo_tiny", [f"policy.megatron_cfg.{override}" for override in overrides])
    assert words in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
