"""A run on its way to its file: what will be run, and the recorder that puts records on disk as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from attnbench.results.run_file import Header, RunWriter, check_writable, new_header, read_run
from attnbench.run.launch import Listener, Request
from attnbench.run.resume import name_functions, store_request
from attnbench.run.user_functions import fingerprint_sources
from attnbench.spec import Environment, Record


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
        self._prepared = prepared
        self._listener = listener
        self._environments = environments
        self._sources = fingerprint_sources(prepared.request.implementations)
        self.writer: RunWriter | None = prepared.writer
        self._request_unwritten = prepared.is_new
        self.done: frozenset[str] = frozenset()
        """Ids of the cells that were recorded since the start."""
        self._earlier: set[str] = set()
        if prepared.resumed is None:
            check_writable(prepared.runs_dir)
        else:
            self._earlier = {one.fingerprint for one in read_run(prepared.resumed).environments.values()}
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
    ordered = sorted(environments, key=lambda environment: environment.device == "cpu")
    return ordered[0].device_name if ordered else "unknown"
