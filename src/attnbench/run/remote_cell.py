"""An open cell in a worker, as the interleaving loop samples it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter_ns

from attnbench.measuring.sampling import Dropped
from attnbench.run import protocol as p
from attnbench.run.crew import Crew
from attnbench.run.plan import Group
from attnbench.run.remote import WorkerDied
from attnbench.spec import Cell, Record, Time

OTHER_CLOCK_SAMPLES, FEWEST_BY_OTHER_CLOCK = 20, 5
OTHER_CLOCK_NS = 3e8


class CellDied(Exception):
    """A cell took its worker along; `record` is what is left of it."""

    def __init__(self, cell: Cell, group: Group, record: Record) -> None:
        super().__init__(record.reason)
        self.cell, self.group, self.record = cell, group, record


class SessionsLost(Exception):
    """A worker ended while nothing was asked of it: what it had open is gone, and no cell is known to be the cause."""

    def __init__(self, cell: Cell, group: Group) -> None:
        super().__init__(cell.id)
        self.cell, self.group = cell, group


def last_words(cell: Cell, group: Group, crew: Crew, died: WorkerDied) -> CellDied:
    """The death of a worker as that of the cell it was busy with."""
    facts = {"implementation": cell.implementation, "workload": cell.workload, "config": cell.config}
    return CellDied(cell, group, died.record(environment=crew.environments.get(group), **facts))


@dataclass
class RemoteCell:
    """An open cell in a worker: a Source for the interleaving loop."""

    cell: Cell
    group: Group
    opened: p.Opened
    crew: Crew
    timeout_s: float
    warm: p.Warm | None = None
    lost: Record | None = None
    repeats: bool = True
    clock_ns: int = 0
    check_ns: int = 0
    changed: tuple[str, ...] = ()
    """What the cell was seen to change in its process while it was timed."""
    by_other_clocks: dict[str, Time] = field(default_factory=dict)

    @property
    def call_ns(self) -> float:
        """Estimate from the warm-up."""
        return self.steady.call_ns

    @property
    def parts(self) -> tuple[str, ...]:
        """What is sampled."""
        return self.steady.parts

    @property
    def slow_clock(self) -> bool:
        """Whether a visit has a large fixed cost."""
        return self.steady.slow_clock

    @property
    def steady(self) -> p.Warm:
        """What the warm-up found."""
        assert self.warm is not None
        return self.warm

    def warm_up(self, clock: str | None = None) -> None:
        """Make it steady, or when it is, change its clock; raises like `sample`."""
        answer = self._ask(p.WarmUp(self.cell.id, clock, brief=self.warm is not None))
        assert isinstance(answer, p.Warm)
        self.warm = answer

    def sample(self, part: str, count: int, calls: int) -> list[float]:
        """Return ns per call; raises Dropped when the cell turned out wrong, CellDied when its worker is gone, and
        SessionsLost when that had happened before."""
        return self._sampled(p.Sample(self.cell.id, part, count, calls, self.steady.clock))

    def sample_other(self, clock: str) -> list[float]:
        """The main part by another clock."""
        count = min(OTHER_CLOCK_SAMPLES, max(FEWEST_BY_OTHER_CLOCK, int(OTHER_CLOCK_NS / max(self.call_ns, 1.0))))
        return self._sampled(p.SampleOther(self.cell.id, clock, count))

    def examine_after(self) -> None:
        """Check it once more when its sampling is over; raises like `sample`."""
        start = perf_counter_ns()
        self._ask(p.ExamineAfter(self.cell.id))
        self.check_ns += perf_counter_ns() - start

    def _sampled(self, question: p.Question) -> list[float]:
        answer = self._ask(question)
        assert isinstance(answer, p.Sampled)
        self.repeats = self.repeats and answer.repeats
        self.clock_ns += answer.clock_ns
        self.check_ns += answer.check_ns
        self.changed += answer.changed
        return answer.ns

    def _ask(self, question: p.Question) -> p.Answer:
        try:
            answer = self.crew.ask(self.group, question, self.timeout_s)
        except WorkerDied as died:
            raise last_words(self.cell, self.group, self.crew, died) from died
        if isinstance(answer, p.Refused) and answer.not_open:
            raise SessionsLost(self.cell, self.group)
        if isinstance(answer, p.Refused):
            raise last_words(self.cell, self.group, self.crew, WorkerDied("failed", answer.reason))
        if not isinstance(answer, p.Closed):
            return answer
        if answer.poisoned:
            self.crew.dismiss(self.group)
            raise CellDied(self.cell, self.group, answer.record)
        self.lost = answer.record
        raise Dropped
