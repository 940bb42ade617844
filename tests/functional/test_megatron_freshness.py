"""`ckpt freshness` on checkpoints that megatron-core itself wrote: `megatron_ranks.py` says how and which."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.cli.main import main

SCRIPT = Path(__file__).with_name("megatron_ranks.py")
ranks = runpy.run_path(str(SCRIPT))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="pip install -e '.[megatron]'"),
]
all_saves = pytest.mark.parametrize(
    "saves", [f"{scene}-{form}" for scene in ranks["SCENES"] for form in ranks["FORMS"]]
)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two ranks wrote all checkpoints into."""
    folder = tmp_path_factory.mktemp("megatron")
    source = str(Path(sys.modules["headwater"].__file__ or "").parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(output)
    return folder


@pytest.fixture
def ask(root: Path, saves: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Asks the command about two checkpoints of a scene: the exit code, and the verdict as it is printed."""

    def run(old: str, new: str) -> tuple[int, dict[str, Any]]:
        code = main(["ckpt", "freshness", "--json", str(root / saves / old), str(root / saves / new)])
        return code, json.loads(capsys.readouterr().out)

    return run


def stale(verdict: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
    return sorted((chunk["role"], chunk["key"], chunk["offset"]) for chunk in verdict["stale"])


@all_saves
def test_two_saves_of_a_training_are_fresh_and_the_step_is_the_optimizers(ask: Any):
    code, verdict = ask("old", "new")
    assert (code, verdict["verdict"], verdict["old_format"]) == (0, "fresh", "Megatron torch_dist")
    (component,) = verdict["components"]
    assert (component["state"], component["old_steps"], component["new_steps"]) == ("advanced", [2, 2], [4, 4])
    assert component["compared"] > component["repeated"]
    assert verdict["notes"] == []


@all_saves
def test_a_save_against_itself_names_moments_masters_and_weights(ask: Any):
    code, verdict = ask("new", "new")
    assert code == 1
    assert {role for role, _, _ in stale(verdict)} == {"exp_avg", "exp_avg_sq", "param", "weight"}
    text = " ".join(verdict["reasons"])
    assert all(f"{role} repeated" in text for role in ("exp_avg", "exp_avg_sq", "param", "weight"))


@all_saves
def test_what_one_rank_owns_of_one_moment_is_found_if_it_went_back(ask: Any, saves: str):
    code, verdict = ask("old", "shard")
    assert code == 1
    assert {role for role, _, _ in stale(verdict)} == {"exp_avg"}
    assert len({key for _, key, _ in stale(verdict)}) == 1
    if saves.endswith("dp_reshardable"):
        assert len(verdict["stale"]) == 1
    else:  # one parameter, stored as its gate and its up projection
        assert ".mlp." in verdict["stale"][0]["key"]
        assert len(verdict["stale"]) == 2
    assert "although the step of its group went from 2 to 4" in verdict["reasons"][0]


@pytest.mark.parametrize(
    ("saves", "how"), [("dp2-fully_reshardable", "repeated in part"), ("dp2-dp_reshardable", "repeated")]
)
def test_a_rank_that_went_back_is_found_where_a_tensor_is_gathered_from_both(ask: Any, how: str):
    code, verdict = ask("old", "edge")
    assert code == 1
    (chunk,) = verdict["stale"]
    assert (chunk["role"], chunk["reason"]) == ("exp_avg", f"{how} although the step of its group went from 2 to 4")


@all_saves
def test_one_unchanged_bf16_weight_is_no_fault(ask: Any):
    code, verdict = ask("old", "weight")
    assert code == 0
    _, trained = ask("old", "new")
    assert verdict["components"][0]["repeated"] > trained["components"][0]["repeated"]


@pytest.mark.parametrize("saves", ["dp2-fully_reshardable"])
def test_frozen_layers_are_reported_and_no_fault(ask: Any):
    code, verdict = ask("old", "new")
    assert code == 0
    assert set(verdict["components"][0]["frozen"]) == {
        "embedding.word_embeddings.weight",
        "decoder.layers.self_attention.linear_qkv.weight",
        "decoder.layers.self_attention.linear_proj.weight",
    }


@all_saves
def test_nothing_else_is_taken_for_frozen(ask: Any, saves: str):
    _, verdict = ask("new", "new")
    assert len(verdict["components"][0]["frozen"]) == (3 if saves == "dp2-fully_reshardable" else 0)


@pytest.mark.parametrize("saves", ["moe-fully_reshardable"])
def test_an_expert_that_no_token_met_is_idle(ask: Any):
    code, verdict = ask("old", "new")
    assert code == 0
    layers = "decoder.layers.mlp.experts.experts"
    expert = ranks["UNTOUCHED"]
    gate_and_up = [f"{layers}.linear_fc1.weight [{layer}, {expert}, {row}, 0]" for layer in (0, 1) for row in (0, 48)]
    down = [f"{layers}.linear_fc2.weight [{layer}, {expert}, 0, 0]" for layer in (0, 1)]
    assert sorted(verdict["components"][0]["idle"]) == sorted(gate_and_up + down)


@pytest.mark.parametrize("saves", ["moe-dp_reshardable"])
def test_an_expert_that_no_token_met_is_idle_in_a_bucket_too(ask: Any):
    code, verdict = ask("old", "new")
    assert code == 0
    assert len(verdict["components"][0]["idle"]) == 4  # two matrices of two layers
    assert all("bucket_idx" in place for place in verdict["components"][0]["idle"])


@pytest.mark.parametrize("saves", ["dp2-dp_reshardable", "moe-dp_reshardable"])
def test_the_padding_of_a_bucket_is_no_evidence(root: Path, saves: str):
    from headwater.checkpoint.compare import find_repeats
    from headwater.checkpoint.foreign.folder import read_folder
    from headwater.checkpoint.freshness import Pair

    old, new = (read_folder(root / saves / name) for name in ("old", "new"))
    before = {chunk.place: chunk for chunk in old.chunks}
    padding = [Pair(before[c.place], c) for c in new.chunks if c.role == "other" and c.key.endswith(".exp_avg")]
    assert len(padding) >= 4
    repeats = find_repeats(padding)
    assert all(found.repeated and found.live for found in repeats.values())  # it would be, if it were a moment


@pytest.mark.parametrize("saves", [f"tp2-{form}" for form in ranks["FORMS"]])
def test_another_layout_or_another_form_cannot_be_told(root: Path, saves: str, capsys: pytest.CaptureFixture[str]):
    other = "dp2-dp_reshardable" if saves == "tp2-fully_reshardable" else "dp2-fully_reshardable"
    assert main(["ckpt", "freshness", str(root / saves / "old"), str(root / other / "new")]) == 2
    assert capsys.readouterr().out.startswith("cannot tell: ")
