"""The first slow commit of a line of commits, by halving; what cannot be judged is stepped over, as git bisect does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from attnbench.comparison import Comparison
from attnbench.spec import Workload


class Found(Struct, frozen=True, kw_only=True):
    """What the search ended with."""

    first: str | None
    """The first slow commit; None when commits that could not be judged leave several."""
    suspects: tuple[str, ...]
    """The first slow commit is one of these, oldest first."""
    tried: dict[str, bool | None]
    """Commit -> whether it was slow; None where that could not be told."""


def find_first_slower(commits: Sequence[str], is_slower: Callable[[str], bool | None]) -> Found:
    """Search commits, oldest first, whose last is known to be slow and before whose first nothing was."""
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


SHORT = 12


def not_confirmed(implementation: str, workload: Workload, good: str, bad: str, found: Comparison) -> str:
    """Why there is nothing to search."""
    case = f"{implementation} on {workload.id}"
    if found.verdict is None:
        return f"{case} could not be compared between {good} and {bad}: {found.reason}"
    if found.verdict == "inconclusive":
        return (
            f"Whether {case} is slower in {bad} than in {good} cannot be told{_figures(found)}: try a quieter machine."
        )
    return f"{case} is not slower in {bad} than in {good}: {found.verdict}{_figures(found)}. Nothing was searched."


def closing(
    found: Found, subjects: Mapping[str, str], implementation: str, workload: Workload, whole: Comparison
) -> str:
    """The first slow commit, or those that it is among."""
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
