"""The experiment behind a comparison: launch by launch a fresh process of each side, called in turn until the evidence
is enough."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Literal

from msgspec import Struct

from attnbench.comparing.sides import Lost, Side, SideWorker
from attnbench.comparing.statistics import Decision, after_fresh_launches, decide, is_overwhelming, published
from attnbench.comparison import FLOOR, LOOKS, Block, Comparison, Launch
from attnbench.measuring.sampling import varied
from attnbench.run.machine import scratch
from attnbench.run.remote import WorkerDied
from attnbench.spec import Failed, Record, Workload

LAUNCH_S = 0.6
LAUNCH_GPU_S = 0.3
BLOCK_NS = 2e6
BLOCK_GPU_NS = 50e6
LONGEST_BLOCK_NS = 200e6
MOST_CALLS = 400
CLOCKS_APART = 0.02
"""Share by which the GPU clocks of neighbouring blocks may differ; beyond it both are measured again."""
MOST_REPEATS = 4
Watch = Callable[[Sequence[Launch], Decision | None], None]


class Terms(Struct, frozen=True, kw_only=True):
    """Workload and settings of an experiment."""

    workload: Workload
    other: Workload | None = None
    """Workload of b if it differs on purpose: a control with more work."""
    budget_s: float = 60.0
    floor: float = FLOOR
    looks: tuple[int, ...] = LOOKS
    launch_s: float = LAUNCH_S
    timeout_s: float = 120.0
    seed: int | None = None
    confirm: bool = False
    """Whether slower and faster must show again in as many launches of newly started processes. All forks of one
    process share the layout of its libraries in memory, and new processes draw that anew."""


class Experiment:
    """One comparison of two live sides."""

    def __init__(self, a: Side, b: Side, terms: Terms, watch: Watch | None = None) -> None:
        self._sides, self._terms, self._watch = {"a": a, "b": b}, terms, watch or (lambda launches, decision: None)
        self._workloads = {"a": terms.workload, "b": terms.other or terms.workload}
        seed = secrets.randbits(31) if terms.seed is None else terms.seed
        self._seed, self._rng = seed, random.Random(seed)
        self._orders: list[tuple[Literal["a", "b"], Literal["a", "b"]]] = []
        self._records: dict[str, Record] = {}
        self._died: dict[str, bool] = {}
        self._launches: list[Launch] = []
        self._clock: str | None = None
        """Clock of both sides, once they had to agree on one."""
        self._devices: dict[str, str] = {}
        self._kept: dict[str, SideWorker] = {}
        """Workers that live as long as the comparison, on an accelerator only: a new context would take longer than a
        launch, and what a process draws anew, the layout of its memory, matters for CPU times."""
        self._unequal = 0
        self._opened_at: float | None = None

    def run(self) -> Comparison:
        """Add launches until there is a verdict, the last look is over, or the budget ends; return the comparison."""
        started = time.monotonic()
        decision: Decision | None = None
        with scratch() as shared:
            self._folders = {side: shared / side for side in ("a", "b")}
            for folder in self._folders.values():
                folder.mkdir()
            try:
                while decision is None or decision.verdict is None:
                    self._launches.append(self._launch())
                    decision = self._decide(time.monotonic() - started)
                    self._watch(self._launches, decision)
                if self._terms.confirm and not is_overwhelming(decision):
                    decision = self._confirm(decision, started)
            except Lost as lost:
                self._records[lost.side], self._died[lost.side] = lost.record, lost.died
                when = f" in launch {len(self._launches) + 1}" if self._launches else ""
                reason = f"{self._sides[lost.side].code.label}: {lost.record.status}{when}: {lost.record.reason}"
                return self._answer(None, reason, time.monotonic() - started)
            finally:
                _end(self._kept)
        return self._answer(decision, "", time.monotonic() - started)

    def _confirm(self, decision: Decision, started: float) -> Decision:
        """Judge again with as many launches of new processes, unless the budget ends before."""
        first, before = len(self._launches), time.monotonic()
        each = (before - started) / first
        _end(self._kept)
        self._kept = {}
        for name in ("b", "a"):
            try:
                self._sides[name].restart()
            except WorkerDied as died:
                raise self._lost_worker(name, died) from died
        while len(self._launches) < 2 * first and time.monotonic() - started + each < self._terms.budget_s:
            self._launches.append(self._launch())
            self._watch(self._launches, None)
        return after_fresh_launches(decision, self._launches, first, self._terms.floor)

    def _decide(self, elapsed: float) -> Decision:
        # Opening workers counts only if every launch opens them anew.
        spent = time.monotonic() - self._opened_at if self._kept and self._opened_at is not None else elapsed
        each = spent / len(self._launches)
        last = len(self._launches) >= self._terms.looks[-1] or elapsed + each > self._terms.budget_s
        # Only the metrics that both sides have, since they may run on different kinds of devices.
        metrics = tuple(name for name in self._launches[0].a[0].ns if name in self._launches[0].b[0].ns)
        return decide(self._launches, metrics, floor=self._terms.floor, looks=self._terms.looks, last=last)

    def _launch(self) -> Launch:
        if not self._orders:  # drawn at random, but each side is started first once in every two launches
            self._orders = [("a", "b"), ("b", "a")]
            self._rng.shuffle(self._orders)
        order, workers = self._orders.pop(), dict(self._kept)
        try:
            if not workers:
                self._open_all(order, workers)
                self._opened_at = self._opened_at or time.monotonic()
            self._warm_up_all([workers[side] for side in order])
            if all(worker.on_device for worker in workers.values()):
                self._kept = workers
            # Blocks come in the order ABBA or BAAB, at random, so that no trend and no first place favours a side.
            taken: dict[str, list[Block]] = {"a": [], "b": []}
            calls, started = _calls(workers["a"], workers["b"]), time.monotonic()
            limit_s = min(self._terms.launch_s, LAUNCH_GPU_S) if self._kept else self._terms.launch_s
            while not taken["a"] or time.monotonic() - started < limit_s:
                for pair in self._rng.choice((("ab", "ba"), ("ba", "ab"))):
                    for side, block in self._pair(pair, workers, varied(calls, self._rng)).items():
                        taken[side].append(block)
        finally:
            if not self._kept:
                _end(workers)
        return Launch(a=tuple(taken["a"]), b=tuple(taken["b"]), first=order[0])

    def _open_all(self, order: Sequence[str], workers: dict[str, SideWorker]) -> None:
        """Open both sides even if the first is lost, since the report also says whether the second is right. On an
        accelerator both open at once, since the host's work is what takes the time."""

        def start(side: str) -> None:
            live = self._sides[side]
            try:
                worker = live.start_worker(self._rng.getrandbits(31))
            except WorkerDied as died:
                raise self._lost_worker(side, died) from died
            workers[side] = SideWorker(side, live, worker, self._workloads[side], self._terms.timeout_s)

        def describe(side: str) -> None:
            self._devices[side] = workers[side].describe()

        def open_cell(side: str) -> None:
            record = workers[side].open(self._seed, str(self._folders[side]), again=bool(self._launches))
            self._records.setdefault(side, record)

        lost = self._attempt_each(start, order, workers, 1)
        if not self._devices:
            lost += self._attempt_each(describe, [side for side in order if side in workers], workers, 2)
        ready = [side for side in order if side not in {loss.side for loss in lost}]
        lost += self._attempt_each(open_cell, ready, workers, 1 if "cpu" in self._devices.values() else 2)
        if lost:
            raise lost[0]

    def _attempt_each(
        self, step: Callable[[str], None], order: Sequence[str], workers: dict[str, SideWorker], at_once: int
    ) -> list[Lost]:
        """Take a step for each side, and return the lost sides."""

        def attempt(side: str) -> Lost | None:
            try:
                step(side)
            except Lost as lost:
                self._records[side], self._died[side] = lost.record, lost.died
                return lost
            return None

        if at_once == 1:
            return [lost for lost in map(attempt, order) if lost is not None]
        pool = ThreadPoolExecutor(at_once)
        try:
            return [lost for lost in pool.map(attempt, order) if lost is not None]
        except BaseException:
            # Ctrl-C must not wait for a verification: aborting the worker ends its question.
            for worker in list(workers.values()):
                worker.abort()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _lost_worker(self, side: str, died: WorkerDied) -> Lost:
        reason = f"no worker could be started: {died.reason}"
        facts = {"implementation": self._sides[side].code.name, "workload": self._workloads[side]}
        return Lost(side, Failed(reason=reason, detail=died.detail, **facts), died=True)

    def _warm_up_all(self, workers: Sequence[SideWorker]) -> None:
        """Warm both up by one clock, the same in every launch: kernel times if one side is too short for events."""
        for worker in workers:
            worker.warm_up(self._clock, brief=bool(self._kept))
        if len({worker.clock for worker in workers}) > 1 and self._clock is None:
            if all("kernel" in (worker.clock, *worker.other_clocks) for worker in workers):
                self._clock = "kernel"
                for worker in workers:
                    worker.warm_up(self._clock)
        elif self._clock is None and workers[0].on_device:
            self._clock = workers[0].clock

    def _pair(self, order: str, workers: dict[str, SideWorker], calls: int) -> dict[str, Block]:
        """Time two neighbouring blocks, again while the GPU's clock differs between them or is held down."""
        pair: dict[str, Block] = {}
        for _ in range(1 + MOST_REPEATS):
            pair = {side: workers[side].block(calls) for side in order}
            a, b = pair["a"], pair["b"]
            apart = 0.0 if a.sm_mhz is None or b.sm_mhz is None else abs(a.sm_mhz / b.sm_mhz - 1)
            if apart <= CLOCKS_APART and not (a.throttled or b.throttled):
                return pair
        self._unequal += 1
        return pair

    def _answer(self, decision: Decision | None, reason: str, elapsed: float) -> Comparison:
        codes = {side: live.code for side, live in self._sides.items()}
        notes = [] if decision is None else [*decision.notes]
        if self._unequal:
            times = f"{self._unequal} of {sum(len(launch.a) for launch in self._launches)} pairs"
            notes.append(f"the GPU's clock was unsteady or held down in {times}, even when repeated")
        estimates = {} if decision is None else decision.estimates
        main = estimates[published(tuple(estimates))] if estimates else None
        return Comparison(
            a=codes["a"].label,
            b=codes["b"].label,
            workload=self._terms.workload,
            verdict=None if decision is None else decision.verdict,
            reason=reason,
            ratio=main and main.ratio,
            interval=main and main.interval,
            smallest_slowdown=main and main.detectable,
            estimates=estimates,
            launches=tuple(self._launches),
            elapsed_s=elapsed,
            timing_s=0.0 if self._opened_at is None else time.monotonic() - self._opened_at,
            record_a=self._records.get("a"),
            record_b=self._records.get("b"),
            died=tuple(side for side in ("a", "b") if self._died.get(side)),
            commit_a=codes["a"].commit,
            commit_b=codes["b"].commit,
            floor=self._terms.floor,
            notes=tuple(notes),
        )


def _end(workers: dict[str, SideWorker]) -> None:
    for worker in workers.values():
        worker.end()


def _calls(a: SideWorker, b: SideWorker) -> int:
    """Return the calls of a block, the same for both sides: enough for the clock, but so few that neighbours stay
    close."""
    least = BLOCK_GPU_NS if a.on_device or b.on_device else BLOCK_NS
    wanted = ceil(least / max(1.0, min(a.call_ns, b.call_ns)))
    fitting = max(1, int(LONGEST_BLOCK_NS / max(1.0, a.call_ns, b.call_ns)))
    return max(1, min(wanted, fitting, MOST_CALLS))
