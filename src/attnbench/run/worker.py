"""A worker, `python -m attnbench.run.worker FD FRAMEWORK DEVICE`: answers questions about cells until its parent ends.

The same `Worker` also serves in the calling process, for a function that cannot travel.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attnbench import errors, frameworks, registry
from attnbench.measuring import anchors
from attnbench.measuring.draws import Draws
from attnbench.measuring.session import FellBack, Options, Session, refusal
from attnbench.measuring.subject import Wrong
from attnbench.run import protocol as p
from attnbench.run.environment import describe
from attnbench.run.memory_need import does_not_fit
from attnbench.spec import Cell, Failed, Incorrect, OutOfMemory, Unsupported


class Worker:
    """Sessions of one framework on one device."""

    def __init__(self, framework: str, device: str | None) -> None:
        self._framework = frameworks.get(framework)
        self._device = device or self._framework.devices()[0]
        self._environment = self._framework.environment(self._device)
        self._sessions: dict[str, Session | anchors.AnchorSession] = {}
        self._draws: dict[str, Draws] = {}
        self._answers: dict[type, Callable[[Any], p.Answer]] = {
            p.Describe: self._describe,
            p.Enlist: self._enlist,
            p.Refusals: self._refusals,
            p.VerifyOnly: lambda q: p.Reasons([registry.get(q.implementation).verify_only or None]),
            p.Open: self._open,
            p.Sample: lambda q: self._sampling(q.cell, lambda s: s.sample(q.part, q.count, q.calls)),
            p.SampleOther: lambda q: self._sampling(q.cell, lambda s: s.sample_other(q.clock, q.count)),
            p.Trace: lambda q: p.Traced(str(self._sessions[q.cell].trace(Path(q.folder)))),
            p.MeasureCeilings: self._ceilings,
            p.Release: self._release,
        }

    def answer(self, question: p.Question) -> p.Answer:
        """One question, one answer; what a cell does wrong comes back as its record."""
        return self._answers[type(question)](question)

    def _describe(self, question: p.Describe) -> p.Described:
        sys.path.extend(folder for folder in question.path if folder not in sys.path)
        self._environment = describe(self._framework, self._device)
        return p.Described(self._environment)

    def _enlist(self, question: p.Enlist) -> p.Answer:
        try:
            if question.pickled is not None:
                import cloudpickle

                found = cloudpickle.loads(question.pickled)
            else:
                assert question.reference is not None
                found = registry.load_reference(question.reference)
            implementation = registry.resolve(found, question.framework)
        except Exception as error:
            return p.Refused(str(error) if isinstance(error, errors.UsageError) else f"{type(error).__name__}: {error}")
        implementation.name = question.name
        registry.register(implementation)
        return p.Done()

    def _refusals(self, question: p.Refusals) -> p.Reasons:
        return p.Reasons([self._refusal(cell) for cell in question.cells])

    def _refusal(self, cell: Cell) -> str | None:
        if cell.implementation in anchors.NAMES:
            return None
        implementation = registry.get(cell.implementation)
        reason = refusal(implementation, cell.workload, self._environment)
        return reason or does_not_fit(implementation, cell.workload, self._environment)

    def _open(self, question: p.Open) -> p.Answer:
        cell = question.cell

        def start() -> p.Answer:
            if (reason := self._refusal(cell)) is not None:
                raise errors.Unsupported(reason)
            session = self._session(question)
            record = (
                session.open() if isinstance(session, anchors.AnchorSession) else session.open(self._inputs(question))
            )
            self._sessions[cell.id] = session
            if not session.timed:
                return p.Opened(record, timed=False)
            return p.Opened(
                record,
                True,
                session.call_ns,
                session.parts,
                session.slow_clock,
                session.clock_name,
                session.other_clocks,
            )

        return self._guarded(cell, start)

    def _session(self, question: p.Open) -> Session | anchors.AnchorSession:
        cell = question.cell
        if cell.implementation in anchors.NAMES:
            return anchors.AnchorSession(self._framework, self._environment, cell)
        options = Options(question.thorough, question.measure, question.clock, question.seed)
        return Session(self._framework, self._environment, registry.get(cell.implementation), cell, options)

    def _inputs(self, question: p.Open) -> Draws:
        workload = question.cell.workload
        if workload.id not in self._draws:
            self._draws[workload.id] = Draws(self._framework, self._device, workload, question.seed)
        return self._draws[workload.id]

    def _sampling(self, cell: str, sample: Callable[[Any], list[float]]) -> p.Answer:
        session = self._sessions[cell]
        return self._guarded(session._cell, lambda: p.Sampled(sample(session)))

    def _guarded(self, cell: Cell, action: Callable[[], p.Answer]) -> p.Answer:
        """Run an action of a cell; anything it raises becomes the cell's record."""
        facts = {
            "implementation": cell.implementation,
            "workload": cell.workload,
            "config": cell.config,
            "environment": self._environment,
        }
        try:
            return action()
        except errors.Unsupported as refused:
            return p.Closed(Unsupported(reason=str(refused), **facts))
        except Wrong as wrong:
            return p.Closed(Incorrect(reason=str(wrong), errors=wrong.errors, **facts))
        except FellBack as fell:
            return p.Closed(Failed(reason=str(fell), **facts))
        except Exception as error:
            detail = traceback.format_exc()[-4000:]
            first_line = (str(error).strip().splitlines() or [""])[0][:300]
            if self._framework.is_out_of_memory(error):
                self._release(p.Release())
                return p.Closed(OutOfMemory(reason=first_line or "out of memory", detail=detail, **facts))
            reason = f"{type(error).__name__}: {first_line}"
            return p.Closed(Failed(reason=reason, detail=detail, **facts), poisoned=not self._healthy())

    def _healthy(self) -> bool:
        """Whether the device still answers (an illegal memory access poisons a CUDA context for good)."""
        try:
            small = self._framework.copy(1024, self._device)
            self._framework.wait(small.run(None))
        except Exception:
            return False
        return True

    def _ceilings(self, question: p.MeasureCeilings) -> p.Answer:
        try:
            return p.Measured(anchors.measure_ceilings(self._framework, self._device, question.dtype))
        except Exception as error:
            return p.Refused(f"{type(error).__name__}: {error}")

    def _release(self, question: p.Release) -> p.Done:
        self._sessions.clear()
        self._draws.clear()
        self._framework.reset()
        return p.Done()


def main() -> None:
    """Serve one parent over the inherited socket."""
    faulthandler.enable()
    os.environ["ATTNBENCH_WORKER"] = "1"
    connection = Connection(int(sys.argv[1]))
    worker = Worker(sys.argv[2], sys.argv[3] or None)
    while True:
        try:
            question = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(p.encode(worker.answer(p.decode_question(question))))


if __name__ == "__main__":
    main()
