"""`headwater train` over the workers of a Ray: it learns as in one process, and whichever worker fails, it ends."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tree import below, is_alive, state, wait_until

from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint
from headwater.cli.main import main
from headwater.config.load import load_config
from headwater.controller import build as build_module
from headwater.controller import loop
from headwater.data.types import TrainSequence
from headwater.metrics.sinks import read_jsonl
from headwater.workers.ray_cluster import RayGroup
from headwater.workers.train import with_advantages
from headwater.workers.train_rank import TrainJob, TrainRank
from headwater.workers.value import estimate_advantages

pytestmark = pytest.mark.usefixtures("one_thread")
HEARTBEAT_S = 5.0
ENDS_S = 10.0  # from a failure that is seen, or from the heartbeat's end, until the run has ended
PHASES = (
    "generate",
    "reward",
    "score",
    "value_turn",
    "values",
    "train_value",
    "policy_turn",
    "train_policy",
    "save",
    "take_news",
    "receive_weights",
    "wait_committed",
)
SHORT = (
    "policy.generation.max_new_tokens=4",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=4",
    "data.validation=null",
)
NO_VALIDATION = ("val_period=0", "val_at_start=false", "val_at_end=false")


class Run:
    """A tiny recipe, over two workers unless told otherwise."""

    def __init__(self, folder: Path, address: str, recipe: str) -> None:
        self.checkpoints, self.logs = folder / "checkpoints", folder / "logs"
        self._address = address
        self._recipe = recipe
        self._algorithm = recipe.removesuffix("_tiny")

    def words(self, *overrides: str, workers: int = 2) -> list[str]:
        cluster = [
            "cluster.launcher=ray",
            f"cluster.address={self._address}",
            f"cluster.workers_per_node={workers}",
            "cluster.cpus_per_worker=0.5",
            f"cluster.heartbeat_timeout_s={HEARTBEAT_S}",
        ]
        folders = [f"checkpointing.checkpoint_dir={self.checkpoints}", f"logger.log_dir={self.logs}"]
        common = [*folders, *SHORT, *(f"{self._algorithm}.{key}" for key in NO_VALIDATION)]
        return ["train", self._recipe, *common, *(cluster if workers else []), *overrides]

    def train(self, *overrides: str, workers: int = 2) -> int:
        """workers: 0 for one process without Ray."""
        return main(self.words(*overrides, workers=workers))

    def metrics(self) -> dict[str, dict[int, float]]:
        return read_jsonl(self.logs / "metrics.jsonl")

    def at(self, step: int) -> Checkpoint:
        (folder,) = self.checkpoints.glob(f"step_{step:06d}-*")
        return Checkpoint.open(folder)


@pytest.fixture
def new_run(tmp_path: Path, ray_address: str) -> Callable[..., Run]:
    def make(name: str = "run", recipe: str = "ppo_tiny") -> Run:
        return Run(tmp_path / name, ray_address, recipe)

    return make


def digests(checkpoint: Checkpoint, component: str) -> dict[tuple[str, tuple[int, ...]], int]:
    chunks = checkpoint.manifest.chunks
    return {(chunk.name, chunk.offset): chunk.digest for chunk in chunks if chunk.component == component}


LEARNS = ("policy.optimizer.lr=0.003", "checkpointing.keep_latest_k=null")


def test_two_workers_train_grpo_as_one_process_does_and_resume_each_other(new_run, capsys) -> None:
    inline, ray = new_run("inline", "grpo_tiny"), new_run("ray", "grpo_tiny")
    options = (*LEARNS, "checkpointing.save_period=2", "grpo.max_num_steps=4")
    assert inline.train(*options, workers=0) == 0
    assert ray.train(*options) == 0
    assert "2 ranks on cpu" in capsys.readouterr().out
    one, two = inline.metrics(), ray.metrics()
    assert one["train/reward"] == two["train/reward"]
    for tag, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4)):
        assert two[tag].keys() == one[tag].keys() == {1, 2, 3, 4}
        assert two[tag] == {step: pytest.approx(value, rel=1e-3, abs=tolerance) for step, value in one[tag].items()}
    assert min(two["train/grad_norm"].values()) > 0
    assert {chunk.file for chunk in ray.at(4).manifest.chunks} == {
        "policy/rank-00000.safetensors",
        "policy/rank-00001.safetensors",
    }
    assert main(["ckpt", "freshness", str(ray.at(2).folder), str(ray.at(4).folder)]) == 0
    assert main(["ckpt", "verify", str(ray.checkpoints)]) == 0

    more = (*LEARNS, "checkpointing.save_period=1")
    assert ray.train(*more, "grpo.max_num_steps=5", workers=0) == 0
    assert "at step 4" in capsys.readouterr().out
    assert {chunk.file for chunk in ray.at(5).manifest.chunks} == {"policy/rank-00000.safetensors"}
    assert ray.train(*more, "grpo.max_num_steps=6") == 0
    assert "at step 5" in capsys.readouterr().out
    assert ray.metrics()["train/optim_steps"][6] == 6 * ray.metrics()["train/optim_steps"][1]


@pytest.mark.slow
def test_four_steps_over_two_workers_equal_two_plus_two(new_run, capsys) -> None:
    whole, halves = new_run("whole"), new_run("halves")
    options = ("ppo.num_prompts_per_step=8", *LEARNS)
    assert whole.train(*options) == 0
    assert halves.train(*options, "ppo.max_num_steps=2") == 0
    assert halves.train(*options) == 0
    assert "at step 2" in capsys.readouterr().out
    assert main(["ckpt", "diff", str(whole.at(4).folder), str(halves.at(4).folder)]) == 0
    assert "identical" in capsys.readouterr().out
    assert whole.at(4).components() == ["policy", "value"]
    assert whole.metrics()["train/critic/loss"] == halves.metrics()["train/critic/loss"]


def test_the_warm_up_over_two_workers_leaves_the_policy_untouched_until_its_step(new_run) -> None:
    run = new_run()
    options = ("ppo.policy_training_start_step=3", "checkpointing.save_period=1", "ppo.num_prompts_per_step=8", *LEARNS)
    assert run.train(*options, "ppo.models_take_turns=true") == 0
    policy = {step: digests(run.at(step), "policy") for step in (1, 2, 3, 4)}
    value = {step: digests(run.at(step), "value") for step in (1, 2, 3, 4)}
    assert policy[1] == policy[2]
    changed = {key for key in policy[2] if policy[3][key] != policy[2][key]}
    assert len(changed) > len(policy[2]) / 2
    for before, after in ((1, 2), (2, 3), (3, 4)):
        moments = [key for key in value[before] if "exp_avg" in key[0]]
        assert moments
        assert all(value[before][key] != value[after][key] for key in moments)
    assert run.metrics()["refit/version"] == {1: 0, 2: 0, 3: 1, 4: 2}
    for before, after in ((2, 3), (3, 4)):
        assert main(["ckpt", "freshness", str(run.at(before).folder), str(run.at(after).folder)]) == 0


@pytest.mark.slow
def test_the_reward_and_the_explained_variance_rise_over_two_workers(new_run) -> None:
    run = new_run()
    learning = (
        "ppo.max_num_steps=26",
        "ppo.num_prompts_per_step=64",
        "ppo.policy_training_start_step=6",
        "ppo.gae_lambda=1",
        "policy.train_global_batch_size=64",
        "policy.train_micro_batch_size=64",
        "policy.optimizer.lr=0.003",
        "value.train_global_batch_size=16",
        "value.train_micro_batch_size=16",
        "value.optimizer.lr=0.003",
    )
    assert run.train(*learning, "checkpointing.enabled=false") == 0
    metrics = run.metrics()
    rewards = [metrics["train/reward"][step] for step in range(1, 27)]
    explained = [metrics["train/critic/explained_var"][step] for step in range(1, 27)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.4
    assert abs(explained[0]) < 0.02
    assert sum(explained[-5:]) / 5 > sum(explained[:5]) / 5 + 0.05


def test_what_a_user_can_cause_stays_one_line(new_run, capsys) -> None:
    run = new_run("run", "grpo_tiny")
    for overrides, words in (
        (("checkpointing.when_busy=skip",), "would let 2 ranks skip different saves"),
        (("policy.torch_cfg.tensor_parallel_size=2", "policy.torch_cfg.sequence_parallel=true"), "one token at a time"),
    ):
        assert run.train(*overrides) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1, said


def test_what_crosses_to_workers_does_not_grow_with_the_square_of_the_batch() -> None:
    count, length = 64, 50
    sequences = [
        TrainSequence(
            group=index,
            prompt_ids=torch.zeros(3, dtype=torch.int64),
            completion_ids=torch.zeros(length, dtype=torch.int64),
            generation_logprobs=torch.zeros(length),
            sampling_logprobs=torch.zeros(length),
        )
        for index in range(count)
    ]
    config = load_config("ppo_tiny").config.ppo
    assert config is not None
    values = [torch.rand(length) for _ in sequences]
    for scored in (
        estimate_advantages(sequences, torch.rand(count), values, config)[0],
        with_advantages(sequences, torch.rand(count, 1)),
    ):
        payload = sum(t.nbytes for s in scored for t in vars(s).values() if isinstance(t, torch.Tensor))
        assert len(pickle.dumps(scored)) < 3 * payload  # each tensor has some hundred bytes of its own


class _Blind(TrainRank):
    """Whose ranks but the first do not see what is in the checkpoints' folder."""

    def __init__(self, job: TrainJob, *, rank: int, world: int) -> None:
        if rank:
            CheckpointManager.latest = lambda self: None  # in this process alone
        super().__init__(job, rank=rank, world=world)


def test_ranks_that_see_different_newest_checkpoints_do_not_start(new_run, capsys, monkeypatch) -> None:
    run = new_run("run", "grpo_tiny")
    assert run.train("checkpointing.save_period=1", "grpo.max_num_steps=2", workers=0) == 0
    monkeypatch.setattr(build_module, "TrainRank", _Blind)
    assert run.train("grpo.max_num_steps=3") == 2
    said = capsys.readouterr().err
    assert re.search(r"rank 0 step_000002-\w+, rank 1 none", said), said


def test_a_step_that_all_ranks_refuse_leaves_the_steps_before_it_saved(new_run, capsys) -> None:
    run = new_run("run", "grpo_tiny")
    one_step_each = "policy.train_global_batch_size=16"
    wild = ("policy.optimizer.lr=1e30", "policy.max_grad_norm=null", one_step_each, "checkpointing.save_period=100")
    assert run.train(*wild) == 1
    output = capsys.readouterr()
    assert "the gradient norm is" in output.err
    assert output.err.count("\n") == 1, output.err
    assert run.at(1).manifest.step == 1


class Strike:
    """Sends a signal to one worker while the driver waits for a method, the second time that it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, phase: str, rank: int, way: str) -> None:
        self.at = 0.0
        self.processes: set[int] = set()
        self._rank, self._signal = rank, getattr(signal, way)
        self._members: Any = None
        self._times = 0
        wanted = 1 if phase == "wait_committed" else 2
        real_wait, real_score = RayGroup._wait, loop.score_groups

        def come(here: str) -> None:
            self._times += here == phase
            if here == phase and self._times == wanted:
                self._hit()

        def wait(group: RayGroup[Any], ranks: dict[Any, int], what: str, timeout_s: float) -> dict[int, Any]:
            self._members = group._members
            come(what)
            return real_wait(group, ranks, what, timeout_s)

        def score(*args: Any) -> Any:
            come("reward")
            return real_score(*args)

        monkeypatch.setattr(RayGroup, "_wait", wait)
        monkeypatch.setattr(loop, "score_groups", score)

    def _hit(self) -> None:
        pids = [int(member.where.split()[1]) for member in self._members]
        self.processes = {pid for worker in pids for pid in (worker, *below(worker))}
        os.kill(pids[self._rank], self._signal)
        self.at = time.monotonic()

    @property
    def gone(self) -> bool:
        return bool(self.processes) and not any(is_alive(pid) for pid in self.processes)


def check_failure(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, phase: str, rank: int, way: str
) -> None:
    options = ("checkpointing.save_period=1", "ppo.models_take_turns=true", "ppo.num_prompts_per_step=8", *LEARNS)
    with monkeypatch.context() as patch:
        strike = Strike(patch, phase, rank, way)
        code = run.train(*options)
    seconds = time.monotonic() - strike.at
    output = capsys.readouterr()
    assert code == 1
    assert strike.at, f"{phase} never came"
    assert seconds < ENDS_S + (HEARTBEAT_S if way == "SIGSTOP" else 0)
    reason = {"SIGKILL": "died", "SIGSTOP": "hangs: no sign of life"}[way]
    assert re.search(rf"worker trainer\[{rank}\] of 2 \(pid \d+ on .*{reason}", output.err), output.err
    wait_until(lambda: strike.gone, f"the workers and their writers are gone: {strike.processes}", 5.0)
    committed = [int(step) for step in re.findall(r"committed \S+/step_(\d+)-", output.out)]
    assert run.train(*options) == 0
    resumed = re.search(r"resumed from \S+ at step (\d+)", capsys.readouterr().out)
    assert resumed is not None or not committed
    if resumed is not None:
        assert int(resumed[1]) >= max(committed, default=0)
    assert max(run.metrics()["train/reward"]) == 4
    assert main(["ckpt", "verify", str(run.checkpoints)]) == 0


@pytest.mark.parametrize(("phase", "rank", "way"), [("train_policy", 1, "SIGKILL"), ("save", 0, "SIGSTOP")])
def test_a_worker_that_fails_ends_the_run_and_the_next_one_goes_on(
    new_run, capsys, monkeypatch, phase: str, rank: int, way: str
) -> None:
    check_failure(new_run(), capsys, monkeypatch, phase, rank, way)


@pytest.mark.soak
@pytest.mark.parametrize(("phase", "rank", "way"), list(product(PHASES, (0, 1), ("SIGKILL", "SIGSTOP"))))
def test_each_worker_fails_in_each_phase_of_the_loop(
    new_run, capsys, monkeypatch, phase: str, rank: int, way: str
) -> None:
    check_failure(new_run(), capsys, monkeypatch, phase, rank, way)


def test_a_run_with_a_ray_of_its_own_leaves_nothing_behind_when_a_worker_dies(tmp_path: Path) -> None:
    run = Run(tmp_path, "", "ppo_tiny")
    words = [word for word in run.words("ppo.max_num_steps=400") if not word.startswith("cluster.address")]
    command = [sys.executable, "-m", "headwater.cli.main", *words, "checkpointing.save_period=1"]
    with open(tmp_path / "out", "wb") as out:
        driver = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    try:
        wait_until(lambda: "step 2/400" in (tmp_path / "out").read_text(), "two steps", 120.0)
        processes = below(driver.pid)
        workers = [pid for pid, name in processes.items() if name.startswith("ray::WorkerHost")]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        assert driver.wait(ENDS_S) == 1
    finally:
        driver.kill()
        driver.wait()
    assert re.search(r"worker trainer\[[01]\] of 2 .* died", (tmp_path / "out").read_text())
    wait_until(lambda: not any(is_alive(pid) for pid in processes), "all processes of the run are gone", 5.0)
    assert state(driver.pid) in ("", "Z")
