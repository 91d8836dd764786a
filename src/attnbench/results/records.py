"""Properties of records that all readers need: names, frameworks, clocks, and which of them may be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeGuard, TypeVar

from msgspec import structs

from attnbench.policy.labels import label_of
from attnbench.spec import Cell, Environment, Errors, Ok, Record, Throughput

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
ANCHOR = "anchor."
"""Prefix of the kernels that are timed beside a run to tell how fast its machine was; never ranked."""
BASELINES = ("torch.eager", "jax.einsum", "numpy.float32")
"""Plain implementation of each framework, the first that was timed being the baseline."""

MACHINE = ("device_name", "cpu", "processor", "cores")
"""Facts that tell machines apart."""


def label(record: Record | Cell) -> str:
    """Return the name in tables: the implementation, with its tunables if they are not the default."""
    return label_of(record.implementation, record.config)


def framework_of(record: Record) -> str:
    """Return the framework that a record ran in; a bare function does not say so in its name."""
    environment = record.environment
    return (environment.framework if environment else "") or record.implementation.partition(".")[0]


def device_of(record: Record) -> str:
    """Return the name of the device that a record was made on; empty if it is not known."""
    return "" if record.environment is None else record.environment.device_name


def is_anchor(record: Record) -> bool:
    """Return whether a record is one of a kernel that is timed beside a run."""
    return record.implementation.startswith(ANCHOR)


def is_timed(record: Record) -> TypeGuard[Ok]:
    """Return whether a record has a speed."""
    return isinstance(record, Ok) and record.time is not None


def exact(records: Iterable[Record]) -> list[Ok]:
    """Return the records with a speed that may be recommended: right answers, no declared error."""
    return [record for record in records if is_timed(record) and not record.approximate]


def median_ns(record: Ok) -> float:
    """Return the median of a timed record."""
    assert record.time is not None
    return record.time.median_ns


def share_of_allowed(errors: Errors | None) -> float | None:
    """Return the larger of the shares of output and gradients in the error allowed; None if neither was compared."""
    if errors is None:
        return None
    pairs = ((errors.forward, errors.forward_allowed), (errors.backward, errors.backward_allowed))
    shares = [error / allowed for error, allowed in pairs if error is not None and allowed]
    return max(shares, default=None)


def same_kernel(a: Ok, b: Ok) -> bool:
    """Return whether profiles of both records show the same kernels; without a profile that is not known."""
    return bool(a.kernels) and set(a.kernels or ()) == set(b.kernels or ())


def matches(name: str, wanted: str) -> bool:
    """Return whether an implementation is the one named, or one of the framework or family named."""
    return name == wanted or name.startswith((f"{wanted}.", f"{wanted}-"))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return key -> the items that have it; keys and items keep the order of the items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_workload(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return workload id -> its records, in the order they were made, without the anchors."""
    return grouped((one for one in records if not is_anchor(one)), lambda record: record.workload.id)


def status_words(record: Record) -> str:
    """Return the status of a record in words, such as out of memory."""
    return record.status.replace("_", " ")


def without_result(records: Iterable[Record]) -> Mapping[tuple[str, str], Sequence[Record]]:
    """Return status in words and reason -> the records that have no result for it, in the order they were made."""
    lost = (record for record in records if not isinstance(record, Ok))
    return grouped(lost, lambda record: (status_words(record), record.reason))


def outcome_text(record: Record) -> str:
    """Return the status and the reason of a record that has no result."""
    return f"{status_words(record)}: {record.reason}"


def baseline(records: Sequence[Record], against: Sequence[str] = ()) -> str | None:
    """Return the name of what the others are compared with: the one named by `against`, else the plain one of the
    first framework that was timed."""
    timed = {r.implementation for r in exact(records) if not is_anchor(r)}
    named = {name for name in timed if any(matches(name, one) for one in against)}
    choices = named or timed
    if len(choices) == 1 and named:
        return choices.pop()
    return next((name for name in BASELINES if name in choices), min(choices, default=None))


def named_record(timed: Sequence[Ok], name: str | None) -> Ok | None:
    """Return the first record with this label, else the first of this implementation; None without either."""
    by_label = (record for record in timed if label(record) == name)
    return next(by_label, next((record for record in timed if record.implementation == name), None))


def labelled(base: str | None, records: Sequence[Record]) -> str | None:
    """Return the baseline as tables call it: the plain one, or the first with tunables if only such were timed."""
    labels = [label(record) for record in records if is_timed(record) and record.implementation == base]
    return base if base in labels else next(iter(labels), base)


def on_one_clock(records: Iterable[Record]) -> list[Record]:
    """Return the records of a workload by the clock that most of them hold, of several such clocks by the one most
    published. A record that does not hold this clock stays as it is."""
    kept = list(records)
    published = Counter(map(clock_of, kept))
    published.pop("", None)
    if len(published) < 2:
        return kept
    held = Counter(name for record in kept for name in _clocks(record))
    clock = max(sorted(held), key=lambda name: (held[name], published[name]))
    return [_by(record, clock) for record in kept]


def comparable(records: Iterable[Record]) -> list[Record]:
    """Return the records of a workload that may be compared, and those that were not timed: of the clock, machine and
    sitting that most were timed by, on and in; of several such sittings the last."""
    kept = on_one_clock(records)
    counts = Counter(map(clock_of, kept))
    counts.pop("", None)
    clock = max(counts, key=counts.__getitem__, default="")
    timed = [record for record in kept if clock and clock_of(record) == clock]

    def beside(one: Record) -> list[Record]:
        return [other for other in timed if sitting_of(other) == sitting_of(one) and is_one_machine(one, other)]

    home = max(timed, key=lambda one: (len(beside(one)), sitting_of(one)), default=None)
    together = {id(record) for record in (beside(home) if home else ())}
    return [record for record in kept if not clock_of(record) or id(record) in together]


def is_one_machine(a: Record, b: Record) -> bool:
    """Return whether two records can be of one machine with as many threads; one that does not say where it was made
    goes with none that does."""
    if a.environment is None or b.environment is None:
        return a.environment is b.environment
    return not machine_differences(a.environment, b.environment, (*MACHINE, "threads"))


def machine_differences(a: Environment, b: Environment, fields: Sequence[str] = MACHINE) -> list[str]:
    """Return the fields in which two environments cannot be of one machine: known in both, and not the same. Devices of
    two kinds may be in one machine, so that their names are not compared."""
    asked = [name for name in fields if name != "device_name" or a.device == b.device]
    return [name for name in asked if getattr(a, name) and getattr(b, name) and getattr(a, name) != getattr(b, name)]


def sitting_of(record: Record) -> str:
    """Return when a record took turns with others; empty if it was not timed, or by an attnbench that did not say."""
    return "" if record.time is None else record.time.sitting.partition("+")[0]


def clock_of(record: Record) -> str:
    """Return the clock that was published; empty if nothing was timed."""
    return "" if record.time is None else record.time.clock


def _clocks(record: Record) -> set[str]:
    if not isinstance(record, Ok) or record.time is None:
        return set()
    return {record.time.clock, *(name for name, time in record.also.items() if time.clock == name)}


def _by(record: Record, clock: str) -> Record:
    """Return the record with another clock's time as its own, and the rates that follow from it."""
    if not isinstance(record, Ok) or record.time is None or record.time.clock == clock or clock not in _clocks(record):
        return record
    old, new = record.time, structs.replace(record.also[clock], sitting=record.time.sitting)
    factor = old.median_ns / new.median_ns
    rates = {name: rate * factor for name in ("tflops", "gb_per_s", "roofline") if (rate := getattr(record.cost, name))}
    throughput = record.throughput
    if throughput is not None:
        throughput = Throughput(**{name: rate * factor for name, rate in structs.asdict(throughput).items()})
    also = {name: time for name, time in record.also.items() if name != clock} | {old.clock: old}
    cost = structs.replace(record.cost, **rates)
    return structs.replace(record, time=new, also=also, cost=cost, throughput=throughput)
