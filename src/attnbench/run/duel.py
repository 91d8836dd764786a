"""Is b slower than a? Launch by launch: a fresh process of each, in turn call by call, until the evidence is enough."""

from __future__ import annotations

import random
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from attnbench.comparison import FLOOR, LOOKS, Block, Comparison, Launch
from attnbench.measuring.paired import Decision, decide, published
from attnbench.run import protocol as p
from attnbench.run.arms import Arm, Side
from attnbench.run.remote import Local, Remote, WorkerDied
from attnbench.spec import Cell, Failed, Ok, OutOfMemory, Record, Timeout, Workload

LAUNCH_S = 0.6
BLOCK_NS = 2e6
BLOCK_GPU_NS = 50e6
LONGEST_BLOCK_NS = 200e6
MOST_CALLS = 400
Watch = Callable[[Sequence[Launch], Decision | None], None]


class Terms(Struct, frozen=True, kw_only=True):
    """What is compared, and how long."""

    workload: Workload
    other: Workload | None = None
    """b's workload, where it differs on purpose: a control with more work."""
    budget_s: float = 60.0
    floor: float = FLOOR
    looks: tuple[int, ...] = LOOKS
    launch_s: float = LAUNCH_S
    timeout_s: float = 120.0
    seed: int | None = None


class Lost(Exception):
    """An arm gave up its worker or its answer; `record` is what is left."""

    def __init__(self, side: str, record: Record) -> None:
        super().__init__(record.reason)
        self.side, self.record = side, record


class Fighter:
    """One arm's worker in one launch, its cell open."""

    def __init__(self, side: str, arm: Arm, worker: Remote | Local, workload: Workload, timeout_s: float) -> None:
        self._side, self._worker, self._timeout_s = side, worker, timeout_s
        self._cell = Cell(arm.name, workload, arm.config)
        self.call_ns, self.clock, self.other_clocks = 0.0, "wall", ()

    def open(self, seed: int, shared: str, again: bool) -> Ok:
        """Build and verify; raises Lost."""
        if not again:
            self._ask(p.Describe([]))
        opened = self._ask(p.Open(self._cell, False, True, None, seed, shared, again))
        assert isinstance(opened, p.Opened)
        if not opened.timed:
            raise Lost(self._side, self._failed(opened.record.notes[0] if opened.record.notes else "cannot be timed"))
        return opened.record

    def warm_up(self, clock: str | None = None) -> None:
        """Until it is steady, by the clock named or the one that suits it."""
        warm = self._ask(p.WarmUp(self._cell.id, clock))
        assert isinstance(warm, p.Warm)
        self.call_ns, self.clock, self.other_clocks = warm.call_ns, warm.clock, warm.other_clocks

    @property
    def on_device(self) -> bool:
        """Whether it is timed by a clock of the device."""
        return self.clock != "wall"

    def block(self, calls: int) -> Block:
        """One turn."""
        taken = self._ask(p.TakeBlock(self._cell.id, calls))
        assert isinstance(taken, p.BlockTaken)
        return taken.block

    def _ask(self, question: p.Question) -> p.Answer:
        try:
            answer = self._worker.ask(question, self._timeout_s)
        except WorkerDied as died:
            kind = {"timeout": Timeout, "out_of_memory": OutOfMemory, "failed": Failed}[died.kind]
            raise Lost(self._side, kind(reason=died.reason, detail=died.detail, **self._facts)) from died
        if isinstance(answer, p.Closed):
            raise Lost(self._side, answer.record)
        if isinstance(answer, p.Refused):
            raise Lost(self._side, self._failed(answer.reason))
        return answer

    @property
    def _facts(self) -> dict[str, Any]:
        cell = self._cell
        return {"implementation": cell.implementation, "workload": cell.workload, "config": cell.config}

    def _failed(self, reason: str) -> Failed:
        return Failed(reason=reason, **self._facts)

    def end(self) -> None:
        """The launch is over."""
        self._worker.kill()


class Duel:
    """One comparison of two live arms."""

    def __init__(self, a: Side, b: Side, terms: Terms, watch: Watch) -> None:
        self._sides, self._terms, self._watch = {"a": a, "b": b}, terms, watch
        self._workloads = {"a": terms.workload, "b": terms.other or terms.workload}
        seed = secrets.randbits(31) if terms.seed is None else terms.seed
        self._seed, self._rng = seed, random.Random(seed)
        self._records: dict[str, Record] = {}
        self._launches: list[Launch] = []
        self._clock: str | None = None
        """Of both arms, once they had to agree on one."""

    def fight(self) -> Comparison:
        """Launches until a verdict, the last look, or the end of the budget."""
        started = time.monotonic()
        decision: Decision | None = None
        with tempfile.TemporaryDirectory(prefix="attnbench-") as shared:
            self._folders = {side: Path(shared, side) for side in ("a", "b")}
            if self._workloads["a"] == self._workloads["b"]:
                self._folders["b"] = self._folders["a"]
            for folder in self._folders.values():
                folder.mkdir(exist_ok=True)
            while decision is None or decision.verdict is None:
                try:
                    self._launches.append(self._launch())
                except Lost as lost:
                    return self._lost(lost, time.monotonic() - started)
                decision = self._decide(time.monotonic() - started)
                self._watch(self._launches, decision)
        return self._answer(decision, "", time.monotonic() - started)

    def _decide(self, elapsed: float) -> Decision:
        each = elapsed / len(self._launches)
        last = len(self._launches) >= self._terms.looks[-1] or elapsed + each > self._terms.budget_s
        metrics = _metrics(self._launches[0])
        return decide(self._launches, metrics, floor=self._terms.floor, looks=self._terms.looks, last=last)

    def _launch(self) -> Launch:
        orders: tuple[tuple[Literal["a", "b"], ...], ...] = (("a", "b"), ("b", "a"))
        order = self._rng.choice(orders)
        fighters: dict[str, Fighter] = {}
        try:
            self._open_all(order, fighters)
            self._warm_up_all([fighters[side] for side in order])
            a, b = self._rounds(fighters)
        finally:
            for fighter in fighters.values():
                fighter.end()
        return Launch(a=tuple(a), b=tuple(b), first=order[0])

    def _open_all(self, order: Sequence[str], fighters: dict[str, Fighter]) -> None:
        """Open both, even when the first is lost: whether the other one is right must be known too."""
        lost: list[Lost] = []
        for side in order:
            try:
                self._open(side, fighters)
            except Lost as one:
                self._records[side] = one.record
                lost.append(one)
                if self._launches:
                    break
        if lost:
            raise lost[0]

    def _open(self, side: str, fighters: dict[str, Fighter]) -> None:
        live, workload = self._sides[side], self._workloads[side]
        try:
            worker = live.hatch(self._rng.getrandbits(31))
        except WorkerDied as died:
            reason = f"no worker could be started: {died.reason}"
            facts = {"implementation": live.arm.name, "workload": workload, "reason": reason, "detail": died.detail}
            raise Lost(side, Failed(**facts)) from died
        fighters[side] = Fighter(side, live.arm, worker, workload, self._terms.timeout_s)
        record = fighters[side].open(self._seed, str(self._folders[side]), again=bool(self._launches))
        self._records.setdefault(side, record)

    def _warm_up_all(self, fighters: Sequence[Fighter]) -> None:
        """Both by one clock, the same in every launch: kernel times where one of them is too short for events."""
        for fighter in fighters:
            fighter.warm_up(self._clock)
        if len({fighter.clock for fighter in fighters}) > 1 and self._clock is None:
            if all("kernel" in (fighter.clock, *fighter.other_clocks) for fighter in fighters):
                self._clock = "kernel"
                for fighter in fighters:
                    fighter.warm_up(self._clock)
        elif self._clock is None and fighters[0].on_device:
            self._clock = fighters[0].clock

    def _rounds(self, fighters: dict[str, Fighter]) -> tuple[list[Block], list[Block]]:
        """ABBA or BAAB at random, so that neither a trend nor who goes first favours an arm."""
        taken: dict[str, list[Block]] = {"a": [], "b": []}
        calls, started = _calls(fighters["a"], fighters["b"]), time.monotonic()
        while not taken["a"] or time.monotonic() - started < self._terms.launch_s:
            for side in self._rng.choice(("abba", "baab")):
                taken[side].append(fighters[side].block(calls))
        return taken["a"], taken["b"]

    def _lost(self, lost: Lost, elapsed: float) -> Comparison:
        self._records[lost.side] = lost.record
        when = f" in launch {len(self._launches) + 1}" if self._launches else ""
        label = self._sides[lost.side].arm.label
        return self._answer(None, f"{label}: {lost.record.status}{when}: {lost.record.reason}", elapsed)

    def _answer(self, decision: Decision | None, reason: str, elapsed: float) -> Comparison:
        arms = {side: live.arm for side, live in self._sides.items()}
        estimates = {} if decision is None else decision.estimates
        main = estimates[published(tuple(estimates))] if estimates else None
        return Comparison(
            a=arms["a"].label,
            b=arms["b"].label,
            workload=self._terms.workload,
            verdict=None if decision is None else decision.verdict,
            reason=reason,
            ratio=main and main.ratio,
            interval=main and main.interval,
            smallest_slowdown=main and main.detectable,
            estimates=estimates,
            launches=tuple(self._launches),
            elapsed_s=elapsed,
            record_a=self._records.get("a"),
            record_b=self._records.get("b"),
            commit_a=arms["a"].commit,
            commit_b=arms["b"].commit,
            floor=self._terms.floor,
            notes=() if decision is None else decision.notes,
        )


def _metrics(launch: Launch) -> tuple[str, ...]:
    """Those that both arms have: one of them may run on another kind of device."""
    return tuple(name for name in launch.a[0].ns if name in launch.b[0].ns)


def _calls(a: Fighter, b: Fighter) -> int:
    """Calls of a block, the same for both: enough for the clock, not so many that neighbours are far apart."""
    least = BLOCK_GPU_NS if a.on_device or b.on_device else BLOCK_NS
    wanted = ceil(least / max(1.0, min(a.call_ns, b.call_ns)))
    fitting = max(1, int(LONGEST_BLOCK_NS / max(1.0, a.call_ns, b.call_ns)))
    return max(1, min(wanted, fitting, MOST_CALLS))
