"""`attnbench baseline save|list|show|update`: records that later runs are compared with, per machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.markup import escape

from attnbench.cli.options import Json, Runs, Words, has_words, read_runs
from attnbench.cli.output import print_json, say, stdout_console, warn
from attnbench.comparing import baselines
from attnbench.comparing.baselines import Baseline, Saved
from attnbench.config import load_settings
from attnbench.errors import UsageError
from attnbench.report.terminal import plain_table, print_cell
from attnbench.report.units import duration
from attnbench.results.records import is_anchor
from attnbench.run.user_functions import sources_of

baseline = App(
    name="baseline", help="Baselines: one file per machine, implementation and workload, replaced only on purpose."
)

NOTHING_WRITTEN = 1
MAKE = "`attnbench run` and then `attnbench baseline save latest` make one"
Folder = Annotated[Path | None, Parameter(name="--dir", help="Folder of baselines (setting baselines_dir).")]
Note = Annotated[str, Parameter(help="Reason for saving it, stored with the baseline.")]


@baseline.command
def save(*runs: Runs, note: Note = "", words: Words = "", folder: Folder = None, json: Json = False) -> int:
    """Save the timed records of runs as baselines; existing baselines stay unchanged."""
    return _keep(baselines.save, runs or ("latest",), note, words, _chosen(folder), json)


@baseline.command
def update(*runs: Runs, note: Note = "", words: Words = "", folder: Folder = None, json: Json = False) -> int:
    """Save the timed records of runs as baselines, and replace existing ones."""
    return _keep(baselines.update, runs or ("latest",), note, words, _chosen(folder), json)


@baseline.command(name="list")
def listing(*, words: Words = "", folder: Folder = None, json: Json = False) -> int:
    """List every baseline: id, median time, commit, when it was measured."""
    rows = [_row(one) for one in _matching(_chosen(folder), words)]
    if json:
        print_json(rows)
        return 0
    told = [{"id": row["id"], "median": duration(row.pop("median_ns")), **row} for row in rows]
    table = plain_table(told) if told else escape(f"There is no baseline in {_chosen(folder)}: {MAKE}.")
    stdout_console().print(table, soft_wrap=not told)
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
    matching = _matching(_chosen(folder), identity)
    matching = [one for one in matching if one.id == identity] or matching
    if not matching:
        raise UsageError(
            f'there is no baseline "{identity}" in {_chosen(folder)}: see `attnbench baseline list`; {MAKE}.'
        )
    if len(matching) > 1:
        raise UsageError(
            f'"{identity}" matches {len(matching)} baselines: add words until only one matches ({matching[0].id}, ...).'
        )
    one = matching[0]
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
    written: list[Baseline] = []
    skipped: list[tuple[str, str]] = []
    for path, run in read_runs(runs).items():
        records = [r for r in run.records if is_anchor(r) or has_words(r, words)]
        changed = (r for r in records if r.environment is not None and r.environment.is_dirty and not is_anchor(r))
        if dirty := sorted({r.implementation for r in changed}):
            warn(
                f"{path.name} was measured with uncommitted changes ({', '.join(dirty)}): no commit contains this code"
            )
        done = keep(
            records, folder, note=note, dates={one.cell.id: when for when, one in run.dated}, sources=sources_of(run)
        )
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
    return Path(load_settings({"baselines_dir": None if folder is None else str(folder)}).baselines_dir)


def _matching(folder: Path, words: str) -> list[Baseline]:
    return [one for one in baselines.list_baselines(folder) if all(word in one.id for word in words.split())]


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
