"""All cells of one workload: opened in their workers, sampled in turn, finished into records.

If a cell brings its worker down, the other cells of that worker are opened again and everything is sampled anew. The
same happens if a worker ends between two questions; if it happens twice, each of its cells is measured in a worker of
its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import TYPE_CHECKING

from msgspec import structs

from attnbench.measuring import anchors
from attnbench.measuring.rates import above_roofline, cost_of, implausible, throughput_of
from attnbench.measuring.sampling import WAITED, Dropped, Series, StopRule, interleave, summarise
from attnbench.results.records import grouped
from attnbench.run import protocol as p
from attnbench.run.environment import BUSY_CORES, busy_cores
from attnbench.run.machine import scratch
from attnbench.run.plan import Group, least_bytes
from attnbench.run.pool import Pool
from attnbench.run.remote import WorkerDied
from attnbench.spec import Cell, Cost, Failed, Ok, OutOfMemory, Record, Time, Workload

if TYPE_CHECKING:
    from attnbench.run.launch import Listener, Request

APART = "measured apart from others of its workload: device memory would not hold them all at once"
ALONE = "measured apart from others of its workload: the worker that they shared ended twice while it was idle"
HEAVY_SHARE, CROWD_SHARE, BATCH_SHARE = 1 / 12, 1 / 2, 2 / 3
"""Shares of device memory, by what cells need at least: a cell above the first is measured after the others if all
together need more than the second; such cells are batched up to the third."""
UNSTABLE = 0.05
"""Half-width of the interval, as a share of the median, above which a record carries a warning."""


class WorkloadRun:
    """The measurement of one workload of a run."""

    def __init__(
        self, request: Request, workload: Workload, pool: Pool, listener: Listener, rng: random.Random, seed: int
    ) -> None:
        self._request, self._workload, self._pool, self._listener = request, workload, pool, listener
        self._rng, self._seed = rng, seed
        self._records: dict[str, Record] = {}
        self._traced: set[str] = set()
        self._crowded_out: list[Cell] = []
        self._suspects: list[Cell] = []
        """Cells of workers that ended twice between two questions."""
        self._lost_once: set[Group] = set()
        """Groups whose worker ended once between two questions."""
        self._in_company = False
        self._by_kernel = False
        self._began, self._turn = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}", -1
        self._abandoned = False

    def records(self, cells: Sequence[Cell]) -> list[Record]:
        """Return a record of every cell, and of the anchors if something was timed."""
        groups = {self._pool.group(cell.implementation) for cell in cells}
        self._in_company = len(groups) > 1
        heavy = self._heavy(cells) if self._in_company else []
        light = [cell for cell in cells if cell not in heavy]
        with scratch() as self._shared:
            self._run_together(light)
            for few in self._that_fit_together(heavy):
                self._run_apart(few)
            crowded, self._crowded_out = self._crowded_out, []
            if 1 < len(crowded) < len(cells):
                self._pool.dismiss_all()
                self._run_apart(crowded)
                crowded, self._crowded_out = self._crowded_out, []
            self._in_company = False
            for cell in crowded:
                self._pool.dismiss_all()
                self._run_apart([cell])
            suspects, self._suspects = self._suspects, []
            for cell in suspects:
                self._pool.dismiss(self._pool.group(cell.implementation))
                self._run_apart([cell], ALONE)
        return list(self._records.values())

    def _heavy(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells to measure after the others, if the device's memory does not hold all at once."""
        shares = [self._share(cell) for cell in cells]
        return [cell for cell, share in zip(cells, shares) if share > HEAVY_SHARE and sum(shares) > CROWD_SHARE]

    def _that_fit_together(self, heavy: Sequence[Cell]) -> Iterator[list[Cell]]:
        """Yield batches of cells that the device's memory holds at once, at least one cell each."""
        few: list[Cell] = []
        for cell in heavy:
            if few and sum(map(self._share, [*few, cell])) > BATCH_SHARE:
                yield few
                few = []
            few.append(cell)
        if few:
            yield few

    def _share(self, cell: Cell) -> float:
        """Return the share of an accelerator's memory that a cell needs at least; 0 on a CPU."""
        environment = self._pool.environment(self._pool.group(cell.implementation).framework)
        if environment is None or environment.device == "cpu" or environment.memory_bytes is None:
            return 0.0
        implementation = self._pool.registered(cell.implementation)
        need = 0 if implementation is None else least_bytes(implementation.configured(cell.config), self._workload)
        return need / environment.memory_bytes

    def _run_apart(self, cells: Sequence[Cell], why: str = APART) -> None:
        """Measure these cells without the others, and add `why` to the notes of their records."""
        self._run_together(cells)
        groups = [self._pool.group(cell.implementation) for cell in cells]
        self._pool.give_memory_back({*groups, *(self._pool.clean(group.framework) for group in groups)})
        for cell in cells:
            if isinstance(record := self._records.get(cell.id), Ok):
                self._records[cell.id] = structs.replace(record, notes=(*record.notes, why))

    def _run_together(self, cells: Sequence[Cell]) -> None:
        if not cells:
            return
        groups = grouped(cells, lambda cell: self._pool.group(cell.implementation))
        self._anchored: set[Group] = set()
        # Before anything is open: measuring them may cost a worker its life.
        environments = [self._pool.environment(group.framework) for group in groups if self._request.measure]
        devices = dict.fromkeys(environment.device for environment in environments if environment is not None)
        self._ceilings = {device: self._pool.ceilings(self._workload.dtype, device) for device in devices}
        timed = [one for one in self._open_all(groups) if one.opened.timed]
        while timed:
            try:
                self._trace(timed)
                self._measure(timed)
                break
            except (CellDied, SessionsLost) as lost:
                for one in timed:  # those that turned out wrong before the others start again
                    if one.lost is not None and self._is_open(one.cell):
                        self._finish(one.lost)
                if isinstance(lost, CellDied):
                    self._record_lost(lost)
                else:
                    self._note_lost_sessions(lost, timed)
                # The cells of the lost worker are opened again in a new one; the others stay as they are.
                left = [one for one in timed if self._is_open(one.cell)]
                again = self._open_group(lost.group, [one.cell for one in left if one.group == lost.group])
                timed = [one for one in left if one.group != lost.group] + [one for one in again if one.opened.timed]
        used = [*groups, *(group for group in self._anchored if group not in groups)]
        with ThreadPoolExecutor(len(used) or 1) as threads:
            list(threads.map(self._release, used))

    def _note_lost_sessions(self, lost: SessionsLost, timed: Sequence[RemoteCell]) -> None:
        """Decide what becomes of the cells of a worker that ended between two questions.

        The first time, they are opened again. The second time, each of them is put off to be measured alone; a cell
        that was alone already has failed, and so has an anchor.
        """
        cells = [one.cell for one in timed if one.group == lost.group and self._is_open(one.cell)]
        if lost.group in self._lost_once and len(cells) > 1:
            self._suspects += cells
        elif lost.group in self._lost_once:
            died = WorkerDied("failed", "its process ended while it was idle, twice")
            self._record_lost(cell_died(lost.cell, lost.group, self._pool, died))
        self._lost_once.add(lost.group)
        self._listener.warning(f"a {lost.group.framework} worker ended while it was idle: its cells start again")

    def _is_open(self, cell: Cell) -> bool:
        """Return whether a cell has no final record yet and is not put off."""
        return cell.id not in self._records and cell not in (*self._crowded_out, *self._suspects)

    def _open_all(self, groups: dict[Group, list[Cell]]) -> list[RemoteCell]:
        """Open every cell: in parallel by worker on an accelerator, where compiling on the host takes the time; one
        after the other on a CPU, where they would slow each other down."""
        beside = {group: mine for group, mine in groups.items() if self._pool.accelerated(group.framework)}
        opened: list[RemoteCell] = []
        with ThreadPoolExecutor(len(beside) or 1) as threads:
            try:
                for cells in threads.map(self._open_group, beside, beside.values()):
                    opened += cells
            except BaseException:
                self._abandoned = True
                for group in beside:
                    self._pool.dismiss(group)  # or the pool would wait for whatever its threads are waiting for
                raise
        for group, mine in groups.items():
            if group not in beside:
                opened += self._open_group(group, mine)
        return opened

    def _open_group(self, group: Group, cells: Sequence[Cell]) -> list[RemoteCell]:
        """Open the cells of a worker one by one; if one brings it down, those opened before are opened again."""
        todo = list(cells)
        while True:
            try:
                return [one for cell in todo if (one := self._open(cell, group)) is not None]
            except CellDied as dead:
                self._record_lost(dead)
                todo = [cell for cell in todo if self._is_open(cell)]

    def _open(self, cell: Cell, group: Group) -> RemoteCell | None:
        if self._abandoned:
            raise CancelledError
        request = self._request
        self._listener.stage(cell, "verify")
        # What a user function's process computes is no truth for others: it shares no folder with them.
        shared = None if group.has_user_code else str(self._shared)
        question = p.Open(cell, request.thorough, request.measure, request.clock, self._seed, shared)
        answer = ask_about(cell, group, self._pool, question, request.timeout_s)
        if isinstance(answer, p.Refused):
            raise cell_died(cell, group, self._pool, WorkerDied("failed", answer.reason))
        self._listener.verified(cell, isinstance(answer, p.Opened))
        if isinstance(answer, p.Closed):
            if answer.poisoned:
                self._pool.dismiss(group)
                raise CellDied(cell, group, answer.record)
            self._finish(answer.record)
            return None
        assert isinstance(answer, p.Opened)
        if not answer.timed:
            self._finish(answer.record)
        return RemoteCell(cell, group, answer, self._pool, request.timeout_s)

    def _record_lost(self, dead: CellDied) -> None:
        if self._is_open(dead.cell):
            self._finish(dead.record)

    def _finish(self, record: Record) -> None:
        if record.implementation in anchors.NAMES:
            sitting = "" if record.time is None else f" {record.time.sitting}"  # each sitting has anchors of its own
            self._records[f"{record.cell.id}{sitting}"] = record
        elif isinstance(record, OutOfMemory) and self._in_company and self._shares_memory(record):
            self._crowded_out.append(record.cell)
        else:
            if self._request.in_process:
                record = structs.replace(record, isolation="in-process")
            self._records[record.cell.id] = record
            self._listener.finished(record)

    def _shares_memory(self, record: Record) -> bool:
        """Return whether other workers held memory of the device on which a cell ran out of memory."""
        return self._pool.accelerated(self._pool.group(record.implementation).framework)

    def _measure(self, timed: Sequence[RemoteCell]) -> None:
        """Sample all cells in turn, then finish all. If a worker dies meanwhile, no cell is finished, and the next
        attempt counts as a sitting of its own."""
        request = self._request
        self._turn += 1
        for one in timed:
            self._listener.stage(one.cell, "measure")
        companions = [one for one in self._anchors(timed) if self._warmed(one)]
        timed = [one for one in timed if self._warmed(one)]
        # If one cell is published by kernel time, all are that can be.
        self._by_kernel = self._by_kernel or any(one.steady.clock == "kernel" for one in timed)
        if self._by_kernel:
            timed = [one for one in timed if "kernel" not in one.steady.other_clocks or self._warmed(one, "kernel")]
        if not timed:
            return
        rule = StopRule(request.budget_s, request.precision, request.trials)
        on_cpu = not any(self._pool.accelerated(one.group.framework) for one in timed)
        idle = on_cpu and busy_cores() < BUSY_CORES
        gathered = interleave(timed, rule, self._rng, always=companions)
        if idle and busy_cores() < BUSY_CORES:  # then threads waited for each other, as they always do
            for one in (*timed, *companions):
                one.waited.clear()
        for one in timed:
            if one.lost is None:
                with suppress(Dropped):  # then the cell turned out wrong, and `lost` is its record
                    for clock in one.steady.other_clocks:
                        one.by_other_clocks[clock] = summarise([one.sample_other(clock)], clock, 1)
                    one.examine_after()
        # Measuring the ceilings may cost a worker its life: nothing is asked of an open cell from here on.
        self._doubt_ceilings(gathered)
        records: list[Record] = []
        for series in gathered:
            one = series.source
            assert isinstance(one, RemoteCell)
            records.append(one.lost if one.lost is not None else self._timed_record(one, series))
        for record in records:
            self._finish(record)

    def _doubt_ceilings(self, gathered: Sequence[Series]) -> None:
        """Measure the ceilings again if a cell exceeds them, since they may have been measured in a bad moment."""
        for series in gathered:
            one = series.source
            assert isinstance(one, RemoteCell)
            ok = one.opened.record
            if one.lost is not None or ok.implementation in anchors.NAMES or ok.environment is None:
                continue
            times = _summaries(one, series)
            if self._implausible(ok, times) is not None:
                device = ok.environment.device
                self._ceilings[device] = self._pool.ceilings(self._workload.dtype, device, again=True)
                return

    def _warmed(self, one: RemoteCell, clock: str | None = None) -> bool:
        try:
            one.warm_up(clock)
        except Dropped:
            assert one.lost is not None
            self._finish(one.lost)
        return one.lost is None

    def _anchors(self, timed: Sequence[RemoteCell]) -> list[RemoteCell]:
        """Return the two anchors, opened in the clean worker of the first cell's framework.

        One process is enough to tell how fast the machine is, and no user code runs there that could slow it down.
        """
        group = self._pool.clean(timed[0].group.framework)
        self._anchored.add(group)
        cells = [Cell(name, self._workload) for name in anchors.NAMES]
        # One that has brought a worker down before is not tried again; every turn has times of its own of the others.
        opened = [self._open_anchor(cell, group) for cell in cells if cell.id not in self._records]
        return [one for one in opened if one is not None]

    def _open_anchor(self, cell: Cell, group: Group) -> RemoteCell | None:
        question = p.Open(cell, False, True, None, self._seed)
        answer = ask_about(cell, group, self._pool, question, self._request.timeout_s)
        assert isinstance(answer, p.Opened | p.Closed | p.Refused)
        if not isinstance(answer, p.Opened):
            reason = answer.reason if isinstance(answer, p.Refused) else answer.record.reason
            self._listener.warning(f"{cell.implementation} could not be opened: {reason}")
            return None
        return RemoteCell(cell, group, answer, self._pool, self._request.timeout_s)

    def _cost(self, ok: Ok, median_ns: float, part: str = "") -> Cost:
        """Return the cost of the workload's pass, or of a part of it, at a median time."""
        assert ok.environment is not None
        ceilings = self._ceilings.get(ok.environment.device)
        devices = 1 if ok.ranks is None else ok.ranks.devices
        workload = structs.replace(self._workload, pass_=part) if part else self._workload
        return cost_of(workload, median_ns, ceilings, ok.quality.get("work", 1.0), devices)

    def _implausible(self, ok: Ok, times: Mapping[str, Time]) -> str | None:
        """Return why a time cannot be true, of the whole pass (`main`) or of a part; None if all may be."""
        for name, time in times.items():
            part = "" if name == "main" else name
            if (reason := implausible(self._cost(ok, time.median_ns, part))) is not None:
                return f"{part} pass {reason}" if part else reason
        return None

    def _timed_record(self, one: RemoteCell, series: Series) -> Record:
        warm, ok = one.steady, one.opened.record
        assert ok.environment is not None
        times = _summaries(one, series)
        doubtful = None if ok.implementation in anchors.NAMES else self._implausible(ok, times)
        sitting = f"{self._began}+{self._turn}" if self._turn else self._began
        main = structs.replace(times.pop("main"), sitting=sitting)
        spent_ns = {**ok.spent_ns, "warm_up": warm.spent_ns, "sample": one.clock_ns}
        if "verify" in spent_ns:
            spent_ns["verify"] += one.check_ns
        if ok.implementation in anchors.NAMES:
            return structs.replace(ok, time=main, spent_ns=spent_ns)
        cost = self._cost(ok, main.median_ns)
        if doubtful is not None:
            return Failed(reason=doubtful, environment=ok.environment, **structs.asdict(ok.cell))
        return structs.replace(
            ok,
            time=main,
            deterministic=ok.deterministic and one.repeats,
            also=times | one.by_other_clocks,
            cost=cost,
            throughput=throughput_of(self._workload, main.median_ns),
            notes=(*ok.notes, *one.changed, *_warnings(main), *above_roofline(cost)),
            spent_ns=spent_ns,
        )

    def _trace(self, timed: Sequence[RemoteCell]) -> None:
        if self._request.trace is None:
            return
        for one in timed:
            if one.cell.id in self._traced:
                continue
            question = p.Trace(one.cell.id, str(self._request.trace))
            answer = ask_about(one.cell, one.group, self._pool, question, self._request.timeout_s)
            self._traced.add(one.cell.id)
            if isinstance(answer, p.Traced):
                self._listener.warning(f"trace of {one.cell.id}: {answer.path}")
            elif isinstance(answer, p.Refused):
                self._listener.warning(f"no trace of {one.cell.id}: {answer.reason}")

    def _release(self, group: Group) -> None:
        """Let a worker drop this workload's arrays; a failure is a warning, since its records are complete."""
        try:
            self._pool.ask(group, p.Release(), self._request.timeout_s)
        except WorkerDied as died:
            self._listener.warning(f"a {group[0]} worker ended between workloads: {died.reason}")


def _summaries(one: RemoteCell, series: Series) -> dict[str, Time]:
    """Return the summary of the main program's samples and of each part's."""
    clock = one.steady.clock
    return {
        part: summarise(rounds, clock, series.calls, one.waited.get(part, ())) for part, rounds in series.rounds.items()
    }


def _warnings(time: Time) -> tuple[str, ...]:
    if (half := time.half_width) is None:
        return ("unstable samples: a single round does not show the spread",)
    if time.waited is not None and time.waited > UNSTABLE:
        return (f"{WAITED}: threads waited for a core, for up to {time.waited:.0%} of the time",)
    return () if half <= UNSTABLE else (f"unstable samples: the median is known to ±{half:.0%} only",)


OTHER_CLOCK_SAMPLES, FEWEST_BY_OTHER_CLOCK = 20, 5
OTHER_CLOCK_NS = 3e8


class CellDied(Exception):
    """A cell that brought its worker down; `record` is its final record."""

    def __init__(self, cell: Cell, group: Group, record: Record) -> None:
        super().__init__(record.reason)
        self.cell, self.group, self.record = cell, group, record


class SessionsLost(Exception):
    """A worker that ended between two questions: its open cells are gone, and no cell is known to be the cause."""

    def __init__(self, cell: Cell, group: Group) -> None:
        super().__init__(cell.id)
        self.cell, self.group = cell, group


def cell_died(cell: Cell, group: Group, pool: Pool, died: WorkerDied) -> CellDied:
    """Return the loss of a worker as the error of the cell it was working on."""
    return CellDied(cell, group, died.record(environment=pool.environments.get(group), **structs.asdict(cell)))


def ask_about(cell: Cell, group: Group, pool: Pool, question: p.Question, timeout_s: float) -> p.Answer:
    """Return the answer to a question about a cell; raises CellDied if it ended its worker, SessionsLost if the worker
    had ended before."""
    try:
        answer = pool.ask(group, question, timeout_s)
    except WorkerDied as died:
        raise cell_died(cell, group, pool, died) from died
    if isinstance(answer, p.Refused) and answer.not_open:
        raise SessionsLost(cell, group)
    return answer


@dataclass
class RemoteCell:
    """A cell that is open in a worker; a SampleSource for `interleave`."""

    cell: Cell
    group: Group
    opened: p.Opened
    pool: Pool
    timeout_s: float
    warm: p.Warm | None = None
    lost: Record | None = None
    repeats: bool = True
    clock_ns: int = 0
    check_ns: int = 0
    changed: tuple[str, ...] = ()
    """Changes that the cell made in its process while it was timed, in words."""
    by_other_clocks: dict[str, Time] = field(default_factory=dict)
    waited: dict[str, list[float]] = field(default_factory=dict)
    """Share of each visit that threads may have waited for a core, by part."""

    @property
    def call_ns(self) -> float:
        return self.steady.call_ns

    @property
    def parts(self) -> tuple[str, ...]:
        return self.steady.parts

    @property
    def slow_clock(self) -> bool:
        return self.steady.slow_clock

    @property
    def steady(self) -> p.Warm:
        """Facts that the warm-up found."""
        assert self.warm is not None
        return self.warm

    def warm_up(self, clock: str | None = None) -> None:
        """Run the cell until its times are steady; if they are, only change its clock. Raises like `sample`."""
        answer = self._ask(p.WarmUp(self.cell.id, clock, brief=self.warm is not None))
        assert isinstance(answer, p.Warm)
        self.warm = answer

    def sample(self, part: str, count: int, calls: int) -> list[float]:
        """Return nanoseconds per call; raises Dropped if the cell turned out wrong, CellDied if it ended its worker,
        and SessionsLost if the worker had ended before."""
        answer = self._sampled(p.TakeSample(self.cell.id, part, count, calls, self.steady.clock))
        if answer.waited is not None:
            self.waited.setdefault(part, []).append(answer.waited)
        return answer.ns

    def sample_other(self, clock: str) -> list[float]:
        """Return nanoseconds per call of the main program by another clock."""
        count = min(OTHER_CLOCK_SAMPLES, max(FEWEST_BY_OTHER_CLOCK, int(OTHER_CLOCK_NS / max(self.call_ns, 1.0))))
        return self._sampled(p.SampleOther(self.cell.id, clock, count)).ns

    def examine_after(self) -> None:
        """Check the cell again after its last sample; raises like `sample`."""
        start = perf_counter_ns()
        self._ask(p.ExamineAfter(self.cell.id))
        self.check_ns += perf_counter_ns() - start

    def _sampled(self, question: p.Question) -> p.Sampled:
        answer = self._ask(question)
        assert isinstance(answer, p.Sampled)
        self.repeats = self.repeats and answer.repeats
        self.clock_ns += answer.clock_ns
        self.check_ns += answer.check_ns
        self.changed += answer.changed
        return answer

    def _ask(self, question: p.Question) -> p.Answer:
        answer = ask_about(self.cell, self.group, self.pool, question, self.timeout_s)
        if isinstance(answer, p.Refused):
            raise cell_died(self.cell, self.group, self.pool, WorkerDied("failed", answer.reason))
        if not isinstance(answer, p.Closed):
            return answer
        if answer.poisoned:
            self.pool.dismiss(self.group)
            raise CellDied(self.cell, self.group, answer.record)
        self.lost = answer.record
        raise Dropped
