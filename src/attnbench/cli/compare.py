"""`attnbench compare A B`: is B slower than A, or one implementation slower in one git ref than in another?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from attnbench.cli.options import Json, Many, Quiet, Shape, Whole
from attnbench.cli.output import print_json, stderr_console, stdout_console, warn
from attnbench.errors import UsageError

if TYPE_CHECKING:
    from attnbench.comparing.experiment import Watch
    from attnbench.comparison import Comparison
    from attnbench.spec import Workload

NOTHING = 3


def compare(
    a: Annotated[str, Parameter(help="A name, file.py:function or package.module:function.")],
    b: Annotated[str | None, Parameter(help="The one that is judged; not given with --baseline and --current.")] = None,
    /,
    *,
    baseline: Annotated[str | None, Parameter(help="Git ref of A; its code runs from a worktree.")] = None,
    current: Annotated[str | None, Parameter(help='Git ref that is judged (HEAD); "." is the working tree.')] = None,
    suite: Annotated[str | None, Parameter(help="Every workload of this suite; else the shape options.")] = None,
    shape: Shape = Shape(),  # noqa: B008 (frozen)
    framework: Annotated[str | None, Parameter(help="Framework of bare functions (torch).")] = None,
    device: Annotated[str | None, Parameter(help="cpu, cuda, ...")] = None,
    threads: Annotated[int | None, Whole, Parameter(help="CPU threads.")] = None,
    budget: Annotated[float, Parameter(help="Seconds that one comparison may take at most.")] = 60.0,
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
    from attnbench.cli.options import Choice
    from attnbench.cli.selection import OWN_SHAPE, select_workloads
    from attnbench.comparing.text import ExperimentProgress, print_comparison
    from attnbench.config import load_settings
    from attnbench.run.machine import measuring

    _check(a, b, baseline, current)
    settings = load_settings({"device": device, "framework": framework, "threads": threads})
    _, workloads = select_workloads(suite, False, OWN_SHAPE if suite is None and shape == Shape() else shape, Choice())
    found: list[Comparison] = []
    with measuring("compare") as notes:
        for note in notes:
            warn(note)
        try:
            for workload in workloads:
                with ExperimentProgress(stderr_console(), quiet or json) as progress:
                    asked = _Question(a, b, baseline, current or "HEAD", settings.framework)
                    found.append(asked.answer(workload, settings.device, settings.threads, budget, progress))
                if not json:
                    print_comparison(stdout_console(), found[-1])
        except BaseException:
            if json and found:
                print_json(found)  # Ctrl-C or an error must not cost what is finished
            raise
    if json:
        print_json(found[0] if len(found) == 1 else found)
    return _exit_code(found, fail_on)


class _Question:
    def __init__(self, a: str, b: str | None, baseline: str | None, current: str, framework: str | None) -> None:
        self._a, self._b, self._baseline, self._current, self._framework = a, b, baseline, current, framework

    def answer(
        self, workload: Workload, device: str | None, threads: int | None, budget: float, watch: Watch
    ) -> Comparison:
        from attnbench.comparing import compare as comparing

        if self._b is not None:
            return comparing.compare(
                self._a,
                self._b,
                workload,
                framework=self._framework or "torch",
                device=device,
                threads=threads,
                budget_s=budget,
                watch=watch,
            )
        assert self._baseline is not None
        return comparing.compare_refs(
            baseline=self._baseline,
            current=self._current,
            implementation=self._a,
            workload=workload,
            framework=self._framework,
            device=device,
            threads=threads,
            budget_s=budget,
            watch=watch,
        )


def _check(a: str, b: str | None, baseline: str | None, current: str | None) -> None:
    if b is None and baseline is None:
        raise UsageError(f"compare {a} with what? Name a second implementation, or --baseline REF [--current REF].")
    if b is not None and (baseline is not None or current is not None):
        raise UsageError("two implementations, or one in two refs: leave out the second name, or the refs.")


def _is_worse(comparison: Comparison) -> bool:
    """Return whether b is wrong, or gave no answer although a did: no speed at all is slower than any."""
    a, b = comparison.record_a, comparison.record_b
    if b is None or b.status == "ok":
        return False
    return b.status == "incorrect" or (a is not None and a.status == "ok")


def _exit_code(found: Sequence[Comparison], fail_on: Sequence[str]) -> int:
    verdicts = {one.verdict for one in found}
    if "slower" in fail_on and ("slower" in verdicts or any(_is_worse(one) for one in found)):
        return 1
    if verdicts == {None}:
        return NOTHING
    return 4 if "inconclusive" in fail_on and "inconclusive" in verdicts else 0
