"""A GRPO step in Headwater and in TRL's GRPOTrainer, in turns in one process.

Both sides see the same prompts in the same order and draw as many completions under the same budget and
sampling; each trains its own copy of the model. Headwater runs twice, once training every group and
once leaving out those without a signal. The peer's trainer owns the outer loop, since it cannot be
stepped from outside; our steps run between its steps, outside the time it is charged for.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headwater.config.load import load_config
from headwater.config.schema import Config, LossConfig
from headwater.controller.build import build
from headwater.controller.loop import sync, train_step
from headwater.controller.runtime import Runtime
from headwater.errors import UserError, require_extra
from headwater.metrics import names
from headwater.metrics.timer import StepTimer
from headwater.models.resolve import resolve
from headwater.rollout.env import Episode
from headwater.workers.train_rank import TrainRank


@dataclass
class Side:
    """Figures of one side, one entry a counted step: seconds, completion tokens sampled, and those trained on."""

    name: str
    seconds: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """The peer, then Headwater with every group, then with silent groups left out."""

    machine: str
    peer: Side
    every_group: Side
    skipping: Side

    def ratios(self, side: Side) -> list[float]:
        """Peer over `side`, step by step: how many times faster the side was."""
        return [peer / own for peer, own in zip(self.peer.seconds, side.seconds, strict=True)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(recipe: str, overrides: Sequence[str], *, steps: int, warmup: int, console: Console) -> Comparison:
    """Run `warmup` uncounted and `steps` counted steps of each side.

    Raises UserError for fewer than one step, BlockedError without the peer.
    """
    if steps < 1 or warmup < 0:
        raise UserError("--steps must be 1 or more and --warmup 0 or more")
    _require_comparable(load_config(recipe, overrides).config)
    try:
        import trl  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise require_extra("bench", "trl") from error

    common = [
        *overrides,
        "checkpointing.enabled=false",
        "data.shuffle=false",
        "data.exclude_validation=false",
        "logger.tensorboard_enabled=false",
    ]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        runs = [
            stack.enter_context(
                build(
                    load_config(
                        recipe,
                        [*common, f"grpo.skip_groups_without_signal={skip}", f"logger.log_dir={folder}/{skip}"],
                    ),
                    Console(quiet=True),
                )
            )
            for skip in ("false", "true")
        ]
        machine = f"torch {torch.__version__}, trl {trl.__version__}, {torch.get_num_threads()} CPU threads"
        result = Comparison(machine, Side(f"TRL {trl.__version__}"), Side("Headwater, every group"), Side("Headwater"))
        _run_peer(result, runs, Path(folder), steps, warmup, console)
    return result


def _require_comparable(config: Config) -> None:
    """Refuse what the two sides would do differently."""
    total = config.algorithm.completions_per_step
    unlike = [
        (config.policy.train_global_batch_size != total, "policy.train_global_batch_size must be the whole step"),
        (config.cluster.launcher != "inline", "cluster.launcher must be inline"),
        (config.loss_fn != LossConfig(), "loss_fn must be the default"),
        (bool(config.policy.generation.stop_strings), "policy.generation.stop_strings must be empty"),
        (config.policy.optimizer.weight_decay != 0, "policy.optimizer.weight_decay must be 0"),
    ]
    for differs, what in unlike:
        if differs:
            raise UserError(f"the peer cannot be set up alike: {what}")


def _now() -> float:
    """Seconds, once the device has done all that was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def table(result: Comparison) -> Table:
    """Medians of each side: seconds, completion tokens sampled and trained on, and the peer's time over its own.

    The last with the lowest and the highest of the steps.
    """
    view = Table(title="GRPO step, medians", caption=result.machine)
    view.add_column("side", no_wrap=True)
    for column in ("s/step", "sampled", "trained", "times faster"):
        view.add_column(column, justify="right", no_wrap=True)
    for side in (result.peer, result.every_group, result.skipping):
        ratios = result.ratios(side)
        view.add_row(
            side.name,
            f"{statistics.median(side.seconds):.2f}",
            f"{statistics.median(side.generated):.0f}",
            f"{statistics.median(side.trained):.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.1f}-{max(ratios):.1f})",
        )
    return view


def _own_step(run: Runtime, side: Side, counted: bool) -> None:
    timer = StepTimer()
    before = run.call(TrainRank.tokens_trained)
    start = _now()
    metrics = train_step(run, timer)
    sync(run, timer)
    seconds = _now() - start
    if counted:
        completions = run.config.algorithm.num_prompts_per_step * run.config.algorithm.num_generations_per_prompt
        side.seconds.append(seconds)
        side.generated.append(round(metrics[names.TRAIN_MEAN_GEN_TOKENS_PER_SAMPLE] * completions))
        side.trained.append(run.call(TrainRank.tokens_trained) - before)


def _run_peer(
    result: Comparison, runs: Sequence[Runtime], folder: Path, steps: int, warmup: int, console: Console
) -> None:
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

    run = runs[0]
    config = run.config
    total = warmup + steps
    rows = [
        run.prompts.source[i % len(run.prompts.source)] for i in range(total * config.algorithm.num_prompts_per_step)
    ]
    sampled: list[int] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, row: list[int], **_: Any) -> list[float | None]:
        sampled.append(sum(len(ids) for ids in completion_ids))
        episodes = [Episode(rows[r], c[0]["content"], "stop") for r, c in zip(row, completions, strict=True)]
        return [score.total for score in run.environment.score(episodes)]

    class Turns(TrainerCallback):
        """Before each of the peer's steps: ours. The peer's clock runs from then to its step's end."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            counted = state.global_step >= warmup
            _own_step(runs[0], result.every_group, counted)
            _own_step(runs[1], result.skipping, counted)
            self.start = _now()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = _now() - self.start
            console.print(f"step {state.global_step}/{total}: {result.peer.name} {seconds:.2f} s", highlight=False)
            if state.global_step > warmup:
                result.peer.seconds.append(seconds)
                result.peer.generated.append(sampled[-1])
                result.peer.trained.append(sampled[-1])

    batch = config.algorithm.completions_per_step
    trainer = GRPOTrainer(
        model=str(resolve(config.policy.model_name)),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": list(p.messages), "row": i} for i, p in enumerate(rows)]),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=batch,
            num_generations=config.algorithm.num_generations_per_prompt,
            max_completion_length=config.policy.generation.max_new_tokens,
            temperature=config.policy.generation.temperature,
            top_p=config.policy.generation.top_p,
            top_k=config.policy.generation.top_k or 0,
            adam_beta1=config.policy.optimizer.betas[0],
            adam_beta2=config.policy.optimizer.betas[1],
            adam_epsilon=config.policy.optimizer.eps,
            learning_rate=config.policy.optimizer.lr,
            lr_scheduler_type="constant",
            max_grad_norm=config.policy.max_grad_norm or 0.0,
            beta=0.0,
            max_steps=total,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": config.policy.precision},
            bf16=config.policy.precision == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            seed=config.algorithm.seed,
        ),
        callbacks=[Turns()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
