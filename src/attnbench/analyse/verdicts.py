"""Two implementations over some workloads -> whether one is faster, and how much: one rule for every sentence.

The level is the ranking's, so that no sentence is surer than the table beside it; the interval that is printed is the
95 % one, which lies within.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from attnbench.analyse.ranking import RANK_LEVEL, sign
from attnbench.analyse.ratios import Ratio, mean_log_ratio, paired_ratio
from attnbench.spec import Ok


class Verdict(Struct, frozen=True):
    """Of a against b."""

    ratio: Ratio
    """Geometric mean of time of b / time of a, at 95 %; where nothing is certain, with the interval that says so."""
    sign: int
    """+1 where a is faster for certain, -1 where b is, 0 where neither."""
    each: tuple[Ratio, ...]
    """The same on each workload, at the level of the ranking."""
    on_average: bool
    """Whether the mean alone carries the sign; else it holds on every workload measured, and for these only."""

    @property
    def from_each(self) -> bool:
        """Whether it was read from the workloads one by one and not from their mean."""
        return not self.on_average and (bool(self.sign) or self.apart)

    @property
    def apart(self) -> bool:
        """Whether the two differ for certain on some workload."""
        return any(map(sign, self.each))

    @property
    def certain(self) -> bool:
        """Whether the two differ for certain, on average or on each workload, whoever is ahead there."""
        return bool(self.sign) or all(map(sign, self.each))

    @property
    def never_behind(self) -> bool:
        """Whether b is nowhere faster for certain."""
        return min(map(sign, self.each)) >= 0

    @property
    def span(self) -> tuple[float, float]:
        """Least and largest of the ratios."""
        values = [ratio.value for ratio in self.each]
        return min(values), max(values)


def judge(pairs: Sequence[tuple[Ok, Ok]]) -> Verdict:
    """Of pairs of records (a, b), one per workload."""
    mean = mean_log_ratio(pairs)
    each = tuple(paired_ratio(a, b, RANK_LEVEL) for a, b in pairs)
    overall, signs = sign(mean.ratio(RANK_LEVEL)), {sign(ratio) for ratio in each}
    everywhere = signs.pop() if len(signs) == 1 else 0
    found = overall or everywhere
    return Verdict(mean.ratio() if found else mean.ratio(RANK_LEVEL), found, each, bool(overall))
