"""The one RL loop.

    prompts ──> generate ──> score ──> advantages ──> train ──> save ──> sync ──> validate
                   ^                                                      │
                   └────────────── weights of the next version ───────────┘

GRPO takes advantages from the rewards of a group, and PPO from a value model, which is trained too, before the policy.

Everything waits for the step before it. `Runtime.state` moves at the end of training, so whatever is
saved stands at a step's boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from headwater.algorithms.advantage import ADVANTAGES
from headwater.controller.interrupt import StopRequest
from headwater.controller.runtime import Runtime
from headwater.data.types import Group, TrainSequence
from headwater.errors import HeadwaterError
from headwater.metrics import names
from headwater.metrics.stat import Stat, all_ranks, merge, reduce
from headwater.metrics.timer import StepTimer
from headwater.rollout.rollout import score_groups, summarize, validate
from headwater.workers.group import WorkerError
from headwater.workers.train import train_sequences, with_advantages
from headwater.workers.train_rank import Refused, TrainRank
from headwater.workers.value import estimate_advantages

T = TypeVar("T")


def run_rl(run: Runtime, stop: StopRequest) -> None:
    """Train until `max_num_steps` or until a stop is asked for; what was trained is saved either way."""
    config, algorithm, state = run.config, run.config.algorithm, run.state
    saved_step = state.step
    accuracies: list[float] = []
    make_room(run)
    if state.step < algorithm.max_num_steps and (algorithm.val_at_start or _metric_is_missing(run)):
        _validate_and_log(run, stop, accuracies)

    while state.step < algorithm.max_num_steps and not stop.requested:
        timer = StepTimer()
        with timer.time(names.TIMING_TOTAL_STEP_TIME):
            optim_steps = state.optim_steps, state.value_optim_steps
            try:
                metrics = train_step(run, timer)
            except WorkerError:
                raise  # which took all ranks with it
            except HeadwaterError:
                # A reward that fails or a prompt too long must not cost the steps before it.
                if saved_step < state.step and (state.optim_steps, state.value_optim_steps) == optim_steps:
                    _finish_saves(run, save=True)
                raise
            stop.step_ended()
            _record_ranking_metric(run, metrics)  # before the save, so that the checkpoint knows its own rank
            if _is_save_due(run):
                may_skip = state.step < algorithm.max_num_steps and not stop.requested
                _save(run, timer, may_skip=may_skip)
                if not may_skip or config.checkpointing.when_busy != "skip":
                    saved_step = state.step  # else a stop asked for meanwhile has it saved once more
            metrics |= sync(run, timer)
        last = state.step == algorithm.max_num_steps
        if not stop.requested and (_is_period(state.step, algorithm.val_period) or (last and algorithm.val_at_end)):
            metrics |= _validate(run, stop, accuracies)
        _log(run, metrics | timer.seconds | _checkpoint_news(run))

    _finish_saves(run, save=saved_step < state.step)
    if len(accuracies) > 1:
        count = len(run.validation)
        run.progress.note(f"validation accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f} (greedy, {count} problems)")


def train_step(run: Runtime, timer: StepTimer) -> dict[str, float]:
    """Generate, score and train once. Returns the step's metrics; its times are in `timer`."""
    algorithm, state = run.config.algorithm, run.state
    run.progress.phase("generate")
    with timer.time(names.TIMING_GENERATION):
        prompts = run.prompts.next(algorithm.num_prompts_per_step)
        answers = run.generator.generate(prompts, algorithm.num_generations_per_prompt, run.sampling)
    with timer.time(names.TIMING_REWARD):
        groups = score_groups(run.environment, prompts, answers)
    rewards = torch.stack([group.rewards for group in groups])

    run.progress.phase("score")
    epochs = algorithm.policy_epochs(state.step + 1)
    sequences, metrics = _score(run, groups, rewards, epochs, timer)

    run.progress.phase("train")
    if run.config.ppo is not None:
        with timer.time(names.TIMING_VALUE_TRAINING):
            metrics |= _train_value(run, sequences, run.config.ppo.ppo_epochs)
            if run.config.ppo.models_take_turns:
                run.call(TrainRank.policy_turn)
    with timer.time(names.TIMING_POLICY_TRAINING):
        metrics |= _train(run, sequences, epochs)
    state.step += 1
    state.cursor = run.prompts.cursor.state_dict()
    return metrics | _rollout_metrics(groups, rewards, timer)


def _score(
    run: Runtime, groups: Sequence[Group], rewards: torch.Tensor, epochs: int, timer: StepTimer
) -> tuple[list[TrainSequence], dict[str, float]]:
    """The completions with all that the losses need, their advantages included. epochs: of the policy."""
    config = run.config
    sequences = train_sequences(groups)
    if config.grpo is not None:
        sequences = with_advantages(sequences, ADVANTAGES[config.grpo.advantage](rewards))
    optim_steps = epochs * (len(sequences) // config.policy.train_global_batch_size)
    kl_in_reward = config.ppo is not None and config.ppo.kl_penalty_in_reward > 0
    with timer.time(names.TIMING_POLICY_AND_REFERENCE_LOGPROBS):
        sequences = run.call(TrainRank.score, sequences, optim_steps=optim_steps, for_reward=kl_in_reward)
    if config.ppo is None:
        return sequences, {}
    with timer.time(names.TIMING_VALUES):
        if config.ppo.models_take_turns:
            run.call(TrainRank.value_turn)
        values = run.call(TrainRank.values, sequences)
    sequences, explained = estimate_advantages(sequences, rewards.flatten(), values, config.ppo)
    return sequences, {} if explained is None else {names.TRAIN_CRITIC_EXPLAINED_VAR: explained}


def _train_value(run: Runtime, sequences: Sequence[TrainSequence], epochs: int) -> dict[str, float]:
    """One optimizer step of the value model for each of its global batches, in each epoch."""
    assert run.config.value is not None
    stats: list[dict[str, Stat]] = []
    for batch in _batches(sequences, run.config.value.train_global_batch_size, epochs):
        result, step = _accepted(run.call(TrainRank.train_value, batch))
        run.state.value_optim_steps += 1
        own = {names.TRAIN_CRITIC_GRAD_NORM: step.grad_norm, names.TRAIN_CRITIC_LR: step.lr}
        stats += [result.stats, {tag: Stat.mean(value, 1) for tag, value in own.items()}]
    return reduce(merge(stats)) | {names.TRAIN_CRITIC_OPTIM_STEPS: float(run.state.value_optim_steps)}


def _train(run: Runtime, sequences: Sequence[TrainSequence], epochs: int) -> dict[str, float]:
    """One optimizer step for each global batch with anything to train on; without any, the weights stay as they are."""
    stats: list[dict[str, Stat]] = []
    for batch in _batches(sequences, run.config.policy.train_global_batch_size, epochs):
        trained = _accepted(run.call(TrainRank.train_policy, batch))
        if trained is None:
            continue
        result, step = trained
        run.state.optim_steps += 1
        own = {names.TRAIN_LOSS: result.loss_sum, names.TRAIN_GRAD_NORM: step.grad_norm, names.TRAIN_LR: step.lr}
        stats += [result.stats, {tag: Stat.mean(value, 1) for tag, value in own.items()}]
    if stats:
        run.state.weight_version += 1
    return reduce(merge(stats)) | {names.TRAIN_OPTIM_STEPS: float(run.state.optim_steps)}


def _accepted(answer: T | Refused) -> T:
    """Raises HeadwaterError for a step that all ranks refused."""
    if isinstance(answer, Refused):
        raise HeadwaterError(answer.why)
    return answer


def _batches(sequences: Sequence[TrainSequence], size: int, epochs: int) -> Iterator[Sequence[TrainSequence]]:
    """Global batches in order, anew in each epoch."""
    for _ in range(epochs):
        for start in range(0, len(sequences), size):
            yield sequences[start : start + size]


def sync(run: Runtime, timer: StepTimer) -> dict[str, float]:
    """Give the generator the newest policy, if it has not got it."""
    run.progress.phase("sync")
    with timer.time(names.TIMING_PREPARE_TOTAL):
        metrics = make_room(run)
        with timer.time(names.TIMING_PREPARE_TRANSFER_AND_UPDATE_WEIGHTS):
            if run.state.weight_version > run.sync.version:
                run.sync.push(run.state.weight_version)
    return metrics | {names.REFIT_VERSION: float(run.sync.version)}


def make_room(run: Runtime) -> dict[str, float]:
    """Leave the devices to generation, where that is asked for."""
    if not run.config.policy.offload_policy_before_refit:
        return {}
    return all_ranks(run.ranks.call(TrainRank.offload_for_generation))


def _is_period(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


def _is_save_due(run: Runtime) -> bool:
    last = run.state.step == run.config.algorithm.max_num_steps
    return run.config.checkpointing.enabled and (
        last or _is_period(run.state.step, run.config.checkpointing.save_period)
    )


def _save(run: Runtime, timer: StepTimer, *, may_skip: bool) -> None:
    run.progress.phase("save")
    with timer.time(names.TIMING_CHECKPOINTING):
        run.state.metric_history = run.call(TrainRank.metric_history)
        state = run.state
        run.call(TrainRank.save, state.step, state.to_json(), state.weight_version, may_skip=may_skip)


def _checkpoint_news(run: Runtime) -> dict[str, float]:
    """Show what became of saves, and return what was measured; a failed one ends the run here if it is to."""
    if not run.config.checkpointing.enabled:
        return {}
    of_ranks = run.ranks.call(TrainRank.take_news)
    for note in of_ranks[0].notes:
        run.progress.note(note)
    return all_ranks([news.metrics for news in of_ranks])


def _finish_saves(run: Runtime, *, save: bool) -> None:
    """Save the last step where it was not, because no other save follows, and wait until all are committed."""
    if not run.config.checkpointing.enabled:
        return
    timer = StepTimer()
    if save:
        _save(run, timer, may_skip=False)
    waits = run.call(TrainRank.pending_saves) > 0
    run.call(TrainRank.wait_committed)
    metrics = _checkpoint_news(run)
    if save or waits:
        for sink in run.sinks:
            sink.log(run.state.step, metrics | timer.seconds)


def _metric_is_missing(run: Runtime) -> bool:
    """A resumed checkpoint whose ranking metric was due but is unknown: the run ended between save and validation."""
    name, step = run.config.checkpointing.metric_name, run.state.step
    if not name or not name.startswith("validation/") or not run.config.checkpointing.enabled:
        return False
    due = step > 0 and _is_period(step, run.config.algorithm.val_period)
    return due and str(step) not in run.call(TrainRank.metric_history)


def _validate_and_log(run: Runtime, stop: StopRequest, accuracies: list[float]) -> None:
    metrics = _validate(run, stop, accuracies)
    if metrics:
        for sink in run.sinks:
            sink.log(run.state.step, metrics)
        _record_ranking_metric(run, metrics)


def _validate(run: Runtime, stop: StopRequest, accuracies: list[float]) -> dict[str, float]:
    """Greedy answers to the held-out problems; nothing where a stop was asked for meanwhile."""
    run.progress.phase("validate")
    completions, scores = [], []
    size = run.config.algorithm.val_batch_size
    for start in range(0, len(run.validation), size):
        if stop.requested:
            return {}
        part = validate(run.generator, run.environment, run.validation[start : start + size], run.sampling)
        completions += part[0]
        scores += part[1]
    result = summarize(completions, scores)
    accuracies.append(result.accuracy)
    run.progress.note(
        f"step {run.state.step}: validation accuracy {result.accuracy:.3f}, reward {result.reward:.3f}, "
        f"{result.length:.1f} tokens ({len(completions)} problems, greedy)"
    )
    return {
        names.VALIDATION_ACCURACY: result.accuracy,
        names.VALIDATION_REWARD: result.reward,
        names.VALIDATION_AVG_LENGTH: result.length,
    }


def _log(run: Runtime, metrics: dict[str, float]) -> None:
    tokens = metrics[names.TRAIN_MEAN_GEN_TOKENS_PER_SAMPLE] * run.config.algorithm.completions_per_step
    metrics[names.PERFORMANCE_TOKENS_PER_SEC] = tokens / metrics[names.TIMING_TOTAL_STEP_TIME]
    metrics |= all_ranks(run.ranks.call(TrainRank.device_memory))
    for sink in run.sinks:
        sink.log(run.state.step, metrics)
    _record_ranking_metric(run, metrics)
    run.progress.step(run.state.step, metrics)


def _record_ranking_metric(run: Runtime, metrics: dict[str, float]) -> None:
    name = run.config.checkpointing.metric_name
    if run.config.checkpointing.enabled and name is not None and name in metrics:
        run.call(TrainRank.record_metric, run.state.step, metrics[name])


def _rollout_metrics(groups: Sequence[Group], rewards: torch.Tensor, timer: StepTimer) -> dict[str, float]:
    completions = [completion for group in groups for completion in group.completions]
    tokens = sum(len(completion.token_ids) for completion in completions)
    groups_have_std = rewards.shape[1] > 1
    return {
        names.TRAIN_REWARD: rewards.mean().item(),
        names.TRAIN_REWARD_STD: (rewards.std(dim=1).mean() if groups_have_std else rewards.std(correction=0)).item(),
        names.TRAIN_GROUPS_WITH_SIGNAL: float((rewards != rewards[:, :1]).any(dim=1).sum()),
        names.TRAIN_MEAN_GEN_TOKENS_PER_SAMPLE: tokens / len(completions),
        names.PERFORMANCE_GENERATION_TOKENS_PER_SEC: tokens / timer.seconds[names.TIMING_GENERATION],
    }
