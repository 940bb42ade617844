"""Learning rate as a pure function of the optimizer steps taken."""

from __future__ import annotations

import math

from headwater.config.schema import SchedulerConfig


def learning_rate_factor(config: SchedulerConfig, step: int) -> float:
    """Factor on the peak learning rate for optimizer step `step`, counted from 0.

    Warm-up rises linearly, (step + 1) / warmup_steps; then constant, or falling to `min_lr_ratio` over
    `decay_steps`, linearly or along a half cosine. Nothing here knows when the run ends, so a run that is
    resumed with more steps goes on along the same curve.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    assert config.decay_steps is not None
    progress = min((step - config.warmup_steps) / config.decay_steps, 1.0)
    shape = 1 - progress if config.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
