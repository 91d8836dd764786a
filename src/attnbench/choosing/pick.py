"""Standings of the candidates -> the one to run; near ties go by a rule that noise does not move: reruns agree."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log, log2

from attnbench.policy import Alternative, Choice
from attnbench.results.ratios import RANK_LEVEL, TIE_LIMIT, Ratio, mean_log_ratio
from attnbench.results.standings import Standing
from attnbench.spec import Ok

COMFORTABLE = 0.5
"""Share of the error allowed below which one answer is as good as another."""
MOST_ALTERNATIVES = 8


def pick(standings: Sequence[Standing], around: Sequence[Standing] = ()) -> Choice | None:
    """Return the choice for workloads that one entry stands for; None if no candidate was timed on all of them.

    `around` are all standings of the place, which tell those apart that are tied here.
    """
    shared = ranked_on_all(standings)
    if not shared:
        return None
    fastest = fastest_of(shared, standings)
    tied = _ahead_around(_tied(fastest, shared, standings), around)
    name = min(tied, key=lambda name: (*_merits(name, tied, standings), name))
    others = {other: time_ratio(name, other, standings) for other in shared if other != name}
    order = sorted(others, key=lambda name: (others[name].value, name))
    record = standings[0].ranked[name]
    regret = max(1.0, time_ratio(fastest, name, standings).value)
    return Choice(
        implementation=record.implementation,
        config=dict(record.config),
        regret=round(regret, 4),
        regret_high=round(max([regret, *(1 / one.low for one in others.values())]), 4),
        candidates=len(shared),
        alternatives=tuple(_alternative(standings[0].ranked[o], others[o]) for o in order[:MOST_ALTERNATIVES]),
        measured=record.workload.id,
    )


def ranked_on_all(standings: Sequence[Standing]) -> list[str]:
    """Return the names that are ranked on every one of these workloads."""
    return sorted(set.intersection(*(set(standing.ranked) for standing in standings)))


def fastest_of(names: Sequence[str], standings: Sequence[Standing]) -> str:
    """Return the fastest of these by rounds that are paired; on one workload the fastest that is unbeaten."""
    first = min(names, key=lambda name: sum(log(one.times[name]) for one in standings))
    led = [name for name in names if len(standings) > 1 or name in standings[0].unbeaten] or [first]
    return min(led, key=lambda name: (time_ratio(first, name, standings).value, name))


def time_ratio(a: str, b: str, standings: Sequence[Standing]) -> Ratio:
    """Return time of b / time of a, the geometric mean over the workloads, at the ranking's confidence."""
    if a == b:
        return Ratio(1, 1, 1)
    if len(standings) == 1:
        return standings[0].ratio(a, b)
    return mean_log_ratio([(one.ranked[a], one.ranked[b]) for one in standings]).ratio(RANK_LEVEL)


def _tied(fastest: str, names: Sequence[str], standings: Sequence[Standing]) -> list[str]:
    """Return who may be run for the fastest: unbeaten (over several workloads: not certainly slower), and at most 5 %
    slower or one kernel with it."""
    tied: list[str] = []
    for name in names:
        ratio = time_ratio(fastest, name, standings)
        unbeaten = ratio.sign <= 0 if len(standings) > 1 else name in standings[0].unbeaten
        near = ratio.value <= TIE_LIMIT or all(one.one_kernel(fastest, name) for one in standings)
        if name == fastest or (unbeaten and near):
            tied.append(name)
    return tied


def _ahead_around(tied: Sequence[str], around: Sequence[Standing]) -> list[str]:
    """Return those of the tied that are tied over everything that all of them were timed on as well: who leads
    elsewhere leads here, so that it does not matter who else came near in this run."""
    standings = [one for one in around if all(name in one.ranked for name in tied)]
    if len(standings) < 2:
        return list(tied)
    return _tied(fastest_of(tied, standings), tied, standings)


def _merits(name: str, tied: Sequence[str], standings: Sequence[Standing]) -> tuple[int, int, bool]:
    """Return what equals are ordered by, the least first: how near to the error allowed, how much memory, whether it
    needs a config."""
    records = [one.ranked[name] for one in standings]
    return max(map(_strain, records)), _memory_rank(name, tied, standings), bool(records[0].config)


def _memory_rank(name: str, tied: Sequence[str], standings: Sequence[Standing]) -> int:
    """Return 0 for the least that is known and all within 5 % of it, 1 more for each doubling beyond; 0 if the memory
    is not known."""
    known = {one: peak for one in tied if (peak := _mean_log_memory(one, standings)) is not None}
    more = known[name] - min(known.values()) if name in known else 0.0
    return 0 if more <= log2(TIE_LIMIT) else 1 + int(more)


def _mean_log_memory(name: str, standings: Sequence[Standing]) -> float | None:
    """Return the mean logarithm of the peaks; None if one of them is not known."""
    peaks = [one.ranked[name].memory.peak_bytes for one in standings]
    known = [log2(max(peak, 1)) for peak in peaks if peak is not None]
    return sum(known) / len(known) if len(known) == len(peaks) else None


def _strain(record: Ok) -> int:
    """Return 0 with half of the allowed error to spare, else 1."""
    errors = record.errors
    pairs = ((errors.forward, errors.forward_allowed), (errors.backward, errors.backward_allowed))
    shares = [error / allowed if allowed else inf for error, allowed in pairs if error and allowed is not None]
    return int(max(shares, default=0.0) > COMFORTABLE)


def _alternative(record: Ok, ratio: Ratio) -> Alternative:
    return Alternative(
        implementation=record.implementation, config=dict(record.config), ratio=round(max(ratio.value, 0.0), 4)
    )
