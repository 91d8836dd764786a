"""Candidates timed together -> the one to run; near ties go by a rule that noise does not move: reruns agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, log, log2

from attnbench.analyse.kernels import same_kernel
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


def settle(fields: Sequence[Field], around: Sequence[Field] = ()) -> Choice | None:
    """The choice for workloads that one entry stands for; None where no candidate was timed on all of them.

    `around`: all that was measured at the place, which tells those apart that are tied here.
    """
    shared = sorted(set.intersection(*(set(field) for field in fields)))
    if not shared:
        return None
    fastest = fastest_of(shared, fields)
    behind = {name: time_ratio(fastest, name, fields) for name in shared}
    tied = _ahead_around(_tied(fastest, behind, fields), around)
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


def _tied(fastest: str, behind: Mapping[str, Ratio], fields: Sequence[Field]) -> list[str]:
    """Who is as good as the fastest: by time, or as another name of its kernel that is not surely further behind."""
    return [name for name, ratio in behind.items() if near(ratio) or _is_its_kernel(fastest, name, ratio, fields)]


def _is_its_kernel(fastest: str, name: str, ratio: Ratio, fields: Sequence[Field]) -> bool:
    return ratio.low <= MOST_DIFFERENCE and all(same_kernel(field[fastest], field[name]) for field in fields)


def _ahead_around(tied: Sequence[str], around: Sequence[Field]) -> list[str]:
    """Those of the tied that are tied over everything that all of them were timed on as well: who leads elsewhere
    leads here, so that it does not matter who else came near in this run."""
    fields = [field for field in around if all(name in field for name in tied)]
    if len(fields) < 2:
        return list(tied)
    fastest = fastest_of(tied, fields)
    return _tied(fastest, {name: time_ratio(fastest, name, fields) for name in tied}, fields)


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
    return max(map(_strain, records)), _memory_rank(name, tied, fields), bool(records[0].config)


def _memory_rank(name: str, tied: Sequence[str], fields: Sequence[Field]) -> int:
    """0 for the least that is known and whatever is within 5 % of it, more for each doubling beyond.

    Where memory is not known it speaks neither for nor against: 0, whoever else is tied.
    """
    known = {one: peak for one in tied if (peak := _mean_log_memory(one, fields)) is not None}
    more = known[name] - min(known.values()) if name in known else 0.0
    return 0 if more <= log2(SAME_MEMORY) else 1 + int(more)


def _mean_log_memory(name: str, fields: Sequence[Field]) -> float | None:
    """None where it is not known of every workload."""
    peaks = [field[name].memory.peak_bytes for field in fields]
    known = [log2(max(peak, 1)) for peak in peaks if peak is not None]
    return sum(known) / len(known) if len(known) == len(peaks) else None


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
