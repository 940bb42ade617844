"""From a configuration to a run that is ready to start, resumed where a checkpoint is there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from headwater.checkpoint.digest import digest, digest_bytes
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint
from headwater.config.load import LoadedConfig
from headwater.config.schema import Config, DatasetConfig, EngineConfig, ValueConfig
from headwater.controller.runtime import Runtime
from headwater.controller.state import TrainerState, restore_rng, seed_everything
from headwater.data.datasets import load_problems
from headwater.data.prompts import PromptCursor
from headwater.data.types import Prompt, SamplingParams
from headwater.engines.generate.native import NativeGenerator
from headwater.engines.torch.engine import TorchEngine
from headwater.engines.torch.value import TorchValueEngine
from headwater.errors import BlockedError, UserError
from headwater.metrics import names
from headwater.metrics.progress import Progress
from headwater.metrics.sinks import open_sinks
from headwater.models.resolve import load_tokenizer, model_identity, resolve
from headwater.refit.sync import WeightSync
from headwater.rollout.env import build_environment
from headwater.rollout.rollout import PromptStream
from headwater.rollout.tolerance import TolerantEnvironment
from headwater.workers.train import PolicyWorker
from headwater.workers.value import ValueWorker


@contextmanager
def build(loaded: LoadedConfig, console: Console | None = None) -> Iterator[Runtime]:
    """Everything that a run needs, closed again at the end. console: where progress goes; standard output if None.

    What can be refused is refused before anything is trained: a model, dataset, environment, folder or
    checkpoint that does not fit the configuration is a UserError.
    """
    config = loaded.config
    if config.cluster.launcher != "inline":
        raise UserError("cluster.launcher=ray: headwater train runs inline alone in this version")
    device = _device(config)
    if config.cluster.num_threads is not None:
        torch.set_num_threads(config.cluster.num_threads)
    seed_everything(config.algorithm.seed)
    with ExitStack() as closing:
        model_path = _model_path(config.policy)
        checkpoints = checkpoint = None
        if config.checkpointing.enabled:
            checkpoints = CheckpointManager(config.checkpointing, uuid.uuid4().hex, model_identity(model_path))
            closing.callback(checkpoints.close)
            checkpoint = checkpoints.latest()
        tokenizer = _tokenizer(config, model_path)
        environment = TolerantEnvironment(build_environment(config.env), config.env.tolerated_failures)
        prompts, validation = _prompts(config, tokenizer)
        turns = config.ppo is not None and config.ppo.models_take_turns
        # Where the host is the device, storage moves for the one who asks for it, and not for the reference policy.
        moves = turns or config.policy.offload_optimizer_for_logprob
        engine = TorchEngine(config.policy, model_path, device, moves_on_host=moves)
        value = None
        if config.value is not None:
            value = TorchValueEngine(config.value, _model_path(config.value), device, moves_on_host=turns)
            _require_same_tokens(config.value, engine, value)
        engines: dict[str, TorchEngine] = {"policy": engine} if value is None else {"policy": engine, "value": value}
        reference = _reference(config, model_path, device)

        state = TrainerState(
            dataset=prompts.source.fingerprint,
            base_model=_weights_digest(engine),
            value_base_model=_weights_digest(value) if value is not None else "",
        )
        if checkpoints is not None:
            sizes = {name: each.checkpoint_bytes for name, each in engines.items()}
            checkpoints.require_space(sum(sizes.values()))
            checkpoints.prepare(sizes, device.type == "cuda", tokenizer.save_pretrained)
        if checkpoints is not None and checkpoint is not None:
            state = _resume(checkpoint, state, engines)
            prompts.cursor.load_state_dict(state.cursor)
            checkpoints.restore_metric_history(state.metric_history)
        if value is not None and turns:
            value.offload()
        generator = NativeGenerator(engine.model, tokenizer, config.policy.generation.max_batch_size)
        sinks = open_sinks(config.logger, state.step + 1)
        for sink in sinks:
            closing.callback(sink.close)
            sink.log(state.step, {names.TRAIN_NUM_TRAINABLE_PARAMETERS: float(engine.num_trainable_parameters)})
        progress = closing.enter_context(Progress(config.algorithm.max_num_steps, state.step + 1, console))
        _announce(progress, config, state, checkpoint, engines)
        yield Runtime(
            config=config,
            config_yaml=loaded.resolved_yaml,
            state=state,
            prompts=prompts,
            validation=validation,
            environment=environment,
            sampling=_sampling(config),
            policy=PolicyWorker(
                engine,
                reference,
                config.loss_fn,
                skip_without_signal=config.grpo is not None and config.grpo.skip_groups_without_signal,
                offload_optimizer_for_logprob=config.policy.offload_optimizer_for_logprob,
            ),
            value=ValueWorker(value, config.value.clip_range)
            if value is not None and config.value is not None
            else None,
            generator=generator,
            sync=WeightSync(generator, state.weight_version),
            checkpoints=checkpoints,
            save_tokenizer=tokenizer.save_pretrained,
            sinks=sinks,
            progress=progress,
        )


def _device(config: Config) -> torch.device:
    wanted = config.cluster.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BlockedError("cluster.device=cuda, but torch sees no CUDA device: set cluster.device=auto or cpu")
    use_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0) if use_cuda else torch.device("cpu")


def _model_path(config: EngineConfig) -> Path:
    return resolve(config.model_name, trust_remote_code=config.trust_remote_code)


def _require_same_tokens(config: ValueConfig, policy: TorchEngine, value: TorchEngine) -> None:
    """Both read the same token ids. Raises UserError where their numbers differ."""
    own, other = (engine.model.get_input_embeddings().num_embeddings for engine in (policy, value))
    if own != other:
        raise UserError(
            f"value.model_name={config.model_name} knows {other} tokens and the policy {own}: "
            "choose a value model with the policy's tokenizer"
        )


def _tokenizer(config: Config, model_path: Path) -> PreTrainedTokenizerBase:
    name = config.policy.tokenizer.name
    path = model_path if name is None else resolve(name, trust_remote_code=config.policy.trust_remote_code)
    return load_tokenizer(path, trust_remote_code=config.policy.trust_remote_code)


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


def _reference(config: Config, model_path: Path, device: torch.device) -> TorchEngine | None:
    """The frozen reference policy: the model that the run began with, also after a resume."""
    in_reward = config.ppo.kl_penalty_in_reward if config.ppo is not None else 0
    if config.loss_fn.reference_policy_kl_penalty == 0 and in_reward == 0:
        return None
    reference = TorchEngine(config.policy, model_path, device, trainable=False)
    reference.offload()
    return reference


def _weights_digest(engine: TorchEngine) -> str:
    """One digest over all weights, in the order of their names."""
    parts = [f"{name} {digest(tensor):016x}" for name, tensor in sorted(engine.export_weights())]
    return f"{digest_bytes(' '.join(parts).encode()):016x}"


def _resume(checkpoint: Checkpoint, fresh: TrainerState, engines: Mapping[str, TorchEngine]) -> TrainerState:
    saved = checkpoint.trainer_state()
    state = TrainerState.from_json(saved)
    if checkpoint.components() != sorted(engines):
        raise UserError(
            f"{checkpoint.folder} holds {' and '.join(checkpoint.components())}, this run trains "
            f"{' and '.join(sorted(engines))}: choose a new checkpointing.checkpoint_dir"
        )
    if state.dataset != fresh.dataset:
        raise UserError(
            f"{checkpoint.folder} was trained on another dataset than data.train describes: "
            "restore the data settings or choose a new checkpointing.checkpoint_dir"
        )
    digests = {
        "policy": (state.base_model, fresh.base_model),
        "value": (state.value_base_model, fresh.value_base_model),
    }
    for group, (then, now) in digests.items():
        if then != now:
            raise UserError(
                f"{checkpoint.folder} was trained from other weights than {group}.model_name holds at "
                f"{group}.precision: restore both or choose a new checkpointing.checkpoint_dir"
            )
    steps = {"policy": state.optim_steps, "value": state.value_optim_steps}
    for name, engine in engines.items():
        engine.load_chunks(checkpoint.component(name))
        assert engine.optimizer is not None
        engine.optimizer.steps = steps[name]
    restore_rng(saved["rng"])
    return state


def _announce(
    progress: Progress,
    config: Config,
    state: TrainerState,
    checkpoint: Checkpoint | None,
    engines: Mapping[str, TorchEngine],
) -> None:
    name, algorithm = config.algorithm_name, config.algorithm
    progress.note(
        f"{name.upper()}: {config.policy.model_name}, {_size(engines['policy'])} parameters, {config.policy.precision} "
        f"on {engines['policy'].model.device}, {algorithm.num_prompts_per_step} prompts x "
        f"{algorithm.num_generations_per_prompt} completions a step"
    )
    if config.value is not None:
        progress.note(
            f"value model: {config.value.model_name}, {_size(engines['value'])} parameters, {config.value.precision}"
        )
    if checkpoint is not None:
        progress.note(f"resumed from {checkpoint.folder} at step {state.step}")
    if state.step >= algorithm.max_num_steps:
        if checkpoint is not None:
            progress.note(f"nothing to do: {name}.max_num_steps is {algorithm.max_num_steps}")
    elif config.ppo is not None and config.ppo.policy_training_start_step > algorithm.max_num_steps:
        progress.note(
            f"the policy is not trained: ppo.policy_training_start_step ({config.ppo.policy_training_start_step}) "
            f"is beyond ppo.max_num_steps ({algorithm.max_num_steps})"
        )


def _size(engine: TorchEngine) -> str:
    return f"{engine.num_trainable_parameters / 1e6:.1f}M"
