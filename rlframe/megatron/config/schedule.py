"""The learning rate of an optimizer step. Pure arithmetic."""

import math

from rlframe.megatron.config.optimizer import OptimizerConfig, Schedule


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Returns the rate of optimizer step `step` (0-based).

    Warm-up rises linearly and reaches lr at step warmup_steps - 1. Afterwards constant stays; linear and cosine reach
    min_lr at the last step of `decay_steps` (null means the whole run); wsd stays at lr and falls linearly to min_lr
    over the last `decay_fraction` of it. Source: Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5 (cosine); Hu
    et al. 2024, arXiv 2404.06395, section 4 (wsd).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    end = (config.decay_steps or total_steps) - 1
    start = config.warmup_steps
    if config.schedule is Schedule.WSD:
        start = max(start, end - round(config.decay_fraction * (end + 1)))
    if config.schedule is Schedule.CONSTANT or step <= start:
        return config.lr
    done = min(1.0, (step - start) / max(1, end - start))
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule is Schedule.COSINE else 1 - done
    return config.min_lr + (config.lr - config.min_lr) * left
