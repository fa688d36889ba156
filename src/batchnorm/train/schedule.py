"""The learning rate over the course of training."""

from __future__ import annotations

import math


def exponential_rate(step: int, *, initial: float, factor: float, every: float) -> float:
    """Return the learning rate at a step: initial * factor^floor(step / every).

    The paper decays exponentially; the stairs are GoogLeNet's (x 0.96 every 8 epochs).

    Args:
        step: steps taken so far.
        initial: the rate at step 0.
        factor: what each stair multiplies the rate by.
        every: steps from stair to stair, a fraction allowed.

    >>> [round(exponential_rate(s, initial=1.0, factor=0.5, every=10), 3) for s in (0, 9, 10, 25)]
    [1.0, 1.0, 0.5, 0.25]

    Paper: Sec. 4.2.1, "learning rate was decayed exponentially"
    """
    return initial * factor ** math.floor(step / every)
