"""Learning rate as a pure function of the step: no scheduler state to save."""

from __future__ import annotations

import math


def warmup_cosine(step: int, total: int, peak: float, warmup: float = 0.2) -> float:
    """Rise linearly to ``peak`` over the first ``warmup`` share of ``total`` steps, then fall to 0 on a cosine.

    Step 0 already learns and the last step still does: the curve is read at the middle of each step.
    """
    position = (min(step, total - 1) + 0.5) / total
    if position < warmup:
        return peak * position / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (position - warmup) / (1 - warmup)))
