"""A search by halving for the first slow commit of a line, and its result in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from attnbench.comparison import Comparison
from attnbench.spec import Workload

SHORT = 12


class Found(Struct, frozen=True, kw_only=True):
    """The result of a search."""

    first: str | None
    """First slow commit; None if commits that could not be judged leave several candidates."""
    suspects: tuple[str, ...]
    """Commits that may be the first slow one, oldest first."""
    tried: dict[str, bool | None]
    """Commit -> whether it was slow; None if that could not be judged."""


def find_first_slower(commits: Sequence[str], is_slower: Callable[[str], bool | None]) -> Found:
    """Search commits, oldest first, of which the last is known to be slow; what lies before them was not.

    Commits that cannot be judged are skipped, as git bisect does.
    """
    if not commits:
        raise ValueError("there is no commit to search")
    fast, slow = -1, len(commits) - 1
    tried: dict[str, bool | None] = {}
    while open_ := [place for place in range(fast + 1, slow) if commits[place] not in tried]:
        middle = min(open_, key=lambda place: abs(2 * place - fast - slow))
        verdict = tried[commits[middle]] = is_slower(commits[middle])
        if verdict is True:
            slow = middle
        elif verdict is False:
            fast = middle
    suspects = tuple(commits[fast + 1 : slow + 1])
    return Found(first=suspects[0] if len(suspects) == 1 else None, suspects=suspects, tried=tried)


def not_confirmed(implementation: str, workload: Workload, good: str, bad: str, found: Comparison) -> str:
    """Return why there is nothing to search."""
    case = f"{implementation} on {workload.id}"
    if found.verdict is None:
        return f"{case} could not be compared between {good} and {bad}: {found.reason}"
    if found.verdict == "inconclusive":
        return f"Inconclusive whether {case} is slower in {bad} than in {good}{_figures(found)}: try a quieter machine."
    return f"{case} is not slower in {bad} than in {good}: {found.verdict}{_figures(found)}. Nothing was searched."


def closing(
    found: Found, subjects: Mapping[str, str], implementation: str, workload: Workload, whole: Comparison
) -> str:
    """Return the first slow commit, or its candidates, as a sentence."""
    case = f"{implementation} on {workload.id} is slower{_figures(whole)}"
    effort = f"{len(found.tried)} of {len(subjects)} commits were compared"
    if found.first is not None:
        return f"{case} since {_commit(found.first, subjects)}; {effort}."
    unknown = sum(answer is None for answer in found.tried.values())
    listed = ", ".join(_commit(commit, subjects) for commit in found.suspects)
    return f"{case} since one of {len(found.suspects)} commits: {listed}; {effort}, {unknown} could not be judged."


def _commit(commit: str, subjects: Mapping[str, str]) -> str:
    return f'{commit[:SHORT]} "{subjects[commit]}"'


def _figures(comparison: Comparison) -> str:
    if comparison.ratio is None:
        return ""
    low, high = comparison.interval or (comparison.ratio, comparison.ratio)
    return f" ({comparison.ratio:.3f}x, {low:.3f}-{high:.3f})"
