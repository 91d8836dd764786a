"""A lab without workers: stands in for `attnbench.run.launch`, so that the command line is tested in milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from record_factory import CPU, incorrect, noisy, ok, unsupported

from attnbench import registry
from attnbench.run import launch as launcher
from attnbench.run.environment import Diagnosis, ImplementationState
from attnbench.run.plan import Planned
from attnbench.spec import Cell

NAMES = ["jax.xla", "numpy.float32", "torch.eager", "torch.fa3", "torch.sdpa", "torch.sdpa-math"]
SPEED = {"torch.eager": 4e6, "torch.sdpa": 1e6, "torch.sdpa-math": 3e6, "jax.xla": 2e6, "numpy.float32": 9e6}
SPEED |= {"torch.multihead-dilated": 5e6, "torch.gemma-stack": 6e6}


class FakeLab:
    """Stands in for `launch`: remembers the requests, answers from SPEED, and stops where it is told to."""

    def __init__(self) -> None:
        self.requests: list = []
        self.done: frozenset[str] = frozenset()
        self.interrupt_after: int | None = None

    def answer(self, name: str, workload, measure: bool):
        if ":" in name:
            return incorrect(name.rpartition(":")[2], "its output is wrong from row 7 on", workload)
        if name not in SPEED:
            return unsupported(name, "needs cuda, this is cpu", workload)
        return ok(name, noisy(SPEED[name], len(name)) if measure else None, workload)

    def launch(self, request, sink, listener, done=frozenset()) -> None:
        self.requests.append(request)
        self.done = done
        listener.environment("torch", CPU)
        cells = [Cell(name, w) for w in request.workloads for name in request.implementations]
        listener.planned([Planned(cell, None) for cell in cells])
        for number, workload in enumerate(request.workloads):
            if number == self.interrupt_after:
                raise KeyboardInterrupt
            todo = [name for name in request.implementations if Cell(name, workload).id not in done]
            records = [self.answer(name, workload, request.measure) for name in todo]
            for record in records:
                listener.finished(record)
            sink([*records, *(ok(name, [1e5], workload) for name in ("anchor.matmul", "anchor.copy"))])

    def plan_only(self, request, listener):
        reasons = {"torch.fa3": "needs 38 GB, 24 GB here"}
        return [Planned(Cell(n, w), reasons.get(n)) for w in request.workloads for n in request.implementations]

    def diagnose(self, listener) -> Diagnosis:
        facts = {"framework": "torch", "origin": "attnbench", "approximate": False, "timed": True}
        reasons = {"torch.eager": None, "torch.fa3": "needs cuda"}
        states = [ImplementationState(name=name, reason=reason, **facts) for name, reason in reasons.items()]
        return Diagnosis(environments={"torch": CPU}, frameworks={"torch": None}, implementations=states)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeLab:
    """Replace the real one, and work in an empty folder."""
    fake = FakeLab()
    for name in ("launch", "plan_only", "diagnose"):
        monkeypatch.setattr(launcher, name, getattr(fake, name))
    monkeypatch.setattr(registry, "names", lambda: NAMES)
    monkeypatch.chdir(folder)
    return fake
