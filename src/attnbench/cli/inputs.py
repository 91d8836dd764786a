"""Runs that a command reads: how they are found and read, and which names they must hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from attnbench.cli.output import warn
from attnbench.config import load_settings
from attnbench.errors import UnknownName, UsageError
from attnbench.files import files_in
from attnbench.results.records import is_anchor, is_timed, matches
from attnbench.results.run_file import Run, read_run
from attnbench.run.user_functions import told_apart
from attnbench.spec import Record


def find_run(text: str) -> Path:
    """Return the file of that path, or the newest in the runs folder whose name contains the text."""
    if Path(text).is_file():
        return Path(text)
    folder = Path(load_settings().runs_dir)
    wanted = "" if text == "latest" else text
    found = sorted((p for p in files_in(folder, "*.jsonl") if wanted in str(p)), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UsageError(
            f'there is no run file "{text}", and no file in {folder} has this in its name: '
            "`attnbench run --quick` makes one."
        )
    return found[-1]


def read_runs(names: Iterable[str]) -> dict[Path, Run]:
    """Read every run named, each once, and print the warnings about them."""
    runs = {path: read_run(path) for path in dict.fromkeys(map(find_run, names))}
    for run in runs.values():
        for warning in run.warnings:
            warn(warning)
    return runs


def read_together(names: Iterable[str]) -> dict[Path, Run]:
    """Read runs whose cells are compared: functions of one name from different files get names of their own."""
    runs, places = told_apart(read_runs(names))
    if places:
        told = ", ".join(f"{name} (from {place})" for name, place in sorted(places.items()))
        warn(f"these runs have different functions of one name; they are called {told}")
    return runs


def has_words(record: Record, words: str) -> bool:
    """Return whether the id of a cell contains all these words."""
    return all(word in record.cell.id for word in words.split())


def spare_runs(targets: Iterable[Path], runs: Iterable[Path], option: str) -> None:
    """Raise UsageError if a target is one of the run files to read; `option` is the one that names the target."""
    read = {path.resolve() for path in runs}
    for target in targets:
        if target.resolve() in read:
            raise UsageError(f"{target} is one of the run files to read: choose another path with {option}.")


def check_against(against: Sequence[str], records: Iterable[Record]) -> None:
    """Raise UsageError for a name without any timed, exact record in these runs to compare others with."""
    known = [record for record in records if not is_anchor(record)]
    for wanted in against:
        mine = [record for record in known if matches(record.implementation, wanted)]
        if not mine:
            raise UnknownName("implementation in these runs", wanted, sorted({r.implementation for r in known}), "")
        if not any(is_timed(record) and not record.approximate for record in mine):
            why = "it is approximate" if any(map(is_timed, mine)) else "it was not timed on any shape"
            raise UsageError(f"nothing can be compared with {wanted}: {why} in these runs.")
