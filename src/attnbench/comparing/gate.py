"""`attnbench gate` between two git refs: every case in two stages, then the controls, then one judgement over all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from attnbench.comparing.compare import altered_notes, check, code_of_ref, harness_notes, nothing_between, refs
from attnbench.comparing.experiment import Experiment, Terms
from attnbench.comparing.gate_cases import OnInconclusive, case_of, confirm, geomean, grew, judge
from attnbench.comparing.refs import Ref
from attnbench.comparing.sides import Code, DiedLoading, ForkedSide, Side, verify_alone
from attnbench.comparing.statistics import Decision
from attnbench.comparison import FLOOR, Case, Comparison, Control, GateReport, Launch
from attnbench.errors import UsageError
from attnbench.run import protocol as p
from attnbench.run.git import commits_between, merge_base
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
    "no implementation of the baseline could be timed as a control, so nothing shows that this job can be trusted"
)
NO_POWER_CONTROL = "no +5 % control: the implementations cannot do its workload, so what would be found is not known"
HARNESS_DIFFERS = "attnbench's own code that measures differs between the refs"
CPU_CONTROL = Workload(batch=20, q_len=256, heads=2, head_dim=64)
CPU_MORE_WORK = Workload(batch=21, q_len=256, heads=2, head_dim=64)
DEVICE_CONTROL = Workload(batch=20, q_len=1024, heads=16, head_dim=128, dtype="bfloat16")
DEVICE_MORE_WORK = Workload(batch=21, q_len=1024, heads=16, head_dim=128, dtype="bfloat16")


class GateWatch(Protocol):
    """A listener to the progress of a gate."""

    def begin(self, title: str) -> None:
        """Note that another comparison starts."""
        ...

    def __call__(self, launches: Sequence[Launch], decision: Decision | None) -> None:
        """Note that one more launch of it is over."""
        ...


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
    outputs: tuple[Path, ...] = ()
    """Files that are written meanwhile; in a working tree they do not count as part of it."""
    on_progress: Callable[[GateReport], None] = lambda report: None
    """Function that gets the report after each case, as if the gate were interrupted then, so that nothing is lost."""


def gate_refs(order: GateOrder, watch: GateWatch) -> GateReport:
    """Run the gate between two refs; raises UsageError if a ref cannot be had, or another gate is running."""
    refuse_distortion()
    for workload in order.workloads:
        check(workload, order.budget_s)
    if same := nothing_between(order.baseline, order.current, order.folder, order.outputs):
        return _nothing(order, same)
    with machine_lock(), refs(order.baseline, order.current, order.folder, order.outputs) as (old, new):
        gate = _Gate(order, old, new, watch)
        try:
            gate.measure()
        except KeyboardInterrupt:
            if not gate.finished:
                raise
            report = gate.report(interrupted=True)
        else:
            report = gate.report(interrupted=False)
        order.on_progress(report)
    return report


def _nothing(order: GateOrder, why: str) -> GateReport:
    """Return the report of a gate that has nothing to judge."""
    report = GateReport(
        baseline=order.baseline,
        current=order.current,
        suite=order.suite,
        outcome="nothing",
        cases=(),
        warnings=(f"{why}: give --baseline a ref that differs",),
        attnbench=version("attnbench"),
    )
    order.on_progress(report)
    return report


class _Gate:
    def __init__(self, order: GateOrder, old: Ref, new: Ref, watch: GateWatch) -> None:
        self._order, self._old, self._new, self._watch = order, old, new, watch
        self._started = time.monotonic()
        self._notes: list[str] = []
        self._altered: list[str] = []
        self._harness = harness_notes(old, new)
        self.finished: list[Case] = []
        self._controls_done: list[Control] = []

    def measure(self) -> None:
        """Measure all cases, then the controls if anything was timed; finished cases stay whatever ends the gate."""
        for case in self.cases():
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
        cases = _with_culprit(confirm(self.finished), old, new, order.folder)
        if self._harness:
            cases = [_undecided(case) for case in cases]
        judgement = judge(cases, controls, order.on_inconclusive)
        outcome = judgement.outcome
        notes = [*old.notes, *new.notes, *_search_hint(cases, old, new), *self._notes, *self._altered, *self._harness]
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
            baseline=_named(old),
            current=_named(new),
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
            try:
                with self._sides(name, self._old, self._old) as (first, second):
                    for work, more in (_control_workloads(first), *_own_controls(self._order.workloads[0])):
                        terms = Terms(workload=work, budget_s=self._order.budget_s)
                        same = self._compare(first, second, terms, "control A/A")
                        if same.verdict is not None:
                            yield from self._controls(first, second, same, more)
                            return
            except (_CannotLoad, NotInRef):
                continue

    def _controls(self, first: Side, second: Side, same: Comparison, more: Workload | None) -> Iterator[Control]:
        yield Control(name="a/a", passed=same.verdict == "same", comparison=same)
        if more is not None:
            terms = Terms(workload=same.workload, other=more, budget_s=self._order.budget_s)
            slower = self._compare(first, second, terms, "control +5 %")
            yield Control(name="+5 %", passed=slower.verdict == "slower", comparison=slower)

    def cases(self) -> Iterator[Case]:
        """Yield the cases, implementation by implementation."""
        for name in self._order.implementations:
            yield from self._cases_of(name)

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
                yield self._unloaded(name, workload, problem)

    def _without_baseline(self, name: str, problem: _CannotLoad) -> Iterator[Case]:
        """Yield the cases of an implementation that the baseline lacks or cannot load.

        The current ref's results must be right all the same. If neither ref loads, nothing is known.
        """
        try:
            with self._sides(name, self._new) as (side,):
                for workload in self._order.workloads:
                    self._watch.begin(f"{name} {workload.id}, without a baseline")
                    yield _alone(self._unloaded(name, workload, problem), side)
        except _CannotLoad as other:
            if not problem.is_open:
                reason = f"{problem}; nor does the current ref's: {other} To load it, {REMEDY}."
                problem = _CannotLoad(0, reason, True)
            for workload in self._order.workloads:
                yield self._unloaded(name, workload, problem)

    def _case(self, name: str, workload: Workload, first: Side, second: Side) -> Case:
        terms = Terms(workload=workload, floor=self._order.floors(name, workload.id), budget_s=self._order.budget_s)
        title = f"{name} {workload.id}"
        try:
            return self._stages(name, workload, first, second, terms, title)
        except NotInRef as error:
            return Case(implementation=name, workload=workload, status="inconclusive", reason=str(error))

    def _stages(self, name: str, workload: Workload, first: Side, second: Side, terms: Terms, title: str) -> Case:
        stage_one = self._settled(first, second, terms, title)
        if stage_one.verdict == "slower":
            fresh = replace(terms, looks=SECOND_STAGE, budget_s=SECOND_BUDGET * terms.budget_s)
            # What all workers of one process share, the layout of its libraries in memory, must not confirm itself.
            _restart(first, second)
            return case_of(name, workload, stage_one, self._settled(first, second, fresh, f"{title}, once more"))
        if grew(stage_one):
            once = replace(terms, looks=(1,), launch_s=0.0)
            weighed = case_of(name, workload, stage_one, self._settled(first, second, once, f"{title}, weighed again"))
            return replace(weighed, second=None)
        return case_of(name, workload, stage_one)

    def _settled(self, first: Side, second: Side, terms: Terms, title: str) -> Comparison:
        """Compare, and compare again in new processes if a side was lost: on a shared machine a crash, a hang or
        missing memory may be another process's doing, whichever side it hits."""
        found = self._compare(first, second, terms, title)
        records = (found.record_a, found.record_b)
        if not any(isinstance(one, Failed | Timeout | OutOfMemory) for one in records):
            return found
        _restart(first, second)
        return self._compare(first, second, terms, f"{title}, once more")

    def _compare(self, first: Side, second: Side, terms: Terms, title: str) -> Comparison:
        self._watch.begin(title)
        return Experiment(first, second, terms, self._watch).run()

    def _unloaded(self, name: str, workload: Workload, problem: _CannotLoad) -> Case:
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

    def _side(self, code: Code) -> ForkedSide:
        try:
            return ForkedSide(code, self._order.device, self._order.threads)
        except DiedLoading:  # once may be the machine's doing
            return ForkedSide(code, self._order.device, self._order.threads)

    @contextmanager
    def _sides(self, name: str, *refs: Ref) -> Iterator[list[Side]]:
        with ExitStack() as stack:
            live: list[Side] = []
            for place, ref in enumerate(refs):
                try:
                    code = code_of_ref(name, ref, self._order.folder)
                    live.append(stack.enter_context(self._side(code)))
                except UsageError as error:
                    is_open = isinstance(error, NotInRef) or (isinstance(error, DiedLoading) and place == 0)
                    raise _CannotLoad(place, str(error), is_open) from error
            yield live


def _alone(case: Case, side: Side) -> Case:
    """Return a case without a baseline, judged by the results of the current ref alone."""
    assert case.first is not None
    try:
        record = verify_alone(side, case.workload)
    except NotInRef as error:
        return replace(case, status="inconclusive", reason=str(error))
    case = replace(case, first=replace(case.first, record_b=record))
    failure = f"{record.status.replace('_', ' ')}: {record.reason}" if not isinstance(record, Ok) else ""
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


def _undecided(case: Case) -> Case:
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


def _own_controls(workload: Workload) -> list[tuple[Workload, Workload | None]]:
    """Return controls for kernels that cannot do the usual ones: their own workload, with 5 % more sequences if
    possible."""
    own: list[tuple[Workload, Workload | None]] = [(workload, None)]
    if workload.visible_mask.per_batch:
        return own
    least, more = (replace(workload, batch=count * -(-workload.batch // 20)) for count in (20, 21))
    return [(least, more), *own]


def _control_workloads(side: Side) -> tuple[Workload, Workload]:
    """Return a workload and one with 5 % more sequences, large enough for the device that the workers run on."""
    try:
        worker = side.start_worker(0)
        answer = worker.ask(p.Describe([]), 120.0)
        worker.kill()
    except WorkerDied:
        answer = None  # the control itself will tell
    on_cpu = not isinstance(answer, p.Described) or answer.environment.device == "cpu"
    return (CPU_CONTROL, CPU_MORE_WORK) if on_cpu else (DEVICE_CONTROL, DEVICE_MORE_WORK)


def _named(ref: Ref) -> str:
    return f"{ref.name} ({ref.commit[:9]}{', uncommitted changes' if ref.dirty else ''})" if ref.commit else ref.name


def _search_hint(cases: Sequence[Case], old: Ref, new: Ref) -> list[str]:
    slow = [case for case in cases if case.status == "regression" and not case.culprit]
    if not slow or not old.commit or not new.commit or new.dirty:
        return []
    command = f"attnbench bisect {slow[0].implementation} --good {old.commit[:9]} --bad {new.commit[:9]}"
    return [f"several commits lie between the refs: `{command}` with the shape of the case finds the one"]


def _with_culprit(cases: Sequence[Case], old: Ref, new: Ref, folder: Path) -> list[Case]:
    """Name the commit of each regression, if a single one lies between the refs."""
    if not old.commit or not new.commit or new.dirty or not any(case.status == "regression" for case in cases):
        return list(cases)
    try:
        between = commits_between(old.commit, new.commit, folder)
        if len(between) != 1 or merge_base(old.commit, new.commit, folder) != old.commit:
            return list(cases)
    except UsageError:  # a shallow clone, say: who did it is a hint, and must not cost the verdict
        return list(cases)
    sha, subject = between[0]
    return [replace(case, culprit=f'{sha[:9]} "{subject}"') if case.status == "regression" else case for case in cases]
