"""The configuration, as strict types: one class a group, one docstring a field.

Unknown keys, wrong types and keys that contradict each other are refused here, before anything starts.
Names are those that people who post-train with Megatron-style stacks already use.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headwater.config.duration import duration_s
from headwater.metrics import names

_RANKING_TAGS = (
    names.TRAIN_REWARD,
    names.VALIDATION_ACCURACY,
    names.VALIDATION_REWARD,
    names.VALIDATION_AVG_LENGTH,
)

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """Unknown keys are errors, types are not coerced (an int is accepted where a float is asked for)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


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


class GenerationConfig(Strict):
    backend: Literal["native"] = "native"
    """native: the trainer's own module generates."""
    max_new_tokens: PositiveInt = 16
    """Upper bound of a completion, in tokens."""
    temperature: PositiveFloat = 1.0
    """Divides the logits; training log-probs use it too. Validation is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling (Holtzman et al., 2020); 1 keeps all tokens."""
    top_k: PositiveInt | None = None
    """Keep the k likeliest tokens; null keeps all."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = []
    """A completion ends when its text contains one of these."""
    max_batch_size: PositiveInt = 256
    """Most sequences decoded at a time."""


class PolicyConfig(Strict):
    model_name: str
    """Hub id, local folder, `builtin:smollm2-135m` or `builtin:tiny`."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    trust_remote_code: bool = False
    """Run code that ships in the model's folder."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights in the forward and backward pass; master weights are fp32 always."""
    fp32_lm_head: bool = False
    """Compute logits in fp32 under a bf16 model: trainer and generator disagree less, for a slower head."""
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
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _completion_fits(self) -> PolicyConfig:
        if self.generation.max_new_tokens >= self.max_total_sequence_length:
            raise ValueError(
                f"generation.max_new_tokens ({self.generation.max_new_tokens}) leaves no room for a prompt in "
                f"max_total_sequence_length ({self.max_total_sequence_length})"
            )
        return self


class GrpoConfig(Strict):
    """Group Relative Policy Optimization (Shao et al., 2024, arXiv:2402.03300)."""

    num_prompts_per_step: PositiveInt
    """Prompts drawn a step."""
    num_generations_per_prompt: PositiveInt
    """Completions a prompt: the group."""
    max_num_steps: NonNegativeInt
    """The run ends after this many steps; may be raised to go on."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of sampling and of every random number generator."""
    advantage: Literal["mean_std", "leave_one_out", "mean"] = "mean_std"
    """mean_std: (r - mean) / std (GRPO). leave_one_out: r - mean of the others (RLOO). mean: no std (Dr. GRPO)."""
    skip_groups_without_signal: bool = True
    """Groups whose advantages are all zero cost no forward or backward pass, where the loss permits; a step in which
    every group is one takes no optimizer step. false trains them with a gradient of zero."""
    val_period: NonNegativeInt = 0
    """Validate every this many steps; 0 never."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step, whatever the period."""
    val_batch_size: PositiveInt = 64
    """Prompts generated at a time in validation."""

    @model_validator(mode="after")
    def _group_has_a_baseline(self) -> GrpoConfig:
        if self.num_generations_per_prompt < 2:
            raise ValueError("num_generations_per_prompt must be 2 or more: a group of one has no baseline")
        return self


class LossConfig(Strict):
    ratio_clip_min: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The probability ratio is clipped below at 1 - this."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """The probability ratio is clipped above at 1 + this (larger: clip-higher of DAPO, arXiv:2503.14476)."""
    ratio_clip_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Dual clipping of negative advantages (arXiv:1912.09729); null for none."""
    reference_policy_kl_penalty: NonNegativeFloat = 0.0
    """Weight of the KL to the frozen reference policy; above 0 builds it."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL (Schulman, 2020)."""
    token_level_loss: bool = True
    """true: mean over all tokens. false: mean over sequences of each one's token mean."""
    sequence_level_importance_ratios: bool = False
    """One ratio a sequence, its tokens' geometric mean (GSPO, arXiv:2507.18071)."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by trainer over generator probability."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound of that weight (2 is common); null for none."""

    @model_validator(mode="after")
    def _truncation_needs_a_weight(self) -> LossConfig:
        if self.truncated_importance_sampling_ratio is not None and not self.use_importance_sampling_correction:
            raise ValueError("truncated_importance_sampling_ratio is read only with use_importance_sampling_correction")
        return self


class CheckpointingConfig(Strict):
    enabled: bool = True
    """Save, and resume from `checkpoint_dir` when it holds a committed checkpoint."""
    checkpoint_dir: str = "runs/grpo/checkpoints"
    """Folder of the checkpoints, one run's."""
    strategy: Literal["native", "sync"] = "native"
    """native: a separate process writes and commits while training goes on. sync: training waits for the commit."""
    when_busy: Literal["wait", "skip"] = "wait"
    """With native, where both staging buffers still wait for the disk: wait for one, or skip the save; the last step's
    is never skipped."""
    verify: Literal["written", "readback"] = "written"
    """What is compared with the live tensors before a commit. written: the bytes that were handed to the disk.
    readback: besides, the files as they are read from the disk again, past the page cache where that is possible."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """Whether a failed save ends the run, or is reported and training goes on."""
    writer_silence_s: PositiveFloat = 120.0
    """Seconds without a sign of life after which native's writer process is replaced."""
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
    options: dict[str, Any] = {}
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
    options: dict[str, Any] = {}
    """Keyword arguments of the reward."""


class EnvConfig(Strict):
    rewards: list[RewardConfig] | None = None
    """Summed by weight. Accuracy counts completions that earn 1 or more from the first."""
    environment: str | None = None
    """`module:Class` that scores completions itself, in place of `rewards`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    tolerated_failures: NonNegativeInt = 0
    """Problems of a run whose scoring may raise, or give no finite number, before one ends the run. All completions of
    such a problem earn 0."""

    @model_validator(mode="after")
    def _one_of_both(self) -> EnvConfig:
        if bool(self.rewards) == bool(self.environment):
            raise ValueError("set exactly one of rewards and environment")
        if self.options and not self.environment:
            raise ValueError("options belongs to environment; a reward has its own options")
        return self


class ClusterConfig(Strict):
    launcher: Literal["inline"] = "inline"
    """inline: one process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is a device."""
    num_threads: PositiveInt | None = None
    """CPU threads of torch; null leaves torch's choice. Results on CPU depend on it in the last bits."""


class LoggerConfig(Strict):
    log_dir: str = "runs/grpo/logs"
    """Folder of metrics.jsonl and of the TensorBoard files."""
    tensorboard_enabled: bool = True
    """Write TensorBoard event files."""


class Config(Strict):
    """A whole run."""

    policy: PolicyConfig
    grpo: GrpoConfig
    loss_fn: LossConfig = LossConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    data: DataConfig
    env: EnvConfig
    cluster: ClusterConfig = ClusterConfig()
    logger: LoggerConfig = LoggerConfig()

    @model_validator(mode="after")
    def _batches_divide(self) -> Config:
        total = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        per_step = self.policy.train_global_batch_size
        if total % per_step:
            raise ValueError(
                f"policy.train_global_batch_size ({per_step}) does not divide grpo.num_prompts_per_step x "
                f"grpo.num_generations_per_prompt ({total})"
            )
        if per_step % self.policy.train_micro_batch_size and per_step > self.policy.train_micro_batch_size:
            raise ValueError(
                f"policy.train_micro_batch_size ({self.policy.train_micro_batch_size}) does not divide "
                f"policy.train_global_batch_size ({per_step})"
            )
        generation = self.policy.generation
        if generation.max_batch_size < self.grpo.num_generations_per_prompt:
            raise ValueError(
                f"policy.generation.max_batch_size ({generation.max_batch_size}) is smaller than "
                f"grpo.num_generations_per_prompt ({self.grpo.num_generations_per_prompt}): a group is one batch"
            )
        validates = self.grpo.val_period or self.grpo.val_at_start or self.grpo.val_at_end
        if validates and self.data.validation is None:
            raise ValueError("grpo.val_period, val_at_start and val_at_end need data.validation")
        if self.data.validation is not None and not validates:
            raise ValueError("data.validation is never read: set grpo.val_period, val_at_start or val_at_end")
        return self

    @model_validator(mode="after")
    def _ranking_metric_is_logged(self) -> Config:
        """A name that nothing logs would rank nothing, and the best checkpoints would be pruned without a word."""
        name, period = self.checkpointing.metric_name, self.grpo.val_period
        if name is None:
            return self
        if name not in _RANKING_TAGS:
            near = get_close_matches(name, _RANKING_TAGS, n=1, cutoff=0)[0]
            raise ValueError(f"checkpointing.metric_name: nothing logs {name!r}; did you mean {near!r}?")
        if name.startswith("validation/") and (not period or self.checkpointing.save_period % period):
            raise ValueError(
                f"checkpointing.metric_name={name} needs a validation at each save: make grpo.val_period ({period}) "
                f"a divisor of checkpointing.save_period ({self.checkpointing.save_period})"
            )
        return self
