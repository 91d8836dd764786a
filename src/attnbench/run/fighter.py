"""One arm of a comparison as the comparison sees it: a worker, asked to open its cell, warm up and take its turns."""

from __future__ import annotations

from typing import Any

from attnbench.comparison import Block
from attnbench.run import protocol as p
from attnbench.run.arms import Arm
from attnbench.run.remote import Local, Remote, WorkerDied
from attnbench.spec import Cell, Failed, Ok, Record, Workload


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

    def describe(self) -> str:
        """The kind of device it runs on."""
        described = self._ask(p.Describe([]))
        assert isinstance(described, p.Described)
        return described.environment.device

    def open(self, seed: int, shared: str, again: bool) -> Ok:
        """Build and verify; raises Lost."""
        opened = self._ask(p.Open(self._cell, False, True, None, seed, shared, again))
        assert isinstance(opened, p.Opened)
        if not opened.timed:
            raise Lost(self._side, self._failed(opened.record.notes[0] if opened.record.notes else "cannot be timed"))
        return opened.record

    def warm_up(self, clock: str | None = None, brief: bool = False) -> None:
        """Until it is steady, by the clock named or the one that suits it; `brief`: it has not rested since."""
        warm = self._ask(p.WarmUp(self._cell.id, clock, brief))
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
            raise Lost(self._side, died.record(**self._facts)) from died
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
