"""Runs that a reading command was given: how they are found, which names they must hold, and their commits in git."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.errors import UnknownName, UsageError
from attnbench.spec import Record

if TYPE_CHECKING:
    from attnbench.comparing.history import Commits


def find_run(text: str) -> Path:
    """Return the file of that path, or the newest in the runs folder whose name contains the text."""
    from attnbench.config import load_settings
    from attnbench.reading import files_in

    if Path(text).is_file():
        return Path(text)
    folder = Path(load_settings().runs_dir)
    wanted = "" if text == "latest" else text
    found = sorted((p for p in files_in(folder, "*.jsonl") if wanted in str(p)), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UsageError(
            f'there is no run file "{text}", and none of that name in {folder}: `attnbench run --quick` makes one.'
        )
    return found[-1]


def spare_runs(targets: Iterable[Path], runs: Iterable[Path], option: str) -> None:
    """Refuse to write over what is read; `option` is how to name another place."""
    read = {path.resolve() for path in runs}
    for target in targets:
        if target.resolve() in read:
            raise UsageError(f"{target} is the run itself: name another place with {option}.")


def check_against(against: Sequence[str], records: Iterable[Record]) -> None:
    """Refuse a name if these runs hold nothing of it that others can be compared with."""
    from attnbench.results.records import ANCHOR, is_timed, matches

    known = [record for record in records if not record.implementation.startswith(ANCHOR)]
    for wanted in against:
        mine = [record for record in known if matches(record.implementation, wanted)]
        if not mine:
            raise UnknownName("implementation in these runs", wanted, sorted({r.implementation for r in known}), "")
        if not any(is_timed(record) and not record.approximate for record in mine):
            why = "it is approximate" if any(map(is_timed, mine)) else "it was timed on no shape"
            raise UsageError(f"nothing can be compared with {wanted}: {why} in these runs.")


def commit_places(records: Iterable[Record]) -> dict[str, int]:
    """Return the place of each commit in git's history; nothing outside a repository."""
    from attnbench.run.git import commit_order, is_repository

    environments = [record.environment for record in records if record.environment is not None]
    commits = {one.commit for one in environments if not one.is_dirty} - {""}
    return commit_order(commits) if commits and is_repository() else {}


def asker(places: Mapping[str, int]) -> Callable[[str, str], Commits]:
    """Return a function that lists (commit, subject) between two commits, oldest first; nothing if one is not in this
    clone. Git is asked once for each pair, however many cells changed there."""
    from attnbench.run.git import commits_between

    @cache
    def between(old: str, new: str) -> Commits:
        return commits_between(old, new) if old in places and new in places else []

    return between
