"""`attnbench compare A B`: is B slower than A, or one implementation slower in one git ref than in another?"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from attnbench.cli.options import (
    INCONCLUSIVE,
    NOTHING,
    OWN_SHAPE,
    Budget,
    Device,
    Json,
    Many,
    Quiet,
    Selection,
    ShapeOptions,
    Threads,
    select_workloads,
)
from attnbench.cli.output import print_json, stderr_console, stdout_console, warn
from attnbench.comparing import compare as comparing
from attnbench.comparing.experiment import Watch
from attnbench.comparing.gate_cases import case_of
from attnbench.comparing.text import ExperimentProgress, print_comparison
from attnbench.comparison import Comparison
from attnbench.config import load_settings
from attnbench.errors import UsageError
from attnbench.run.machine import measuring
from attnbench.spec import Workload


def compare(
    a: Annotated[str, Parameter(help="A name, file.py:function or package.module:function.")],
    b: Annotated[
        str | None, Parameter(help="The implementation that is judged; leave it out with --baseline and --current.")
    ] = None,
    /,
    *,
    baseline: Annotated[str | None, Parameter(help="Git ref of A; its code runs from a worktree.")] = None,
    current: Annotated[str | None, Parameter(help='Git ref that is judged (HEAD); "." is the working tree.')] = None,
    suite: Annotated[str | None, Parameter(help="Every workload of this suite; else the shape options.")] = None,
    shape: ShapeOptions = ShapeOptions(),  # noqa: B008 (frozen)
    framework: Annotated[str | None, Parameter(help="Framework of bare functions (torch).")] = None,
    device: Device = None,
    threads: Threads = None,
    budget: Budget = 60.0,
    fail_on: Annotated[
        tuple[Literal["slower", "inconclusive"], ...],
        Many,
        Parameter(help="Exit 1 (slower) or 4 (inconclusive) on this verdict."),
    ] = (),
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Decide whether B is slower than A. Each launch starts fresh processes, checks both, and times them in turn.

    Examples: `attnbench compare torch.eager torch.sdpa --seq-len 1024` ·
    `attnbench compare my_kernel.py:attention --baseline main --current HEAD`
    """
    if b is None and baseline is None:
        raise UsageError(f"compare {a} with what? Name a second implementation, or --baseline REF [--current REF].")
    if b is not None and (baseline is not None or current is not None):
        raise UsageError(
            "compare takes two implementations, or one in two refs: leave out the second name, or the refs."
        )
    settings = load_settings({"device": device, "framework": framework, "threads": threads})
    shape = OWN_SHAPE if suite is None and shape == ShapeOptions() else shape
    _, workloads = select_workloads(suite, False, shape, Selection())

    def answer(workload: Workload, watch: Watch) -> Comparison:
        terms: Any = {"device": settings.device, "threads": settings.threads, "budget_s": budget, "watch": watch}
        if b is not None:
            return comparing.compare(a, b, workload, framework=settings.framework or "torch", **terms)
        assert baseline is not None
        return comparing.compare_refs(
            baseline=baseline,
            current=current or "HEAD",
            implementation=a,
            workload=workload,
            framework=settings.framework,
            **terms,
        )

    found: list[Comparison] = []
    with measuring("compare") as notes:
        for note in notes:
            warn(note)
        try:
            for workload in workloads:
                with ExperimentProgress(stderr_console(), quiet or json) as progress:
                    found.append(answer(workload, progress))
                if not json:
                    print_comparison(stdout_console(), found[-1])
        except BaseException:
            if json and found:
                print_json(found)  # Ctrl-C or an error must not cost what is finished
            raise
    if json:
        print_json(found[0] if len(found) == 1 else found)
    verdicts = {one.verdict for one in found}
    # What is wrong, or gave no answer although A did, has no speed at all.
    wrong = any(case_of(one.b, one.workload, one).status == "wrong" for one in found)
    if "slower" in fail_on and ("slower" in verdicts or wrong):
        return 1
    if verdicts == {None}:
        return NOTHING
    return INCONCLUSIVE if "inconclusive" in fail_on and "inconclusive" in verdicts else 0
