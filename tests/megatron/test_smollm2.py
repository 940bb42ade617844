"""SmolLM2-135M, nine heads and three query groups, cut by what divides them: the same logits as transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_outcomes import Outcomes, run_ranks

pytest.importorskip("megatron.core", reason="needs the extra megatron, which make test-slow installs")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    from headwater.models.resolve import resolve

    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HEADWATER_CACHE", raising=False)  # the user's, where the model may be already
        run_ranks(Path(__file__).with_name("smollm2_ranks.py"), folder, str(resolve("builtin:smollm2-135m")))
    return Outcomes(folder)


@pytest.mark.parametrize(("layout", "ranks"), [("one", 1), ("tp3", 3), ("pp2", 2)])
def test_the_logits_are_those_of_transformers(layout: str, ranks: int, outcomes: Outcomes) -> None:
    found = outcomes.every(layout)
    assert len(found) == ranks
    for of_rank in found:
        assert of_rank["shape"] == [1, 24, 49152]
        assert of_rank["largest"] > 10  # of the logits themselves
        assert of_rank["difference"] < 1e-3
        assert of_rank["same likeliest"]
        assert of_rank["exact"] == 272  # tensors of the folder that come out as they went in
