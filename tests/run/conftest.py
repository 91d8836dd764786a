"""Runs through real workers, short and without measuring the machine's ceilings each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from attnbench import masks
from attnbench.measuring.rates import Ceilings
from attnbench.results.sentences import closing
from attnbench.results.standings import rank
from attnbench.run import pool
from attnbench.run.launch import Listener, Request, launch
from attnbench.spec import Cell, Record, Workload

HERE = Path(__file__).parent
CAUSAL = Workload(batch=2, q_len=24, heads=4, kv_heads=2, head_dim=8, mask=masks.causal())


@dataclass
class Seen(Listener):
    """What a run handed over: records, the batches in which they came, and what the listener was told."""

    batches: list[list[Record]] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def sink(self, records: Sequence[Record]) -> None:
        self.batches.append(list(records))
        self.events.append(("sink", records[0].workload.id))

    def stage(self, cell: Cell, stage: str) -> None:
        self.events.append((stage, cell.id))

    def finished(self, record: Record) -> None:
        self.events.append(("finished", record.cell.id))

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    @property
    def records(self) -> list[Record]:
        return [r for batch in self.batches for r in batch if not r.implementation.startswith("anchor.")]

    def of(self, workload: Workload) -> Seen:
        """The part of a run that concerns one workload."""
        return Seen([batch for batch in self.batches if batch[0].workload == workload])

    @property
    def by_name(self) -> dict[str, Record]:
        return {record.implementation: record for record in self.records}

    @property
    def ranked(self) -> set[str]:
        return {row.implementation for row in rank(self.records) if row.rank is not None}

    @property
    def closing(self) -> str:
        return closing(self.records)


@pytest.fixture(autouse=True)
def _as_a_user_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start with what the frameworks choose by themselves."""
    for name in ("OMP_NUM_THREADS", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that nothing reaches, so that no second is spent on measuring them."""
    monkeypatch.setattr(pool, "load_ceilings", lambda environment, dtype: Ceilings(1e15, 1e15))
    monkeypatch.setattr(pool.Pool, "_confirms", lambda *_: True)


@pytest.fixture
def lab(ceilings: None) -> Callable[..., Seen]:
    """Run implementations on workloads in real workers; returns what was seen."""

    def run(*implementations: Any, workloads: Sequence[Workload] = (CAUSAL,), **options: Any) -> Seen:
        seen = Seen()
        settings = {"framework": "numpy", "budget_s": 0.02, "timeout_s": 60.0, "seed": 1} | options
        done = settings.pop("done", frozenset())
        request = Request(workloads=tuple(workloads), implementations=implementations, **settings)
        launch(request, seen.sink, seen, done)
        return seen

    return run


@pytest.fixture
def trap() -> Callable[[str], str]:
    """A numpy trap as the reference that a command line would give."""
    return lambda name: f"{HERE / 'traps.py'}:{name}"


@pytest.fixture
def torch_trap() -> Callable[[str], str]:
    """The same for torch."""
    return lambda name: f"{HERE / 'torch_traps.py'}:{name}"


@pytest.fixture
def causal() -> Workload:
    """What every trap is asked for."""
    return CAUSAL
