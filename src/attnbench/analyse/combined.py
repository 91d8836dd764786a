"""Ratios with intervals -> the interval of their weighted product: a geometric mean, or one ratio over another."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot, log

from attnbench.analyse.ratios import Ratio


def combine(ratios: Sequence[Ratio], weights: Sequence[float]) -> Ratio:
    """Product of independent ratios, each to the power of its weight, at the confidence of the intervals given.

    The distances from value to bound add up as standard errors do, each side for itself (Zou and Donner's MOVER), so
    nothing but the intervals need be known and skew ones stay skew.
    """
    middle = sum(weight * log(ratio.value) for ratio, weight in zip(ratios, weights))
    below, above = [], []
    for ratio, weight in zip(ratios, weights):
        down, up = weight * log(ratio.value / ratio.low), weight * log(ratio.high / ratio.value)
        below.append(down if weight > 0 else up)
        above.append(up if weight > 0 else down)
    return Ratio(exp(middle), exp(middle - hypot(*below)), exp(middle + hypot(*above)))


def geometric_mean(ratios: Sequence[Ratio]) -> Ratio:
    """Of these ratios and no others: they are not taken as a sample of more."""
    return combine(ratios, [1 / len(ratios)] * len(ratios))
