"""The entry to a run: the request, the plan, and the loop over workloads that hands over their records."""

from __future__ import annotations

import logging
import os
import random
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import isfinite
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from attnbench import frameworks, registry
from attnbench.errors import UnknownName, UsageError
from attnbench.run.environment import Diagnosis, ImplementationState, threads_left
from attnbench.run.machine import RUN_PATIENCE_S, measuring
from attnbench.run.plan import Asked, Group, Planned, cells_of, distinct, require_dtype
from attnbench.run.pool import Pool
from attnbench.run.user_functions import (
    CannotSend,
    UserFunction,
    free_name,
    from_object,
    from_reference,
    is_reference,
    name_references,
)
from attnbench.run.workload import WorkloadRun
from attnbench.spec import Cell, Environment, Failed, Ok, Record, Unsupported, Workload

CLOCKS = ("wall", "events", "kernel", "graph")
Sink = Callable[[Sequence[Record]], None]


class Request(Struct, frozen=True, kw_only=True):
    """The parameters of a run."""

    workloads: tuple[Workload, ...]
    implementations: tuple[Any, ...]
    """Names, `file.py:function` or `module:function` references, functions, or Implementations."""
    framework: str = "torch"
    """Framework of bare functions."""
    device: str | None = None
    """Device kind; None takes the best one of each framework."""
    measure: bool = True
    """Whether cells are timed; False verifies them only."""
    budget_s: float = 1.0
    """Sampling time per cell."""
    trials: int | None = None
    """A fixed number of samples instead of the stop rule."""
    precision: float = 0.01
    """Stop when the 95 % interval of the median is within this share of it."""
    timeout_s: float = 300.0
    """Time limit of each question to a worker, such as opening a cell."""
    threads: int | None = None
    seed: int | None = None
    clock: str | None = None
    trace: Path | None = None
    thorough: bool = False
    in_process: bool = False
    """Whether everything runs in the calling process, for functions that cannot be sent to a worker."""
    every_config: bool = False
    """Whether an implementation that needs a setting (a pair needs its two halves) runs with every setting worth trying
    if the request names none."""
    strict: bool = False
    """Whether a run in which every cell is refused for its dtype raises UsageError."""


class Listener:
    """Receiver of progress messages; each method may be overridden."""

    def environment(self, framework: str, environment: Environment) -> None:
        """Receive the environment of a framework when its first worker has started."""

    def planned(self, cells: Sequence[Planned]) -> None:
        """Receive all planned cells before anything runs."""

    def stage(self, cell: Cell, stage: str) -> None:
        """Report that a cell enters the stage "verify" or "measure"."""

    def verified(self, cell: Cell, ok: bool) -> None:
        """Report whether a cell passed its checks."""

    def finished(self, record: Record) -> None:
        """Receive the final record of a cell."""

    def warning(self, text: str) -> None:
        """Receive a warning for the user."""

    def waiting(self, text: str) -> None:
        """Report that the run waits because another process is measuring; by default, log it as a warning."""
        logging.getLogger("attnbench").warning(text)


def launch(
    request: Request,
    sink: Sink,
    listener: Listener,
    done: frozenset[str] = frozenset(),
    pool: Pool | None = None,
    patience_s: float = RUN_PATIENCE_S,
) -> None:
    """Run every cell whose id is not in `done`, and pass the records of each workload to `sink` when it ends.

    A given `pool` is used and left alive; otherwise the run starts workers of its own and ends them. Timing needs the
    machine's lock: raises UsageError if another process holds it for longer than `patience_s` seconds.
    """
    refuse_distortion()
    wanted, user_functions = _resolve(request)
    with ExitStack() as stack:
        if request.measure:
            for note in stack.enter_context(measuring("run", patience_s, listener.waiting)):
                listener.warning(note)
        if pool is None:
            threads = request.threads
            if threads is None and request.measure:
                threads, told = threads_left(request.device)
                if told:
                    listener.warning(told)
            pool = stack.enter_context(Pool(user_functions, request.device, threads, request.in_process))
            pool.on_environment = listener.environment
        elif request.measure and (told := threads_left(request.device)[1]):
            sink = _with_note(sink, f"{told.partition(':')[0]} when it began: threads may have waited")
        _run_all(request, wanted, sink, listener, done, pool)


def _with_note(sink: Sink, note: str) -> Sink:
    """Return a sink that adds a note to what was measured by workers whose number of threads is given."""

    def noted(records: Sequence[Record]) -> None:
        sink(
            [
                structs.replace(one, notes=(*one.notes, note)) if isinstance(one, Ok) and one.time else one
                for one in records
            ]
        )

    return noted


def _run_all(
    request: Request, wanted: Sequence[Asked], sink: Sink, listener: Listener, done: frozenset[str], pool: Pool
) -> None:
    seed = secrets.randbits(31) if request.seed is None else request.seed
    rng = random.Random(seed)
    workloads = distinct(request.workloads)
    planned = _planned(request, wanted, pool, done)
    if request.strict and not done:
        require_dtype(planned)
    listener.planned(planned)
    pool.spread([one.cell.implementation for one in planned if one.reason is None])
    for number, workload in enumerate(workloads):
        here = [one for one in planned if one.cell.workload == workload]
        if not here:
            continue
        remaining = frozenset(workloads[number:])
        pool.keep_only(
            one.cell.implementation for one in planned if one.reason is None and one.cell.workload in remaining
        )
        refused = [_not_run(one, pool) for one in here if one.reason is not None]
        for record in refused:
            listener.finished(record)
        run = WorkloadRun(request, workload, pool, listener, rng, seed + 7919 * number)
        measured = run.records([one.cell for one in here if one.reason is None])
        place = {one.cell.id: turn for turn, one in enumerate(here)}
        # In the order asked, the anchors last.
        sink(sorted([*refused, *measured], key=lambda one: place.get(one.cell.id, len(here))))


def plan_only(request: Request, listener: Listener) -> list[Planned]:
    """Return the cells of a request, each with the reason if it would not run."""
    wanted, user_functions = _resolve(request)
    with Pool(user_functions, request.device, request.threads, request.in_process) as pool:
        pool.on_environment = listener.environment
        return _planned(request, wanted, pool)


def _planned(
    request: Request, wanted: Sequence[Asked], pool: Pool, done: frozenset[str] = frozenset()
) -> list[Planned]:
    """Return the cells with their refusals; a timed run refuses the CPU if another framework uses an accelerator."""
    pool.clock = request.clock
    configs = [pool.configs] if request.every_config else []
    cells = cells_of(distinct(request.workloads), wanted, *configs)
    planned = pool.refusals([cell for cell in cells if cell.id not in done])
    if request.device is not None and pool.unusable and not pool.environments:
        reasons = "; ".join(dict.fromkeys(pool.unusable.values()))
        raise UsageError(f'nothing can run on device "{request.device}": {reasons}. See `attnbench doctor`.')
    accelerator = next((found.device for found in pool.environments.values() if found.device != "cpu"), None)
    if accelerator is None or not request.measure:
        return planned
    for number, one in enumerate(planned):
        framework = pool.group(one.cell.implementation).framework
        if one.reason is None and not pool.accelerated(framework):
            reason = f"{framework} runs on the cpu here, but this run is on {accelerator}: use --device cpu"
            planned[number] = Planned(one.cell, reason)
    return planned


def diagnose(listener: Listener) -> Diagnosis:
    """Start one worker per framework and return which implementations can run here."""
    with Pool((), None, None) as pool:
        pool.on_environment = listener.environment
        pool.start([Group(name) for name in frameworks.NAMES])
        states = [_state(name, pool) for name in registry.names()]
        usable = {name: pool.unusable.get(name) for name in frameworks.NAMES}
        environments = {group.framework: environment for group, environment in pool.environments.items()}
    return Diagnosis(environments=environments, frameworks=usable, implementations=states)


def _state(name: str, pool: Pool) -> ImplementationState:
    facts: dict[str, Any] = {"name": name, "origin": registry.origin(name)}
    try:
        implementation = registry.get(name)
    except UsageError as error:
        facts |= {"framework": name.partition(".")[0], "approximate": False, "timed": False}
        return ImplementationState(**facts, reason=str(error))
    framework = implementation.framework
    environment = pool.environments.get(Group(framework))
    reason = pool.unusable.get(framework) if environment is None else implementation.available(environment)
    interpreted = "" if environment is None else pool.verify_only(implementation)
    return ImplementationState(
        **facts,
        framework=framework,
        approximate=implementation.approximate,
        reason=reason,
        timed=not interpreted,
        note=interpreted or (f"by name only: {implementation.by_name_only}" if implementation.by_name_only else ""),
        untested=implementation.untested,
    )


def _resolve(request: Request) -> tuple[list[Asked], list[UserFunction]]:
    """Return the requested implementations in order, and those of them that are user functions; refuse an unknown
    clock."""
    if request.clock is not None and request.clock not in CLOCKS:
        raise UnknownName("clock", request.clock, CLOCKS, "attnbench run --help")
    wanted: list[Asked] = []
    user_functions: list[UserFunction] = []
    # What an earlier in-process run registered may be replaced; a rival of this run may not.
    known = () if request.in_process else registry.names()
    called = name_references(request.implementations, known)
    for what in request.implementations:
        user_function = _user_function(what, request, {*known, *(one.name for one in wanted)}, called)
        if user_function is not None:
            user_functions.append(user_function)
            wanted.append(Asked(user_function.name))
        elif isinstance(what, str):
            name, config = registry.asked(what)
            wanted.append(Asked(name, config, registry.get(name).step))
    return [one for n, one in enumerate(wanted) if one not in wanted[:n]], user_functions


def _user_function(what: Any, request: Request, taken: set[str], called: dict[str, str]) -> UserFunction | None:
    if isinstance(what, str):
        if is_reference(what):
            return from_reference(what, request.framework, taken, called[what])
        if "[" in what or registry.origin(what) != registry.HERE:
            return None
        what, taken = registry.get(what), set()
    if request.in_process:
        implementation = registry.resolve(what, request.framework)
        implementation.name = free_name(implementation.name, taken)
        registry.register(implementation)
        framework, process = implementation.framework, implementation.process
        return UserFunction(name=implementation.name, framework=framework, process=process, label="")
    user_function = from_object(what, request.framework, taken)
    if user_function is None:
        raise CannotSend(f"{getattr(what, '__name__', what)!r} cannot be sent to a worker process.")
    return user_function


def refuse_distortion() -> None:
    """Raise UsageError if an environment variable is set that makes every time wrong."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise UsageError(
            "CUDA_LAUNCH_BLOCKING is set, which delays every launch, so that times are wrong. Unset it and run again."
        )


def check_seconds(name: str, value: Any) -> None:
    """Raise UsageError unless a duration is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and isfinite(value)):
        raise UsageError(f"{name} must be a finite number of seconds above 0, not {value!r}.")


def _not_run(planned: Planned, pool: Pool) -> Record:
    """Return the record of a cell that is refused or whose worker could not be started."""
    group = pool.group(planned.cell.implementation)
    environment = pool.environments.get(group) or pool.environments.get(Group(group.framework))
    facts: dict[str, Any] = structs.asdict(planned.cell) | {"environment": environment, "reason": planned.reason}
    return Failed(**facts, unstarted=True) if planned.unstarted else Unsupported(**facts)
