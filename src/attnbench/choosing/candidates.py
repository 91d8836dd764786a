"""Candidates of a policy: the records of runs that may be chosen, by place and workload, and why others may not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, structs

from attnbench.errors import UnknownName
from attnbench.policy import Barred, Constraints, Place, Shape, shape_of
from attnbench.results.families import Track, length, tracks
from attnbench.results.records import by_workload, device_of, framework_of, is_anchor, is_timed, label, matches
from attnbench.results.run_file import NamedRun
from attnbench.results.standings import (
    RecordPlaces,
    Setback,
    Standing,
    Standings,
    by_date,
    deciding,
    incorrect_at,
    setbacks,
)
from attnbench.spec import Ok, Record, Workload

WRAPPERS: dict[str, str] = dict.fromkeys(
    ("torch.hf-sdpa", "torch.hf-eager"), "calls another candidate through Transformers: ask for it with --only"
)
"""Implementations that are never faster than what they call, and import far more."""
NOT_ASKED_FOR = "is not among --only"
Refusal = tuple[Record, str]
"""A record that may not be chosen, and why."""


def eligible(
    records: Iterable[Record], constraints: Constraints, left_out: Mapping[str, str]
) -> tuple[list[Ok], list[Refusal]]:
    """Return the records that may be chosen, and those that may not; `left_out`: names -> why sweeps omit them."""
    kept: list[Ok] = []
    refused: list[Refusal] = []
    for record in records:
        if is_anchor(record):
            continue
        why = _why_not(record, constraints, left_out)
        if why is None and is_timed(record):
            kept.append(record)
        else:
            refused.append((record, why or "was not timed"))
    return kept, refused


def check_names(constraints: Constraints, records: Iterable[Record], known: Iterable[str]) -> None:
    """Raise UnknownName if --only names what no record has, or --forbid names what is not in `known` either."""
    recorded = {name for record in records for name in (record.implementation, label(record))}
    forbidden = [name.partition("[")[0] for name in constraints.forbid]
    for asked, candidates in ((constraints.only, recorded), (forbidden, recorded | set(known))):
        for wanted in asked:
            if not any(_is_named(name, name, [wanted]) for name in candidates):
                raise UnknownName("implementation in these runs", wanted, candidates, "attnbench show RUN")


def allowed(name: str, config_name: str, constraints: Constraints) -> bool:
    """Return whether --only and --forbid allow an implementation with a config."""
    asked = not constraints.only or _is_named(name, config_name, constraints.only)
    return asked and not _is_named(name, config_name, constraints.forbid)


def _why_not(record: Record, constraints: Constraints, left_out: Mapping[str, str]) -> str | None:
    if constraints.only and not _is_named(record.implementation, label(record), constraints.only):
        return NOT_ASKED_FOR
    if not isinstance(record, Ok):
        return f"{record.status.replace('_', ' ')}: {record.reason}"
    if record.time is None:
        return "was verified, not timed"
    if record.approximate:
        return "is approximate"
    if record.workload.step:
        return f"computes the step {record.workload.step}, not attention alone"
    if record.environment is None:
        return "has no record of where it was measured"
    return _why_not_by_name(record, constraints, left_out) or _why_outside(record, constraints)


def _why_not_by_name(record: Record, constraints: Constraints, left_out: Mapping[str, str]) -> str | None:
    """Return why an implementation may be chosen nowhere, whatever was measured; None if it may."""
    name = record.implementation
    if "." not in name:
        return "is a bare function: register it as an implementation"
    by_name = name in constraints.only or label(record) in constraints.only
    if not by_name and (name in left_out or name in WRAPPERS):
        return left_out.get(name) or WRAPPERS[name]
    return "is forbidden" if _is_named(name, label(record), constraints.forbid) else None


def _why_outside(record: Ok, constraints: Constraints) -> str | None:
    """Return which constraint a measurement does not keep to; None if it keeps to all."""
    if constraints.deterministic and not record.deterministic:
        return "is not deterministic"
    peak, limit = record.memory.peak_bytes, constraints.max_memory
    if limit is not None and (peak is None or peak > limit):
        return "its peak memory is unknown" if peak is None else f"needs {peak:,} bytes"
    return None if constraints.max_error is None else _why_too_inexact(record, constraints.max_error)


def _why_too_inexact(record: Ok, limit: float) -> str | None:
    """Return why the errors of a record exceed the limit or are not known for its pass; None if they are within."""
    errors = {"forward": record.errors.forward, "backward": record.errors.backward}
    known = [error for error in errors.values() if error is not None]
    if any(not error <= limit for error in known):
        return f"has an error of {max(known):.1e}"
    needed = errors if record.workload.pass_ == "train" else (record.workload.pass_,)
    return "its error is unknown" if any(errors[part] is None for part in needed) else None


def _is_named(name: str, config_name: str, wanted: Sequence[str]) -> bool:
    return any(matches(name, one) or config_name == one for one in wanted)


class Ground(Struct, frozen=True):
    """Measurements of one place."""

    place: Place
    standings: dict[str, Standing]
    """Workload id -> standing of its candidates, all from one run."""
    barred: tuple[Barred, ...] = ()
    """Who may not be chosen where, by measurement."""

    @property
    def by_shape(self) -> dict[Shape, list[Standing]]:
        """Shape -> standings of the workloads that share its entry, such as windows of several sizes."""
        found: dict[Shape, list[Standing]] = {}
        for standing in self.standings.values():
            found.setdefault(shape_of(standing.workload), []).append(standing)
        return found

    @property
    def lines(self) -> Iterator[tuple[Track, dict[str, list[Record]], dict[int, Workload]]]:
        """Each track of the candidates, their records by name, and its workloads by length."""
        for track, names in tracks(r for one in self.standings.values() for r in one.ranked.values()).items():
            yield track, names, {length(r.workload): r.workload for records in names.values() for r in records}


class _Bars:
    """Who may not be chosen, place by place: found incorrect, or outside the constraints by the newest time."""

    def __init__(self, records: Sequence[Record], constraints: Constraints, left_out: Mapping[str, str]) -> None:
        """Keep what might be chosen by its name; `records` are the oldest first."""
        self._records = [
            one for one in records
            if not one.workload.step
            and allowed(one.implementation, label(one), constraints)
            and _why_not_by_name(one, constraints, left_out) is None
        ]  # fmt: skip
        self._constraints = constraints
        self._places = RecordPlaces()
        self._found: dict[tuple[object, ...], tuple[Barred, ...]] = {}

    def at(self, place: Place) -> tuple[Barred, ...]:
        """Return who may not be chosen at a place, workload by workload, in the order of a file."""
        if place.key not in self._found:
            wrong, outside = by_workload(incorrect_at(place, self._records)), by_workload(self._outside(place))
            barred = [
                Barred(
                    at=shape_of(group[0].workload),
                    measured=key,
                    incorrect=_labels(wrong.get(key, ())),
                    kept_out=_labels(outside.get(key, ())),
                )
                for key, group in (outside | wrong).items()
            ]
            self._found[place.key] = tuple(sorted(barred, key=lambda one: (one.at.order, one.measured)))
        return self._found[place.key]

    def names(self, place: Place, shape: Shape) -> dict[str, str]:
        """Return who may not be chosen for a shape, and why."""
        found: dict[str, str] = {}
        for one in self.at(place):
            if one.at == shape:
                found |= dict.fromkeys(one.kept_out, f"is outside the constraints at {one.measured}")
                found |= dict.fromkeys(one.incorrect, f"is incorrect at {one.measured}, which has the same shape")
        return found

    def _outside(self, place: Place) -> list[Ok]:
        """Return the newest timed record of each cell at a place, of those that do not keep to the constraints."""
        newest = {
            one.cell.id: one
            for one in self._records
            if is_timed(one) and not one.approximate and self._places.of(one)[1].agrees(place)
        }
        return [one for one in newest.values() if _why_outside(one, self._constraints) is not None]


def _labels(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(sorted(set(map(label, records))))


def survey(
    sources: Sequence[NamedRun], constraints: Constraints, left_out: Mapping[str, str]
) -> tuple[list[Ground], list[Refusal], list[Setback]]:
    """Return the measurements of each place, what may not be chosen, and the candidates that a newer run found
    incorrect (they are left out) or could not run; oldest source first. Of two runs that one is newer on a workload
    whose ranked records are."""
    grounds: dict[tuple[object, ...], Ground] = {}
    held: dict[tuple[object, ...], dict[str, list[tuple[tuple[str, int], Standing]]]] = {}
    homes: dict[tuple[object, ...], dict[str, NamedRun]] = {}
    refused: list[Refusal] = []
    every = by_date(one for source in sources for one in source.run.dated)
    known, bars = setbacks([every]), _Bars(every, constraints, left_out)
    wrong = {id(one.record) for one in known if one.is_wrong}
    for number, source in enumerate(sources):
        records = [record for record in source.run.records if id(record) not in wrong]
        found, others = eligible(records, constraints, left_out)
        refused += others
        for place, workload, standing, when in _standings(records, found, source.run.dated):
            out = bars.names(place, shape_of(standing.workload))
            refused += [(record, out[name]) for name, record in standing.ranked.items() if name in out]
            standing = standing.only(lambda record, out=out: label(record) not in out)
            if not standing.ranked:
                continue
            key = next((one for one, ground in grounds.items() if ground.place.agrees(place)), place.key)
            ground = grounds.setdefault(key, Ground(place, {}))
            held.setdefault(key, {}).setdefault(workload, []).append(((when, number), standing))
            runs = tuple(dict.fromkeys((*ground.place.runs, source.name)))
            made = max(ground.place.made, source.run.header.created)
            software = dict(sorted((place.software | ground.place.software).items()))
            merged = structs.replace(ground.place, runs=runs, made=made, software=software)
            grounds[key] = Ground(merged, ground.standings, bars.at(merged))
    for key, workloads in held.items():
        for workload, several in workloads.items():
            (_, number), standing = deciding(sorted(several, key=lambda one: one[0]))
            homes.setdefault(key, {})[workload] = sources[number]
            grounds[key].standings[workload] = standing
    used: set[int] = set()
    for key, ground in grounds.items():
        for workload, standing in ground.standings.items():
            cells = {(device_of(record), record.cell.id) for record in standing.ranked.values()}
            used |= {id(one) for one in homes[key][workload].run.records if (device_of(one), one.cell.id) in cells}
    candidates = {id(record) for record in eligible((one.record for one in known), constraints, left_out)[0]}
    told = [one for one in known if id(one.record) in (candidates if one.is_wrong else used)]
    return list(grounds.values()), refused, told


def _standings(
    records: Sequence[Record], candidates: Sequence[Ok], dated: Iterable[tuple[str, Record]]
) -> Iterable[tuple[Place, str, Standing, str]]:
    """Yield place, workload id, standing and its date, of the candidates of a run, by place and workload. The whole run
    is ranked, device by device, before candidates are selected: records that may not be chosen still decide by which
    clock a workload is compared."""

    def cell_of(record: Record) -> tuple[str, str, str]:
        return device_of(record), framework_of(record), record.cell.id

    known = RecordPlaces()
    places = {cell_of(record): known.of(record)[1] for record in candidates}
    dates = {id(record): when for when, record in dated}
    for device in dict.fromkeys(map(device_of, records)):
        standings = Standings([[r for r in records if device_of(r) == device]], known=(), dates=dates)
        for workload, whole in standings.by_run[0].items():
            here = {place.key: place for row in whole.rows if (place := places.get(cell_of(row.record))) is not None}
            for key, place in here.items():

                def is_candidate(record: Record, key: object = key) -> bool:
                    found = places.get(cell_of(record))
                    return found is not None and found.key == key

                standing = whole.only(is_candidate)
                if standing.ranked:
                    yield place, workload, standing, standings.made(0, standing)
