"""What git knows of the commits that records were measured at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnbench.comparing.history import Commits
    from attnbench.spec import Record


def commit_places(records: Iterable[Record]) -> dict[str, int]:
    """Place of each commit in git's history; empty outside a repository."""
    from attnbench.run.git import commit_order, is_repository

    environments = [record.environment for record in records if record.environment is not None]
    commits = {one.commit for one in environments if not one.is_dirty} - {""}
    return commit_order(commits) if commits and is_repository() else {}


def asker(places: Mapping[str, int]) -> Callable[[str, str], Commits]:
    """(commit, subject) of what lies between two commits, oldest first; nothing where one is not in this clone. Git is
    asked once for each pair, however many cells changed there."""
    from attnbench.run.git import commits_between

    @cache
    def between(old: str, new: str) -> Commits:
        return commits_between(old, new) if old in places and new in places else []

    return between
