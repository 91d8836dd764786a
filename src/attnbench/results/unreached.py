"""Shapes that a stopped run was asked for and did not reach; `attnbench run --resume` continues with them."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from typing import Any

import msgspec

from attnbench.config import load_settings
from attnbench.errors import UsageError
from attnbench.reading import convert
from attnbench.registry import is_reference
from attnbench.results.run_file import Run
from attnbench.spec import Workload

MOST_NAMED = 3


def unreached(run: Run, elsewhere: Collection[str] = ()) -> list[str]:
    """Return the ids of requested workloads that neither this run nor `elsewhere` holds; records come by whole
    workloads."""
    held = {record.workload.id for record in run.records} | set(elsewhere)
    return [name for name in _asked(run) if name not in held]


def tell_unreached(name: str, run: Run, elsewhere: Collection[str] = ()) -> str | None:
    """Return a sentence that names the missing workloads and the command that continues; None if none is missing."""
    left = unreached(run, elsewhere)
    if not left:
        return None
    some = ", ".join(left[:MOST_NAMED]) + (f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else "")
    count = len(_asked(run))
    last = run.headers[-1].request
    command = resume_command(name, run, last.get("trace"), last.get("timeout_s"))
    return f"{name} ended before {len(left)} of its {count} shapes ({some}): `{command}` goes on"


def resume_command(name: str, run: Run, trace: object = None, timeout_s: object = None) -> str:
    """Return the command that continues with everything that a run file was asked for.

    The command repeats what the file does not decide: functions given by reference, since a file imports no code, the
    folder of traces, and the timeout of a stage if it differs from the settings.
    """
    words = [word for reference in references(run) for word in ("--impl", reference)]
    words += ["--trace", str(trace)] if trace is not None else []
    if isinstance(timeout_s, int | float) and timeout_s != load_settings().timeout_s:
        words += ["--timeout", f"{timeout_s:g}"]
    return shlex.join(["attnbench", "run", "--resume", name, *words])


def references(run: Run) -> list[str]:
    """Return the functions given by reference that a run file was asked for, each once."""
    return list(dict.fromkeys(one for header in run.headers for one in asked_references(header.request)))


def asked_references(request: dict[str, Any]) -> list[str]:
    """Return the references among the implementations of a header's request; the request may hold anything."""
    found = request.get("implementations")
    return [one for one in found if is_reference(one)] if isinstance(found, list | tuple) else []


def _asked(run: Run) -> list[str]:
    """Return the ids of all workloads asked for; a header that asks for something else asks for none."""
    ids: dict[str, None] = {}
    for header in run.headers:
        try:
            asked = convert(header.request.get("workloads", []), list[Workload])
        except (msgspec.ValidationError, UsageError):
            continue
        ids |= dict.fromkeys(workload.id for workload in asked)
    return list(ids)
