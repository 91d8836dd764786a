"""`attnbench gate` between two git refs: every case in two stages, then the controls, then one judgement over all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from attnbench.comparing.compare import altered_notes, check, code_of_ref, folder_in, harness_notes, refs
from attnbench.comparing.experiment import Experiment, Terms
from attnbench.comparing.gate_cases import OnInconclusive, case_of, confirm, geomean, grew, judge
from attnbench.comparing.refs import Ref, same_code
from attnbench.comparing.sides import DiedLoading, ForkedSide, Side, verify_alone
from attnbench.comparing.text import ExperimentProgress
from attnbench.comparison import FLOOR, Case, Comparison, Control, GateReport
from attnbench.errors import UsageError
from attnbench.results.records import outcome_text
from attnbench.run import protocol as p
from attnbench.run.git import commits_between, merge_base, root
from attnbench.run.launch import refuse_distortion
from attnbench.run.machine import machine_lock
from attnbench.run.origin import REMEDY, NotInRef
from attnbench.run.remote import WorkerDied
from attnbench.spec import Failed, Incorrect, Ok, OutOfMemory, Timeout, Workload

CONTROLS = ("a/a", "+5 %")
SECOND_STAGE = (16,)
"""Number of launches of stage two."""
SECOND_BUDGET = 2
"""Budget of stage two, times that of stage one."""
NO_CONTROL = (
    "no implementation of the baseline could be timed as a control, so it is unknown whether this job can be trusted"
)
NO_POWER_CONTROL = (
    "no +5 % control: no implementation supports its workload, so it is unknown which slowdowns this job would find"
)
HARNESS_DIFFERS = "attnbench's own measuring code differs between the refs"
CPU_CONTROL = Workload(batch=20, q_len=256, heads=2, head_dim=64)
CPU_MORE_WORK = Workload(batch=21, q_len=256, heads=2, head_dim=64)
DEVICE_CONTROL = Workload(batch=20, q_len=1024, heads=16, head_dim=128, dtype="bfloat16")
DEVICE_MORE_WORK = Workload(batch=21, q_len=1024, heads=16, head_dim=128, dtype="bfloat16")


class GateOrder(Struct, frozen=True, kw_only=True):
    """Refs, cases and settings of a gate."""

    baseline: str
    current: str
    suite: str
    workloads: tuple[Workload, ...]
    implementations: tuple[str, ...]
    folder: Path
    device: str | None = None
    threads: int | None = None
    budget_s: float = 60.0
    """Longest time of a comparison."""
    floors: Callable[[str, str], float] = lambda implementation, workload: FLOOR
    on_inconclusive: OnInconclusive = "inconclusive"
    relaxed: Callable[[Path], Sequence[str]] = lambda folder: ()
    """Function from the baseline's folder to notes on what the files there ask for and this gate does not."""
    outputs: tuple[Path, ...] = ()
    """Files that are written during the gate; they do not count as part of a working tree."""
    on_progress: Callable[[GateReport], None] = lambda report: None
    """Function that gets the report after each case, as if the gate were interrupted then, so that nothing is lost."""


def gate_refs(order: GateOrder, watch: ExperimentProgress) -> GateReport:
    """Run the gate between two refs; raises UsageError if a ref cannot be had, or another gate is running."""
    refuse_distortion()
    for workload in order.workloads:
        check(workload, order.budget_s)
    if same := same_code(order.baseline, order.current, order.folder, order.outputs):
        report = GateReport(
            baseline=order.baseline,
            current=order.current,
            suite=order.suite,
            outcome="nothing",
            cases=(),
            warnings=(f"{same}: give --baseline a ref that differs",),
            attnbench=version("attnbench"),
        )
        order.on_progress(report)
        return report
    with machine_lock(), refs(order.baseline, order.current, order.folder, order.outputs) as (old, new):
        gate, interrupted = _Gate(order, old, new, watch), False
        try:
            gate.measure()
        except KeyboardInterrupt:
            if not gate.finished:
                raise
            interrupted = True
        report = gate.report(interrupted)
        order.on_progress(report)
    return report


class _Gate:
    def __init__(self, order: GateOrder, old: Ref, new: Ref, watch: ExperimentProgress) -> None:
        self._order, self._old, self._new, self._watch = order, old, new, watch
        self._started = time.monotonic()
        self._harness = harness_notes(old, new)
        inner = order.folder.resolve().relative_to(root(order.folder).resolve())
        self._notes = [f"{old.name} {note}" for note in order.relaxed(folder_in(old, inner))]
        self._altered: list[str] = []
        self.finished: list[Case] = []
        self._controls_done: list[Control] = []

    def measure(self) -> None:
        """Measure all cases, then the controls if anything was timed; finished cases stay whatever ends the gate."""
        for name in self._order.implementations:
            for case in self._cases_of(name):
                self.finished.append(case)
                self._order.on_progress(self.report(interrupted=True))
        self._altered = altered_notes(self._old, self._new)
        if not _any_timed(self.finished):
            return
        try:
            for control in self.controls():
                self._controls_done.append(control)
        except UsageError as error:
            self._notes.append(f"the controls ended early: {error}")

    def report(self, interrupted: bool) -> GateReport:
        """Report the cases and controls that are finished."""
        order, old, new, controls = self._order, self._old, self._new, self._controls_done
        cases = confirm(self.finished)
        if self._harness:
            cases = [_as_inconclusive(case) for case in cases]
        cases, hints = _with_culprit(cases, old, new, order.folder)
        judgement = judge(cases, controls, order.on_inconclusive)
        outcome = judgement.outcome
        notes = [*old.notes, *new.notes, *hints, *self._notes, *self._altered, *self._harness]
        if interrupted:
            wanted = len(order.implementations) * len(order.workloads)
            before = "before the controls" if len(controls) < len(CONTROLS) else "after the controls"
            notes.append(f"interrupted after {len(cases)} of {wanted} cases, {before} were finished")
            outcome = "interrupted"
        elif self._altered:
            outcome = "untrusted"
        elif _any_timed(cases) and {control.name for control in controls} != set(CONTROLS):
            notes.append(NO_CONTROL if not controls else NO_POWER_CONTROL)
            outcome = outcome if controls or outcome == "fail" else "untrusted"
        return GateReport(
            baseline=_ref_text(old),
            current=_ref_text(new),
            suite=order.suite,
            outcome=outcome,
            cases=tuple(cases),
            controls=tuple(controls),
            geomean=geomean(cases),
            elapsed_s=time.monotonic() - self._started,
            warnings=(*notes, *judgement.warnings),
            attnbench=version("attnbench"),
        )

    def controls(self) -> Iterator[Control]:
        """Yield two controls, A/A and 5 % more real work, of the first implementation of the baseline that can be
        timed."""
        for name in self._order.implementations:
            with suppress(_CannotLoad, NotInRef), self._sides(name, self._old, self._old) as (first, second):
                for work, more in _control_workloads(first, self._order.workloads[0]):
                    terms = Terms(workload=work, budget_s=self._order.budget_s)
                    same = self._compare(first, second, terms, "control A/A")
                    if same.verdict is None:
                        continue
                    yield Control(name="a/a", passed=same.verdict == "same", comparison=same)
                    if more is not None:
                        slower = self._compare(first, second, replace(terms, other=more), "control +5 %")
                        yield Control(name="+5 %", passed=slower.verdict == "slower", comparison=slower)
                    return

    def _cases_of(self, name: str) -> Iterator[Case]:
        """Yield the cases of one implementation as they are finished; its two processes are started once."""
        try:
            with self._sides(name, self._old, self._new) as (first, second):
                for workload in self._order.workloads:
                    yield self._case(name, workload, first, second)
        except _CannotLoad as problem:
            if problem.place == 0:
                yield from self._without_baseline(name, problem)
                return
            for workload in self._order.workloads:
                yield self._case_not_loaded(name, workload, problem)

    def _without_baseline(self, name: str, problem: _CannotLoad) -> Iterator[Case]:
        """Yield the cases of an implementation that the baseline lacks or cannot load. The current ref's results must
        still be right. If neither ref can be loaded, the cases stay open."""
        try:
            with self._sides(name, self._new) as (side,):
                for workload in self._order.workloads:
                    self._watch.begin(f"{name} {workload.id}, without a baseline")
                    yield _judge_without_baseline(self._case_not_loaded(name, workload, problem), side)
        except _CannotLoad as other:
            if not problem.is_open:
                reason = f"{problem}; the current ref fails too: {other} To load it, {REMEDY}."
                problem = _CannotLoad(0, reason, True)
            for workload in self._order.workloads:
                yield self._case_not_loaded(name, workload, problem)

    def _case(self, name: str, workload: Workload, first: Side, second: Side) -> Case:
        """Return a case after one stage, or after two if the first called it slower or heavier."""
        terms = Terms(workload=workload, floor=self._order.floors(name, workload.id), budget_s=self._order.budget_s)
        title = f"{name} {workload.id}"
        try:
            stage_one = self._compare_robustly(first, second, terms, title)
            if stage_one.verdict == "slower":
                fresh = replace(terms, looks=SECOND_STAGE, budget_s=SECOND_BUDGET * terms.budget_s)
                # What all workers of one process share, the layout of its libraries in memory, must not confirm itself.
                _restart(first, second)
                return case_of(
                    name, workload, stage_one, self._compare_robustly(first, second, fresh, f"{title}, once more")
                )
            if grew(stage_one):
                once = replace(terms, looks=(1,), launch_s=0.0)
                again = self._compare_robustly(first, second, once, f"{title}, memory measured again")
                return replace(case_of(name, workload, stage_one, again), second=None)
            return case_of(name, workload, stage_one)
        except NotInRef as error:
            return Case(implementation=name, workload=workload, status="inconclusive", reason=str(error))

    def _compare_robustly(self, first: Side, second: Side, terms: Terms, title: str) -> Comparison:
        """Compare, and compare again in new processes if a side was lost: on a shared machine a crash, a hang or
        missing memory may be another process's doing, whichever side it hits."""
        comparison = self._compare(first, second, terms, title)
        if any(isinstance(one, Failed | Timeout | OutOfMemory) for one in (comparison.record_a, comparison.record_b)):
            _restart(first, second)
            return self._compare(first, second, terms, f"{title}, once more")
        return comparison

    def _compare(self, first: Side, second: Side, terms: Terms, title: str) -> Comparison:
        self._watch.begin(title)
        return Experiment(first, second, terms, self._watch).run()

    def _case_not_loaded(self, name: str, workload: Workload, problem: _CannotLoad) -> Case:
        """Return a case of which one side cannot be loaded, as if that side had failed."""
        failed = Failed(implementation=name, workload=workload, reason=str(problem))
        is_old = problem.place == 0
        comparison = Comparison(
            a=f"{name} at {self._old.name}",
            b=f"{name} at {self._new.name}",
            workload=workload,
            verdict=None,
            reason=failed.reason,
            record_a=failed if is_old else None,
            record_b=None if is_old else failed,
        )
        status = "inconclusive" if problem.is_open else "no_baseline" if is_old else "wrong"
        return Case(implementation=name, workload=workload, status=status, reason=str(problem), first=comparison)

    @contextmanager
    def _sides(self, name: str, *refs: Ref) -> Iterator[list[Side]]:
        with ExitStack() as stack:
            live: list[Side] = []
            for place, ref in enumerate(refs):
                try:
                    settings = (code_of_ref(name, ref, self._order.folder), self._order.device, self._order.threads)
                    try:
                        side = ForkedSide(*settings)
                    except DiedLoading:  # a single loss may be the fault of the machine
                        side = ForkedSide(*settings)
                    live.append(stack.enter_context(side))
                except UsageError as error:
                    is_open = isinstance(error, NotInRef) or (isinstance(error, DiedLoading) and place == 0)
                    raise _CannotLoad(place, str(error), is_open) from error
            yield live


def _judge_without_baseline(case: Case, side: Side) -> Case:
    """Return a case without a baseline, judged by the results of the current ref alone."""
    assert case.first is not None
    try:
        record = verify_alone(side, case.workload)
    except NotInRef as error:
        return replace(case, status="inconclusive", reason=str(error))
    case = replace(case, first=replace(case.first, record_b=record))
    failure = "" if isinstance(record, Ok) else outcome_text(record)
    if isinstance(record, Incorrect):
        return replace(case, status="wrong", reason=failure)
    if failure and case.status == "no_baseline":
        return replace(case, status="not_measured", reason=f"{failure}; and no baseline: {case.reason}")
    return case


class _CannotLoad(UsageError):
    """A side whose code cannot be loaded; `is_open` if that does not show anything about the code of its ref."""

    def __init__(self, place: int, reason: str, is_open: bool) -> None:
        super().__init__(reason)
        self.place, self.is_open = place, is_open


def _as_inconclusive(case: Case) -> Case:
    """Return a case without a verdict by time or memory: the two sides were measured in different ways."""
    if case.status not in ("pass", "improved", "regression", "memory"):
        return case
    reason = f"{HARNESS_DIFFERS}{f' ({case.reason})' if case.reason else ''}"
    return replace(case, status="inconclusive", reason=reason, culprit="")


def _restart(*sides: Side) -> None:
    """Start new processes for all sides; one that cannot be started is reported by the comparison that follows."""
    for side in reversed(sides):
        with suppress(WorkerDied):
            side.restart()


def _any_timed(cases: Sequence[Case]) -> bool:
    return any(case.first is not None and case.first.verdict is not None for case in cases)


def _control_workloads(side: Side, own: Workload) -> list[tuple[Workload, Workload | None]]:
    """Return pairs of a workload and one with 5 % more sequences, of which the first that the kernel supports is the
    control: one large enough for the device of the workers, or else the kernel's own."""
    try:
        worker = side.start_worker(0)
        answer = worker.ask(p.Describe([]), 120.0)
        worker.kill()
    except WorkerDied:
        answer = None  # the control itself will report it
    on_cpu = not isinstance(answer, p.EnvironmentAnswer) or answer.environment.device == "cpu"
    usual = (CPU_CONTROL, CPU_MORE_WORK) if on_cpu else (DEVICE_CONTROL, DEVICE_MORE_WORK)
    if own.visible_mask.per_batch:
        return [usual, (own, None)]
    least, more = (replace(own, batch=count * -(-own.batch // 20)) for count in (20, 21))
    return [usual, (least, more), (own, None)]


def _ref_text(ref: Ref) -> str:
    return f"{ref.name} ({ref.commit[:9]}{', uncommitted changes' if ref.dirty else ''})" if ref.commit else ref.name


def _with_culprit(cases: list[Case], old: Ref, new: Ref, folder: Path) -> tuple[list[Case], list[str]]:
    """Name the commit of each regression if a single one lies between the refs; else return how to find it."""
    slow = [case for case in cases if case.status == "regression"]
    if not slow or not old.commit or not new.commit or new.dirty:
        return cases, []
    with suppress(UsageError):  # a shallow clone, say: who did it is a hint, and must not cost the verdict
        between = commits_between(old.commit, new.commit, folder)
        if len(between) == 1 and merge_base(old.commit, new.commit, folder) == old.commit:
            culprit = f'{between[0][0][:9]} "{between[0][1]}"'
            return [replace(case, culprit=culprit) if case.status == "regression" else case for case in cases], []
    command = f"attnbench bisect {slow[0].implementation} --good {old.commit[:9]} --bad {new.commit[:9]}"
    hint = f"several commits lie between the refs: `{command}` with the shape of the case finds the slow one"
    return cases, [hint]
