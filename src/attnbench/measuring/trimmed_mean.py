"""The mean over launches that one disturbed launch cannot carry away, with its standard error: Yuen's trimmed t."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

LAUNCHES_PER_TRIMMED = 8
"""One launch in so many is left out at either end: none of 6, one of 10, two of 16, three of 24."""


class TrimmedMean(Struct, frozen=True):
    """A mean without the extremes."""

    value: float
    se: float | None
    """None of a single launch: it says nothing about its own spread."""
    freedom: int
    """Degrees of freedom of the t distribution that the mean, over its standard error, follows."""

    def half_width(self, alpha: float) -> float:
        """Of the t interval each of whose bounds errs with probability alpha."""
        from scipy.special import stdtrit

        return float("inf") if self.se is None else float(stdtrit(self.freedom, 1 - alpha)) * self.se

    def p_above(self, excess: float) -> float:
        """One-sided p-value of an excess that is not really there."""
        from scipy.special import stdtr

        if self.se is None:
            return 1.0
        if self.se == 0:
            return float(excess <= 0)
        return float(stdtr(self.freedom, -excess / self.se))


def trimmed_mean(values: np.ndarray) -> TrimmedMean:
    """Below 8 values Student's t as it is: with five or fewer left between the extremes its bounds are hopelessly wide.

    Extremes leave the mean but not its error, where they count as their nearest neighbour that stays. All sums run in
    the order of the launches, so that negated values give the negated mean to the last bit.
    """
    cut = len(values) // LAUNCHES_PER_TRIMMED
    ordered, kept = np.sort(values), len(values) - 2 * cut
    low, high = ordered[cut], ordered[-1 - cut]
    pulled_in = np.clip(values, low, high)
    mean = (float(pulled_in.sum()) - cut * float(low + high)) / kept
    if len(values) == 1:
        return TrimmedMean(mean, None, 0)
    spread = float(pulled_in.std(ddof=1)) * ((len(values) - 1) / (kept - 1)) ** 0.5
    return TrimmedMean(mean, spread / kept**0.5, kept - 1)
