"""A search by halving for the first slow commit of a line, and its result in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from attnbench.comparing import compare as comparing
from attnbench.comparing.history import SHORT, commit_text
from attnbench.comparing.statistics import clears
from attnbench.comparison import Comparison
from attnbench.config import load_settings
from attnbench.errors import UsageError
from attnbench.run.git import commits_between, merge_base, resolve
from attnbench.run.machine import machine_lock
from attnbench.spec import Workload

FOUND, NOT_SLOWER, NOTHING, INCONCLUSIVE = 0, 1, 3, 4
"""Exit codes of `attnbench bisect`."""
WORDS = {True: "slower    ", False: "as fast   ", None: "not judged"}


class BisectResult(Struct, frozen=True, kw_only=True):
    """The result of a search."""

    first: str | None
    """First slow commit; None if commits that could not be judged leave several candidates."""
    suspects: tuple[str, ...]
    """Commits that may be the first slow one, oldest first."""
    tried: dict[str, bool | None]
    """Commit -> whether it was slower; None if that could not be judged."""


def bisect(
    implementation: str, workload: Workload, good: str, bad: str, tell: Callable[[str], None]
) -> tuple[dict[str, Any], int]:
    """Search for the commit that made an implementation slower; return what was found and the exit code. `tell` gets a
    line for every step."""
    start, end, base = resolve(good), resolve(bad), merge_base(good, bad)
    # Commit -> subject, oldest first; a merged branch counts as its merge commit.
    commits = dict(commits_between(base, bad, first_parent=True))
    if not commits:
        raise UsageError(f"{bad} has no commits that {good} lacks: choose an older --good or a newer --bad.")

    def try_base(commit: str) -> Comparison | None:
        try:
            return compare_refs(base, commit, implementation, workload)
        except UsageError:  # one of the two does not build or load
            return None

    def is_slower(commit: str) -> bool | None:
        answer = judge(try_base(commit), since_base or whole)
        tell(f"  {commit[:SHORT]}  {WORDS[answer]}  {commits[commit]}")
        return answer

    found = None
    with machine_lock(doing="bisect"):
        whole = since_base = compare_refs(start, end, implementation, workload)
        if whole.verdict == "slower" and base != start:
            tell(f"note: {good} is not an ancestor of {bad}; {bad} is compared with their common ancestor too.")
            since_base = try_base(end)
        if since_base is not None and since_base.verdict == "slower":
            tell(f"{bad} is slower than {good if base == start else base[:SHORT]}; searching {len(commits)} commits")
            found = find_first_slower(list(commits), is_slower)
    case = f"{implementation} on {workload.id}"
    if found is not None:
        sentence, code = _closing(found, commits, f"{case} is slower{_figures(since_base)}")
    elif whole.verdict == "slower":
        slower = f"{case} is slower in {bad} than in {good}{_figures(whole)}"
        sentence, code = _not_searched(slower, good, bad, base[:SHORT], judge(since_base, whole), _figures(since_base))
    elif whole.verdict is None:
        sentence, code = f"{case} could not be compared between {good} and {bad}: {whole.reason}", NOTHING
    elif whole.verdict == "inconclusive":
        told = f"Inconclusive whether {case} is slower in {bad} than in {good}{_figures(whole)}"
        sentence, code = f"{told}: try again on a quieter machine.", INCONCLUSIVE
    else:
        told = f"{case} is not slower in {bad} than in {good}: {whole.verdict}{_figures(whole)}"
        sentence, code = f"{told}. Nothing was searched.", NOT_SLOWER
    ancestor = None if base == start else {"commit": base, "comparison": since_base}
    shown = {"confirmed": found is not None, "comparison": whole, "common_ancestor": ancestor}
    return {**shown, "found": found, "closing": sentence}, code


def compare_refs(baseline: str, current: str, implementation: str, workload: Workload) -> Comparison:
    """Compare two commits with the settings in force."""
    settings = load_settings()
    return comparing.compare_refs(
        baseline=baseline,
        current=current,
        implementation=implementation,
        workload=workload,
        device=settings.device,
        threads=settings.threads,
    )


def find_first_slower(commits: Sequence[str], is_slower: Callable[[str], bool | None]) -> BisectResult:
    """Search commits, oldest first; the last is known to be slow, and the one before the first is known to be fast.
    Commits that cannot be judged are skipped, as git bisect does."""
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


def judge(comparison: Comparison | None, sought: Comparison) -> bool | None:
    """Return whether b is slower; None if that cannot be judged, or if b was not compared.

    It is slower if it has at least half of the slowdown that is `sought`, by factor: what made 3 % is not to blame for
    20 %. It is not slower only if it surely lacks that, or if it is not called slower and surely lacks what is sought,
    by every metric that shows it: "same" alone means within 5 %, which a small slowdown is too.
    """
    if comparison is None:
        return None
    if comparison.verdict == "slower" and comparison.ratio is not None and sought.ratio is not None:
        half, (_, high) = sought.ratio**0.5, comparison.interval or (comparison.ratio, comparison.ratio)
        return True if comparison.ratio >= half else False if high < half else None
    slower = {name: one for name, one in sought.estimates.items() if clears(one.interval, "slower", sought.floor)}
    found = comparison.estimates
    lies_below = slower and all(
        name in found and found[name].interval[1] < one.interval[0] for name, one in slower.items()
    )
    return False if lies_below and comparison.verdict in ("same", "faster") else None


def _not_searched(slower: str, good: str, bad: str, base: str, judged: bool | None, figures: str) -> tuple[str, int]:
    """Return why no commit is searched for: bad is not known to be slower than `base`, its common ancestor with good.
    `slower` says that it is slower than good, `judged` and `figures` how it compares with that ancestor."""
    if judged is False:
        return (
            f"{slower}, but as fast as in their common ancestor {base}{figures}: {good} is faster than that "
            f"ancestor, and {bad} merely lacks what made it so. No commit of {bad} is to blame."
        ), NOT_SLOWER
    return (
        f"{slower}. It could not be judged whether {bad} is slower than their common ancestor {base}{figures}, "
        f"or {good} faster, so no commit was searched for: try again on a quieter machine, or with another --good."
    ), INCONCLUSIVE


def _closing(result: BisectResult, subjects: Mapping[str, str], slower: str) -> tuple[str, int]:
    """Return the first slow commit, or its candidates, as a sentence."""
    effort = f"{len(result.tried)} of {len(subjects)} commits were compared"
    if result.first is not None:
        return f"{slower} since {commit_text(result.first, subjects[result.first])}; {effort}.", FOUND
    unknown = sum(answer is None for answer in result.tried.values())
    listed = ", ".join(commit_text(commit, subjects[commit]) for commit in result.suspects)
    told = f"{slower} since one of {len(result.suspects)} commits: {listed}; {effort}, {unknown} could not be judged."
    return told, INCONCLUSIVE


def _figures(comparison: Comparison | None) -> str:
    if comparison is None or comparison.ratio is None:
        return ""
    low, high = comparison.interval or (comparison.ratio, comparison.ratio)
    return f" ({comparison.ratio:.3f}x, {low:.3f}-{high:.3f})"
