"""One side of a comparison as the comparison sees it: a worker, asked to open its cell, warm up and take its turns."""

from __future__ import annotations

import secrets
from typing import Any

from attnbench.comparing.sides import Side
from attnbench.comparison import Block
from attnbench.run import protocol as p
from attnbench.run.machine import scratch
from attnbench.run.origin import NotInRef
from attnbench.run.remote import Local, Remote, WorkerDied
from attnbench.spec import Cell, Failed, Ok, Record, Workload


class Lost(Exception):
    """A side gave up its worker (`died`) or its answer; `record` is what is left."""

    def __init__(self, side: str, record: Record, died: bool = False) -> None:
        super().__init__(record.reason)
        self.side, self.record, self.died = side, record, died


def verify_alone(side: Side, workload: Workload, timeout_s: float = 120.0) -> Record:
    """Return how a side is verified if there is nothing to compare it with; raises NotInRef as a comparison does."""
    try:
        worker = side.start_worker(secrets.randbits(31))
    except WorkerDied as died:
        return died.record(implementation=side.code.name, workload=workload, config=side.code.config)
    worker = SideWorker("b", side, worker, workload, timeout_s)
    try:
        with scratch() as folder:
            return worker.open(secrets.randbits(31), str(folder), again=False)
    except Lost as lost:
        return lost.record
    finally:
        worker.end()


class SideWorker:
    """One side's worker in one launch, its cell open. It runs only while it is asked something.

    Between its turns all of its processes are stopped: threads that spin and helpers that it has started would take the
    processor from the other side, whose time would then be too long. A stopped process keeps its GPU context.
    """

    def __init__(self, side: str, live: Side, worker: Remote | Local, workload: Workload, timeout_s: float) -> None:
        self._side, self._live, self._worker, self._timeout_s = side, live, worker, timeout_s
        self._cell = Cell(live.code.name, workload, live.code.config)
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
        self._live.resume()
        try:
            answer = self._worker.ask(question, self._timeout_s)
        except WorkerDied as died:
            raise Lost(self._side, died.record(**self._facts), died=True) from died
        self._live.pause()
        if isinstance(answer, p.Closed):
            raise Lost(self._side, answer.record)
        if isinstance(answer, p.Refused) and answer.not_in_ref:
            raise NotInRef(f"{self._live.code.label}: {answer.reason}")
        if isinstance(answer, p.Refused):
            raise Lost(self._side, self._failed(answer.reason))
        return answer

    @property
    def _facts(self) -> dict[str, Any]:
        cell = self._cell
        return {"implementation": cell.implementation, "workload": cell.workload, "config": cell.config}

    def _failed(self, reason: str) -> Failed:
        return Failed(reason=reason, **self._facts)

    def abort(self) -> None:
        """Make another thread's question to it fail at once."""
        self._worker.abort()

    def end(self) -> None:
        """The launch is over."""
        self._worker.kill()
