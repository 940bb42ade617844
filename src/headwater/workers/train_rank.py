"""One process's part of all that trains: its part of the policy and of the value model, and of their checkpoints.

A run in one process has one; on a cluster each rank has one, and the loop calls all of them at once with the same
arguments. What all ranks work out alike, rank 0 answers with.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from headwater.checkpoint.adapters import recorded_peft
from headwater.checkpoint.digest import digest, digest_bytes
from headwater.checkpoint.manager import CheckpointManager, News
from headwater.checkpoint.ranks import Ranks
from headwater.checkpoint.reader import Checkpoint
from headwater.config.schema import Config, EngineConfig, ValueConfig
from headwater.data.types import Completion, Prompt, SamplingParams, TrainSequence
from headwater.engines.base import ForwardBackward, GenerateEngine, OptimStep, TrainEngine
from headwater.engines.generate.trainers import CopiedWeights, SharedWeights
from headwater.engines.torch.engine import DTYPES, TorchEngine
from headwater.engines.torch.host_memory import keep_freed_memory
from headwater.engines.torch.value import TorchValueEngine
from headwater.errors import BlockedError, HeadwaterError, UserError, require_extra
from headwater.metrics import names
from headwater.models.resolve import load_tokenizer, model_identity, resolve
from headwater.workers.train import PolicyWorker
from headwater.workers.value import ValueWorker


class Engine(TrainEngine, Protocol):
    """What a run needs of its engines besides."""

    optimizer: Any

    @property
    def vocabulary(self) -> int: ...

    @property
    def num_trainable_parameters(self) -> int: ...

    @property
    def checkpoint_bytes(self) -> int: ...


@dataclass(frozen=True)
class TrainJob:
    """What all ranks of one start of a run are told alike.

    config_yaml: the resolved configuration, for checkpoints. run_id: of the run, unless it resumes. session: see
    `Ranks`.
    """

    config: Config
    config_yaml: str
    run_id: str
    session: str


@dataclass(frozen=True)
class TrainStart:
    """What a run begins with.

    base_models: digest of the weights, by component. parameters: how many are trained, by component. device: where
    the policy is. checkpoint: the newest one's folder, None without one. trainer_state: what it holds besides tensors.
    """

    base_models: Mapping[str, str]
    parameters: Mapping[str, int]
    device: str
    checkpoint: Path | None
    trainer_state: dict[str, Any] | None


@dataclass(frozen=True)
class Refused:
    """An optimizer step that every rank refused alike, with nothing changed, so that the run can still be saved."""

    why: str


class TrainRank:
    """Made by all ranks together, and each method is called on all ranks together; `start` first.

    Making it takes the checkpoints' folder. Raises UserError where that is in use or cannot be written, or its newest
    checkpoint is corrupt or of another model, BlockedError where torch sees no such device.
    """

    def __init__(self, job: TrainJob, *, rank: int, world: int) -> None:
        config = job.config
        self._config, self._config_yaml = config, job.config_yaml
        self._answers = rank == 0
        self._device = _device(config)
        self._saves: CheckpointManager | None = None
        self._checkpoint: Checkpoint | None = None
        _require_native_generation(config)
        self._model_path = _model_path(config.policy)
        if not config.checkpointing.enabled:
            return
        ranks, identity = Ranks(rank, world, job.session), model_identity(self._model_path)
        self._saves = CheckpointManager(config.checkpointing, job.run_id, identity, ranks)
        try:
            if world > 1:
                dist.barrier()  # rank 0 has locked the folder: no run commits in it any more
            self._checkpoint = self._saves.latest()
            _require_the_same(self._checkpoint, world)
        except BaseException:
            self.close()
            raise

    def start(self) -> TrainStart:
        """Load the models, and say what the run begins with.

        Raises UserError for a model that does not fit the configuration, or a disk without room for a checkpoint.
        """
        config = self._config
        keep_freed_memory()
        tokenizer = tokenizer_of(config)
        self._save_tokenizer = tokenizer.save_pretrained
        self._engines, self.policy, self._value = _models(config, self._model_path, self._device)
        self._generator = _generator(config, self._engines["policy"], self._model_path, self._device, tokenizer)
        if self._saves is not None:
            sizes = {name: engine.checkpoint_bytes for name, engine in self._engines.items()}
            self._saves.require_space(_sum_over_ranks(sum(sizes.values())))
            self._saves.prepare(sizes, self._device.type == "cuda", self._save_tokenizer)
        checkpoint = self._checkpoint
        return TrainStart(
            base_models={name: _weights_digest(engine) for name, engine in self._engines.items()},
            parameters={name: engine.num_trainable_parameters for name, engine in self._engines.items()},
            device=str(self._device),
            checkpoint=checkpoint.folder if checkpoint is not None else None,
            trainer_state=checkpoint.trainer_state() if checkpoint is not None else None,
        )

    @property
    def value(self) -> ValueWorker:
        """The value model, which PPO has."""
        assert self._value is not None, "only PPO has a value model"
        return self._value

    @property
    def _checkpoints(self) -> CheckpointManager:
        assert self._saves is not None, "checkpointing.enabled is false"
        return self._saves

    def load(self, optim_steps: Mapping[str, int], metric_history: Mapping[str, float]) -> None:
        """Go on from the newest checkpoint. optim_steps: taken until then, by component.

        Raises UserError where it holds other components than are trained, other tensors than they have, or other
        adapters.
        """
        checkpoint = self._checkpoint
        assert checkpoint is not None
        if checkpoint.components() != sorted(self._engines):
            raise UserError(
                f"{checkpoint.folder} holds {' and '.join(checkpoint.components())}, this run trains "
                f"{' and '.join(sorted(self._engines))}: choose a new checkpointing.checkpoint_dir"
            )
        for name, engine in self._engines.items():
            _require_same_adapters(checkpoint, name, self._config)
            engine.load_chunks(checkpoint.component(name))
            assert engine.optimizer is not None
            engine.optimizer.steps = optim_steps[name]
        self._checkpoints.restore_metric_history(metric_history)

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams
    ) -> list[tuple[Completion, ...]]:
        """See GenerateEngine."""
        completions = self._generator.generate(prompts, num_samples, params)
        return completions if self._answers else []

    def receive_weights(self, version: int) -> None:
        """See GenerateEngine."""
        if self._config.policy.megatron_cfg.clear_memory_caches_before_refit and self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        self._generator.receive_weights(version)

    def score(
        self, sequences: Sequence[TrainSequence], *, optim_steps: int, for_reward: bool = False
    ) -> list[TrainSequence]:
        """See PolicyWorker."""
        scored = self.policy.score(sequences, optim_steps=optim_steps, for_reward=for_reward)
        return scored if self._answers else []

    def values(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        """See ValueWorker."""
        values = self.value.values(sequences)
        return values if self._answers else []

    def value_turn(self) -> None:
        """The value model has the device from now on, and the policy waits on the host."""
        self.policy.engine.offload()
        self.value.engine.onload()

    def policy_turn(self) -> None:
        """The policy has the device from now on, and the value model waits on the host."""
        self.value.engine.offload()
        self.policy.engine.onload()

    def train_value(self, batch: Sequence[TrainSequence]) -> tuple[ForwardBackward, OptimStep] | Refused:
        """One optimizer step of the value model on a global batch."""
        return _step(self.value, batch)

    def train_policy(self, batch: Sequence[TrainSequence]) -> tuple[ForwardBackward, OptimStep] | Refused | None:
        """One optimizer step of the policy on a global batch; None, and no step, where nothing of it is trained on."""
        return _step(self.policy, batch) if self.policy.is_worth_a_step(batch) else None

    def offload_for_generation(self) -> dict[str, float]:
        """Move what generation does not need to the host, until `score`; metrics of what the device holds then."""
        self.policy.engine.offload_optimizer()
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        return {names.MEMORY_RETAINED_AFTER_OFFLOAD: float(total - free)}

    def tokens_trained(self) -> int:
        """Completion tokens that went through a backward pass of the policy so far."""
        return self.policy.tokens_trained

    def save(self, step: int, trainer_state: Mapping[str, Any], weight_version: int, *, may_skip: bool) -> None:
        """Begin a checkpoint of all models, of which this rank writes its part; see CheckpointManager."""
        self._checkpoints.save(
            step=step,
            components={name: engine.state_chunks() for name, engine in self._engines.items()},
            trainer_state=trainer_state,
            config_yaml=self._config_yaml,
            tokenizer=self._save_tokenizer,
            weight_version=weight_version,
            fences=[engine.fence for engine in self._engines.values()],
            may_skip=may_skip,
        )

    def take_news(self) -> News:
        """What became of saves since the last call, and what they cost this rank."""
        news = self._checkpoints.take_news()
        news.metrics[names.CHECKPOINT_FENCE_WAIT_S] = sum(e.fence.take_waited_s() for e in self._engines.values())
        return news

    def pending_saves(self) -> int:
        """Saves that are neither committed nor failed."""
        return self._checkpoints.pending

    def wait_committed(self) -> None:
        """Return when every save so far is committed; see CheckpointManager."""
        self._checkpoints.wait_committed()

    def record_metric(self, step: int, value: float) -> None:
        """How good a step is, for retention."""
        self._checkpoints.record_metric(step, value)

    def metric_history(self) -> dict[str, float]:
        """See CheckpointManager."""
        return self._checkpoints.metric_history

    def has_checkpoint(self) -> bool:
        """Whether there is one to resume from."""
        return self._saves is not None and self._saves.latest() is not None

    def device_memory(self) -> dict[str, float]:
        """Metrics of the CUDA device's memory; none on a CPU."""
        if self._device.type != "cuda":
            return {}
        return {
            names.MEMORY_ALLOCATED: float(torch.cuda.memory_allocated(self._device)),
            names.MEMORY_RESERVED: float(torch.cuda.memory_reserved(self._device)),
        }

    def close(self) -> None:
        """Wait for what is being written, and let another run use the folder."""
        if self._saves is not None:
            self._saves.close()


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase:
    """The policy's. Raises UserError where there is none."""
    name, trust = config.policy.tokenizer.name, config.policy.trust_remote_code
    path = _model_path(config.policy) if name is None else resolve(name, trust_remote_code=trust)
    return load_tokenizer(path, trust_remote_code=trust)


def _model_path(config: EngineConfig) -> Path:
    return resolve(config.model_name, trust_remote_code=config.trust_remote_code)


def _step(
    worker: PolicyWorker | ValueWorker, batch: Sequence[TrainSequence]
) -> tuple[ForwardBackward, OptimStep] | Refused:
    result = worker.forward_backward(batch)
    try:
        return result, worker.optim_step()
    except HeadwaterError as error:  # of the gradient norm, which is that of all ranks
        return Refused(str(error))


def _generator(
    config: Config, policy: Engine, model_path: Path, device: torch.device, tokenizer: PreTrainedTokenizerBase
) -> GenerateEngine:
    max_batch_size = config.policy.generation.max_batch_size
    if isinstance(policy, TorchEngine):
        return SharedWeights(policy, tokenizer, max_batch_size)
    trust = config.policy.trust_remote_code
    if config.policy.generation.backend == "megatron":
        from headwater.engines.megatron.generate import MegatronGenerator

        own: Any = policy
        return MegatronGenerator(own, model_path, device, tokenizer, max_batch_size, trust_remote_code=trust)
    return CopiedWeights(
        policy,
        model_path,
        DTYPES[config.policy.precision],
        device,
        tokenizer,
        max_batch_size,
        fp32_lm_head=config.policy.fp32_lm_head,
        trust_remote_code=trust,
    )


def _sum_over_ranks(count: int) -> int:
    if not dist.is_initialized():
        return count
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return sum(counts)


def _require_native_generation(config: Config) -> None:
    if config.policy.torch_cfg.sequence_parallel:
        raise UserError(
            "policy.torch_cfg.sequence_parallel: policy.generation.backend=native decodes one token at a time, which "
            "cannot be cut by position; set it to false (value.torch_cfg.sequence_parallel may stay)"
        )


def _require_the_same(checkpoint: Checkpoint | None, world: int) -> None:
    """Raises UserError where ranks found different checkpoints, as a network's cached listing of a folder may show."""
    if world == 1:
        return
    found: list[str | None] = [None] * world
    dist.all_gather_object(found, checkpoint.folder.name if checkpoint is not None else None)
    if len(set(found)) > 1:
        seen = ", ".join(f"rank {rank} {name or 'none'}" for rank, name in enumerate(found))
        raise UserError(
            f"ranks do not see the same newest checkpoint ({seen}): checkpointing.checkpoint_dir must be a folder that "
            "all nodes share; if it is, start again once its listing is up to date on all"
        )


def _require_same_adapters(checkpoint: Checkpoint, component: str, config: Config) -> None:
    """Raises UserError where the checkpoint's run trained other adapters than this one, or one of both trains none."""
    engine = config.value if component == "value" else config.policy
    assert engine is not None
    peft = engine.megatron_cfg.peft
    then, now = recorded_peft(checkpoint, component), peft.model_dump() if peft.enabled else None
    if _in_words(then) != _in_words(now):
        raise UserError(
            f"{checkpoint.folder} holds {_in_words(then)} of the {component}, this run trains {_in_words(now)}: set "
            f"{component}.megatron_cfg.peft as it was, or choose a new checkpointing.checkpoint_dir"
        )


def _in_words(peft: Mapping[str, Any] | None) -> str:
    if peft is None:
        return "whole weights"
    targets = ", ".join(sorted(peft["target_modules"]))
    return f"adapters (rank {peft['rank']}, alpha {peft['alpha']:g}, on {targets})"


def _device(config: Config) -> torch.device:
    wanted = config.cluster.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BlockedError("cluster.device=cuda, but torch sees no CUDA device: set cluster.device=auto or cpu")
    has_own = config.cluster.launcher == "inline" or config.cluster.gpus_per_node > 0
    use_cuda = wanted == "cuda" or (wanted == "auto" and has_own and torch.cuda.is_available())
    return torch.device("cuda", 0) if use_cuda else torch.device("cpu")


def _engine_kind(config: EngineConfig, device: torch.device, *, values: bool) -> Callable[..., Any]:
    """The backend's engine of a policy or a value model. Raises BlockedError where its package is missing."""
    if not config.megatron_cfg.enabled:
        return TorchValueEngine if values else TorchEngine
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise require_extra("megatron", "megatron-core")
    # What it says of packages that are not there, and what torch says of the functions it calls, are not the user's.
    for of_module in (r"megatron\.", r"torch\.distributed\.c10d_logger"):
        warnings.filterwarnings("ignore", module=of_module)
    if device.type == "cpu":
        from headwater.engines.megatron import cpu

        cpu.enable()
    from headwater.engines.megatron.engine import MegatronEngine, MegatronValueEngine

    return MegatronValueEngine if values else MegatronEngine


def _models(
    config: Config, model_path: Path, device: torch.device
) -> tuple[dict[str, Engine], PolicyWorker, ValueWorker | None]:
    """The engines whose state a checkpoint holds, by component, and the workers that use them."""
    turns = config.ppo is not None and config.ppo.models_take_turns
    # Where the host is the device, storage moves for the one who asks for it, and not for the reference policy.
    moves = turns or config.policy.offload_optimizer_for_logprob or config.policy.offload_policy_before_refit
    kind = _engine_kind(config.policy, device, values=False)
    policy: Engine = kind(config.policy, model_path, device, moves_on_host=moves)
    engines, value = {"policy": policy}, None
    if config.value is not None:
        kind = _engine_kind(config.value, device, values=True)
        engines["value"] = critic = kind(config.value, _model_path(config.value), device, moves_on_host=turns)
        _require_same_tokens(config.value, policy, critic)
        value = ValueWorker(critic, config.value.clip_range)
    worker = PolicyWorker(
        policy,
        _reference(config, model_path, device),
        config.loss_fn,
        skip_without_signal=config.grpo is not None and config.grpo.skip_groups_without_signal,
        offload_optimizer_for_logprob=config.policy.offload_optimizer_for_logprob,
    )
    return engines, worker, value


def _require_same_tokens(config: ValueConfig, policy: Engine, value: Engine) -> None:
    """Both read the same token ids. Raises UserError where their numbers differ."""
    if policy.vocabulary != value.vocabulary:
        raise UserError(
            f"value.model_name={config.model_name} knows {value.vocabulary} tokens and the policy {policy.vocabulary}: "
            "choose a value model with the policy's tokenizer"
        )


def _reference(config: Config, model_path: Path, device: torch.device) -> Engine | None:
    """The frozen reference policy: the model that the run began with, also after a resume."""
    in_reward = config.ppo.kl_penalty_in_reward if config.ppo is not None else 0
    if config.loss_fn.reference_policy_kl_penalty == 0 and in_reward == 0:
        return None
    reference = _engine_kind(config.policy, device, values=False)(config.policy, model_path, device, trainable=False)
    reference.offload()
    return reference


def _weights_digest(engine: Engine) -> str:
    """One digest over all weights, in the order of their names."""
    parts = sorted(f"{name} {digest(tensor):016x}" for name, tensor in engine.export_weights())  # one tensor at a time
    return f"{digest_bytes(' '.join(parts).encode()):016x}"
