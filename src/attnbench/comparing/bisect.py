"""A search by halving for the first slow commit of a line, and its result in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from attnbench.comparing.history import SHORT, commit_text
from attnbench.comparing.statistics import clears
from attnbench.comparison import Comparison
from attnbench.spec import Workload


class BisectResult(Struct, frozen=True, kw_only=True):
    """The result of a search."""

    first: str | None
    """First slow commit; None if commits that could not be judged leave several candidates."""
    suspects: tuple[str, ...]
    """Commits that may be the first slow one, oldest first."""
    tried: dict[str, bool | None]
    """Commit -> whether it was slow; None if that could not be judged."""


def find_first_slower(commits: Sequence[str], is_slower: Callable[[str], bool | None]) -> BisectResult:
    """Search commits, oldest first; the last is known to be slow, and the one before the first is known to be fast.

    Commits that cannot be judged are skipped, as git bisect does.
    """
    if not commits:
        raise ValueError("there are no commits to search")
    fast, slow = -1, len(commits) - 1
    tried: dict[str, bool | None] = {}
    while untried := [place for place in range(fast + 1, slow) if commits[place] not in tried]:
        middle = min(untried, key=lambda place: abs(2 * place - fast - slow))
        verdict = tried[commits[middle]] = is_slower(commits[middle])
        if verdict is True:
            slow = middle
        elif verdict is False:
            fast = middle
    suspects = tuple(commits[fast + 1 : slow + 1])
    return BisectResult(first=suspects[0] if len(suspects) == 1 else None, suspects=suspects, tried=tried)


def not_confirmed(implementation: str, workload: Workload, good: str, bad: str, comparison: Comparison) -> str:
    """Return why no commit is searched for: b was not found to be slower."""
    case, figures = f"{implementation} on {workload.id}", _figures(comparison)
    if comparison.verdict is None:
        return f"{case} could not be compared between {good} and {bad}: {comparison.reason}"
    if comparison.verdict == "inconclusive":
        return (
            f"Inconclusive whether {case} is slower in {bad} than in {good}{figures}: try again on a quieter machine."
        )
    return f"{case} is not slower in {bad} than in {good}: {comparison.verdict}{figures}. Nothing was searched."


def judge(comparison: Comparison | None, sought: Comparison) -> bool | None:
    """Return whether b is slower; None if that cannot be judged, or if b was not compared.

    It is slower if it has at least half of the slowdown that is `sought`, by factor: what made 3 % is not to blame for
    20 %. It is not slower only if it surely lacks that: "same" alone means within 5 %, which a small slowdown is too.
    """
    if comparison is None:
        return None
    if comparison.verdict == "slower" and comparison.ratio is not None and sought.ratio is not None:
        half, (_, high) = sought.ratio**0.5, comparison.interval or (comparison.ratio, comparison.ratio)
        return True if comparison.ratio >= half else False if high < half else None
    without = comparison.verdict in ("same", "faster") and _lies_below(comparison, sought)
    return False if without else None


def _lies_below(comparison: Comparison, sought: Comparison) -> bool:
    """Return whether a ratio is surely below the sought one, by every metric that shows the sought one to be slower."""
    slower = {metric: bounds for metric, bounds in _bounds(sought).items() if clears(bounds, "slower", sought.floor)}
    found = _bounds(comparison)
    return bool(slower) and all(metric in found and found[metric][1] < low for metric, (low, _) in slower.items())


def _bounds(comparison: Comparison) -> dict[str, tuple[float, float]]:
    """Return the interval by each metric."""
    return {name: one.interval for name, one in comparison.estimates.items()}


def not_searched(
    implementation: str,
    workload: Workload,
    good: str,
    bad: str,
    whole: Comparison,
    base: str,
    since_base: Comparison | None,
) -> str:
    """Return why no commit is searched for: bad is not known to be slower than its common ancestor with good."""
    case = f"{implementation} on {workload.id} is slower in {bad} than in {good}{_figures(whole)}"
    figures = _figures(since_base) if since_base else ""
    if judge(since_base, whole) is False:
        return (
            f"{case}, but as fast as in their common ancestor {base[:SHORT]}{figures}: {good} is faster than that "
            f"ancestor, and {bad} merely lacks what made it so. No commit of {bad} is to blame."
        )
    return (
        f"{case}. It could not be judged whether {bad} is slower than their common ancestor {base[:SHORT]}{figures}, "
        f"or {good} faster, so no commit was searched for: try again on a quieter machine, or with another --good."
    )


def closing(
    result: BisectResult, subjects: Mapping[str, str], implementation: str, workload: Workload, whole: Comparison
) -> str:
    """Return the first slow commit, or its candidates, as a sentence."""
    case = f"{implementation} on {workload.id} is slower{_figures(whole)}"
    effort = f"{len(result.tried)} of {len(subjects)} commits were compared"
    if result.first is not None:
        return f"{case} since {commit_text(result.first, subjects[result.first])}; {effort}."
    unknown = sum(answer is None for answer in result.tried.values())
    listed = ", ".join(commit_text(commit, subjects[commit]) for commit in result.suspects)
    return f"{case} since one of {len(result.suspects)} commits: {listed}; {effort}, {unknown} could not be judged."


def _figures(comparison: Comparison) -> str:
    if comparison.ratio is None:
        return ""
    low, high = comparison.interval or (comparison.ratio, comparison.ratio)
    return f" ({comparison.ratio:.3f}x, {low:.3f}-{high:.3f})"
