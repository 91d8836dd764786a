"""The command line of `attnbench run` -> what will be run. What is wrong with it is found before anything runs."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attnbench import registry
from attnbench.cli.options import Choice, Sampling, Shape, spell
from attnbench.cli.output import stderr_console
from attnbench.cli.selection import DEFAULT_SUITE, filter_words, select_implementations, select_workloads
from attnbench.config import load_settings
from attnbench.errors import BrokenFile, UsageError
from attnbench.run.launch import Request
from attnbench.run.naming import name_references
from attnbench.run.sources import refuse_changed_sources
from attnbench.store.runfile import Run, read_run, repair

QUICK_BUDGET_S = 0.5
MOST = 1_000_000_000
"""Of samples and the like: beyond it nobody waits for the end."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The command line of `run`, parsed."""

    suite: str | None
    quick: bool
    shape: Shape
    choice: Choice
    sampling: Sampling
    resume: Path | None
    out: Path | None


@dataclass(frozen=True)
class Prepared:
    """What will be run, under which name, on top of what."""

    request: Request
    suite: str
    runs_dir: Path
    against: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    """Options by which `verify` looks at the same workloads in the same way; a resumed run has none."""
    resumed: Path | None = None
    done: frozenset[str] = frozenset()

    @property
    def names(self) -> dict[str, str]:
        """What the run calls the functions that were given by reference."""
        return called(self.request)


def prepare(order: Order) -> Prepared:
    """Everything that can be wrong with the command line is found here, before anything runs."""
    runs_dir = Path(load_settings({"runs_dir": None if order.out is None else str(order.out)}).runs_dir)
    if order.resume is None:
        suite, request = make_request(order)
        return Prepared(request, suite, runs_dir, _against(order, request), _where(order))
    warning = repair(order.resume)
    kept = read_run(order.resume)
    if warning:
        stderr_console().print(f"warning: {warning}", highlight=False, markup=False)
    if _asks_nothing(order):
        suite, request = kept.header.suite, _stored_request(order.resume, kept)
    else:
        suite, request = make_request(order)
    refuse_changed_sources(order.resume, kept.header.sources, request.implementations)
    against = _against(order, request) or kept.header.against
    return Prepared(request, suite, order.resume.parent, against, (), order.resume, kept.done)


def called(request: Request) -> dict[str, str]:
    """Reference -> name, as the run makes them."""
    return name_references(request.implementations, registry.names())


def _against(order: Order, request: Request) -> tuple[str, ...]:
    names = called(request)
    return tuple(names.get(one, one) for one in order.choice.against)


def _where(order: Order) -> tuple[str, ...]:
    shape = spell(order.shape)
    suite = [] if order.suite is None and shape else ["--suite", order.suite or DEFAULT_SUITE]
    quick = ["--quick"] if order.quick and suite else []
    return (*suite, *quick, *shape, *place_words(order.choice.framework, order.choice.device))


def place_words(framework: str | None, device: str | None) -> list[str]:
    """The options that say where bare functions run, as words."""
    given = {"--framework": framework, "--device": device}
    return [word for option, value in given.items() if value is not None for word in (option, value)]


def _asks_nothing(order: Order) -> bool:
    given = (order.suite, order.quick, order.shape, order.choice, order.sampling)
    return given == (None, False, Shape(), Choice(), Sampling())


def _stored_request(path: Path, run: Run) -> Request:
    if not run.header.request:
        raise UsageError(f"{path} does not say what was asked: name the suite and options again beside --resume.")
    try:
        return msgspec.convert(run.header.request, Request, dec_hook=_to_path)
    except (msgspec.ValidationError, UsageError) as error:
        raise BrokenFile(path, 1, f"its request cannot be read ({error}).") from error


def _to_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError


def store_request(request: Request) -> dict[str, Any]:
    """The request as it stands in a run file's header."""
    return msgspec.to_builtins(request, enc_hook=_from_path)


def _from_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError


def make_request(order: Order) -> tuple[str, Request]:
    """Name of the suite and the request, with settings where the command line is silent."""
    choice, sampling = order.choice, order.sampling
    quick_budget = QUICK_BUDGET_S if order.quick else None
    settings = load_settings(
        {
            "device": choice.device,
            "framework": choice.framework,
            "threads": sampling.threads,
            "budget_s": quick_budget if sampling.budget is None else sampling.budget,
            "timeout_s": sampling.timeout,
            "seed": sampling.seed,
        }
    )
    _check_positive("--trials", sampling.trials)
    _check_positive("--precision", sampling.precision)
    suite, workloads = select_workloads(order.suite, order.quick, order.shape, choice)
    workloads, implementations = filter_words(
        choice.words, workloads, select_implementations(choice, settings.framework, {w.step for w in workloads})
    )
    request = Request(
        workloads=workloads,
        implementations=implementations,
        framework=settings.framework or "torch",
        device=settings.device,
        budget_s=settings.budget_s,
        trials=sampling.trials,
        timeout_s=settings.timeout_s,
        threads=settings.threads,
        seed=secrets.randbits(31) if settings.seed is None else settings.seed,
        clock=sampling.clock,
        trace=sampling.trace,
        every_config=True,
        strict=choice.shard is None,
    )
    if sampling.precision is not None:
        request = msgspec.structs.replace(request, precision=sampling.precision)
    return suite, request


def _check_positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value <= MOST:
        raise UsageError(f"{option} must be more than 0 and at most {MOST}, not {value:g}.")
