"""The configuration, as strict types: one class a group, one docstring a field.

Unknown keys, wrong types and keys that contradict each other are refused here, before anything starts.
Names are those that people who post-train with Megatron-style stacks already use.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from headwater.config.algorithms import AlgorithmConfig, GrpoConfig, LossConfig, PpoConfig
from headwater.config.duration import duration_s
from headwater.config.strict import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict
from headwater.metrics import names

_RANKING_TAGS = (
    names.TRAIN_REWARD,
    names.VALIDATION_ACCURACY,
    names.VALIDATION_REWARD,
    names.VALIDATION_AVG_LENGTH,
)

AdaptedModule = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class TokenizerConfig(Strict):
    name: str | None = None
    """Hub id or local folder; null takes the model's own."""


class OptimizerConfig(Strict):
    """AdamW with decoupled weight decay (Loshchilov & Hutter, 2019), fp32 master weights and moments."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay; matrices only, norms and biases are exempt."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    @model_validator(mode="before")
    @classmethod
    def _betas_from_list(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("betas"), list):
            return {**data, "betas": tuple(data["betas"])}
        return data

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        return self


class SchedulerConfig(Strict):
    """Learning-rate schedule over optimizer steps. Its length is its own, never the run's."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Linear rise from lr / warmup_steps."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps from the end of the warm-up to `min_lr_ratio`; needed by linear and cosine."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Floor, as a share of lr."""

    @model_validator(mode="after")
    def _decay_has_a_length(self) -> SchedulerConfig:
        if self.name != "constant" and self.decay_steps is None:
            raise ValueError(f"decay_steps is needed by the {self.name} schedule")
        if self.name == "constant" and (self.decay_steps is not None or self.min_lr_ratio):
            raise ValueError(
                "decay_steps and min_lr_ratio are not read by the constant schedule: choose linear or cosine"
            )
        return self


class SequencePackingConfig(Strict):
    enabled: bool = True
    """Pack sequences into rows, the prompt of a group once; false pads one sequence a row."""
    max_tokens_per_row: PositiveInt = 1024
    """Upper bound of a packed row, unless a single sequence is longer."""


class TorchConfig(Strict):
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that share each matrix; the rest of the training processes shard by FSDP and split the batch."""
    sequence_parallel: bool = False
    """Cut norms and residuals by position over the tensor-parallel processes; needs tensor_parallel_size above 1."""

    @model_validator(mode="after")
    def _sequence_parallel_needs_ranks(self) -> TorchConfig:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError("sequence_parallel needs tensor_parallel_size above 1")
        return self


class DistributedDataParallelConfig(Strict):
    grad_reduce_in_fp32: bool = True
    """Keep and add up gradients in fp32; false does so in the model's precision, in half the memory under bfloat16."""


class PeftConfig(Strict):
    """LoRA (Hu et al., 2021): the model's own weights stay as they are, and small matrices beside them are trained."""

    enabled: bool = False
    """Train adapters alone."""
    rank: PositiveInt = 8
    """Width of the adapters."""
    alpha: PositiveFloat = 16.0
    """What an adapter adds is scaled by alpha / rank."""
    target_modules: list[AdaptedModule] = Field(default=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
    """Which layers have adapters, by Megatron's names: of attention its queries, keys and values (linear_qkv) and its
    output (linear_proj), of feed-forward layers gate and up (linear_fc1), and down (linear_fc2)."""

    @model_validator(mode="after")
    def _is_read(self) -> PeftConfig:
        if not self.target_modules:
            raise ValueError("target_modules is empty: name a module, or set enabled=false")
        if len(set(self.target_modules)) < len(self.target_modules):
            raise ValueError("target_modules names a module twice")
        changed = _changed(self)
        if changed and not self.enabled:
            raise ValueError(f"{', '.join(changed)} is read only with enabled=true")
        return self


def _changed(group: Strict) -> list[str]:
    """Keys besides `enabled` that are not at their default."""
    fields = type(group).model_fields
    return [key for key, field in fields.items() if key != "enabled" and getattr(group, key) != field.default]


class MegatronConfig(Strict):
    """Training by megatron-core in place of the torch backend; needs the extra `megatron`."""

    enabled: bool = False
    """Train with megatron-core."""
    converter_type: str | None = None
    """Family of the bridge between Hugging Face's parameters and Megatron's; null goes by the model's configuration."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers."""
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2)] | None = None
    """Groups of layers on each pipeline rank (interleaved schedule); null is one, in the 1F1B schedule."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share the positions of each row."""
    sequence_parallel: bool = False
    """Cut norms and residuals by position over the tensor-parallel ranks; needs tensor_model_parallel_size above 1."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that share each matrix of an expert; null is tensor_model_parallel_size."""
    use_distributed_optimizer: bool = True
    """Share out fp32 master weights and moments over the data-parallel ranks."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    distributed_data_parallel_config: DistributedDataParallelConfig = DistributedDataParallelConfig()
    clear_memory_caches_before_refit: bool = False
    """Give device memory that torch keeps for itself back before weights go to the generator."""
    peft: PeftConfig = PeftConfig()
    """Train adapters in place of the weights."""

    @model_validator(mode="after")
    def _parts_need_ranks(self) -> MegatronConfig:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel needs tensor_model_parallel_size above 1")
        if self.virtual_pipeline_model_parallel_size and self.pipeline_model_parallel_size == 1:
            raise ValueError("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 1")
        changed = _changed(self)
        if changed and not self.enabled:
            raise ValueError(f"{', '.join(changed)} is read only with enabled=true")
        return self


class GenerationConfig(Strict):
    backend: Literal["native", "megatron"] = "native"
    """native: a transformers model generates, the trainer's own module or, where megatron-core trains, a copy of its
    weights. megatron: the model that megatron-core trains generates itself; needs megatron_cfg.enabled."""
    max_new_tokens: PositiveInt = 16
    """Upper bound of a completion, in tokens."""
    temperature: PositiveFloat = 1.0
    """Divides the logits; training log-probs use it too. Validation is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling (Holtzman et al., 2020); 1 keeps all tokens."""
    top_k: PositiveInt | None = None
    """Keep the k likeliest tokens; null keeps all."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """A completion ends when its text contains one of these."""
    max_batch_size: PositiveInt = 256
    """Most sequences decoded at a time."""


class EngineConfig(Strict):
    """What a trained model needs, the policy or the value model."""

    model_name: str
    """Hub id, local folder, `builtin:smollm2-135m` or `builtin:tiny`."""
    trust_remote_code: bool = False
    """Run code that ships in the model's folder."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights in the forward and backward pass; master weights are fp32 always."""
    max_total_sequence_length: PositiveInt = 1024
    """Prompt and completion together, in tokens."""
    train_global_batch_size: PositiveInt
    """Completions an optimizer step."""
    train_micro_batch_size: PositiveInt = 32
    """Completions a forward and backward pass."""
    logprob_batch_size: PositiveInt = 32
    """Completions a forward pass that only scores."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip gradients to this global L2 norm; null does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    torch_cfg: TorchConfig = TorchConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()


class PolicyConfig(EngineConfig):
    tokenizer: TokenizerConfig = TokenizerConfig()
    fp32_lm_head: bool = False
    """Compute logits in fp32 under a bf16 model: trainer and generator disagree less, for a slower head."""
    offload_optimizer_for_logprob: bool = False
    """Keep master weights and moments in host memory while log-probabilities are computed."""
    offload_policy_before_refit: bool = False
    """Keep master weights, gradients and moments in host memory while completions are generated. The weights stay:
    they generate."""
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _completion_fits(self) -> PolicyConfig:
        if self.generation.max_new_tokens >= self.max_total_sequence_length:
            raise ValueError(
                f"generation.max_new_tokens ({self.generation.max_new_tokens}) leaves no room for a prompt in "
                f"max_total_sequence_length ({self.max_total_sequence_length})"
            )
        return self

    @model_validator(mode="after")
    def _megatron_generates_what_it_trains(self) -> PolicyConfig:
        if self.generation.backend == "megatron" and not self.megatron_cfg.enabled:
            raise ValueError("generation.backend=megatron needs megatron_cfg.enabled=true: its model is the trainer's")
        return self


class ValueConfig(EngineConfig):
    """The value model of PPO: `model_name` with its head replaced by one linear output in fp32."""

    clip_range: PositiveFloat | None = 0.2
    """A value moves from the one before the update by this much at most, or its loss has no gradient; null does not
    clip."""


class CheckpointingConfig(Strict):
    enabled: bool = True
    """Save, and resume from `checkpoint_dir` when it holds a committed checkpoint."""
    checkpoint_dir: str = "runs/grpo/checkpoints"
    """Folder of the checkpoints, one run's."""
    strategy: Literal["native", "nvrx", "sync"] = "native"
    """native: a separate process writes and commits while training goes on. nvrx: NVIDIA's resiliency extension writes;
    for Megatron models. sync: training waits for the commit."""
    async_save: bool = True
    """Whether training goes on while native or nvrx write. false: it waits for the commit, as with sync."""
    ckpt_assume_constant_structure: bool = True
    """With nvrx: its process keeps handles to device tensors from save to save, which versions before 0.6 never do.
    They are closed whenever memory moves."""
    use_persistent_ckpt_worker: bool = True
    """With nvrx: one process for all saves. false: each save forks one, and training waits for the copies."""
    async_ckpt_use_cpu_shm: bool = False
    """With nvrx 0.6 and later: training copies tensors into shared memory, so that its process needs no device."""
    when_busy: Literal["wait", "skip"] = "wait"
    """With native, where both staging buffers still wait for the disk, and with nvrx, where the save before is still
    being written: wait for one, or skip the save; the last step's is never skipped."""
    verify: Literal["written", "readback"] = "written"
    """What is compared with the live tensors before a commit. written: the bytes that were handed to the disk.
    readback: besides, the files as they are read from the disk again, past the page cache where that is possible."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """Whether a failed save ends the run, or is reported and training goes on."""
    writer_silence_s: PositiveFloat = 120.0
    """Seconds without a sign of life after which the process that writes is replaced."""
    vote_timeout_s: PositiveFloat = 600.0
    """Where several ranks save together: seconds that rank 0's writer, its own files done, waits for the votes of the
    others before it refuses the save. The others wait for rank 0 twice as long."""
    save_period: PositiveInt = 10
    """Save every this many steps; the last step is saved always."""
    checkpoint_must_save_by: str | None = None
    """Time from the start of the process, DD:HH:MM:SS or HH:MM:SS: the first step that ends then or later is saved, and
    the run ends with exit code 0, to be resumed with the same command; null for none. Leave a step and a save before
    the end of a time slot."""
    keep_latest_k: PositiveInt | None = 2
    """Newest committed checkpoints to keep; null keeps all."""
    keep_top_k: PositiveInt | None = None
    """Best committed checkpoints to keep besides, by `metric_name`."""
    metric_name: str | None = None
    """Metric tag that ranks checkpoints, such as validation/accuracy."""
    higher_is_better: bool = True
    """Direction of `metric_name`."""

    @field_validator("checkpoint_must_save_by")
    @classmethod
    def _must_save_by_is_a_duration(cls, value: str | None) -> str | None:
        if value is not None:
            duration_s(value)
        return value

    @property
    def must_save_by_s(self) -> int | None:
        """`checkpoint_must_save_by` in seconds."""
        return None if self.checkpoint_must_save_by is None else duration_s(self.checkpoint_must_save_by)

    @model_validator(mode="after")
    def _nothing_to_save_by_a_time(self) -> CheckpointingConfig:
        if self.checkpoint_must_save_by is not None and not self.enabled:
            raise ValueError("checkpoint_must_save_by needs enabled=true: there is nothing to resume from")
        return self

    @model_validator(mode="after")
    def _only_nvrx_reads_its_keys(self) -> CheckpointingConfig:
        if self.strategy == "nvrx":
            return self
        for key in ("ckpt_assume_constant_structure", "use_persistent_ckpt_worker", "async_ckpt_use_cpu_shm"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is read only with strategy=nvrx: set strategy=nvrx, or leave it out")
        return self

    @model_validator(mode="after")
    def _best_needs_a_metric(self) -> CheckpointingConfig:
        if self.keep_top_k is not None and self.metric_name is None:
            raise ValueError("keep_top_k needs metric_name, such as metric_name=validation/accuracy")
        if self.metric_name is not None and self.keep_top_k is None:
            raise ValueError("metric_name is read only with keep_top_k: set both or neither")
        return self


class DatasetConfig(Strict):
    dataset: str
    """`reasoning_gym:<name>`, `builtin:letters`, a .jsonl file, or a folder saved by Hugging Face datasets."""
    size: PositiveInt | None = None
    """Rows to generate or the most to read; null takes all (generators need a number)."""
    seed: NonNegativeInt = 0
    """Of generated datasets."""
    split: str | None = None
    """Split of a Hugging Face dataset dictionary."""
    prompt_key: str = "prompt"
    """Column with the question, or with a list of chat messages."""
    answer_key: str | None = "answer"
    """Column with the reference answer; null where there is none."""
    options: dict[str, Any] = Field(default={})
    """Passed to the generator, such as min_terms of reasoning_gym:chain_sum."""


class DataConfig(Strict):
    shuffle: bool = True
    """A new order each epoch, from `seed`; false goes in file order."""
    seed: NonNegativeInt = 0
    """Of the order."""
    system_prompt: str | None = None
    """Put before every conversation that has no system turn."""
    train: DatasetConfig
    """What to train on."""
    validation: DatasetConfig | None = None
    """Held-out problems."""
    exclude_validation: bool = True
    """Never train on a question that is in `validation` too."""


class RewardConfig(Strict):
    reward: str
    """`reasoning_gym`, `math_verify`, `format`, `letter_share`, or `module:function`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor in the total."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the reward."""


class EnvConfig(Strict):
    rewards: list[RewardConfig] | None = None
    """Summed by weight. Accuracy counts completions that earn 1 or more from the first."""
    environment: str | None = None
    """`module:Class` that scores completions itself, in place of `rewards`."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the environment."""
    tolerated_failures: NonNegativeInt = 0
    """Problems whose scoring may raise, or give no finite number, before one ends the run; counted anew after a resume.
    All completions of such a problem earn 0, which with grpo is no signal and with ppo is a reward like others."""

    @model_validator(mode="after")
    def _one_of_both(self) -> EnvConfig:
        if bool(self.rewards) == bool(self.environment):
            raise ValueError("set exactly one of rewards and environment")
        if self.options and not self.environment:
            raise ValueError("options belongs to environment; a reward has its own options")
        return self


class ClusterConfig(Strict):
    launcher: Literal["inline", "ray"] = "inline"
    """inline: one process. ray: workers in processes of their own, on one node or many."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is a device; with ray, where `gpus_per_node` is set."""
    num_threads: PositiveInt | None = None
    """CPU threads of torch here; null leaves torch's choice. Results on CPU depend on it in the last bits."""
    address: str | None = None
    """Ray cluster to join: HOST:PORT, or auto for the one that this machine belongs to; null starts a Ray here
    and stops it at the end."""
    num_nodes: PositiveInt = 1
    """Nodes of the Ray cluster to use."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs to use on each node, one a worker; 0 for workers on CPU."""
    workers_per_node: PositiveInt | None = None
    """Workers on each node, where they run on CPU; null is 1."""
    cpus_per_worker: PositiveFloat = 1.0
    """CPU cores reserved for a worker, which has as many threads; below 1, workers share a core."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds that starting Ray, placing workers and connecting them may take, each."""
    heartbeat_timeout_s: PositiveFloat = 60.0
    """Seconds without an answer from a worker's process after which it counts as hung, and the run ends."""
    call_timeout_s: PositiveFloat = 3600.0
    """Seconds that one call of the workers, and one collective between them, may take before the run ends."""

    @model_validator(mode="after")
    def _workers_fit_the_launcher(self) -> ClusterConfig:
        own = {"launcher", "device", "num_threads"}
        fields = ClusterConfig.model_fields
        changed = [key for key, field in fields.items() if key not in own and getattr(self, key) != field.default]
        if self.launcher == "inline" and changed:
            raise ValueError(f"{', '.join(changed)} is read only with launcher=ray")
        if self.gpus_per_node and self.workers_per_node is not None:
            raise ValueError("workers_per_node is for workers on CPU: with gpus_per_node there is one worker a GPU")
        if self.gpus_per_node and self.device == "cpu":
            raise ValueError("device=cpu contradicts gpus_per_node: set one of them")
        if self.launcher == "ray" and self.device == "cuda" and not self.gpus_per_node:
            raise ValueError("device=cuda with launcher=ray needs gpus_per_node")
        if self.cpus_per_worker > 1 and self.cpus_per_worker % 1:
            raise ValueError(f"cpus_per_worker ({self.cpus_per_worker}) must be whole above 1")
        if self.address is None and self.num_nodes > 1:
            raise ValueError("num_nodes above 1 needs address: a Ray that the run starts has one node")
        return self


class LoggerConfig(Strict):
    log_dir: str = "runs/grpo/logs"
    """Folder of metrics.jsonl and of the TensorBoard files."""
    tensorboard_enabled: bool = True
    """Write TensorBoard event files."""


class Config(Strict):
    """A whole run: one of `grpo` and `ppo`, and with `ppo` a `value`."""

    policy: PolicyConfig
    value: ValueConfig | None = None
    grpo: GrpoConfig | None = None
    ppo: PpoConfig | None = None
    loss_fn: LossConfig = LossConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    data: DataConfig
    env: EnvConfig
    cluster: ClusterConfig = ClusterConfig()
    logger: LoggerConfig = LoggerConfig()

    @property
    def algorithm(self) -> AlgorithmConfig:
        """`grpo` or `ppo`, whichever is set."""
        chosen = self.grpo or self.ppo
        assert chosen is not None
        return chosen

    @property
    def algorithm_name(self) -> Literal["grpo", "ppo"]:
        """The group that `algorithm` stands in."""
        return "grpo" if self.grpo is not None else "ppo"

    @model_validator(mode="before")
    @classmethod
    def _one_algorithm(cls, data: Any) -> Any:
        """Before the fields are looked at, since half a group would be told of by what it lacks."""
        if not isinstance(data, dict):
            return data
        grpo, ppo, value = (data.get(name) is not None for name in ("grpo", "ppo", "value"))
        if grpo and ppo:
            raise ValueError(
                "grpo and ppo are both set, and a run has one: choose the recipe, or set the other to null"
            )
        if not grpo and not ppo:
            raise ValueError("set exactly one of grpo and ppo: neither is")
        if ppo and not value:
            raise ValueError("ppo needs value, such as value.model_name: see the recipe ppo")
        if grpo and value:
            raise ValueError("value is read by ppo only: choose the recipe ppo, or set value=null")
        return data

    @model_validator(mode="after")
    def _batches_divide(self) -> Config:
        name, algorithm = self.algorithm_name, self.algorithm
        engines: dict[str, EngineConfig] = {"policy": self.policy}
        if self.value is not None:
            engines["value"] = self.value
        for group, engine in engines.items():
            per_step, per_pass = engine.train_global_batch_size, engine.train_micro_batch_size
            if algorithm.completions_per_step % per_step:
                raise ValueError(
                    f"{group}.train_global_batch_size ({per_step}) does not divide {name}.num_prompts_per_step x "
                    f"{name}.num_generations_per_prompt ({algorithm.completions_per_step})"
                )
            if per_step % per_pass and per_step > per_pass:
                raise ValueError(
                    f"{group}.train_micro_batch_size ({per_pass}) does not divide "
                    f"{group}.train_global_batch_size ({per_step})"
                )
        generation = self.policy.generation
        if generation.max_batch_size < algorithm.num_generations_per_prompt:
            raise ValueError(
                f"policy.generation.max_batch_size ({generation.max_batch_size}) is smaller than "
                f"{name}.num_generations_per_prompt ({algorithm.num_generations_per_prompt}): a group is one batch"
            )
        return self

    @model_validator(mode="after")
    def _nvrx_saves_megatron_models(self) -> Config:
        engines = [self.policy, *([self.value] if self.value is not None else [])]
        if self.checkpointing.strategy == "nvrx" and not all(engine.megatron_cfg.enabled for engine in engines):
            raise ValueError(
                "checkpointing.strategy=nvrx saves Megatron models: set megatron_cfg.enabled=true, or strategy=native"
            )
        return self

    @model_validator(mode="after")
    def _only_the_policy_has_a_refit(self) -> Config:
        value = self.value is not None and self.value.megatron_cfg.clear_memory_caches_before_refit
        if value and not self.policy.megatron_cfg.clear_memory_caches_before_refit:
            raise ValueError(
                "value.megatron_cfg.clear_memory_caches_before_refit is not read: set it in policy.megatron_cfg"
            )
        return self

    @model_validator(mode="after")
    def _value_reads_what_the_policy_writes(self) -> Config:
        longest = self.policy.max_total_sequence_length
        if self.value is not None and self.value.max_total_sequence_length < longest:
            raise ValueError(
                f"value.max_total_sequence_length ({self.value.max_total_sequence_length}) is less than "
                f"policy.max_total_sequence_length ({longest}), whose sequences it reads"
            )
        return self

    @model_validator(mode="after")
    def _validation_is_read(self) -> Config:
        name, validates = self.algorithm_name, self.algorithm.validates
        if validates and self.data.validation is None:
            raise ValueError(f"{name}.val_period, val_at_start and val_at_end need data.validation")
        if self.data.validation is not None and not validates:
            raise ValueError(f"data.validation is never read: set {name}.val_period, val_at_start or val_at_end")
        return self

    @model_validator(mode="after")
    def _ranking_metric_is_logged(self) -> Config:
        """A name that nothing logs would rank nothing, and the best checkpoints would be pruned without a word."""
        name, period = self.checkpointing.metric_name, self.algorithm.val_period
        if name is None:
            return self
        if name not in _RANKING_TAGS:
            near = get_close_matches(name, _RANKING_TAGS, n=1, cutoff=0)[0]
            raise ValueError(f"checkpointing.metric_name: nothing logs {name!r}; did you mean {near!r}?")
        if name.startswith("validation/") and (not period or self.checkpointing.save_period % period):
            raise ValueError(
                f"checkpointing.metric_name={name} needs a validation at each save: make "
                f"{self.algorithm_name}.val_period ({period}) a divisor of checkpointing.save_period "
                f"({self.checkpointing.save_period})"
            )
        return self
