"""Learning rate as a pure function of the update."""

from __future__ import annotations

import math

from memtrain.options import RunConfig

WARMUP_SHARE = 0.1  # of the run, when warmup_steps is not set
WSD_DECAY_SHARE = 0.2  # of the run, when decay_steps is not set (arXiv 2405.18392 finds 10 to 20 % enough)


def learning_rate_factor(step: int, total_steps: int, config: RunConfig) -> float:
    """learning rate / `config.learning_rate` of update `step` (from 0) of `total_steps`.

    Warm-up is linear and reaches 1 at update `warmup_steps`. After it: `cosine` (arXiv 1608.03983) and `linear` go from 1 to
    `min_lr_ratio` at the last update; `wsd` (warm-up, stable, decay; arXiv 2404.06395) stays at 1 and falls linearly over the
    last `decay_steps`; `constant` stays.
    """
    last = total_steps - 1
    start = config.warmup_steps if config.warmup_steps is not None else round(WARMUP_SHARE * total_steps)
    if step < start:
        return (step + 1) / (start + 1)
    if config.lr_schedule == "constant":
        return 1.0
    if config.lr_schedule == "wsd":
        decay = config.decay_steps if config.decay_steps is not None else round(WSD_DECAY_SHARE * total_steps)
        start = max(start, last - decay)
    progress = min(max((step - start) / max(last - start, 1), 0.0), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_schedule == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
