"""What a bisect found, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping

from attnbench.comparing.bisect import Found
from attnbench.comparison import Comparison
from attnbench.spec import Workload

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
