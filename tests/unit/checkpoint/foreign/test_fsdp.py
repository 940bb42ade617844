"""Freshness of what two ranks saved of FSDP2 models; `fsdp_ranks.py` says how, and which folders there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.checkpoint.compare import check_freshness
from headwater.checkpoint.freshness import ComponentReport, Verdict

SCRIPT = Path(__file__).with_name("fsdp_ranks.py")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(output)
    return folder


def component(verdict: Verdict, name: str) -> ComponentReport:
    return next(report for report in verdict.components if report.component == name)


def test_two_saves_of_a_training_are_fresh_with_the_expert_idle_and_the_frozen_layer_reported(root: Path):
    verdict = check_freshness(root / "old", root / "new")
    assert (verdict.exit_code, verdict.outcome) == (0, "fresh")
    policy, value = component(verdict, "policy"), component(verdict, "value")
    assert policy.state == value.state == "advanced"
    assert (policy.old_steps, policy.new_steps) == ((1, 1), (1, 2))
    assert set(policy.idle) == {"expert.weight", "expert.bias"}
    assert set(policy.frozen) == {"policy.model.frozen.weight", "policy.model.frozen.bias"}
    assert value.idle == ()


def test_each_rank_wrote_its_own_shards(root: Path):
    assert {path.name for path in (root / "new").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}


def test_a_save_against_itself_names_moments_and_weights(root: Path):
    verdict = check_freshness(root / "new", root / "new")
    assert verdict.exit_code == 1
    assert {(chunk.component, chunk.role) for chunk in verdict.stale} == {
        (name, role) for name in ("policy", "value") for role in ("exp_avg", "exp_avg_sq", "weight")
    }


def test_the_shard_of_one_moment_that_one_rank_took_back_is_found(root: Path):
    verdict = check_freshness(root / "old", root / "shard")
    assert verdict.exit_code == 1
    assert [(chunk.component, chunk.key, chunk.offset, chunk.shape) for chunk in verdict.stale] == [
        ("policy", "policy.optim.state.body.weight.exp_avg", (8, 0), (8, 16))
    ]
    assert verdict.reasons == (
        "policy: exp_avg repeated although its step went from 1 to 2 (1 chunk): "
        "policy.optim.state.body.weight.exp_avg [8, 0]",
    )


def test_one_unchanged_bf16_weight_is_no_fault(root: Path):
    verdict = check_freshness(root / "old", root / "weight")
    assert verdict.exit_code == 0
    trained = component(check_freshness(root / "old", root / "new"), "value")
    assert component(verdict, "value").repeated == trained.repeated + 2


def test_a_policy_that_waits_for_its_critic_is_idle(root: Path):
    verdict = check_freshness(root / "old", root / "waiting")
    assert verdict.exit_code == 0
    assert (component(verdict, "policy").state, component(verdict, "value").state) == ("idle", "advanced")
    assert component(verdict, "policy").new_steps == (1, 1)
