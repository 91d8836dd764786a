"""`attnbench list implementations|suites|workloads` and `attnbench doctor`: what there is, and what runs here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import App, Parameter

from attnbench import registry
from attnbench.cli.options import DEFAULT_SUITE, NOTHING, Json, Switch, load_suite
from attnbench.cli.output import print_json, print_rows, stderr_console, stdout_console
from attnbench.errors import UsageError
from attnbench.report.environment import print_diagnosis
from attnbench.report.progress import Silent
from attnbench.run import launch as launcher
from attnbench.workloads import suites as known_suites

listing = App(name="list", help="List implementations, suites or workloads.")


@listing.command
def implementations(*, json: Json = False) -> int:
    """List every implementation, where it comes from and what it is. `attnbench doctor` says what runs here."""
    rows = []
    for name in registry.names():
        row: dict[str, Any] = {"implementation": name, "framework": name.partition(".")[0]}
        row["from"] = registry.origin(name)
        try:
            one = registry.get(name)
        except UsageError as error:  # a broken entry point of a third party must not hide the others
            rows.append(row | {"approximate": None, "what": str(error)})
            continue
        doc = one.description or type(one).__doc__ or sys.modules[type(one).__module__].__doc__ or ""
        what = " ".join(doc.strip().partition("\n\n")[0].split()) + (" (by name only)" if one.by_name_only else "")
        rows.append(row | {"approximate": one.approximate, "what": what})
    return print_rows(rows, json)


@listing.command
def suites(*, json: Json = False) -> int:
    """List every suite and how many workloads it has."""
    found = map(known_suites.load, known_suites.names())
    rows = [{"suite": s.name, "workloads": len(s.workloads), "description": s.description} for s in found]
    return print_rows(rows, json)


@listing.command
def workloads(
    suite: str = DEFAULT_SUITE,
    /,
    *,
    quick: Annotated[Switch, Parameter(help="Capped shapes.")] = False,
    json: Json = False,
) -> int:
    """List the workloads of a suite (a name or a TOML file)."""
    _, found = load_suite(suite, quick)
    if json:
        return print_rows([{"id": w.id, **w.axes, "source": w.source, "tags": w.tags} for w in found], json)
    return print_rows([{"workload": w.id, "source": w.source, "tags": " ".join(w.tags)} for w in found], json)


def doctor(*, json: Json = False) -> int:
    """Show the device, the libraries really loaded, and for every implementation whether it runs here, or why not."""
    diagnosis = launcher.diagnose(Silent(stderr_console()))
    if json:
        print_json(diagnosis)
    else:
        print_diagnosis(stdout_console(), diagnosis)
    return 0 if any(state.reason is None for state in diagnosis.implementations) else NOTHING
