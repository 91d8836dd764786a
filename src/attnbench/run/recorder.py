"""A run and its file: the recorder that puts records on disk as they come, the shapes that a file did not reach, the
command that continues it, and the requests that `attnbench run --resume` runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from attnbench import registry
from attnbench.config import load_settings
from attnbench.errors import BrokenFile, UsageError
from attnbench.files import convert
from attnbench.registry import is_reference
from attnbench.results.run_file import Header, Run, RunWriter, check_writable, new_header, read_run
from attnbench.results.sentences import some_of
from attnbench.run.launch import Listener, Request
from attnbench.run.user_functions import asked_references, fingerprint_sources, name_references
from attnbench.spec import Environment, Record, Workload


@dataclass(frozen=True)
class Prepared:
    """Requests that will be run, the suite's name, and the run file that they continue."""

    request: Request
    suite: str
    runs_dir: Path
    against: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    """Options of `verify` for the same workloads and device; empty for a resumed run."""
    resumed: Path | None = None
    done: frozenset[str] = frozenset()
    writer: RunWriter | None = None
    """Writer of a resumed file, which it keeps locked; None if cells are only listed."""
    more: tuple[Request, ...] = ()
    """Other requests that a resumed file was asked for."""
    is_new: bool = True
    """Whether no header of the file holds this request yet."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everything that will be run, in order."""
        return (self.request, *self.more)

    @property
    def names(self) -> dict[str, str]:
        """Names that the run gives to functions that were given by reference."""
        return {reference: name for request in self.requests for reference, name in name_functions(request).items()}


class Recorder:
    """Writer of a run's records: creates the file with the first records, since the device's name is not known before.

    A resumed file gets another header if its own do not hold the request.
    """

    def __init__(self, prepared: Prepared, listener: Listener, environments: dict[str, Environment]) -> None:
        self._prepared, self._listener, self._environments = prepared, listener, environments
        self._sources = fingerprint_sources(prepared.request.implementations)
        self.writer: RunWriter | None = prepared.writer
        self._request_unwritten = prepared.is_new
        self.done: frozenset[str] = frozenset()
        """Ids of the cells that were recorded since the start."""
        before = {} if prepared.resumed is None else read_run(prepared.resumed).environments
        self._earlier = {one.fingerprint for one in before.values()}
        if prepared.resumed is None:
            check_writable(prepared.runs_dir)
        if prepared.request.trace is not None:
            check_writable(prepared.request.trace, "--trace")

    def __call__(self, records: Sequence[Record]) -> None:
        """Put the records of a workload on disk."""
        made_in = [record.environment for record in records if record.environment is not None]
        if self.writer is None:
            machine = device_name([*self._environments.values(), *made_in])
            self.writer = RunWriter.create(self._prepared.runs_dir, machine, self._prepared.suite, self._header())
            self._request_unwritten = False
        self.write_request()
        self.writer.write(records)
        self.done |= {record.cell.id for record in records}
        if self._earlier and not {one.fingerprint for one in made_in} <= self._earlier:
            self._earlier = set()
            self._listener.warning(
                "the run file was made in another environment: its old and new times cannot be compared"
            )

    def write_request(self) -> None:
        """Add the request to a resumed file, unless one of its headers holds the request already."""
        if self._request_unwritten and self.writer is not None:
            self.writer.add_header(self._header())
            self._request_unwritten = False

    def _header(self) -> Header:
        prepared, asked = self._prepared, store_request(self._prepared.request)
        facts = {"seed": prepared.request.seed, "against": tuple(prepared.against), "sources": self._sources}
        return new_header(version("attnbench"), prepared.suite, asked, **facts)


def device_name(environments: Sequence[Environment]) -> str:
    """Return the name of the machine's folder: that of the accelerator, if there is one."""
    main = min(environments, key=lambda environment: environment.device == "cpu", default=None)
    return "unknown" if main is None else main.device_name


def unreached(run: Run, elsewhere: Collection[str] = ()) -> list[str]:
    """Return the ids of requested workloads that neither this run nor `elsewhere` holds; records come by whole
    workloads."""
    reached = {record.workload.id for record in run.records} | set(elsewhere)
    return [name for name in _requested(run) if name not in reached]


def describe_unreached(name: str, run: Run, elsewhere: Collection[str] = ()) -> str | None:
    """Return a sentence that names the missing workloads and the command that continues; None if none is missing."""
    missing = unreached(run, elsewhere)
    if not missing:
        return None
    last = run.headers[-1].request
    command = resume_command(name, run, last.get("trace"), last.get("timeout_s"))
    shapes = f"{len(missing)} of its {len(_requested(run))} shapes ({some_of(missing)})"
    return f"{name} ended before {shapes}: `{command}` continues it"


def _requested(run: Run) -> list[str]:
    """Return the ids of all workloads that were requested; a header that cannot be read requests none."""
    ids: dict[str, None] = {}
    for header in run.headers:
        try:
            workloads = convert(header.request.get("workloads", []), list[Workload])
        except (msgspec.ValidationError, UsageError):
            continue
        ids |= dict.fromkeys(workload.id for workload in workloads)
    return list(ids)


def resume_command(name: str, run: Run, trace: object = None, timeout_s: object = None) -> str:
    """Return the command that continues with everything that a run file was asked for.

    The command repeats what the file does not decide: functions given by reference, since a file imports no code, the
    folder of traces, and the timeout of a stage if it differs from the settings.
    """
    words = [word for reference in references(run) for word in ("--impl", reference)]
    words += ["--trace", str(trace)] if trace is not None else []
    if isinstance(timeout_s, int | float) and timeout_s != load_settings().timeout_s:
        words += ["--timeout", f"{timeout_s:g}"]
    return shlex.join(["attnbench", "run", "--resume", name, *words])


def references(run: Run) -> list[str]:
    """Return the functions given by reference that a run file was asked for, each once."""
    return list(dict.fromkeys(one for header in run.headers for one in asked_references(header.request)))


def function_place(reference: str) -> tuple[str, str]:
    """Return the file or module of a reference, and its function: `./a.py:f` gives the same as `a.py:f`."""
    where, _, function = reference.rpartition(":")
    return str(Path(where).resolve()) if where.endswith(".py") else where, function


def name_functions(request: Request) -> dict[str, str]:
    """Return reference -> name that the function has in the run."""
    return name_references(request.implementations, registry.names())


def store_request(request: Request) -> dict[str, Any]:
    """Return the request as the header of a run file holds it."""
    return msgspec.to_builtins(request, enc_hook=os.fspath)


def stored_requests(
    path: Path, run: Run, named: Sequence[str], trace: Path | None, timeout_s: float | None
) -> tuple[list[Request], list[str]]:
    """Return everything that a file was asked for, each request once, and warnings about what is not taken over.

    A file may come from anyone, so it decides nothing that reaches beyond measuring: which code is imported (`named`
    are the functions that the user named again), in which process, where traces are written and how long a cell may
    take are said on the command line, or not at all.
    """
    headers = [header for header in run.headers if header.request]
    if not headers:
        raise UsageError(f"{path} does not record what was requested: give the suite and options again with --resume.")
    requests: list[Request] = []
    warnings: list[str] = []
    again = {function_place(one): one for one in named}
    for header in headers:
        stored = _read_request(path, header, line=1 if header is run.header else None)
        if not all(function_place(one) in again for one in references(run)):
            command = resume_command(str(path), run, trace, timeout_s)
            raise UsageError(
                f"{path} was measured with functions that the command does not name: {', '.join(references(run))}. "
                f"A run file alone imports no code. If you trust it, run: {command}"
            )
        own: Mapping[str, Any] = {
            "implementations": tuple(
                again[function_place(one)] if is_reference(one) else one for one in stored.implementations
            ),
            "in_process": False,
            "trace": trace,
            "timeout_s": load_settings({"timeout_s": timeout_s}).timeout_s,
        }
        options = {"in_process": ("", None), "trace": ("--trace", trace), "timeout_s": ("--timeout", timeout_s)}
        for field, (option, given) in options.items():
            value = getattr(stored, field)
            if given is None and value not in (None, False, own[field]):
                how = f": give {option} again to use it" if option else ""
                warnings.append(f"{field} = {value} in {path} is ignored{how}")
        request = msgspec.structs.replace(stored, **own)
        if not any(msgspec.structs.replace(request, seed=one.seed) == one for one in requests):
            requests.append(request)
    return requests, warnings


def _read_request(path: Path, header: Header, line: int | None) -> Request:
    def to_path(kind: type, value: Any) -> Any:
        if issubclass(kind, Path):
            return Path(value)
        raise NotImplementedError

    try:
        request = msgspec.convert(header.request, Request, dec_hook=to_path)
    except (msgspec.ValidationError, UsageError) as error:
        raise BrokenFile(path, line, f"its request cannot be read ({error}).") from error
    if not all(isinstance(one, str) for one in request.implementations):
        raise BrokenFile(path, line, "the implementations of its request are not all names.")
    return request


def refuse_shared_names(path: Path, run: Run, requests: Sequence[Request]) -> list[str]:
    """Refuse a function if the file holds times of another one by the name that it would get; return a warning for
    each name whose function the file does not record."""
    known: dict[str, tuple[str, str | None]] = {}
    for header in run.headers:
        for reference, name in name_references(asked_references(header.request), registry.names()).items():
            known[name] = reference, header.sources.get(reference.rpartition(":")[0])
    unknown = {record.implementation for record in run.records} - known.keys()
    warnings: list[str] = []
    for reference, name in chain.from_iterable(name_functions(request).items() for request in requests):
        earlier, then = known.get(name, (reference, None))
        now = fingerprint_sources([reference]).get(reference.rpartition(":")[0])
        if function_place(earlier) != function_place(reference) and (then is None or now != then):
            raise UsageError(
                f"{path} uses the name {name} for {earlier}, and {reference} would get the same name: their times "
                "would be mixed. Start a new run for it, or give the function another name."
            )
        if name in unknown:
            warnings.append(
                f"{path} holds times of {name} but not its source file: the function may have changed since"
            )
    return warnings
