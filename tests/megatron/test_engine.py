"""The same training by megatron-core at every layout, and by the torch backend: on CPUs, over gloo.

Losses within 1e-6 and gradient norms within 1e-5 of themselves in fp32, as for the torch backend's own layouts. Each
family is compared with transformers, which the torch backend runs, not only with itself: a map that is merely
invertible would not do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_ranks import LAYOUTS, fits
from families import FAMILIES
from rank_outcomes import Outcomes, ranks_of, run_ranks

from headwater.checkpoint.diff import diff

pytest.importorskip("megatron.core", reason="needs the extra megatron, which make test-slow installs")
pytestmark = pytest.mark.slow
SCENARIOS = [
    (model, layout) for layouts in LAYOUTS.values() for layout in layouts for model in FAMILIES if fits(model, layout)
]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("megatron")
    run_ranks(Path(__file__).with_name("engine_ranks.py"), folder)
    return Outcomes(folder)


@pytest.mark.parametrize(("model", "layout"), SCENARIOS)
def test_five_steps_are_those_of_transformers(model: str, layout: str, outcomes: Outcomes) -> None:
    (expected,) = outcomes.every(f"{model} torch")
    found = outcomes.every(f"{model} {layout}")
    assert len(found) == ranks_of(LAYOUTS, layout)
    for of_rank in found:
        assert of_rank["first"] == pytest.approx(expected["first"], abs=1e-5)
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert of_rank["losses of one"] == pytest.approx(expected["losses of one"], abs=1e-6)
        assert of_rank["norms of one"] == pytest.approx(expected["norms of one"], rel=1e-4)
        assert of_rank["last"] == pytest.approx(expected["last"], abs=1e-4)
        assert of_rank["parameters"] == expected["parameters"]
    assert max(abs(a - b) for a, b in zip(expected["first"], expected["last"], strict=True)) > 0.001, "nothing trained"


@pytest.mark.parametrize(("model", "layout"), SCENARIOS)
def test_the_round_trip_to_hugging_face_is_exact(model: str, layout: str, outcomes: Outcomes) -> None:
    assert all(of_rank["exact"] for of_rank in outcomes.every(f"{model} {layout}"))


@pytest.mark.parametrize("layout", ["pp2-vpp2", "tp2-sp-recompute"])
def test_the_interleaved_pipeline_and_recomputation_train_alike(layout: str, outcomes: Outcomes) -> None:
    (expected,) = outcomes.every("tiny torch")
    found = outcomes.every(f"tiny {layout}")
    assert len(found) == 2
    for of_rank in found:
        assert of_rank["recomputes"] == layout.endswith("recompute")
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", "cp2"])
def test_a_value_model_trains_alike(layout: str, outcomes: Outcomes) -> None:
    (expected,) = outcomes.every("value torch")
    found = outcomes.every(f"value {layout}")
    assert len(found) == 2
    for of_rank in found:
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert of_rank["last"] == pytest.approx(expected["last"], abs=1e-5)
    assert expected["losses"][-1] < expected["losses"][0] * 0.99, "nothing was learnt"


@pytest.mark.parametrize("layout", ["one", "tp2", "dp2", "torch"])
def test_a_checkpoint_of_tp2_pp2_resumes_elsewhere(layout: str, outcomes: Outcomes) -> None:
    found = diff(outcomes.checkpoint("saved"), outcomes.checkpoint(f"again-{layout}"))
    assert found.identical
    assert sum(component.compared for component in found.components) > 100
    expected = outcomes.every("save")[0]
    assert min(expected["norms"]) > 0.01
    for of_rank in outcomes.every(f"load {layout}"):
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=1e-4)


def test_a_checkpoint_in_bf16_resumes_elsewhere_with_its_masters(outcomes: Outcomes) -> None:
    saved = outcomes.checkpoint("saved-bf16")
    assert any(chunk.name.startswith("optimizer.state.param.") for chunk in saved.manifest.chunks)
    assert diff(saved, outcomes.checkpoint("again-bf16-dp2")).identical
    expected = outcomes.every("save bf16")[0]
    for of_rank in outcomes.every("load bf16 dp2"):
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=2e-3)


def test_a_checkpoint_with_tensors_that_the_model_lacks_is_refused(outcomes: Outcomes) -> None:
    for of_rank in outcomes.every("refused tp2"):
        assert "holds tensors that this model does not have: optimizer.state.param." in of_rank["said"]


@pytest.mark.parametrize("scenario", ["moved tp2", "moved dp2 bf16"])
def test_state_that_leaves_and_comes_back_is_saved_and_trained_as_if_it_had_stayed(
    scenario: str, outcomes: Outcomes
) -> None:
    found = outcomes.every(scenario)
    assert len(found) == 2
    for of_rank in found:
        assert all(of_rank["emptied"])
        assert of_rank["same"] == [True] * 8
        assert len(set(of_rank["losses"])) == 4, "nothing trained"


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_masters_of_a_model_of_two_dtypes_are_saved_under_their_own_names(layout: str, outcomes: Outcomes) -> None:
    found = outcomes.every(f"masters {layout}")
    assert len(found) == 2
    for of_rank in found:
        assert of_rank["boxes"] > 20
        assert of_rank["wrong"] == 0
        assert not of_rank["head"]  # fp32 is its own master


def test_a_bf16_model_computes_its_logits_in_fp32_where_that_is_asked_for(outcomes: Outcomes) -> None:
    for of_rank in outcomes.every("head tp2-sp"):
        assert of_rank["true"]["dtypes"] == ["torch.float32"]
        assert of_rank["false"]["dtypes"] == ["torch.bfloat16"]
        assert of_rank["true"]["losses"] != of_rank["false"]["losses"]
        assert of_rank["true"]["norms"] == pytest.approx(of_rank["false"]["norms"], rel=0.05)
