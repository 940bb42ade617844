"""The keys of the RL algorithms: what a step draws, how long a run is, and what is optimized."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headwater.config.strict import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict


class AlgorithmConfig(Strict):
    """What every RL algorithm has."""

    num_prompts_per_step: PositiveInt
    """Prompts drawn a step."""
    num_generations_per_prompt: PositiveInt
    """Completions a prompt: the group."""
    max_num_steps: NonNegativeInt
    """The run ends after this many steps; may be raised to go on."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of sampling and of every random number generator."""
    val_period: NonNegativeInt = 0
    """Validate every this many steps; 0 never."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step, whatever the period."""
    val_batch_size: PositiveInt = 64
    """Prompts generated at a time in validation."""

    @property
    def completions_per_step(self) -> int:
        """Of all prompts together."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def validates(self) -> bool:
        """Whether the run ever validates."""
        return bool(self.val_period or self.val_at_start or self.val_at_end)

    def policy_epochs(self, step: int) -> int:
        """How often the policy is trained on the completions of a step, counted from 1."""
        return 1


class GrpoConfig(AlgorithmConfig):
    """Group Relative Policy Optimization (Shao et al., 2024, arXiv:2402.03300)."""

    advantage: Literal["mean_std", "leave_one_out", "mean"] = "mean_std"
    """mean_std: (r - mean) / std (GRPO). leave_one_out: r - mean of the others (RLOO). mean: no std (Dr. GRPO)."""
    skip_groups_without_signal: bool = True
    """Groups whose advantages are all zero cost no forward or backward pass, where the loss permits; a step in which
    every group is one takes no optimizer step. false trains them with a gradient of zero."""

    @model_validator(mode="after")
    def _group_has_a_baseline(self) -> GrpoConfig:
        if self.num_generations_per_prompt < 2:
            raise ValueError("num_generations_per_prompt must be 2 or more: a group of one has no baseline")
        return self


class PpoConfig(AlgorithmConfig):
    """Proximal Policy Optimization with a value model (Schulman et al., 2017, arXiv:1707.06347)."""

    num_generations_per_prompt: PositiveInt = 1
    """Completions a prompt."""
    ppo_epochs: PositiveInt = 1
    """How often a step's completions are trained on, by the value model and by the policy."""
    policy_training_start_step: NonNegativeInt = 0
    """The first step, counted from 1, that trains the policy; those before it train the value model alone (critic
    warm-up). 0 and 1 train both from the outset. May lie beyond max_num_steps, which may be raised."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Of generalized advantage estimation (Schulman et al., 2016, arXiv:1506.02438): 0 trusts the value model at the
    next token, 1 the rewards alone."""
    gae_gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount a token."""
    kl_penalty_in_reward: NonNegativeFloat = 0.0
    """Each token's reward is lowered by this times its log-probability ratio to the frozen reference policy (k1); above
    0 builds the reference."""
    whiten_advantages: bool = True
    """Scale the advantages of all tokens of a step to mean 0 and standard deviation 1."""
    models_take_turns: bool = False
    """Keep the policy in host memory, optimizer state included, while the value model works, and the other way round: a
    device that holds either can train both."""

    def policy_epochs(self, step: int) -> int:
        return self.ppo_epochs if step >= self.policy_training_start_step else 0


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
