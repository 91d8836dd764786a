"""`attnbench bisect`: the commit that made an implementation slower, found by direct comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from attnbench.cli.options import OWN_SHAPE, Json, Quiet, Selection, ShapeOptions, select_workloads
from attnbench.cli.output import note, print_json, say
from attnbench.errors import UsageError

if TYPE_CHECKING:
    from attnbench.comparison import Comparison
    from attnbench.spec import Workload

SHORT = 12
NOT_SLOWER, NOTHING, INCONCLUSIVE = 1, 3, 4


def bisect(
    implementation: Annotated[str, Parameter(help="A name, file.py:function or package.module:function.")],
    /,
    *,
    good: Annotated[str, Parameter(help="Git ref at which it was fast enough.")],
    bad: Annotated[str, Parameter(help="Git ref at which it is slower.")] = "HEAD",
    shape: ShapeOptions = ShapeOptions(),  # noqa: B008 (frozen)
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Find the commit that made an implementation slower, by comparing commits with the good one and halving the rest.

    Device, framework and threads come from the settings (attnbench.toml, ATTNBENCH_THREADS=1).

    Example: `attnbench bisect torch.sdpa --good v1.0 --bad main --seq-len 1024 --causal`
    """
    from attnbench.comparing.bisect import closing, find_first_slower, judge, not_confirmed, not_searched
    from attnbench.run.git import commits_between, merge_base, resolve
    from attnbench.run.machine import machine_lock

    tell = (lambda _: None) if quiet or json else note
    _, workloads = select_workloads(None, False, OWN_SHAPE if shape == ShapeOptions() else shape, Selection())
    if len(workloads) != 1:
        raise UsageError(f"bisect takes one workload at a time, and these options make {len(workloads)}.")
    workload, start, end, base = workloads[0], resolve(good), resolve(bad), merge_base(good, bad)
    # Commit -> subject, oldest first; a merged branch counts as its merge commit.
    commits = dict(commits_between(base, bad, first_parent=True))
    if not commits:
        raise UsageError(f"{bad} has no commits that {good} lacks: choose an older --good or a newer --bad.")

    def is_slower(commit: str) -> bool | None:
        answer = judge(try_refs(base, commit, implementation, workload), since_base or whole)
        tell(f"  {commit[:SHORT]}  {_WORDS[answer]}  {commits[commit]}")
        return answer

    with machine_lock(doing="bisect"):
        whole = since_base = compare_refs(start, end, implementation, workload)
        if whole.verdict == "slower" and base != start:
            tell(f"note: {good} is not an ancestor of {bad}; {bad} is compared with their common ancestor too.")
            since_base = try_refs(base, end, implementation, workload)
        found = None
        if since_base is not None and since_base.verdict == "slower":
            tell(f"{bad} is slower than {good if base == start else base[:SHORT]}; searching {len(commits)} commits")
            found = find_first_slower(list(commits), is_slower)
    if found is not None:
        sentence = closing(found, commits, implementation, workload, since_base or whole)
        code = 0 if found.first else INCONCLUSIVE
    elif whole.verdict == "slower":
        sentence = not_searched(implementation, workload, good, bad, whole, base, since_base)
        code = INCONCLUSIVE if judge(since_base, whole) is None else NOT_SLOWER
    else:
        sentence = not_confirmed(implementation, workload, good, bad, whole)
        code = {None: NOTHING, "inconclusive": INCONCLUSIVE}.get(whole.verdict, NOT_SLOWER)
    if json:
        ancestor = None if base == start else {"commit": base, "comparison": since_base}
        shown = {"confirmed": found is not None, "comparison": whole, "common_ancestor": ancestor}
        print_json({**shown, "found": found, "closing": sentence})
    else:
        say(sentence)
    return code


_WORDS = {True: "slower    ", False: "as fast   ", None: "not judged"}


def compare_refs(baseline: str, current: str, implementation: str, workload: Workload) -> Comparison:
    """Compare two commits with the settings in force."""
    from attnbench.comparing import compare as comparing
    from attnbench.config import load_settings

    settings = load_settings()
    return comparing.compare_refs(
        baseline=baseline,
        current=current,
        implementation=implementation,
        workload=workload,
        device=settings.device,
        threads=settings.threads,
    )


def try_refs(baseline: str, current: str, implementation: str, workload: Workload) -> Comparison | None:
    """Compare two commits with the settings in force; return None if one does not build or load."""
    try:
        return compare_refs(baseline, current, implementation, workload)
    except UsageError:
        return None
