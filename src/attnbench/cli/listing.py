"""`attnbench list implementations|suites|workloads`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import App, Parameter

from attnbench.cli.options import Json
from attnbench.cli.output import print_json, stdout_console
from attnbench.errors import UsageError

listing = App(help="List implementations, suites or workloads.")


@listing.command
def implementations(*, json: Json = False) -> int:
    """List every implementation, where it comes from and what it is. `attnbench doctor` says what runs here."""
    from attnbench import registry

    _show([_describe(name) for name in registry.names()], json)
    return 0


@listing.command
def suites(*, json: Json = False) -> int:
    """List every suite and how many workloads it has."""
    from attnbench.workloads.suites import load, names

    found = [load(name) for name in names()]
    _show([{"suite": s.name, "workloads": len(s.workloads), "description": s.description} for s in found], json)
    return 0


@listing.command
def workloads(
    suite: str = "quick",
    /,
    *,
    quick: Annotated[bool, Parameter(negative="", help="Capped shapes.")] = False,
    json: Json = False,
) -> int:
    """List the workloads of a suite (a name or a TOML file)."""
    from attnbench.cli.selection import load_suite

    _, found = load_suite(suite, quick)
    if json:
        _show([{"id": w.id, **w.axes, "source": w.source, "tags": w.tags} for w in found], json)
    else:
        _show([{"workload": w.id, "source": w.source, "tags": " ".join(w.tags)} for w in found], json)
    return 0


def _describe(name: str) -> dict[str, Any]:
    """Return one row; a broken entry point of a third party is shown as such and does not hide the others."""
    from attnbench import registry

    row: dict[str, Any] = {"implementation": name, "framework": name.partition(".")[0], "from": registry.origin(name)}
    try:
        found = registry.get(name)
    except UsageError as error:
        return row | {"approximate": None, "what": str(error)}
    doc = found.description or type(found).__doc__ or sys.modules[type(found).__module__].__doc__ or ""
    what = " ".join(doc.strip().partition("\n\n")[0].split()) + (" (by name only)" if found.by_name_only else "")
    return row | {"approximate": found.approximate, "what": what}


def _show(rows: list[dict[str, Any]], json: bool) -> None:
    from attnbench.report.terminal import plain_table

    if json:
        print_json(rows)
    else:
        stdout_console().print(plain_table(rows), highlight=False)
