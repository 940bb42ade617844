"""From a configuration to a run that is ready to start, resumed where a checkpoint is there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from headwater.config.load import LoadedConfig
from headwater.config.schema import Config, DatasetConfig, EngineConfig
from headwater.controller.runtime import Runtime
from headwater.controller.state import TrainerState, restore_rng, seed_everything
from headwater.data.datasets import load_problems
from headwater.data.prompts import PromptCursor
from headwater.data.types import Prompt, SamplingParams
from headwater.errors import HeadwaterError, UserError
from headwater.metrics import names
from headwater.metrics.progress import Progress
from headwater.metrics.sinks import open_sinks
from headwater.refit.sync import WeightSync
from headwater.rollout.env import build_environment
from headwater.rollout.rollout import PromptStream
from headwater.rollout.tolerance import TolerantEnvironment
from headwater.workers.generate import TrainerGenerator
from headwater.workers.group import WorkerGroup, launch
from headwater.workers.train_rank import TrainJob, TrainRank, TrainStart, tokenizer_of


@contextmanager
def build(loaded: LoadedConfig, console: Console | None = None) -> Iterator[Runtime]:
    """Everything that a run needs, closed again at the end. console: where progress goes; standard output if None.

    What can be refused is refused before anything is trained: a model, dataset, environment, folder or
    checkpoint that does not fit the configuration is a UserError.
    """
    config = loaded.config
    if config.cluster.num_threads is not None:
        torch.set_num_threads(config.cluster.num_threads)
    seed_everything(config.algorithm.seed)
    with ExitStack() as closing:
        cluster = closing.enter_context(launch(config.cluster))
        job = TrainJob(config, loaded.resolved_yaml, run_id=uuid.uuid4().hex, session=uuid.uuid4().hex)
        ranks = cluster.start("trainer", TrainRank, job)
        closing.push(_Closing(ranks).end)
        tokenizer = tokenizer_of(config)
        environment = TolerantEnvironment(build_environment(config.env), config.env.tolerated_failures)
        prompts, validation = _prompts(config, tokenizer)
        start = ranks.call(TrainRank.start)[0]
        state = TrainerState(
            dataset=prompts.source.fingerprint,
            base_model=start.base_models["policy"],
            value_base_model=start.base_models.get("value", ""),
        )
        if start.checkpoint is not None and start.trainer_state is not None:
            state = _resume(start.checkpoint, start.trainer_state, state, ranks)
            prompts.cursor.load_state_dict(state.cursor)
        if config.ppo is not None and config.ppo.models_take_turns:
            ranks.call(TrainRank.policy_turn)
        generator = TrainerGenerator(ranks)
        sinks = open_sinks(config.logger, state.step + 1)
        for sink in sinks:
            closing.callback(sink.close)
            sink.log(state.step, {names.TRAIN_NUM_TRAINABLE_PARAMETERS: float(start.parameters["policy"])})
        progress = closing.enter_context(Progress(config.algorithm.max_num_steps, state.step + 1, console))
        _announce(progress, config, state, start, ranks.world)
        yield Runtime(
            config=config,
            state=state,
            prompts=prompts,
            validation=validation,
            environment=environment,
            sampling=_sampling(config),
            ranks=ranks,
            generator=generator,
            sync=WeightSync(generator, state.weight_version),
            sinks=sinks,
            progress=progress,
        )


@dataclass(frozen=True)
class _Closing:
    ranks: WorkerGroup[TrainRank]

    def end(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Wait for what is being written. Where the run has failed, that is its reason, and not what follows of it."""
        try:
            self.ranks.call(TrainRank.close)
        except HeadwaterError:
            if kind is None:
                raise


def _prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptStream, list[Prompt]]:
    """The stream to train on, and the problems to validate on."""
    policy = config.policy

    def stream(dataset: DatasetConfig, held_out: frozenset[str]) -> PromptStream:
        source = load_problems(dataset, system_prompt=config.data.system_prompt)
        cursor = PromptCursor(len(source), shuffle=config.data.shuffle, seed=config.data.seed)
        limits = policy.generation.max_new_tokens, policy.max_total_sequence_length
        return PromptStream(source, cursor, tokenizer, *limits, held_out)

    validation = stream(config.data.validation, frozenset()).all() if config.data.validation is not None else []
    excluded = (prompt.problem.question for prompt in validation if config.data.exclude_validation)
    return stream(config.data.train, frozenset(excluded)), validation


def _sampling(config: Config) -> SamplingParams:
    generation = config.policy.generation
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_strings=tuple(generation.stop_strings),
        seed=config.algorithm.seed,
    )


def _resume(folder: Path, saved: dict[str, Any], fresh: TrainerState, ranks: WorkerGroup[TrainRank]) -> TrainerState:
    """Load the newest checkpoint and return where the run was. Raises UserError where it is not of this run."""
    state = TrainerState.from_json(saved)
    if state.dataset != fresh.dataset:
        raise UserError(
            f"{folder} was trained on another dataset than data.train describes: "
            "restore the data settings or choose a new checkpointing.checkpoint_dir"
        )
    base_models = {
        "policy": (state.base_model, fresh.base_model),
        "value": (state.value_base_model, fresh.value_base_model),
    }
    for group, (then, now) in base_models.items():
        if then and now and then != now:  # one without a value model is told when its components are loaded
            raise UserError(
                f"{folder} was trained from other weights than {group}.model_name holds at "
                f"{group}.precision: restore both or choose a new checkpointing.checkpoint_dir"
            )
    optim_steps = {"policy": state.optim_steps, "value": state.value_optim_steps}
    ranks.call(TrainRank.load, optim_steps, state.metric_history)
    restore_rng(saved["rng"])
    return state


def _announce(progress: Progress, config: Config, state: TrainerState, start: TrainStart, world: int) -> None:
    name, algorithm = config.algorithm_name, config.algorithm
    where = start.device if world == 1 else f"{world} ranks on {start.device}"
    progress.note(
        f"{name.upper()}: {config.policy.model_name}, {_size(start, 'policy', config.policy)}, "
        f"{config.policy.precision} on {where}, {algorithm.num_prompts_per_step} prompts x "
        f"{algorithm.num_generations_per_prompt} completions a step"
    )
    if config.value is not None:
        progress.note(
            f"value model: {config.value.model_name}, {_size(start, 'value', config.value)}, {config.value.precision}"
        )
    if start.checkpoint is not None:
        progress.note(f"resumed from {start.checkpoint} at step {state.step}")
    if state.step >= algorithm.max_num_steps:
        if start.checkpoint is not None:
            progress.note(f"nothing to do: {name}.max_num_steps is {algorithm.max_num_steps}")
    elif config.ppo is not None and config.ppo.policy_training_start_step > algorithm.max_num_steps:
        progress.note(
            f"the policy is not trained: ppo.policy_training_start_step ({config.ppo.policy_training_start_step}) "
            f"is beyond ppo.max_num_steps ({algorithm.max_num_steps})"
        )


def _size(start: TrainStart, component: str, config: EngineConfig) -> str:
    trained = start.parameters[component]
    return (
        f"{trained:,} parameters of adapters"
        if config.megatron_cfg.peft.enabled
        else f"{trained / 1e6:.1f}M parameters"
    )
