"""Whether two runs come from machines alike enough for their times to be compared at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attnbench.errors import UsageError
from attnbench.measuring.anchors import anchors_beside
from attnbench.results.records import ANCHOR, machine_differences
from attnbench.spec import Environment, Ok, Record

MEASURE_BOTH = (
    "Measure both on one machine with the same packages and the same attnbench, "
    "or make a new baseline here with `attnbench baseline save RUN`."
)


def check_comparable(baseline: Sequence[Record], current: Sequence[Record]) -> None:
    """Refuse what two runs both hold, anchors included, where environments are not known or their hard keys differ."""
    for old, new in _pairs(baseline, current):
        here = _known(old, "baseline", anchors_beside(old, baseline))
        there = _known(new, "current", anchors_beside(new, current)) if isinstance(new, Ok) else new.environment
        if there is None or (_is_anchor(old) and here.framework != there.framework):
            continue  # a worker that never started; anchors of two frameworks are not compared anyway
        found = differences(here, there)
        if found:
            raise UsageError(f"the two runs are not comparable: of {new.cell.id} {'; '.join(found)}. {MEASURE_BOTH}")


def _pairs(baseline: Sequence[Record], current: Sequence[Record]) -> Iterator[tuple[Ok, Record]]:
    """Yield what judges and what is judged: each cell, then its anchors; a refusal of the current run needs no
    machine."""
    old = {one.cell.id: one for one in baseline if isinstance(one, Ok) and not _is_anchor(one)}
    for new in current:
        if new.cell.id not in old or new.status == "unsupported":
            continue
        yield old[new.cell.id], new
        judges = {one.implementation: one for one in anchors_beside(old[new.cell.id], baseline)}
        judged = anchors_beside(new, current)
        yield from ((judges[one.implementation], one) for one in judged if one.implementation in judges)


def _known(record: Ok, run: str, anchors: Sequence[Record]) -> Environment:
    """Where it was made; refuses what nobody knows that of, and anchors beside it that are of another machine."""
    here = record.environment
    if here is None or not here.device_name:
        field = "environment" if here is None else "device_name"
        raise UsageError(
            f"the two runs are not comparable: the {field} of {record.cell.id} in the {run} run is not known. "
            f"{MEASURE_BOTH}"
        )
    for anchor in anchors:
        there = anchor.environment
        if there is not None and here.device == there.device and (names := machine_differences(here, there)):
            name = names[0]
            raise UsageError(
                f"the {run} run mixes machines: {name} of {record.cell.id} is {_shown(getattr(here, name))} and of "
                f"{anchor.implementation} beside it {_shown(getattr(there, name))}. {MEASURE_BOTH}"
            )
    return here


def _is_anchor(record: Record) -> bool:
    return record.implementation.startswith(ANCHOR)


def differences(a: Environment, b: Environment) -> list[str]:
    """Fields of the hard key in which b, the current one, is not what a was, each with both values."""
    old, new = a.hard_key, b.hard_key
    told = [
        f"{name} is {_shown(old[name])} in the baseline and {_shown(new[name])} in the current run"
        for name in old
        if name != "packages" and old[name] != new[name]
    ]
    return told + _package_differences(a.packages, b.packages)


def _package_differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [
        f"package {name} is {old.get(name, 'absent')} in the baseline and {new.get(name, 'absent')} in the current run"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ".".join(str(part) for part in value)
    return "unknown" if value in ("", None) else str(value)


def one_source(a: str, b: str) -> bool:
    """Whether two spellings may mean one file or module: `kern.py`, `/home/me/kern.py` and `pkg.kern` are one if the
    longer ends with the shorter. What is not known may be anything."""
    first, second = sorted((_source_parts(a), _source_parts(b)), key=len)
    return not first or second[-len(first) :] == first


def _source_parts(where: str) -> tuple[str, ...]:
    """Return the parts of a file's or module's name: `src/pkg/kern.py` and `pkg.kern` end alike."""
    if not where.endswith(".py"):
        return tuple(filter(None, where.split(".")))
    return tuple(part for part in Path(where.removesuffix(".py")).parts if part not in ("/", ".", ".."))
