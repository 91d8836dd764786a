"""Who leads where: the exact and timed records of a family, ranked workload by workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from math import log

from msgspec import Struct

from attnbench.analyse.ranking import RANK_LEVEL, by_workload, is_timed, label, sign
from attnbench.analyse.ratios import condensed, paired_ratio
from attnbench.spec import Ok, Record

Field = Mapping[str, Mapping[str, Ok]]
"""Workload id -> name -> its record."""


class Front(Struct, frozen=True):
    """A family, ranked."""

    leaders: Mapping[str, list[str]]
    """Workload id -> names that share the first rank."""
    field: Field

    @property
    def names(self) -> set[str]:
        """Everybody who was timed."""
        return {name for one in self.field.values() for name in one}

    def champion(self) -> str:
        """Unbeaten most often; of several, the one with least time lost where it ran."""
        counts = Counter(name for names in self.leaders.values() for name in names)
        return max(counts, key=lambda name: (counts[name], -self.mean_loss(name)))

    def rival(self, champion: str, but: Iterable[str] = ()) -> str | None:
        """The best of the others where the champion ran, those that ran in most places first."""
        counts = {name: len(self.pairs(champion, name)) for name in sorted(self.names - {champion, *but})}
        most = max(counts.values(), default=0)
        return min((n for n in counts if counts[n] == most), key=self.mean_loss) if most else None

    def led(self, names: Iterable[str]) -> int:
        """Workloads on which nobody was faster for certain than one of these."""
        return sum(not set(names).isdisjoint(leaders) for leaders in self.leaders.values())

    def won(self, names: Iterable[str]) -> int:
        """Workloads on which one of these was faster for certain than everybody else."""
        return sum(set(names).issuperset(leaders) for leaders in self.leaders.values())

    def pairs(self, a: str, b: str) -> list[tuple[Ok, Ok]]:
        """Records of both on every workload that has them."""
        return [(one[a], one[b]) for one in self.field.values() if a in one and b in one]

    def mean_loss(self, name: str) -> float:
        """Mean logarithm of its time over the best time, where it ran."""
        losses = [
            log(_median(one[name]) / min(map(_median, one.values()))) for one in self.field.values() if name in one
        ]
        return sum(losses) / len(losses)


def exact(records: Iterable[Record]) -> list[Ok]:
    """Records with a speed that may be recommended: right answers, no declared error."""
    return [record for record in records if is_timed(record) and not record.approximate]


def front_of(records: Iterable[Record]) -> Front:
    """Rank every workload of some records."""
    leaders: dict[str, list[str]] = {}
    field: dict[str, dict[str, Ok]] = {}
    for key, group in by_workload(map(condensed, exact(records))).items():
        field[key] = {label(record): record for record in group if is_timed(record)}
        leaders[key] = _leaders(list(field[key].values()))
    return Front(leaders, field)


def _leaders(group: Sequence[Ok]) -> list[str]:
    """Those that share the first rank: the fastest, and the next ones until one is slower for certain."""
    first, *others = sorted(group, key=_median)
    near = takewhile(lambda one: sign(paired_ratio(first, one, RANK_LEVEL)) <= 0, others)
    return [label(one) for one in (first, *near)]


def _median(record: Ok) -> float:
    assert record.time is not None
    return record.time.median_ns
