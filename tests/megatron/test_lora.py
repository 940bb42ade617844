"""Adapters trained by megatron-core at every layout, and by PEFT on transformers' models: on CPUs, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora_ranks import LAYOUTS, MODELS, RANK, fits, matrices
from rank_outcomes import Outcomes, ranks_of, run_ranks

from headwater.checkpoint.diff import diff

pytest.importorskip("megatron.core", reason="needs the extra megatron, which make test-slow installs")
pytest.importorskip("peft", reason="needs the extra dev")
pytestmark = pytest.mark.slow
SCENARIOS = [
    (model, layout) for layouts in LAYOUTS.values() for layout in layouts for model in MODELS if fits(model, layout)
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("lora")
    run_ranks(Path(__file__).with_name("lora_ranks.py"), folder)
    return Outcomes(folder)


@pytest.mark.parametrize(("model", "layout"), SCENARIOS)
def test_five_steps_are_those_of_peft(model: str, layout: str, outcomes: Outcomes) -> None:
    (expected,) = outcomes.every(f"{model} peft")
    found = outcomes.every(f"{model} {layout}")
    assert len(found) == ranks_of(LAYOUTS, layout)
    for of_rank in found:
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert of_rank["last"] == pytest.approx(expected["last"], abs=1e-4)
        assert of_rank["parameters"] == expected["parameters"] > 100
    assert expected["losses"][-1] < expected["losses"][0] - 0.003, "nothing was learnt"


@pytest.mark.parametrize(("model", "layout"), SCENARIOS)
def test_adapters_alone_are_trained_and_saved(model: str, layout: str, outcomes: Outcomes) -> None:
    saved: set[str] = set()
    for of_rank in outcomes.every(f"{model} {layout}"):
        weights, changed_weights = of_rank["frozen"]
        adapters, changed_adapters = of_rank["changed"]
        assert weights > 5
        assert changed_weights == 0
        assert changed_adapters == adapters
        saved |= set(of_rank["saved"])
        steps = 4 * sum(name.startswith("optimizer.state.step.") for name in of_rank["saved"])
        assert of_rank["bytes"][0] == of_rank["bytes"][1] - steps
    stems = {name.removeprefix("optimizer.state.") for name in saved if name.startswith("optimizer.state.")}
    weights = {name for name in saved if not name.startswith("optimizer.")}
    assert {name.removesuffix(".weight").rpartition(".")[2] for name in weights} == {"lora_A", "lora_B"}
    assert {name.split(".")[-3] for name in weights} == set(matrices(model))
    assert stems == {f"{key}.{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in weights}
    assert len(weights) == 2 * 2 * len(matrices(model))  # two factors in each of two layers


@pytest.mark.parametrize(("model", "layout"), SCENARIOS)
def test_what_is_exported_is_the_model_with_its_adapters_merged(model: str, layout: str, outcomes: Outcomes) -> None:
    found = outcomes.every(f"{model} {layout}")
    assert found[0]["merged"] == pytest.approx(found[0]["last"], abs=1e-5)
    for of_rank in found:
        assert of_rank["exact at first"]
        assert of_rank["moved"] == []
        assert of_rank["of layers moved"] == sorted(matrices(model))


@pytest.mark.parametrize("layout", ["one", "tp2-sp", "pp2-vpp2", "dp2"])
def test_adapters_saved_by_tp2_pp2_resume_elsewhere(layout: str, outcomes: Outcomes) -> None:
    found = diff(outcomes.checkpoint("saved"), outcomes.checkpoint(f"again-{layout}"))
    assert found.identical
    assert sum(component.compared for component in found.components) > 100
    shapes = {chunk.name: chunk.global_shape for chunk in outcomes.checkpoint("saved").manifest.chunks}
    assert RANK in shapes["model.layers.0.self_attn.q_proj.lora_A.weight"]
    expected = outcomes.every("save")[0]
    assert expected["losses"][-1] < expected["losses"][0] - 1e-5, "nothing was learnt"
    for of_rank in outcomes.every(f"load {layout}"):
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-4)


def test_adapters_in_bf16_resume_elsewhere_with_their_masters(outcomes: Outcomes) -> None:
    saved = outcomes.checkpoint("saved-bf16")
    assert any(chunk.name.startswith("optimizer.state.param.") for chunk in saved.manifest.chunks)
    assert diff(saved, outcomes.checkpoint("again-bf16-dp2")).identical
    expected = outcomes.every("save bf16")[0]
    for of_rank in outcomes.every("load bf16 dp2"):
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=2e-3)


def test_state_that_leaves_and_comes_back_is_saved_and_trained_as_if_it_had_stayed(outcomes: Outcomes) -> None:
    for of_rank in outcomes.every("moved tp2"):
        assert all(of_rank["emptied"])
        assert of_rank["same"] == [True] * 8
        assert len(set(of_rank["losses"])) == 4, "nothing trained"


def test_the_reference_policy_is_the_base_model(outcomes: Outcomes) -> None:
    assert outcomes.every("reference") == [[True, True, True]] * 2


def test_experts_have_no_adapters(outcomes: Outcomes) -> None:
    assert outcomes.every("refused") == [
        "policy.megatron_cfg.peft.target_modules: linear_fc1 and linear_fc2 of experts cannot be adapted; for a model "
        "with experts set it to [linear_qkv,linear_proj]"
    ]


def test_weights_that_nothing_is_added_to_keep_their_bits(outcomes: Outcomes) -> None:
    assert outcomes.every("keeps signs") == [True]
