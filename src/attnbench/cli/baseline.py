"""`attnbench baseline save|list|show|update`: records that later runs are compared with, per machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from attnbench.cli.options import Json
from attnbench.cli.output import print_json, say, stdout_console, warn
from attnbench.errors import UsageError

if TYPE_CHECKING:
    from attnbench.comparing.baselines import Baseline, Saved

baseline = App(help="Baselines: one file per machine, implementation and workload, replaced only on purpose.")

NOTHING_WRITTEN = 1
MAKE = "`attnbench run` and then `attnbench baseline save latest` make one"
Runs = Annotated[str, Parameter(help="Run files, parts of their names, or `latest` (when none is given).")]
Folder = Annotated[Path | None, Parameter(name="--dir", help="Folder of baselines (setting baselines_dir).")]
Note = Annotated[str, Parameter(help="Why, for those who read it later.")]
Words = Annotated[str, Parameter(name=["--filter", "-k"], help="Only cells whose id contains all these words.")]


@baseline.command
def save(*runs: Runs, note: Note = "", words: Words = "", folder: Folder = None, json: Json = False) -> int:
    """Keep the timed records of runs as baselines; one that is there already stays as it is."""
    from attnbench.comparing import baselines

    return _keep(baselines.save, runs or ("latest",), note, words, _chosen(folder), json)


@baseline.command
def update(*runs: Runs, note: Note = "", words: Words = "", folder: Folder = None, json: Json = False) -> int:
    """Keep the timed records of runs as baselines in place of those that are there."""
    from attnbench.comparing import baselines

    return _keep(baselines.update, runs or ("latest",), note, words, _chosen(folder), json)


@baseline.command(name="list")
def listing(*, words: Words = "", folder: Folder = None, json: Json = False) -> int:
    """List every baseline: id, median time, commit, when it was measured."""
    from rich.markup import escape

    from attnbench.report.terminal import plain_table
    from attnbench.report.units import duration

    rows = [_row(one) for one in _matching(_chosen(folder), words)]
    if json:
        print_json(rows)
        return 0
    told = [{"id": row["id"], "median": duration(row["median_ns"]), **row} for row in rows]
    for row in told:
        del row["median_ns"]
    table = plain_table(told) if told else escape(f"There is no baseline in {_chosen(folder)}: {MAKE}.")
    stdout_console().print(table, highlight=False, soft_wrap=not told)
    return 0


@baseline.command
def show(
    identity: Annotated[str, Parameter(name="ID", help="An id of the list, or words that only one id contains.")],
    /,
    *,
    folder: Folder = None,
    json: Json = False,
) -> int:
    """Show one baseline in full, with its anchors."""
    from attnbench.report.terminal import print_cell

    one = _only(identity, _chosen(folder))
    if json:
        print_json(one)
        return 0
    console = stdout_console()
    for name, value in {"baseline": one.id, "commit": one.commit, "measured": one.created, "note": one.note}.items():
        say(f"{name:9} {value or '–'}")
    for record in one.records:
        print_cell(console, record)
    return 0


def _keep(keep: Callable[..., Saved], runs: Sequence[str], note: str, words: str, folder: Path, json: bool) -> int:
    """Save or update baselines, and print what was left out with its reason; return the exit code."""
    from attnbench.cli.inputs import find_run
    from attnbench.results.records import ANCHOR
    from attnbench.results.run_file import read_run
    from attnbench.run.user_functions import sources_of

    written: list[Baseline] = []
    skipped: list[tuple[str, str]] = []
    for path in dict.fromkeys(find_run(name) for name in runs):
        run = read_run(path)
        for warning in run.warnings:
            warn(warning)
        records = [
            r
            for r in run.records
            if r.implementation.startswith(ANCHOR) or all(word in r.cell.id for word in words.split())
        ]
        dirty = {r.implementation for r in records if r.environment is not None and r.environment.is_dirty}
        if dirty := sorted(name for name in dirty if not name.startswith(ANCHOR)):
            warn(f"{path.name} was measured with uncommitted changes ({', '.join(dirty)}): no commit holds them")
        done = keep(records, folder, note=note, created=run.header.created, sources=sources_of(run))
        written += done.written
        skipped += done.skipped
    if json:
        reasons = [{"cell": cell, "reason": reason} for cell, reason in skipped]
        print_json({"folder": folder, "written": [_row(one) for one in written], "skipped": reasons})
    else:
        for one in written:
            say(f"kept     {one.id}")
        for cell, reason in skipped:
            say(f"skipped  {cell}: {reason}")
        say(f"{len(written)} kept in {folder}, {len(skipped)} skipped.")
    return 0 if written else NOTHING_WRITTEN


def _chosen(folder: Path | None) -> Path:
    from attnbench.config import load_settings

    return Path(load_settings({"baselines_dir": None if folder is None else str(folder)}).baselines_dir)


def _matching(folder: Path, words: str) -> list[Baseline]:
    from attnbench.comparing.baselines import list_baselines

    return [one for one in list_baselines(folder) if all(word in one.id for word in words.split())]


def _only(identity: str, folder: Path) -> Baseline:
    found = _matching(folder, identity)
    found = [one for one in found if one.id == identity] or found
    if not found:
        raise UsageError(f'there is no baseline "{identity}" in {folder}: see `attnbench baseline list`; {MAKE}.')
    if len(found) > 1:
        raise UsageError(
            f'"{identity}" names {len(found)} baselines: add words until one is left ({found[0].id}, ...).'
        )
    return found[0]


def _row(one: Baseline) -> dict[str, Any]:
    assert one.record.time is not None
    return {
        "id": one.id,
        "median_ns": one.record.time.median_ns,
        "commit": one.commit,
        "measured": one.created,
        "machine": one.environment.device_name,
        "note": one.note,
    }
