"""Standings of several workloads together: the implementation to recommend, and whether it is faster than another.

A verdict uses the confidence of the ranking, so that no sentence claims more than the table beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import log

from msgspec import Struct

from attnbench.measuring.rates import describe_host_limit
from attnbench.results.ratios import RANK_LEVEL, Ratio, mean_log_ratio, paired_ratio
from attnbench.results.standings import Standing
from attnbench.spec import Ok


class Verdict(Struct, frozen=True):
    """Whether a is faster than b over some workloads, and how much."""

    ratio: Ratio
    """Geometric mean of time of b / time of a, at 95 % if it is significant, else at the ranking's level."""
    sign: int
    """+1 if a is significantly faster, -1 if b is, else 0."""
    each: tuple[Ratio, ...]
    """Time of b / time of a on each workload, at the ranking's confidence."""
    on_average: bool
    """Whether the mean alone carries the sign; else it holds on each measured workload, and for these only."""

    @property
    def from_each(self) -> bool:
        """Whether the verdict comes from the workloads one by one and not from their mean."""
        return not self.on_average and (bool(self.sign) or self.apart)

    @property
    def apart(self) -> bool:
        """Whether the two differ significantly on some workload."""
        return any(ratio.sign for ratio in self.each)

    @property
    def mixed(self) -> bool:
        """Whether each is significantly faster on some workload."""
        return {1, -1} <= {ratio.sign for ratio in self.each}

    @property
    def certain(self) -> bool:
        """Whether the two differ significantly, on average or on each workload, whichever is ahead there."""
        return bool(self.sign) or all(ratio.sign for ratio in self.each)

    @property
    def never_behind(self) -> bool:
        """Whether b is significantly faster on none of the workloads."""
        return min(ratio.sign for ratio in self.each) >= 0

    @property
    def span(self) -> tuple[float, float]:
        """Least and largest of the ratios."""
        values = [ratio.value for ratio in self.each]
        return min(values), max(values)


def judge(pairs: Sequence[tuple[Ok, Ok]], each: Sequence[Ratio] = ()) -> Verdict:
    """Return the verdict on pairs of records (a, b), one per workload; `each` are their ratios at the ranking's
    confidence, if they are known already."""
    mean = mean_log_ratio(pairs)
    ratios = tuple(each) or tuple(paired_ratio(a, b, RANK_LEVEL) for a, b in pairs)
    overall, signs = mean.ratio(RANK_LEVEL).sign, {ratio.sign for ratio in ratios}
    everywhere = signs.pop() if len(signs) == 1 else 0
    found = overall or everywhere
    return Verdict(mean.ratio() if found else mean.ratio(RANK_LEVEL), found, ratios, bool(overall))


class Recommended(Struct, frozen=True):
    """Implementation to use for some workloads."""

    name: str
    """Plainest name of its kernel: the one that ran most often, then the shortest."""
    same: tuple[str, ...] = ()
    """Other names of the same kernel."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the kernel."""
        return self.name, *self.same

    def __str__(self) -> str:
        """Return the name, and what else the same kernel is called."""
        return f"{self.name} (the same kernel as {', '.join(self.same)})" if self.same else self.name


class Tally:
    """The standings of several workloads, such as a family or all that one framework ran."""

    def __init__(self, standings: Mapping[str, Standing]) -> None:
        self.standings = {key: standing for key, standing in standings.items() if standing.ranked}

    @cached_property
    def names(self) -> set[str]:
        """Names of all ranked implementations."""
        return {name for standing in self.standings.values() for name in standing.ranked}

    @cached_property
    def recommended(self) -> Recommended:
        """Implementation that is unbeaten on most workloads, of several the one with the least mean loss; by the
        plainest name of its kernel."""
        counts = Counter(name for standing in self.standings.values() for name in standing.unbeaten)
        first = min(counts, key=lambda name: (-counts[name], self.mean_loss(name), name))
        names = {first, *self.same_kernel(first)}
        name = self.plainest(names)
        return Recommended(name, tuple(sorted(names & {name, *self.same_kernel(name)} - {name})))

    def next_best(self) -> str | None:
        """Return the implementation to compare the recommended one with, by the plainest name of its kernel: of those
        that share the most workloads with it, the one with the least mean loss; None if there is no other."""
        best = self.recommended
        left = sorted(self.names.difference(best.names))
        shared = {name: len(self.pairs(best.name, name)) for name in left}
        most = max(shared.values(), default=0)
        if not most:
            return None
        other = min((name for name in left if shared[name] == most), key=self.mean_loss)
        return self.plainest({other, *self.same_kernel(other)} - {best.name})

    def led(self, names: Iterable[str]) -> int:
        """Return on how many workloads one of these is unbeaten: no other is significantly faster."""
        return sum(not set(names).isdisjoint(one.unbeaten) for one in self.standings.values())

    def won(self, names: Iterable[str]) -> int:
        """Return on how many workloads these alone are unbeaten: significantly faster than all others."""
        return sum(set(names).issuperset(one.unbeaten) for one in self.standings.values())

    def first_elsewhere(self, names: Iterable[str]) -> list[tuple[str, Standing]]:
        """Return the first name and the standing of every workload on which none of these is unbeaten."""
        chosen, standings = set(names), self.standings.values()
        return [(one.first, one) for one in standings if one.first is not None and chosen.isdisjoint(one.unbeaten)]

    def pairs(self, a: str, b: str) -> list[tuple[Ok, Ok]]:
        """Return the records of both on every workload that has them."""
        return [(one.ranked[a], one.ranked[b]) for one in self._with(a, b)]

    def verdict(self, a: str, b: str) -> Verdict:
        """Return whether a is faster than b over the workloads that both ran, which must be one at least."""
        return judge(self.pairs(a, b), [one.ratio(a, b) for one in self._with(a, b)])

    def host_limit(self, name: str) -> str:
        """Return words for an implementation that waits for its host, so that its kernel time is not its time; else an
        empty text."""
        return describe_host_limit(one.ranked[name] for one in self._with(name))

    def mean_loss(self, name: str) -> float:
        """Return the mean logarithm of its time over the best time, over the workloads it ran on."""
        losses = [log(one.times[name] / min(one.times.values())) for one in self._with(name)]
        return sum(losses) / len(losses)

    def same_kernel(self, name: str) -> list[str]:
        """Return the other names of its kernel: one kernel with it on every workload that both ran."""
        others = ((other, self._with(name, other)) for other in sorted(self.names - {name}))
        return [other for other, shared in others if shared and all(one.one_kernel(name, other) for one in shared)]

    def plainest(self, names: Iterable[str]) -> str:
        """Return the name that ran most often, then the shortest, so that noise does not decide."""
        return min(names, key=lambda name: (-len(self._with(name)), len(name), name))

    def _with(self, *names: str) -> list[Standing]:
        return [one for one in self.standings.values() if all(name in one.ranked for name in names)]
