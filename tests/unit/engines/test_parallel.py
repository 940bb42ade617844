"""The same training on one process and over ranks: FSDP2, tensor parallel, sequence parallel and their products.

Tolerances. In fp32 layouts differ by the order in which sums are taken, some 1e-7 of a sum; Adam's division by the root
of the second moment passes that on to the update of a weight, and where a gradient is near zero enlarges it. Hence
losses within 1e-6, gradient norms within 1e-5 of themselves, and the whole update of the weights within 1e-4 of its
norm. In bf16 each matrix product is rounded to 8 bits, differently for each cut, so that only 2 % of losses and 5 % of
norms are asked.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_outcomes import Outcomes, run_ranks
from safetensors.torch import load_file

from headwater.checkpoint.diff import diff
from headwater.config.load import load_config
from headwater.data.packing import pack
from headwater.engines.torch.parallel import Layout, check_model
from headwater.errors import UserError

FAST = ["fsdp2", "tp2", "tp2-sp", "fsdp2-tp2", "qwen3-tp2", "qwen3-fsdp4"]
SLOW = [
    "fsdp2-recompute",
    "tp2-sp-recompute",
    "fsdp2-tp2-sp",
    "qwen2-tp2",
    "qwen2-tp2-sp",
    "qwen3-tp2-sp",
    "qwen3-fsdp2-tp2",
    "qwen2-fsdp2-tp2-sp",
]
SLOW_BF16 = ["tp2-sp-bf16", "fsdp2-tp2-sp-bf16"]


class ParallelOutcomes(Outcomes):
    """With the weights that rank 0 wrote."""

    def reference(self, scenario: str) -> str:
        model = f"{scenario.split('-')[0]}-" if scenario.startswith("qwen") else ""
        return f"{model}inline{'-bf16' if scenario.endswith('bf16') else ''}"

    def weights(self, scenario: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Before the first step and after the last."""
        tensors = load_file(self.folder / f"{scenario}.safetensors")
        last = {name: tensor for name, tensor in tensors.items() if not name.startswith("first.")}
        return {name: tensors[f"first.{name}"] for name in last}, last


def start_ranks(folder: Path, which: str) -> ParallelOutcomes:
    run_ranks(Path(__file__).with_name("parallel_ranks.py"), folder, which)
    return ParallelOutcomes(folder)


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory) -> ParallelOutcomes:
    return start_ranks(tmp_path_factory.mktemp("parallel"), "fast")


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> ParallelOutcomes:
    return start_ranks(tmp_path_factory.mktemp("parallel-slow"), "slow")


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors.values()) ** 0.5


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return norm({name: tensor.double() - other[name].double() for name, tensor in one.items()})


def assert_like_inline(outcomes: ParallelOutcomes, scenario: str) -> None:
    expected = outcomes.every(outcomes.reference(scenario))[0]
    found = outcomes.every(scenario)
    assert len(found) == (4 if "fsdp4" in scenario or "fsdp2-tp2" in scenario else 2)
    for of_rank in found:
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for stats, expected_stats in zip(of_rank["stats"], expected["stats"], strict=True):
            assert stats == pytest.approx(expected_stats, rel=1e-4, abs=1e-6)
        assert of_rank["loss of one"] == pytest.approx(expected["loss of one"], abs=1e-6)
        assert of_rank["norm of one"] == pytest.approx(expected["norm of one"], rel=1e-5)
        assert of_rank["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-5)
        assert of_rank["weights"] == found[0]["weights"]  # bit for bit
        assert of_rank["parameters"] == expected["parameters"]
    first, last = outcomes.weights(scenario)
    first_inline, last_inline = outcomes.weights(outcomes.reference(scenario))
    assert difference(first, first_inline) == 0
    moved = difference(first_inline, last_inline)
    assert moved > 0.1
    assert difference(last, last_inline) < 1e-4 * moved


def assert_like_inline_in_bf16(outcomes: ParallelOutcomes, scenario: str) -> None:
    expected = outcomes.every("inline-bf16")[0]
    for of_rank in outcomes.every(scenario):
        assert of_rank["losses"] == pytest.approx(expected["losses"], rel=0.02, abs=2e-3)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=0.05)
        assert of_rank["logprobs"] == pytest.approx(expected["logprobs"], abs=0.05)
        assert of_rank["weights"] == outcomes.every(scenario)[0]["weights"]
    (first, last), (_, last_inline) = outcomes.weights(scenario), outcomes.weights("inline-bf16")
    assert difference(last, last_inline) < 0.2 * difference(first, last_inline)


@pytest.mark.parametrize("scenario", FAST)
def test_five_steps_over_ranks_are_those_of_one_process(scenario: str, fast: ParallelOutcomes) -> None:
    assert_like_inline(fast, scenario)


@pytest.mark.parametrize("scenario", ["fsdp2", "tp2", "fsdp2-tp2"])
def test_the_trained_module_generates_the_same_on_every_rank(scenario: str, fast: ParallelOutcomes) -> None:
    expected = fast.every("inline")[0]["tokens"]
    assert [len(tokens) for tokens in expected] == [6, 6, 6, 6]
    assert all(of_rank["tokens"] == expected for of_rank in fast.every(scenario))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SLOW)
def test_five_steps_over_ranks_are_those_of_one_process_in_more_layouts(scenario: str, slow: ParallelOutcomes) -> None:
    assert_like_inline(slow, scenario)


def test_bf16_with_sharded_fp32_masters_trains_as_one_process_does(fast: ParallelOutcomes) -> None:
    assert_like_inline_in_bf16(fast, "fsdp2-bf16")
    masters = [box for of_rank in fast.every("fsdp2-bf16") for box in of_rank["saved"] if ".param." in box[0]]
    assert {name for name, *_ in masters} == {
        f"optimizer.state.param.{name}" for name in fast.weights("inline-bf16")[0]
    }


def test_no_copy_is_kept_of_a_head_that_is_gathered_for_each_pass(fast: ParallelOutcomes) -> None:
    assert fast.every("inline-bf16")[0]["head copied"]
    assert [of_rank["head copied"] for of_rank in fast.every("fsdp2-bf16")] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SLOW_BF16)
def test_bf16_trains_as_one_process_does_in_more_layouts(scenario: str, slow: ParallelOutcomes) -> None:
    assert_like_inline_in_bf16(slow, scenario)


@pytest.mark.parametrize(
    ("scenario", "shapes"),
    [
        ("inline", {"embed_tokens": [259, 128], "layers.0.self_attn.o_proj": [128, 128], "norm": [128]}),
        ("fsdp2", {"embed_tokens": [130, 128], "layers.0.self_attn.o_proj": [64, 128], "norm": [64]}),
        ("tp2", {"embed_tokens": [130, 128], "layers.0.self_attn.o_proj": [128, 64], "norm": [128]}),
        ("tp2-sp", {"embed_tokens": [130, 128], "layers.0.self_attn.o_proj": [128, 64], "norm": [128]}),
        ("fsdp2-tp2", {"embed_tokens": [65, 128], "layers.0.self_attn.o_proj": [64, 64], "norm": [64]}),
    ],
)
def test_a_rank_holds_its_part_alone(scenario: str, shapes: dict[str, list[int]], fast: ParallelOutcomes) -> None:
    found = fast.every(scenario)[0]["shapes"]
    assert {name: found[f"model.{name}.weight"] for name in shapes} == shapes


@pytest.mark.parametrize("scenario", [*FAST, "fsdp2-bf16"])
def test_saved_boxes_cover_each_tensor_once_over_all_ranks(scenario: str, fast: ParallelOutcomes) -> None:
    covered: dict[str, int] = {}
    shapes: dict[str, list[int]] = {}
    for of_rank in fast.every(scenario):
        for name, global_shape, _, shape in of_rank["saved"]:
            assert 0 not in shape
            covered[name] = covered.get(name, 0) + torch.Size(shape).numel()
            shapes[name] = global_shape
        total, without_steps = of_rank["bytes"][1], of_rank["bytes"][0]
        assert without_steps <= total <= without_steps + 4 * len(shapes)
    expected = {name: shape for name, shape, *_ in fast.every(fast.reference(scenario))[0]["saved"]}
    assert shapes == expected
    assert covered == {name: torch.Size(shape).numel() for name, shape in shapes.items()}


@pytest.mark.parametrize("scenario", ["fsdp2", "tp2", "fsdp2-tp2"])
def test_ranks_share_the_prompts_and_need_not_run_in_step(scenario: str, fast: ParallelOutcomes) -> None:
    (expected,) = fast.every("inline")
    assert [len(tokens) for tokens in expected["answers"]] == [1, 5]
    for of_rank in fast.every(scenario):
        assert of_rank["answers"] == expected["answers"]


@pytest.mark.parametrize("layout", ["fsdp2", "tp2-sp", "fsdp2-tp2"])
def test_a_value_model_over_ranks_trains_like_one_process(layout: str, fast: ParallelOutcomes) -> None:
    (expected,) = fast.every("value-inline")
    found = fast.every(f"value-{layout}")
    assert len(found) == (4 if layout == "fsdp2-tp2" else 2)
    for of_rank in found:
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert of_rank["values"] == pytest.approx(expected["values"], abs=1e-5)
        assert of_rank["weights"] == found[0]["weights"]
    assert expected["losses"][-1] < expected["losses"][0] * 0.99, "nothing was learnt"
    first, last = fast.weights("value-inline")
    assert difference(last, fast.weights(f"value-{layout}")[1]) < 1e-4 * difference(first, last)
    covered: dict[str, int] = {}
    for of_rank in found:
        for name, _, _, shape in of_rank["saved"]:
            covered[name] = covered.get(name, 0) + torch.Size(shape).numel()
    assert covered == {name: torch.Size(shape).numel() for name, shape, *_ in expected["saved"]}
    assert covered["value_head.weight"] == 128


def test_a_value_model_in_bf16_keeps_its_fp32_head_over_ranks(fast: ParallelOutcomes) -> None:
    (expected,) = fast.every("value-inline-bf16")
    for of_rank in fast.every("value-fsdp2-bf16"):
        assert of_rank["losses"] == pytest.approx(expected["losses"], rel=0.02)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=0.05)
    _, last = fast.weights("value-fsdp2-bf16")
    assert last["value_head.weight"].dtype == torch.float32
    assert last["model.norm.weight"].dtype == torch.bfloat16


def assert_resumed_alike(outcomes: ParallelOutcomes, load: str, again: str, *, norms: float, losses: float) -> None:
    found = diff(outcomes.checkpoint("saved"), outcomes.checkpoint(again))
    assert found.identical
    assert sum(component.compared for component in found.components) > 100
    expected = outcomes.every("save")[0]
    assert min(expected["norms"]) > 0.01
    for of_rank in outcomes.every(load):
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=losses)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=norms)


@pytest.mark.parametrize("layout", ["inline", "tp2", "fsdp2-tp2"])
def test_a_checkpoint_of_fsdp2_resumes_at_another_layout(layout: str, fast: ParallelOutcomes) -> None:
    assert len({chunk.file for chunk in fast.checkpoint("saved").manifest.chunks}) == 2
    assert_resumed_alike(fast, f"load-{layout}", f"again-{layout}", norms=1e-4, losses=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["inline", "tp2", "fsdp4"])
def test_a_checkpoint_in_bf16_of_fsdp2_resumes_at_another_layout(layout: str, slow: ParallelOutcomes) -> None:
    assert_resumed_alike(slow, f"load-{layout}", f"again-{layout}", norms=0.05, losses=2e-3)


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_a_frozen_engine_scores_alike(layout: str, fast: ParallelOutcomes) -> None:
    (expected,) = fast.every("frozen-inline")
    found = fast.every(f"frozen-{layout}")
    assert len(found) == 2
    assert all(logprobs == pytest.approx(expected, abs=1e-5) for logprobs in found)


def test_sizes_that_do_not_divide_are_one_line(fast: ParallelOutcomes) -> None:
    assert fast.of[0]["odd size"] == (
        "policy.torch_cfg.tensor_parallel_size (3) does not divide the number of training processes (2)"
    )
    assert fast.of[0]["odd heads"] == (
        "policy.torch_cfg.tensor_parallel_size=4 does not divide the model's num_key_value_heads (2)"
    )


def test_tensor_parallel_size_needs_as_many_processes(make_engine) -> None:
    with pytest.raises(UserError, match=r"tensor_parallel_size \(2\) does not divide .* processes \(1\)"):
        make_engine("policy.torch_cfg.tensor_parallel_size=2")


def test_a_family_without_a_plan_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="no tensor-parallel plan for gpt2 models, only for llama, qwen2, qwen3"):
        check_model(SimpleNamespace(model_type="gpt2"), Layout(tensor_size=2))
    check_model(SimpleNamespace(model_type="gpt2"), Layout(data_size=2))


def test_sequence_parallel_needs_tensor_parallel_ranks() -> None:
    with pytest.raises(UserError, match="sequence_parallel needs tensor_parallel_size above 1"):
        load_config("grpo_tiny", ["policy.torch_cfg.sequence_parallel=true"])


@pytest.mark.parametrize(("count", "sizes"), [(13, [4, 3, 3, 3]), (3, [1, 1, 1, 0]), (0, [0, 0, 0, 0])])
def test_shares_are_contiguous_and_even(count: int, sizes: list[int]) -> None:
    layouts = [Layout(rank=rank, data_size=4, tensor_size=2) for rank in range(8)]
    shares = [layout.share(range(count)) for layout in layouts]
    assert [len(share) for share in shares[::2]] == sizes
    assert [index for share in shares[::2] for index in share] == list(range(count))
    assert shares[::2] == shares[1::2]  # tensor-parallel ranks have the same
    assert layouts[0].largest_share(count) == max(sizes)


def test_rows_are_padded_to_a_multiple(recorded_rollout) -> None:
    plain = pack(recorded_rollout, max_tokens_per_row=64)
    padded = pack(recorded_rollout, max_tokens_per_row=64, multiple_of=5)
    length = plain.input_ids.shape[1]
    assert padded.input_ids.shape[1] == -(-length // 5) * 5 != length
    assert torch.equal(padded.input_ids[:, :length], plain.input_ids)
    assert (padded.block_ids[:, length:] == -1).all()


def test_one_process_trains_plain_tensors(make_engine) -> None:
    engine = make_engine()
    assert all(type(param) is torch.nn.Parameter for param in engine.model.parameters())
    assert all(chunk.tensor.shape == chunk.global_shape for chunk in engine.state_chunks())
