"""Learning rate over the steps of a run."""

from __future__ import annotations

import math

_FLOOR = 0.02  # of the peak, so that the last steps still learn


def learning_rate(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Linear warm-up, then a half cosine down to 2% of the peak; step counts from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
