"""Who is fastest on a workload: the order, the ties, the names of one kernel, and which of several runs decides.

All outputs read this file: terminal, `--json`, report page, Markdown, summaries, advice, gallery and `choose`.
docs/method.md ("Who is faster?") describes the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import accumulate, chain
from typing import Any, TypeVar

from msgspec import Struct, structs

from attnbench.measuring.rates import KERNELS_ONLY
from attnbench.policy import Place, place_of
from attnbench.results.ratios import ACROSS_RUNS, CONTENDER, RANK_LEVEL, TIE_LIMIT, Ratio, condensed, paired_ratio
from attnbench.results.records import (
    baseline,
    by_workload,
    clock_of,
    comparable,
    device_of,
    exact,
    framework_of,
    grouped,
    is_anchor,
    is_one_machine,
    is_timed,
    label,
    labelled,
    median_ns,
    named_record,
    on_one_clock,
    same_kernel,
    sitting_of,
)
from attnbench.spec import ONLY_TIMED, Environment, Failed, Incorrect, Ok, OutOfMemory, Record, Timeout, Workload

Named = TypeVar("Named")
"""Name or number of a run, beside its standing."""
NOT_TIMED = "verified, not timed"
"""Beginning of the note of a record that may be checked but not timed, such as one of an interpreter."""
OTHER_CLOCK, OTHER_SITTING = "timed by another clock", "timed in another sitting"
OTHER_MACHINE = "timed on another machine, or with other threads"
NOT_COMPARED = (OTHER_CLOCK, OTHER_SITTING, OTHER_MACHINE)
APPROXIMATE = "approximate: not ranked among exact ones"


class Row(Struct, frozen=True, kw_only=True):
    """One line of a standing. `rank` is None if the row is not ranked: `reason` says why."""

    implementation: str
    record: Record
    rank: int | None = None
    tied: bool = False
    """Whether the row shares its rank with the row above: it, or one below it that is not significantly slower, does
    not differ significantly from all rows of that rank."""
    behind: bool = False
    """Whether the row is significantly slower than the first row of its rank, which it shares through another row."""
    speedup: Ratio | None = None
    """Time of the baseline / time of this row, at 95 %."""
    reason: str = ""


class Ratios:
    """Ratios between timed records at the ranking's confidence, each worked out once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[Ratio, Ok, Ok]] = {}
        """Ratios by the identities of two records, which are kept so that no other records get these."""

    def of(self, a: Ok, b: Ok) -> Ratio:
        """Return time of b / time of a."""
        key = id(a), id(b)
        if key not in self._found:
            self._found[key] = paired_ratio(a, b, RANK_LEVEL), a, b
        return self._found[key][0]


class Standing:
    """The rows of one workload, by records of one run: those that are ranked in order, then the others."""

    def __init__(self, rows: Iterable[Row], ratios: Ratios | None = None) -> None:
        self.rows = tuple(rows)
        self._ratios = ratios or Ratios()

    @property
    def workload(self) -> Workload:
        """The workload; a standing has one row at least."""
        return self.rows[0].record.workload

    @cached_property
    def ranked(self) -> dict[str, Ok]:
        """Name -> record of every row with a rank, the first row first."""
        return {row.implementation: row.record for row in self.rows if row.rank is not None and is_timed(row.record)}

    @cached_property
    def times(self) -> dict[str, float]:
        """Name -> median of every row with a rank."""
        return {name: median_ns(record) for name, record in self.ranked.items()}

    @property
    def compared(self) -> list[Ok]:
        """Records that took turns with each other: the ranked ones, then the approximate ones."""
        return [r.record for r in self.rows if is_timed(r.record) and not r.reason.startswith(NOT_COMPARED)]

    @cached_property
    def unbeaten(self) -> tuple[str, ...]:
        """Names of the first rank without those that are significantly slower than its first row."""
        return tuple(row.implementation for row in self.rows if row.rank == 1 and not row.behind)

    @cached_property
    def kernels(self) -> list[list[Row]]:
        """Ranked rows by kernel: names of one kernel together, the plainest (shortest) name first. Kernels come in the
        order of their ranks, within a rank those that are not `behind` first, then by time."""
        groups: list[list[Row]] = []
        for row in sorted((r for r in self.rows if r.rank is not None), key=lambda row: (row.rank, row.behind)):
            home = next((g for g in groups if self.one_kernel(g[0].implementation, row.implementation)), None)
            if home is None:
                groups.append([row])
            else:
                home.append(row)
        return [sorted(group, key=lambda row: (len(row.implementation), row.implementation)) for group in groups]

    @property
    def first(self) -> str | None:
        """Plainest name of the fastest kernel; None if nothing is ranked."""
        return self.kernels[0][0].implementation if self.kernels else None

    @property
    def close(self) -> bool:
        """Whether another kernel is unbeaten beside the first: too close to call."""
        return len(self.kernels) > 1 and any(row.implementation in self.unbeaten for row in self.kernels[1])

    def one_kernel(self, a: str, b: str) -> bool:
        """Return whether two ranked names are one kernel here: both launched the same kernels, share a rank, and
        neither is significantly faster."""
        if a == b or not same_kernel(self.ranked[a], self.ranked[b]):
            return a == b
        ranks = {row.rank for row in self.rows if row.implementation in (a, b)}
        return len(ranks) == 1 and self.ratio(a, b).sign == 0

    def ratio(self, a: str, b: str) -> Ratio:
        """Return time of b / time of a at the ranking's confidence, of two ranked names."""
        return self._ratios.of(self.ranked[a], self.ranked[b])

    def only(self, keep: Callable[[Record], bool]) -> Standing:
        """Return the standing of some of its rows: they keep their order and their ties, ranks are counted anew. Rows
        that another clock or sitting kept unranked are ranked among themselves if no ranked row is left."""
        kept = [row for row in self.rows if keep(row.record)]
        if len(kept) == len(self.rows):
            return self
        if all(row.rank is None for row in kept) and exact(row.record for row in kept):
            return standing_of(row.record for row in kept)
        rows: list[Row] = []
        leader, place = None, 0
        for count, row in enumerate(kept, start=1):
            if row.rank is not None:
                tied = leader is not None and leader.rank == row.rank
                if leader is None or not tied:
                    leader, place = row, count
                behind = tied and self.ratio(leader.implementation, row.implementation).sign > 0
                row = structs.replace(row, rank=place, tied=tied, behind=behind)
            rows.append(row)
        return Standing(rows, self._ratios)


def rank(records: Iterable[Record], base: str | None = None) -> list[Row]:
    """Return the rows of one workload and run: exact ones by time, approximate ones, the rest with their reasons."""
    return list(standing_of(records, base).rows)


def standing_of(records: Iterable[Record], base: str | None = None) -> Standing:
    """Return the standing of the records of one workload and run; `base` names what speed-ups are against."""
    shown = on_one_clock(r for r in records if not is_anchor(r))
    timed = sorted((r for r in comparable(shown) if is_timed(r)), key=lambda r: (median_ns(r), label(r)))
    clock, sitting = (clock_of(timed[0]), sitting_of(timed[0])) if timed else ("", "")
    base_record, ratios = named_record(timed, base), Ratios()

    def row(record: Record, **fields: Any) -> Row:
        return Row(implementation=label(record), record=record, **fields)

    def timed_row(record: Ok, **fields: Any) -> Row:
        return row(record, speedup=None if base_record is None else paired_ratio(record, base_record), **fields)

    rows = [timed_row(record, **place) for record, place in _places([r for r in timed if not r.approximate], ratios)]
    rows += [timed_row(record, reason=APPROXIMATE) for record in timed if record.approximate]
    left: list[Row] = []
    for record in shown:
        if not is_timed(record):
            reason = record.reason or ""
            if isinstance(record, Ok):
                reason = next((note for note in record.notes if note.startswith(NOT_TIMED)), NOT_TIMED)
            left.append(row(record, reason=reason))
        elif clock_of(record) != clock:
            reason = f"{OTHER_CLOCK} ({clock_of(record)}; the others by {clock}): not compared"
            rows.append(row(record, reason=reason))
        elif sitting_of(record) != sitting:
            rows.append(row(record, reason=f"{OTHER_SITTING}, so that it took no turns with the others: not compared"))
        elif not is_one_machine(record, timed[0]):
            rows.append(row(record, reason=f"{OTHER_MACHINE}: not compared"))
    return Standing([*rows, *left], ratios)


def _places(timed: Sequence[Ok], ratios: Ratios) -> Iterator[tuple[Ok, dict[str, Any]]]:
    """Yield each record with its rank, in order of time.

    A new rank opens with a record that is significantly slower than every record of the rank before, and than none
    after it (on a machine that drifts, medians and rounds may contradict each other). If a ~ b and b ~ c do not differ
    significantly, all three share a rank; c is `behind` if a is significantly faster.
    """

    def slower(record: Ok, than: Ok) -> bool:
        return ratios.of(than, record).sign > 0

    peers: list[Ok] = []
    for position, record in enumerate(timed, start=1):
        opens = all(slower(record, peer) for peer in reversed(peers))
        opens = opens and not any(slower(record, later) for later in timed[position:])
        tied = bool(peers) and not opens
        behind = tied and any(slower(record, peer) for peer in peers)
        peers = [*peers, record] if tied else [record]
        yield record, {"rank": position + 1 - len(peers), "tied": tied, "behind": behind}


def contenders(standing: Standing) -> list[str]:
    """Return who may lead after another measurement: the fastest two and all within 1.5 times the fastest, by time."""
    times = standing.times
    order = sorted(times, key=lambda name: (times[name], name))
    return [name for n, name in enumerate(order) if n < 2 or times[name] <= CONTENDER * times[order[0]]]


def supersedes(new: Standing, old: Standing) -> bool:
    """Return whether a newer run decides a workload in place of an older one.

    A clock that leaves out part of what a call waits for gives way to one that counts it all and ranks two
    implementations at least. Else the newer run decides if it holds all contenders of the older, by any name of their
    kernels, or if its fastest is over 1.1 times as fast as the older run's, each held against what both runs have. Runs
    that share no name are compared in plain time if their clock is the same, else by the number of ranked ones.
    """
    whole_new, whole_old = (_clock(standing) != KERNELS_ONLY for standing in (new, old))
    if whole_new != whole_old and len((new if whole_new else old).ranked) > 1:
        return whole_new
    shared = [name for name in old.ranked if name in new.ranked]
    fastest_new, fastest_old = (min(standing.times.values()) for standing in (new, old))
    if not shared:
        ahead = fastest_old / fastest_new
        if _clock(new) == _clock(old) and not 1 / ACROSS_RUNS <= ahead <= ACROSS_RUNS:
            return ahead > 1
        return len(new.ranked) > len(old.ranked)

    def holds(name: str) -> bool:
        leader = old.ranked[name]
        return name in new.ranked or any(
            same_kernel(leader, old.ranked[other])
            and same_kernel(leader, new.ranked[other])
            and old.ratio(name, other).high <= TIE_LIMIT
            for other in shared
        )

    if all(map(holds, contenders(old))):
        return True
    link = min(shared, key=lambda name: (new.times[name], name))
    return new.times[link] / fastest_new > ACROSS_RUNS * old.times[link] / fastest_old


class Setback(Struct, frozen=True):
    """A timed record of a cell, and what a newer run on the same device has instead of a time."""

    record: Ok
    newer: Incorrect | Failed | OutOfMemory | Timeout
    right_elsewhere: bool = False
    """Whether the newer record is incorrect, and a still newer run on the same device, with other versions or threads
    or on another processor, found the cell right."""

    @property
    def is_wrong(self) -> bool:
        """Whether the newer record is incorrect, so that the older time does not count."""
        return isinstance(self.newer, Incorrect)


def by_date(dated: Iterable[tuple[str, Record]]) -> list[Record]:
    """Return dated records in the order of their dates; those of one date keep their order."""
    return [record for _, record in sorted(dated, key=lambda one: one[0])]


def setbacks(runs: Iterable[Iterable[Record]]) -> list[Setback]:
    """Return the timed records whose cell was found incorrect or was lost later on the same device; `runs` are the
    oldest first.

    A cell is incorrect for a record if the verdict of all newer records of the device is, or that of those made with
    versions, threads and a processor for which the record counts. A crash, a timeout and a lack of memory say nothing
    of its numbers.
    """
    places = RecordPlaces()
    judged: dict[tuple[str, str], list[Ok | Incorrect]] = {}
    losses: dict[tuple[str, str], Failed | OutOfMemory | Timeout] = {}
    found: list[Setback] = []
    for record in reversed([record for run in runs for record in run if not is_anchor(record)]):
        key = device_of(record), record.cell.id
        newer = judged.setdefault(key, [])
        if is_timed(record):
            whole = _verdict(newer)
            wrong = whole if isinstance(whole, Incorrect) else _wrong_where(places.of(record)[1], newer, places)
            if wrong is not None:
                found.append(Setback(record, wrong, right_elsewhere=wrong is not whole))
            elif key in losses:
                found.append(Setback(record, losses[key]))
        if isinstance(record, Ok | Incorrect):
            newer.append(record)
        elif isinstance(record, Failed | OutOfMemory | Timeout) and not (newer or getattr(record, "unstarted", False)):
            losses.setdefault(key, record)
    return found[::-1]


def _verdict(judged: Iterable[Ok | Incorrect]) -> Ok | Incorrect | None:
    """Return the record that says whether a cell is right, of records with the newest first; None without any. That is
    the newest. If it was checked only and not timed, it is the newest of those that were right or wrong in timed calls,
    if there are any."""
    verdict: Ok | Incorrect | None = None
    for record in judged:
        in_timed_calls = isinstance(record, Incorrect) and record.reason.startswith(ONLY_TIMED)
        if is_timed(record) or in_timed_calls or (verdict is None and isinstance(record, Incorrect)):
            return record
        if verdict is None:
            verdict = record
    return verdict


def _wrong_where(home: Place, newer: Sequence[Ok | Incorrect], places: RecordPlaces) -> Incorrect | None:
    """Return the verdict of a place where records of the place `home` would count and their cell is incorrect; None
    without one."""
    for one in (one for one in newer if isinstance(one, Incorrect)):
        environment, place = places.of(one)
        if home.stale(environment) is None:
            verdict = _verdict(other for other in newer if places.of(other)[1].agrees(place))
            if isinstance(verdict, Incorrect):
                return verdict
    return None


def incorrect_at(home: Place, records: Sequence[Record]) -> list[Incorrect]:
    """Return the verdict of each cell that is incorrect at a place, by the rules of `setbacks`: where its newest time
    there, if it has one, does not count. The records are the oldest first."""
    places = RecordPlaces()
    judged: dict[str, list[Ok | Incorrect]] = {}
    timed: set[str] = set()
    for record in reversed(records):
        if device_of(record) != home.device_name or framework_of(record) != home.framework or is_anchor(record):
            continue
        if isinstance(record, Ok | Incorrect) and record.cell.id not in timed:
            if is_timed(record) and places.of(record)[1].agrees(home):
                timed.add(record.cell.id)
                judged.setdefault(record.cell.id, [])
            else:
                judged.setdefault(record.cell.id, []).append(record)
    found: list[Incorrect] = []
    for newer in judged.values():
        whole = _verdict(newer)
        wrong = whole if isinstance(whole, Incorrect) else _wrong_where(home, newer, places)
        found += [] if wrong is None else [wrong]
    return found


class RecordPlaces:
    """The places of records as a policy tells them apart, each worked out once for an environment and a framework."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], tuple[Environment, Place]] = {}

    def of(self, record: Record) -> tuple[Environment, Place]:
        """Return the environment of a record, with the framework that it ran in, and its place."""
        key = id(record.environment), framework_of(record)
        if key not in self._found:
            made_in = record.environment or Environment(device="", device_name="")
            environment = structs.replace(made_in, framework=key[1])
            self._found[key] = environment, place_of(environment)
        return self._found[key]


class Position(Struct, frozen=True):
    """Place of a ranked row among all rows of its workload that are shown together."""

    row: Row
    place: int
    """Place in the order, from 0 on."""
    kernel: int
    """Number that names of one kernel share."""
    group: int
    """Number of rows that were timed together; times of two groups do not compare."""
    ratio: float
    """Time of the row / time of the first row of its group, in the rounds they shared, as the ranking compares them."""
    near: tuple[int, ...]
    """Later places of other kernels that cannot be told from this one: with this row first, each would be unbeaten."""


class Standings:
    """The standings of all workloads of some runs of one machine, each by the run that decides it.

    Of two runs that one is newer on a workload whose ranked records are: a file may have been resumed after another
    was begun. A run decides a workload for each framework on its own: it may have had a run to itself. Frameworks are
    ranked together if one run decides for all of them; else the framework whose run prevails stands for the workload.
    Times of a cell that a newer run found incorrect are left out of every run.
    """

    def __init__(
        self,
        runs: Iterable[Iterable[Record]],
        against: Sequence[str] = (),
        known: Iterable[Setback] | None = None,
        dates: Mapping[int, str] | None = None,
    ) -> None:
        """Rank every workload of each run; `runs` are the oldest first, `against` names the baseline. `known` are the
        setbacks of all runs, if these are a part of them; `dates` the dates of records by their identity, without which
        a run is as old as its place says."""
        whole = [[r for r in run if not is_anchor(r)] for run in runs]
        held = {id(record) for run in whole for record in run}
        known = setbacks(whole) if known is None else known
        self._setbacks = [one for one in known if not held.isdisjoint((id(one.record), id(one.newer)))]
        wrong = {id(one.record) for one in self._setbacks if one.is_wrong}
        self.runs = [[record for record in run if id(record) not in wrong] for run in whole]
        """The records that count, run by run."""
        self.against = tuple(against)
        steps = grouped(chain.from_iterable(self.runs), lambda record: record.workload.step)
        self.baselines = {step: labelled(baseline(members, against), members) for step, members in steps.items()}
        """Step -> name of what speed-ups of its workloads are against."""
        self.by_run = [{key: self._rank(group) for key, group in by_workload(run).items()} for run in self.runs]
        """Run by run, workload id -> its standing, by the last record of each cell on each device."""
        self._dates = [{_spot(record): (dates or {}).get(id(record), "") for record in run} for run in self.runs]

    def _rank(self, group: Iterable[Record]) -> Standing:
        last = {_spot(record): condensed(record) for record in group}
        return standing_of(last.values(), self.baselines[next(iter(last.values())).workload.step])

    def made(self, number: int, standing: Standing) -> str:
        """Return when a standing of a run was made: the newest date of its ranked records, of all without any; empty if
        none is known."""
        records = list(standing.ranked.values()) or [row.record for row in standing.rows]
        return max((self._dates[number][_spot(record)] for record in records), default="")

    def _by_age(self, found: Iterable[tuple[int, Standing]]) -> list[tuple[int, Standing]]:
        """Return standings of one workload with the numbers of their runs, oldest first."""
        return sorted(found, key=lambda one: (self.made(*one), one[0]))

    def _held(self, key: str) -> list[tuple[int, Standing]]:
        """Return the standings of a workload with the numbers of their runs, oldest first."""
        return self._by_age((number, run[key]) for number, run in enumerate(self.by_run) if key in run)

    @cached_property
    def _decided(self) -> dict[str, dict[str, tuple[int, Standing]]]:
        """Workload id -> framework -> number and standing of the run that decides."""
        held: dict[str, dict[str, list[tuple[int, Standing]]]] = {}
        for number, run in enumerate(self.by_run):
            for key, whole in run.items():
                homes = held.setdefault(key, {})
                for name in dict.fromkeys(framework_of(row.record) for row in whole.rows):
                    one = whole.only(lambda record, name=name: framework_of(record) == name)
                    if one.ranked:
                        homes.setdefault(name, []).append((number, one))
        return {
            key: {name: deciding(self._by_age(found)) for name, found in homes.items()} for key, homes in held.items()
        }

    @cached_property
    def frameworks(self) -> dict[str, dict[str, Standing]]:
        """Framework -> workload id -> standing of its implementations, by the run that decides for it."""
        standings: dict[str, dict[str, Standing]] = {}
        for key, homes in self._decided.items():
            for name, (_, standing) in homes.items():
                standings.setdefault(name, {})[key] = standing
        return standings

    @cached_property
    def _overall(self) -> dict[str, tuple[int, Standing]]:
        """Workload id -> number of the run that stands for it, and the standing of the frameworks it decides for."""
        found: dict[str, tuple[int, Standing]] = {}
        for key, homes in self._decided.items():
            if not homes:
                found[key] = self._held(key)[-1]
                continue
            standings: list[tuple[int, Standing]] = []
            for number in {number for number, _ in homes.values()}:
                others = {name for name, (home, _) in homes.items() if home != number}
                one = self.by_run[number][key].only(lambda record, others=others: framework_of(record) not in others)
                standings.append((number, one))
            found[key] = deciding(self._by_age(standings))
        return found

    @cached_property
    def overall(self) -> dict[str, Standing]:
        """Workload id -> standing of all frameworks that one run decides for; of a workload without ranked rows, the
        newest standing, which has the reasons."""
        return {key: standing for key, (_, standing) in self._overall.items()}

    def apart(self, key: str) -> list[Standing]:
        """Return the standings of a workload that were not timed together: that of `overall` first, then one for each
        framework that another run or clock decides for."""
        home, whole = self._overall[key]
        others = [
            one for number, one in self._decided[key].values()
            if number != home or not any(name in whole.ranked for name in one.ranked)
        ]  # fmt: skip
        return [whole, *others]

    def together(self, key: str, *names: str) -> Standing | None:
        """Return the standing in which names took turns on a workload: the one that decides if it ranks them all, else
        that of the newest run that does; None if no run does."""
        runs = (one for _, one in reversed(self._held(key)))
        return next((one for one in (self.overall[key], *runs) if one.ranked.keys() >= set(names)), None)

    def order(self, key: str) -> list[Position]:
        """Return the ranked rows of a workload, one standing of `apart` after the other. Rows that are unbeaten in a
        further standing are near a row of an earlier one if they were timed by the same clock and took at most 1.1
        times as long."""
        apart = self.apart(key)
        kernels = [(group, names) for group, standing in enumerate(apart) for names in standing.kernels]
        starts = list(accumulate((len(names) for _, names in kernels), initial=0))
        found: list[Position] = []
        for kernel, (group, names) in enumerate(kernels):
            first = min(names, key=lambda row, group=group: apart[group].times[row.implementation])
            near = tuple(
                starts[other] + place
                for other in range(kernel + 1, len(kernels))
                for place, row in enumerate(kernels[other][1])
                if _is_near(apart[group], first, apart[kernels[other][0]], row)
            )
            lead = apart[group].kernels[0][0].implementation
            ratios = [apart[group].ratio(lead, row.implementation).value for row in names]
            found += [Position(row, starts[kernel] + n, kernel, group, ratios[n], near) for n, row in enumerate(names)]
        return found

    @cached_property
    def shown(self) -> list[tuple[int, Record]]:
        """One record of each cell and the number of its run, by one clock per workload and run: of the run that decides
        for its framework if it was timed there, else of the newest."""
        kept: dict[str, tuple[bool, str, int, Record]] = {}
        for number, run in enumerate(self.runs):
            for key, group in by_workload(run).items():
                for record in on_one_clock(group):
                    home, _ = self._decided[key].get(framework_of(record), (None, None))
                    found = is_timed(record) and home == number, self._dates[number][_spot(record)], number, record
                    if record.cell.id not in kept or found[:3] >= kept[record.cell.id][:3]:
                        kept[record.cell.id] = found
        return [(number, record) for _, _, number, record in kept.values()]

    @cached_property
    def setbacks(self) -> list[Setback]:
        """The setbacks to tell of: times that are left out as wrong, and times that are ranked though a newer run could
        not repeat them."""
        ranked: set[int] = set()
        for number, run in enumerate(self.runs):
            for record in run:
                home, one = self._decided[record.workload.id].get(framework_of(record), (None, None))
                if one is not None and home == number and label(record) in one.ranked:
                    ranked.add(id(record))
        return [one for one in self._setbacks if one.is_wrong or id(one.record) in ranked]

    @property
    def records(self) -> list[Record]:
        """One record of each cell: those of `shown`."""
        return [record for _, record in self.shown]

    @property
    def newest(self) -> list[Record]:
        """The newest record of each cell, whichever run decides."""
        newest: dict[str, tuple[str, Record]] = {}
        for number, run in enumerate(self.runs):
            for record in run:
                made = self._dates[number][_spot(record)]
                if record.cell.id not in newest or made >= newest[record.cell.id][0]:
                    newest[record.cell.id] = made, record
        return [record for _, record in newest.values()]


def _spot(record: Record) -> tuple[str, str]:
    """Return device and cell: of the records of a run that share both the last counts."""
    return device_of(record), record.cell.id


def deciding(found: Iterable[tuple[Named, Standing]]) -> tuple[Named, Standing]:
    """Return the standing that decides a workload, of several with what names their runs, oldest first."""
    return reduce(lambda old, new: new if supersedes(new[1], old[1]) else old, found)


def _is_near(standing: Standing, first: Row, home: Standing, row: Row) -> bool:
    """Return whether a later row of the standing `home` cannot be told from the first row of a kernel."""
    if home is standing:
        return row.rank == first.rank and standing.ratio(first.implementation, row.implementation).sign <= 0
    limit = ACROSS_RUNS * standing.times[first.implementation]
    near = _clock(home) == _clock(standing) and min(home.times.values()) <= limit
    return near and row.implementation in home.unbeaten


def _clock(standing: Standing) -> str:
    return clock_of(next(iter(standing.ranked.values())))
