"""Shapes that a run was asked for and did not come to: it was stopped, and `attnbench run --resume` goes on."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from attnbench.errors import UsageError
from attnbench.reading import convert
from attnbench.registry import is_reference
from attnbench.spec import Workload
from attnbench.store.runfile import Run

MOST_NAMED = 3


def unreached(run: Run, elsewhere: Collection[str] = ()) -> list[str]:
    """Ids of the workloads asked for that neither this run holds nor `elsewhere`; records come by whole workloads."""
    held = {record.workload.id for record in run.records} | set(elsewhere)
    return [name for name in _asked(run) if name not in held]


def tell_unreached(name: str, run: Run, elsewhere: Collection[str] = ()) -> str | None:
    """The same as a sentence that says how to go on."""
    left = unreached(run, elsewhere)
    if not left:
        return None
    some = ", ".join(left[:MOST_NAMED]) + (f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else "")
    count = len(_asked(run))
    implementations = run.header.request.get("implementations")
    command = resume_command(name, implementations if isinstance(implementations, list) else ())
    return f"{name} ended before {len(left)} of its {count} shapes ({some}): `{command}` goes on"


def resume_command(name: str, implementations: Iterable[Any], options: Sequence[str] = ()) -> str:
    """Return what goes on with a run. Functions given by reference are named again: a file alone imports no code."""
    again = [word for one in implementations if is_reference(one) for word in ("--impl", one)]
    return shlex.join(["attnbench", "run", "--resume", name, *again, *options])


def _asked(run: Run) -> list[str]:
    """Of the header; a header that asks for something else asks for no shapes."""
    try:
        asked = convert(run.header.request.get("workloads", []), list[Workload])
    except (msgspec.ValidationError, UsageError):
        return []
    return list(dict.fromkeys(workload.id for workload in asked))
