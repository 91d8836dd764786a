"""Turn the command line of `attnbench run` into requests, and refuse everything that is wrong before anything runs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from attnbench import registry
from attnbench.cli.options import Choice, Sampling, Shape, spell
from attnbench.cli.output import warn
from attnbench.cli.selection import DEFAULT_SUITE, filter_words, select_implementations, select_workloads
from attnbench.config import load_settings
from attnbench.errors import BrokenFile, UsageError
from attnbench.registry import is_reference
from attnbench.results.run_file import Header, Run, RunWriter, read_run
from attnbench.results.unreached import asked_references, references, resume_command
from attnbench.run.launch import Request
from attnbench.run.user_functions import fingerprint_sources, name_references, refuse_changed_sources

QUICK_BUDGET_S = 0.5
MOST = 1_000_000_000
"""Largest count of samples and the like that is accepted."""


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
    """Requests that will be run, the suite's name, and the run file that they continue."""

    request: Request
    suite: str
    runs_dir: Path
    against: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    """Options by which `verify` looks at the same workloads in the same way; a resumed run has none."""
    resumed: Path | None = None
    done: frozenset[str] = frozenset()
    writer: RunWriter | None = None
    """Writer of a resumed file, which it keeps locked; None if cells are only listed."""
    more: tuple[Request, ...] = ()
    """Other requests that a resumed file was asked for."""
    is_new: bool = True
    """Whether no header of the file says yet what is asked."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everything that will be run, in order."""
        return (self.request, *self.more)

    @property
    def names(self) -> dict[str, str]:
        """Names that the run gives to functions that were given by reference."""
        return {reference: name for request in self.requests for reference, name in called(request).items()}


def prepare(order: Order, only_listed: bool = False) -> Prepared:
    """Check the whole command line before anything runs, and return what will be run.

    A file to resume is locked and, if its last line is torn, repaired; it is left alone if cells are only listed.
    """
    runs_dir = Path(load_settings({"runs_dir": None if order.out is None else str(order.out)}).runs_dir)
    if order.resume is None:
        suite, request = make_request(order)
        return Prepared(request, suite, runs_dir, _against(order, request), _where(order))
    kept = read_run(order.resume)
    warnings = list(kept.warnings)
    is_new = not _only_goes_on(order, kept)
    if is_new:
        suite, request = make_request(order)
        requests = [request]
    else:
        suite, requests = kept.header.suite, _stored_requests(order, order.resume, kept, warnings)
    for header in kept.headers:
        refuse_changed_sources(order.resume, header.sources, [name for one in requests for name in one.implementations])
    warnings += _refuse_shared_names(order.resume, kept, requests)
    prepared = Prepared(
        request=requests[0],
        suite=suite,
        runs_dir=order.resume.parent,
        against=_against(order, requests[0]) or kept.against,
        resumed=order.resume,
        done=kept.done,
        more=tuple(requests[1:]),
        is_new=is_new,
    )
    if not only_listed:
        writer = RunWriter(order.resume)
        prepared = replace(prepared, writer=writer, done=read_run(order.resume).done)
    for warning in dict.fromkeys(warnings):
        warn(warning)
    return prepared


def called(request: Request) -> dict[str, str]:
    """Return reference -> name, as the run makes them."""
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
    """Return the options that say where bare functions run, as words."""
    given = {"--framework": framework, "--device": device}
    return [word for option, value in given.items() if value is not None for word in (option, value)]


def _only_goes_on(order: Order, kept: Run) -> bool:
    """Return whether only the requests of the file are asked for again: its functions may be named again, and options
    that a file does not decide may be given."""
    stored = {_place(one) for one in references(kept)}
    again = all(is_reference(one) and _place(one) in stored for one in order.choice.impl)
    choice = replace(order.choice, impl=()) if again else order.choice
    sampling = replace(order.sampling, trace=None, timeout=None)
    return (order.suite, order.quick, order.shape, choice, sampling) == (None, False, Shape(), Choice(), Sampling())


def _stored_requests(order: Order, path: Path, run: Run, warnings: list[str]) -> list[Request]:
    """Return everything that the file was asked for, each request once."""
    asked = [header for header in run.headers if header.request]
    if not asked:
        raise UsageError(f"{path} does not say what was asked: name the suite and options again beside --resume.")
    found: list[Request] = []
    for header in asked:
        request = _stored_request(order, path, run, header, warnings)
        if not any(msgspec.structs.replace(request, seed=one.seed) == one for one in found):
            found.append(request)
    return found


def _stored_request(order: Order, path: Path, run: Run, header: Header, warnings: list[str]) -> Request:
    """Return what a header asks for. A file may come from anyone, so it decides nothing that reaches beyond measuring:
    which code is imported, in which process, where traces are written and how long a cell may take are said on the
    command line, or not at all."""
    line = 1 if header is run.header else None
    try:
        stored = msgspec.convert(header.request, Request, dec_hook=_to_path)
    except (msgspec.ValidationError, UsageError) as error:
        raise BrokenFile(path, line, f"its request cannot be read ({error}).") from error
    if not all(isinstance(one, str) for one in stored.implementations):
        raise BrokenFile(path, line, "its request names implementations that are not names.")
    given = {_place(one): one for one in order.choice.impl}
    if not all(_place(one) in given for one in references(run)):
        command = resume_command(str(path), run, order.sampling.trace, order.sampling.timeout)
        raise UsageError(
            f"{path} was measured with functions that only this file names: {', '.join(references(run))}. "
            f"If you know that code, name it again: {command}"
        )
    own: Mapping[str, Any] = {
        "implementations": tuple(given[_place(one)] if is_reference(one) else one for one in stored.implementations),
        "in_process": False,
        "trace": order.sampling.trace,
        "timeout_s": load_settings({"timeout_s": order.sampling.timeout}).timeout_s,
    }
    again = {"in_process": "", "trace": "--trace", "timeout_s": "--timeout"}
    for field, option in again.items():
        asked = getattr(stored, field)
        if asked not in (None, False, own[field]) and getattr(order.sampling, option.strip("-"), None) is None:
            how = f": give {option} again if it is wanted" if option else ""
            warnings.append(f"{field} = {asked} of {path} is not taken over{how}")
    return msgspec.structs.replace(stored, **own)


def _refuse_shared_names(path: Path, kept: Run, requests: Sequence[Request]) -> list[str]:
    """Refuse a function if the file holds times of another one by the name that it would get; returns a warning for
    each of which the file does not say whose times it holds."""
    held: dict[str, tuple[str, str | None]] = {}
    for header in kept.headers:
        for reference, name in name_references(asked_references(header.request), registry.names()).items():
            held[name] = reference, header.sources.get(reference.rpartition(":")[0])
    unknown = {record.implementation for record in kept.records} - held.keys()
    warnings: list[str] = []
    for reference, name in (item for request in requests for item in called(request).items()):
        earlier, then = held.get(name, (reference, None))
        now = fingerprint_sources([reference]).get(reference.rpartition(":")[0])
        if _place(earlier) != _place(reference) and (then is None or now != then):
            raise UsageError(
                f"{path} calls {earlier} {name}, and would call {reference} the same: their times would pass for those "
                "of one function. Start a new run for it, or give the function another name."
            )
        if name in unknown:
            warnings.append(f"{path} holds times of {name} and does not say of which file: it may have changed since")
    return warnings


def _place(reference: str) -> tuple[str, str]:
    """Return file or module, and function: `./a.py:f` is `a.py:f`."""
    where, _, function = reference.rpartition(":")
    return str(Path(where).resolve()) if where.endswith(".py") else where, function


def _to_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError


def store_request(request: Request) -> dict[str, Any]:
    """Return the request as the header of a run file holds it."""
    return msgspec.to_builtins(request, enc_hook=_from_path)


def _from_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError


def make_request(order: Order) -> tuple[str, Request]:
    """Return the suite's name and the request, with settings for what the command line leaves open."""
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
