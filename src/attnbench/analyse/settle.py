"""Candidates timed together -> the one to run; near ties go by a rule that noise does not move: reruns agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, log, log2

from attnbench.analyse.ranking import RANK_LEVEL, sign
from attnbench.analyse.ratios import Ratio, mean_log_ratio, paired_ratio
from attnbench.policy import Alternative, Choice
from attnbench.spec import Ok

MOST_DIFFERENCE = 1.05
"""No further apart is a tie, however wide the interval."""
COMFORTABLE = 0.5
"""Of the error that is allowed: below it one answer is as good as another."""
SAME_MEMORY = 1.05
MOST_ALTERNATIVES = 8

Field = Mapping[str, Ok]
"""Label -> its record, of one workload and one run."""


def settle(fields: Sequence[Field]) -> Choice | None:
    """The choice for workloads that one entry stands for; None where no candidate was timed on all of them."""
    shared = sorted(set.intersection(*(set(field) for field in fields)))
    if not shared:
        return None
    fastest = fastest_of(shared, fields)
    behind = {name: time_ratio(fastest, name, fields) for name in shared}
    tied = [name for name in shared if name == fastest or near(behind[name])]
    pick = min(tied, key=lambda name: (*_merits(name, tied, fields), name))
    others = {name: time_ratio(pick, name, fields) for name in shared if name != pick}
    order = sorted(others, key=lambda name: (others[name].value, name))
    record = fields[0][pick]
    regret = max(1.0, behind[pick].value)
    return Choice(
        implementation=record.implementation,
        config=dict(record.config),
        regret=round(regret, 4),
        regret_high=round(max([regret, *(1 / one.low for one in others.values())]), 4),
        candidates=len(shared),
        alternatives=tuple(_alternative(fields[0][name], others[name]) for name in order[:MOST_ALTERNATIVES]),
        measured=record.workload.id,
    )


def near(ratio: Ratio) -> bool:
    """Whether the time of one over that of the fastest is a tie: not certainly more than 1 %, and not above 5 %."""
    return sign(ratio) <= 0 and ratio.value <= MOST_DIFFERENCE


def fastest_of(names: Sequence[str], fields: Sequence[Field]) -> str:
    """By rounds that are paired: what slowed one of them down slowed all."""
    first = min(names, key=lambda name: _mean_log_time(name, fields))
    return min(names, key=lambda name: (time_ratio(first, name, fields).value, name))


def time_ratio(a: str, b: str, fields: Sequence[Field]) -> Ratio:
    """Time of b / time of a, the geometric mean over the workloads; the level is the ranking's."""
    if a == b:
        return Ratio(1, 1, 1)
    pairs = [(field[a], field[b]) for field in fields]
    return paired_ratio(*pairs[0], RANK_LEVEL) if len(pairs) == 1 else mean_log_ratio(pairs).ratio(RANK_LEVEL)


def _mean_log_time(name: str, fields: Sequence[Field]) -> float:
    return sum(log(time.median_ns) for field in fields if (time := field[name].time) is not None) / len(fields)


def _merits(name: str, tied: Sequence[str], fields: Sequence[Field]) -> tuple[int, int, bool]:
    """Among equals, the least first: how near to the error allowed, how much memory, whether it needs a config."""
    records = [field[name] for field in fields]
    peaks = {one: [field[one].memory.peak_bytes for field in fields] for one in tied}
    memory = 0
    if all(peak is not None for found in peaks.values() for peak in found):
        mean = {one: sum(log2(max(peak or 1, 1)) for peak in found) / len(found) for one, found in peaks.items()}
        more = mean[name] - min(mean.values())
        memory = 0 if more <= log2(SAME_MEMORY) else 1 + int(more)
    return max(map(_strain, records)), memory, bool(records[0].config)


def _strain(record: Ok) -> int:
    """0 with half of the allowed error to spare, else 1."""
    errors = record.errors
    pairs = ((errors.forward, errors.forward_allowed), (errors.backward, errors.backward_allowed))
    shares = [error / allowed if allowed else inf for error, allowed in pairs if error and allowed is not None]
    return int(max(shares, default=0.0) > COMFORTABLE)


def _alternative(record: Ok, ratio: Ratio) -> Alternative:
    return Alternative(
        implementation=record.implementation, config=dict(record.config), ratio=round(max(ratio.value, 0.0), 4)
    )
