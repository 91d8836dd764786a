"""The workers of a run, one per group, started when first needed and replaced when they die."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from attnbench import errors, frameworks, registry
from attnbench.measuring.rates import Ceilings
from attnbench.run import protocol as p
from attnbench.run.ceilings import load_ceilings, store_ceilings
from attnbench.run.plan import Asked, Group, Planned, group_of
from attnbench.run.remote import Local, Remote, WorkerDied
from attnbench.run.travel import Traveller
from attnbench.spec import Cell, Config, Environment, Implementation, Workload

START_S = 120.0
CEILINGS_S = 60.0
KEEPS_MEMORY = frozenset({"jax"})
"""Frameworks whose process gives no device memory back while it lives."""


class Crew:
    """All workers of one run on one device kind per framework."""

    def __init__(
        self, travellers: Sequence[Traveller], device: str | None, threads: int | None, in_process: bool = False
    ) -> None:
        self._travellers, self._device, self._threads = travellers, device, threads
        self._in_process = in_process
        self._workers: dict[Group, Remote | Local] = {}
        self._lanes: dict[str, int] = {}
        self.clock: str | None = None
        """The clock that was asked for, so that refusals can mention it."""
        self.environments: dict[Group, Environment] = {}
        self.unusable: dict[str, str] = {}
        """Framework -> why no worker of it can be had."""
        self.on_environment: Callable[[str, Environment], None] = lambda framework, environment: None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss_all()

    def dismiss_all(self) -> None:
        """End every worker."""
        for group in list(self._workers):
            self.dismiss(group)

    def dismiss(self, group: Group) -> None:
        """End a worker; the next question to its group starts another."""
        worker = self._workers.pop(group, None)
        if worker is not None:
            worker.kill()

    def give_memory_back(self, groups: Iterable[Group]) -> None:
        """End those of these workers whose memory nobody else could have otherwise."""
        for group in groups:
            if group.framework in KEEPS_MEMORY:
                self.dismiss(group)

    def keep_only(self, names: Iterable[str]) -> None:
        """Of workers on an accelerator, those that these implementations need: where the idle ones hold its memory, no
        other process can even open it."""
        needed = {self.group(name) for name in names}
        self.give_memory_back(g for g in list(self._workers) if g not in needed and self.accelerated(g.framework))

    def group(self, name: str) -> Group:
        """The worker an implementation runs in."""
        for traveller in self._travellers:
            if traveller.name == name:
                return Group(traveller.framework, traveller.process, self._lanes.get(name, 0))
        return group_of(registry.get(name))._replace(lane=self._lanes.get(name, 0))

    def registered(self, name: str) -> Implementation | None:
        """An implementation that this process knows; None for one that only its worker has."""
        known = any(traveller.name == name for traveller in self._travellers)
        return None if known else registry.get(name)

    def configs(self, one: Asked, workload: Workload) -> Sequence[Config]:
        """What to set an implementation to: as asked, or in every way worth trying where none is meant by its name."""
        implementation = self.registered(one.name)
        if implementation is None or not implementation.every_config or {*implementation.tunables} <= {*one.config}:
            return (one.config,)
        self.start([Group(implementation.framework)])
        environment = self.environment(implementation.framework)
        named = implementation.configured(one.config)
        found = () if environment is None else named.configs_here(workload, environment)
        return found or (one.config,)

    def spread(self, names: Sequence[str]) -> None:
        """On an accelerator each implementation gets a worker of its own: opening them is bound by the host."""
        taken: dict[Group, int] = {}
        for name in dict.fromkeys(names):
            base = self.group(name)._replace(lane=0)
            if self.accelerated(base.framework):
                self._lanes[name] = taken.get(base, 0)
                taken[base] = taken.get(base, 0) + 1

    def accelerated(self, framework: str) -> bool:
        """Whether a framework runs on something other than the CPU here."""
        environment = self.environment(framework)
        return environment is not None and environment.device != "cpu"

    def environment(self, framework: str) -> Environment | None:
        """Where a framework runs; None before any worker of it has told."""
        return next((found for group, found in self.environments.items() if group.framework == framework), None)

    def start(self, groups: Sequence[Group]) -> None:
        """Start workers side by side (importing a framework takes seconds), then hear what they are."""
        for group in groups:
            if group in self._workers and not self._workers[group].alive:
                self.dismiss(group)
        wanted = [group for group in groups if group not in self._workers and self._usable(group.framework)]
        for group in wanted:
            self._workers[group] = self._new(group.framework)
        try:
            for group in wanted:
                self._introduce(group)
        except BaseException:
            for group in wanted:
                self.dismiss(group)
            raise

    def _new(self, framework: str) -> Remote | Local:
        if self._in_process:
            return Local(framework, self._device)
        return Remote.start(framework, self._device, self._threads)

    def _usable(self, framework: str) -> bool:
        if framework in self.unusable:
            return False
        if not frameworks.installed(framework):
            self.unusable[framework] = f"{framework} is not installed: pip install 'attnbench[{framework}]'"
        return framework not in self.unusable

    def _introduce(self, group: Group) -> None:
        try:
            answer = self._workers[group].ask(p.Describe([*sys.path, ""]), START_S)
        except WorkerDied as died:
            self._workers.pop(group)
            if group.process or group.lane:
                raise
            self.unusable[group.framework] = f"no {group.framework} worker could be started: {died.reason}"
            return
        if isinstance(answer, p.Refused):
            self.dismiss(group)
            self.unusable[group.framework] = answer.reason
            return
        assert isinstance(answer, p.Described)
        if group not in self.environments:
            self.environments[group] = answer.environment
            if not group.process and not group.lane:
                self.on_environment(group.framework, answer.environment)
        for traveller in self._travellers:
            if (traveller.framework, traveller.process) == group[:2] and not traveller.is_here:
                self._enlist(traveller, group)

    def _enlist(self, traveller: Traveller, group: Group) -> None:
        try:
            answer = self._workers[group].ask(traveller.enlist(), START_S)
        except WorkerDied as died:
            raise errors.UsageError(f"{traveller.label} could not be loaded: {died.reason}.") from died
        if isinstance(answer, p.Refused):
            raise errors.UsageError(f"{traveller.label} could not be loaded: {answer.reason}")

    def ask(self, group: Group, question: p.Question, timeout_s: float) -> p.Answer:
        """Ask a group's worker; one that died, or whose answer nobody waited for (Ctrl-C), is not asked again."""
        self.start([group])
        if group not in self._workers:
            raise WorkerDied("failed", self.unusable.get(group.framework, "no worker"))
        try:
            return self._workers[group].ask(question, timeout_s)
        except BaseException:
            self.dismiss(group)
            raise

    def refusals(self, cells: Sequence[Cell]) -> list[Planned]:
        """Each cell with its reason not to run; the framework's plain worker judges for special processes too."""
        groups = {cell.implementation: self.group(cell.implementation) for cell in cells}
        bases = dict.fromkeys(self._judge(cell, groups) for cell in cells)
        self.start(list(bases))
        reasons: dict[str, str | None] = {}
        for base in bases:
            mine = [cell for cell in cells if self._judge(cell, groups) == base]
            if base not in self._workers:
                reasons |= {cell.id: self.unusable.get(base.framework, "no worker") for cell in mine}
                continue
            reasons |= dict(zip((cell.id for cell in mine), self._reasons(base, mine)))
        return [Planned(cell, reasons[cell.id]) for cell in cells]

    def _reasons(self, group: Group, cells: Sequence[Cell]) -> list[str | None]:
        """What the worker says; when the question kills it, each cell is asked about alone."""
        try:
            answer = self.ask(group, p.Refusals(list(cells), self.clock), START_S)
        except WorkerDied as died:
            if len(cells) == 1:
                return [f"could not say whether it supports this: {died.reason}"]
            return [reason for cell in cells for reason in self._reasons(group, [cell])]
        assert isinstance(answer, p.Reasons)
        return answer.reasons

    def _judge(self, cell: Cell, groups: dict[str, Group]) -> Group:
        known = any(traveller.name == cell.implementation for traveller in self._travellers)
        base = groups[cell.implementation]._replace(lane=0)
        return base if known else Group(base.framework)

    def verify_only(self, implementation: Implementation) -> str:
        """Why an implementation may be checked but not timed here; empty when it may be timed."""
        answer = self.ask(Group(implementation.framework), p.VerifyOnly(implementation.name), START_S)
        assert isinstance(answer, p.Reasons)
        return answer.reasons[0] or ""

    def ceilings(self, dtype: str, device: str, again: bool = False) -> Ceilings | None:
        """Best measured ceilings of a device over the frameworks at work, from the store or measured now.

        `again` measures once more and keeps the better: before a figure is called implausible.
        """
        found: list[Ceilings] = []
        for group, environment in self.environments.items():
            if group != Group(group.framework) or environment.device != device:
                continue
            known = load_ceilings(environment, dtype)
            if known is None or again:
                known = _best(known, self._measure_ceilings(group, dtype))
                if known is not None:
                    store_ceilings(environment, dtype, known)
            if known is not None:
                found.append(known)
        best: Ceilings | None = None
        for one in found:
            best = _best(best, one)
        return best

    def _measure_ceilings(self, group: Group, dtype: str) -> Ceilings | None:
        """None where it cannot be done: the record then says that there is no ceiling."""
        try:
            answer = self.ask(group, p.MeasureCeilings(dtype), CEILINGS_S)
        except WorkerDied:
            return None
        return answer.ceilings if isinstance(answer, p.Measured) else None


def _best(a: Ceilings | None, b: Ceilings | None) -> Ceilings | None:
    """The higher of each ceiling."""
    if a is None or b is None:
        return a or b
    return Ceilings(
        max(a.flops_per_s, b.flops_per_s), max(a.bytes_per_s, b.bytes_per_s), max(a.cache_bytes, b.cache_bytes)
    )
