"""The learning rate as a function of the step, so that there is no scheduler state to save."""

from __future__ import annotations

import math


def warmup_cosine(step: int, total: int, peak: float, warmup: float = 0.2) -> float:
    """Rise linearly to ``peak`` over the fraction ``warmup`` of ``total`` steps, then fall to 0 along a cosine.

    The curve is evaluated at the middle of each step, so that the rates of the first and last step are not zero.
    """
    position = (min(step, total - 1) + 0.5) / total
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))
