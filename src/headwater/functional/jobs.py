"""The named jobs, and what must hold of the metrics of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import UserError
from headwater.metrics import names

if TYPE_CHECKING:  # every command's parser lists the jobs
    from headwater.config.schema import Config


@dataclass(frozen=True)
class Job:
    """A recipe by its name, with what must hold after it.

    checks: expressions of `headwater metrics check` for a resolved configuration. components: of its checkpoints, each
    of which must be fresh in every save. settings: what it sets beside its recipe; overrides win.
    """

    recipe: str
    what: str
    checks: Callable[[Config], list[str]]
    components: Sequence[str] = ("policy",)
    settings: Sequence[str] = ()


def _data(tag: str, step: int | None = None) -> str:
    return f'data["{tag}"]' if step is None else f'data["{tag}"]["{step}"]'


def _policy(config: Config) -> list[str]:
    """A policy that trained, on data that its generator and it agree about. NaN and infinity fail any of them."""
    last = config.algorithm.max_num_steps
    checks = [
        f"len({_data(names.TRAIN_REWARD)}) == {last}",
        f"min({_data(names.TRAIN_NUM_TRAINABLE_PARAMETERS)}) > 0",
        f"{_data(names.TRAIN_OPTIM_STEPS, last)} > 0",
        f"{_data(names.REFIT_VERSION, last)} > 0",
        f"max({_data(names.TRAIN_GRAD_NORM)}) > 0",
        f"max({_data(names.TRAIN_LOSS)}) - min({_data(names.TRAIN_LOSS)}) < 100",
        f"min({_data(names.TRAIN_APPROX_ENTROPY)}) > 0",
        f"max({_data(names.TRAIN_TOKEN_MULT_PROB_ERROR)}) < 1.05",
        f"max({_data(names.TRAIN_GEN_KL_ERROR)}) < 0.01",
        f"min({_data(names.TRAIN_PROBS_RATIO_CLAMPED_MIN)}) > 0.79",
        f"max({_data(names.TRAIN_PROBS_RATIO_CLAMPED_MAX)}) < 1.21",
    ]
    if config.loss_fn.reference_policy_kl_penalty > 0:
        # The policy begins as the reference, and moves.
        checks.append(f"{_data(names.TRAIN_KL_PENALTY, last)} > 0")
    return checks


def _critic(config: Config) -> list[str]:
    last = config.algorithm.max_num_steps
    return [
        *_policy(config),
        f"len({_data(names.TRAIN_CRITIC_LOSS)}) == {last}",
        f"{_data(names.TRAIN_CRITIC_OPTIM_STEPS, last)} >= {last}",
        f"min({_data(names.TRAIN_CRITIC_GRAD_NORM)}) > 0",
        f"max({_data(names.TRAIN_CRITIC_EXPLAINED_VAR)}) <= 1",
    ]


JOBS: dict[str, Job] = {
    job.recipe: job
    for job in (
        Job("grpo_megatron", "a Megatron policy and a reference policy, some updates of GRPO", _policy),
        Job(
            "ppo_megatron",
            "policy and value model take turns and are saved by NVRx at every step; both fresh in every checkpoint",
            _critic,
            ("policy", "value"),
            ("checkpointing.strategy=nvrx", "checkpointing.ckpt_assume_constant_structure=true"),
        ),
        Job("grpo_megatron_lora", "GRPO of adapters alone, which are all that is saved", _policy),
        Job("grpo_megatron_generation", "the Megatron policy generates itself, with nothing exported", _policy),
    )
}


def find_job(name: str) -> Job:
    """Raises UserError that lists the known ones."""
    if name not in JOBS:
        raise UserError(f"there is no functional job {name}; there are {', '.join(JOBS)}")
    return JOBS[name]
