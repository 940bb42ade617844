"""The model that megatron-core trains generates what a transformers copy of it does, at every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from generation_ranks import DENSE, LAYOUTS, MOE, SAMPLED, fits
from rank_outcomes import Outcomes, run_ranks

pytest.importorskip("megatron.core", reason="needs the extra megatron, which make test-slow installs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # four processes on what cores there are
RANKS = {
    f"{model} {layout}": world
    for world, layouts in LAYOUTS.items()
    for layout in layouts
    for model in (*DENSE, *MOE)
    if fits(model, layout)
}
RANKS |= {"tiny pp2-vpp2": 2, "qwen3 tp2-sp-lora": 2}


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("generation")
    run_ranks(Path(__file__).with_name("generation_ranks.py"), folder)
    return Outcomes(folder)


@pytest.mark.parametrize("scenario", RANKS)
def test_completions_are_those_of_a_transformers_copy(scenario: str, outcomes: Outcomes) -> None:
    found = outcomes.every(scenario)
    assert len(found) == RANKS[scenario]
    for of_rank in found:
        for kind in SAMPLED:
            tokens, logprobs, reasons, versions = of_rank[kind]["found"]
            expected = of_rank[kind]["expected"]
            assert tokens == expected[0]
            assert len(tokens) == 15
            for one, other in zip(logprobs, expected[1], strict=True):
                assert one == pytest.approx(other, abs=1e-5)
            assert [reasons, versions] == expected[2:]
            assert set(versions) == {1}
        assert of_rank["sampled"]["found"] == found[0]["sampled"]["found"]
        assert of_rank["alone"], "a completion depends on its batch"
        assert all(of_rank["padding looks"]), "attention of a row that may look nowhere is NaN in some kernels"


@pytest.mark.parametrize("scenario", RANKS)
def test_it_generates_with_the_weights_of_the_moment_and_leaves_training_as_it_was(
    scenario: str, outcomes: Outcomes
) -> None:
    for of_rank in outcomes.every(scenario):
        assert of_rank["changed"], "a step changed no completion"
        assert of_rank["caches"]
        assert not any(of_rank["caches"])
        assert not any(of_rank["inputs"])
        assert of_rank["goes on"]


@pytest.mark.parametrize("scenario", RANKS)
def test_ranks_that_compute_other_logits_give_the_same_completions(scenario: str, outcomes: Outcomes) -> None:
    found = outcomes.every(scenario)
    assert all(of_rank["disturbed"] == found[0]["disturbed"] for of_rank in found)
    assert found[0]["disturbed"] != found[0]["greedy"]["found"][0]


def test_some_completions_stop_early(outcomes: Outcomes) -> None:
    for scenario in RANKS:
        if not scenario.startswith("tiny"):
            reasons = outcomes.every(scenario)[0]["sampled"]["found"][2]
            assert set(reasons) == {"stop", "length"}
