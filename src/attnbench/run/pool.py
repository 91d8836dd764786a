"""The worker processes of a run, one per group: started when first needed, replaced when they die.

A user function is loaded in a worker of its own, which is stopped while nothing is asked of it: threads that spin and
processes that it has started would otherwise take the processor from others. Anchors and ceilings are measured in a
clean worker of each framework, which loads nothing but attnbench's own implementations. Measured ceilings are kept in
the user's cache folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from attnbench import errors, frameworks, registry
from attnbench.files import decode_json
from attnbench.measuring.rates import Ceilings
from attnbench.run import protocol as p
from attnbench.run.machine import cache_folder
from attnbench.run.plan import Asked, Group, Planned, group_of
from attnbench.run.remote import Local, Remote, WorkerDied
from attnbench.run.user_functions import UserFunction
from attnbench.spec import Cell, Config, Environment, Implementation, Workload

START_S = 120.0
CEILINGS_S = 60.0
NEAR, NEAR_COPY = 0.5, 0.25
"""Shares of a stored ceiling that a brief measurement must reach; else the ceiling is measured again. Less is asked of
a copy, which takes long and is interrupted more on a busy machine."""
KEEPS_MEMORY = frozenset({"jax"})
"""Frameworks whose process returns no device memory to the system while it lives."""


class Pool:
    """The workers of one run, on one kind of device per framework."""

    def __init__(
        self, user_functions: Sequence[UserFunction], device: str | None, threads: int | None, in_process: bool = False
    ) -> None:
        self._user_functions = {one.name: one for one in user_functions}
        self._device, self._threads, self._in_process = device, threads, in_process
        self._workers: dict[Group, Remote | Local] = {}
        self._lost: dict[Group, WorkerDied] = {}
        """Groups whose worker could not be started, twice in a row."""
        self._loaded_once: set[Group] = set()
        self._believed: dict[tuple[Group, str], Ceilings] = {}
        """Ceilings by clean worker and dtype that were measured or confirmed in this run."""
        self._lanes: dict[str, int] = {}
        self.clock: str | None = None
        """The requested clock, for the refusals of cells on devices that lack it."""
        self.environments: dict[Group, Environment] = {}
        self.unusable: dict[str, str] = {}
        """Frameworks without a worker, and the reason."""
        self.on_environment: Callable[[str, Environment], None] = lambda framework, environment: None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss_all()

    def dismiss_all(self) -> None:
        """End all workers of the pool."""
        for group in list(self._workers):
            self.dismiss(group)

    def dismiss(self, group: Group) -> None:
        """End the worker of a group; the next question to the group starts another."""
        if (worker := self._workers.pop(group, None)) is not None:
            worker.kill()

    def give_memory_back(self, groups: Iterable[Group]) -> None:
        """End those workers of the groups whose framework would keep device memory otherwise."""
        for group in groups:
            if group.framework in KEEPS_MEMORY:
                self.dismiss(group)

    def keep_only(self, names: Iterable[str]) -> None:
        """End workers on an accelerator that none of these implementations needs, so that their memory is free."""
        needed = {self.group(name) for name in names}
        needed |= {self.clean(group.framework) for group in needed}
        self.give_memory_back(g for g in list(self._workers) if g not in needed and self.accelerated(g.framework))

    def group(self, name: str) -> Group:
        """Return the worker in which an implementation runs."""
        one = self._user_functions.get(name)
        group = group_of(registry.get(name)) if one is None else Group(one.framework, one.process)
        return group._replace(lane=self._lanes.get(name, 0))

    def clean(self, framework: str) -> Group:
        """Return the worker of a framework in which no user code is loaded."""
        return Group(framework, "anchors") if self._in_process else Group(framework)

    def registered(self, name: str) -> Implementation | None:
        """Return an implementation of the registry; None for a user function, which only its worker knows."""
        return None if name in self._user_functions else registry.get(name)

    def configs(self, one: Asked, workload: Workload) -> Sequence[Config]:
        """Return the settings to run an implementation with: the requested one, or all worth trying if it needs
        settings that the request does not name."""
        implementation = self.registered(one.name)
        if implementation is None or not implementation.every_config or {*implementation.tunables} <= {*one.config}:
            return (one.config,)
        self.start([Group(implementation.framework)])
        environment = self.environment(implementation.framework)
        named = implementation.configured(one.config)
        found = () if environment is None else named.configs_here(workload, environment)
        return found or (one.config,)

    def spread(self, names: Sequence[str]) -> None:
        """Give each implementation on an accelerator a worker of its own, so that their compilations run in
        parallel."""
        taken: dict[Group, int] = {}
        for name in dict.fromkeys(names):
            base = self.group(name)._replace(lane=0)
            if self.accelerated(base.framework):
                self._lanes[name] = taken.get(base, 0)
                taken[base] = taken.get(base, 0) + 1

    def accelerated(self, framework: str) -> bool:
        """Return whether a framework runs on another device than the CPU here."""
        environment = self.environment(framework)
        return environment is not None and environment.device != "cpu"

    def environment(self, framework: str) -> Environment | None:
        """Return the environment of a framework; None if none of its workers has started yet."""
        return next((found for group, found in self.environments.items() if group.framework == framework), None)

    def start(self, groups: Sequence[Group]) -> None:
        """Start the workers of groups in parallel (importing a framework takes seconds) and ask for their
        environments."""
        for group in groups:
            if group in self._workers and not self._workers[group].alive:
                self.dismiss(group)
        wanted = [group for group in groups if group not in (*self._workers, *self._lost)]
        for name in dict.fromkeys(group.framework for group in wanted):
            if name not in self.unusable and not frameworks.installed(name):
                self.unusable[name] = f"{name} is not installed: pip install 'attnbench[{name}]'"
        wanted = [group for group in wanted if group.framework not in self.unusable]
        for group in wanted:
            self._workers[group] = self._new(group)
        try:
            for group in wanted:
                self._introduce(group)
        except BaseException:
            for group in wanted:
                self.dismiss(group)
            raise

    def _new(self, group: Group) -> Remote | Local:
        if self._in_process and group != self.clean(group.framework):
            return Local(group.framework, self._device)
        return Remote.start(group.framework, self._device, self._threads)

    def _introduce(self, group: Group) -> None:
        try:
            answer = self._described(group)
        except WorkerDied as died:
            self.dismiss(group)
            tries = "" if died.kind == "timeout" else ", tried twice"
            reason = f"no {group.framework} worker could be started{tries}: {died.reason}"
            self._lost[group] = WorkerDied("failed", reason, died.detail, unstarted=True)
            return
        if isinstance(answer, p.Refused):
            self.dismiss(group)
            self.unusable[group.framework] = answer.reason
            return
        assert isinstance(answer, p.EnvironmentAnswer)
        if self.environment(group.framework) is None:
            self.on_environment(group.framework, answer.environment)
        self.environments.setdefault(group, answer.environment)
        for user_function in self._user_functions.values():
            if (user_function.framework, user_function.process) == group[:2] and not user_function.is_here:
                self._load(user_function, group)
        if group.has_user_code:
            self._workers[group].pause()

    def _described(self, group: Group) -> p.Answer:
        """Ask a new worker for its environment; a worker that dies before its answer is replaced once."""
        question = p.Describe([*sys.path, ""])
        try:
            return self._workers[group].ask(question, START_S)
        except WorkerDied as died:
            if died.kind == "timeout":
                raise
            self._workers[group].kill()
            self._workers[group] = self._new(group)
            return self._workers[group].ask(question, START_S)

    def _load(self, user_function: UserFunction, group: Group) -> None:
        """Load a user function in its worker. A failure raises UsageError at first; after an earlier success only the
        function's own cells fail."""
        try:
            answer = self._workers[group].ask(user_function.load(), START_S)
            reason = answer.reason if isinstance(answer, p.Refused) else ""
        except WorkerDied as died:
            reason = f"{died.reason}."
        if reason and group in self._loaded_once:
            raise WorkerDied("failed", f"{user_function.label} could not be loaded again: {reason}")
        if reason:
            raise errors.UsageError(f"{user_function.label} could not be loaded: {reason}")
        self._loaded_once.add(group)

    def ask(self, group: Group, question: p.Question, timeout_s: float) -> p.Answer:
        """Return a worker's answer; after an error or an interruption (Ctrl-C) the worker is ended.

        A worker that ended after its last answer is replaced and asked again: the new one answers `not_open` to
        questions about cells that the old one had open.
        """
        try:
            return self._ask(group, question, timeout_s)
        except WorkerDied as died:
            if not died.idle:
                raise
            return self._ask(group, question, timeout_s)

    def _ask(self, group: Group, question: p.Question, timeout_s: float) -> p.Answer:
        self.start([group])
        if group in self._lost:
            raise self._lost[group]
        if group not in self._workers:
            raise WorkerDied("failed", self.unusable[group.framework])
        worker = self._workers[group]
        try:
            worker.resume()
            answer = worker.ask(question, timeout_s)
            if group.has_user_code:
                worker.pause()
        except BaseException:
            self.dismiss(group)
            raise
        return answer

    def refusals(self, cells: Sequence[Cell]) -> list[Planned]:
        """Return each cell with the reason if it will not run."""
        judges = {cell.implementation: self._judge(cell.implementation) for cell in cells}
        self.start(list(dict.fromkeys(judges.values())))
        planned: dict[str, Planned] = {}
        for judge in dict.fromkeys(judges.values()):
            asked = [cell for cell in cells if judges[cell.implementation] == judge]
            if judge in self._lost:
                planned |= {cell.id: Planned(cell, self._lost[judge].reason, unstarted=True) for cell in asked}
                continue
            refused = self.unusable.get(judge.framework)
            reasons = self._reasons(judge, asked) if refused is None else [refused] * len(asked)
            planned |= {cell.id: Planned(cell, reason) for cell, reason in zip(asked, reasons, strict=True)}
        return [planned[cell.id] for cell in cells]

    def _reasons(self, group: Group, cells: Sequence[Cell]) -> list[str | None]:
        """Return a worker's refusals; if the question ends the worker, ask about each cell separately."""
        try:
            answer = self.ask(group, p.Refusals(list(cells), self.clock), START_S)
        except WorkerDied as died:
            if len(cells) == 1:
                return [f"could not say whether it supports this: {died.reason}"]
            return [reason for cell in cells for reason in self._reasons(group, [cell])]
        assert isinstance(answer, p.Reasons)
        return answer.reasons

    def _judge(self, name: str) -> Group:
        """Return the worker to ask what an implementation supports: the plain worker of its framework, or its own for
        user code."""
        group = self.group(name)._replace(lane=0)
        return group if group.has_user_code or self.registered(name) is None else Group(group.framework)

    def verify_only(self, implementation: Implementation) -> str:
        """Return why an implementation may be checked but not timed here; empty if it may be timed."""
        try:
            answer = self.ask(self._judge(implementation.name), p.VerifyOnly(implementation.name), START_S)
        except WorkerDied as died:
            return f"could not say whether it may be timed: {died.reason}"
        assert isinstance(answer, p.Reasons)
        return answer.reasons[0] or ""

    def ceilings(self, dtype: str, device: str, again: bool = False) -> Ceilings | None:
        """Return the highest ceilings of a device over all frameworks of the run, stored or measured now.

        `again` measures once more and keeps the higher figures, before a time is called implausible.
        """
        frameworks_here = dict.fromkeys(g.framework for g, found in self.environments.items() if found.device == device)
        groups = [self.clean(framework) for framework in frameworks_here]
        self.start(groups)
        best: Ceilings | None = None
        for group in groups:
            environment = self.environments.get(group)
            if environment is not None and environment.device == device:
                best = _best(best, self._ceilings_of(group, environment, dtype, again))
        return best

    def _ceilings_of(self, group: Group, environment: Environment, dtype: str, again: bool) -> Ceilings | None:
        known = self._believed.get((group, dtype))
        if known is None:
            stored = load_ceilings(environment, dtype)
            known = stored if stored is not None and self._confirms(group, dtype, stored) else None
        if known is None or again:
            known = _best(known, self._measure_ceilings(group, dtype))
            if known is not None:
                store_ceilings(environment, dtype, known)
        if known is not None:
            self._believed[group, dtype] = known
        return known

    def _confirms(self, group: Group, dtype: str, stored: Ceilings) -> bool:
        """Return whether a brief measurement confirms the stored ceilings, which any program may have written."""
        measured = self._ask_ceilings(group, p.MeasureCeilings(dtype, brief=True))
        return (
            measured is not None
            and measured.flops_per_s >= NEAR * stored.flops_per_s
            and measured.bytes_per_s >= NEAR_COPY * stored.bytes_per_s
            and stored.cache_bytes == measured.cache_bytes
        )

    def _measure_ceilings(self, group: Group, dtype: str) -> Ceilings | None:
        return self._ask_ceilings(group, p.MeasureCeilings(dtype))

    def _ask_ceilings(self, group: Group, question: p.MeasureCeilings) -> Ceilings | None:
        """Return the ceilings that a worker measures; None if it cannot, which the records then say."""
        try:
            answer = self.ask(group, question, CEILINGS_S)
        except WorkerDied:
            return None
        return answer.ceilings if isinstance(answer, p.MeasuredCeilings) else None


def _best(a: Ceilings | None, b: Ceilings | None) -> Ceilings | None:
    """Return the higher of two values of each ceiling."""
    if a is None or b is None:
        return a or b
    return Ceilings(*map(max, msgspec.structs.astuple(a), msgspec.structs.astuple(b)))


def _file(environment: Environment, dtype: str) -> Path:
    return cache_folder() / f"ceilings-{environment.framework}-{environment.storage_key}-{dtype}.json"


def load_ceilings(environment: Environment, dtype: str) -> Ceilings | None:
    """Return the stored ceilings of a device and dtype, or None."""
    try:
        return decode_json(_file(environment, dtype).read_bytes(), Ceilings)
    except (OSError, msgspec.DecodeError):
        return None


def store_ceilings(environment: Environment, dtype: str, ceilings: Ceilings) -> None:
    """Store ceilings in the cache folder; a failure is ignored, since the next run can measure again."""
    file = _file(environment, dtype)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(ceilings))
