"""Run files: records are written as soon as a workload is done, and read again by show, compare and resume.

The format is JSON lines. The first is the header; an environment is written once and records refer to it; records come
in the order they were made, and a later record of the same cell replaces the earlier one. Anchors of several sittings
are all kept. A resumed run with another request than the file began with adds a header of its own before its records.
The records of a resumed run have dates of their own; the others have the date of the first header.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from attnbench.errors import BrokenFile, UsageError
from attnbench.files import LONGEST_LINE, decode_json, read_lines, write_errors
from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.measuring.anchors import anchors_beside
from attnbench.measuring.rates import KERNELS_ONLY
from attnbench.printable import printable
from attnbench.spec import Environment, Failed, Ok, Record, Time

SCHEMA = 1
OTHER_FOLDER = "Choose another folder with --out."
LONGEST_SLUG = 80
"""Characters of a device or suite name in a file's name, which may have 255."""
SHORTEST_NS, LONGEST_NS = 1e-3, 1e18
"""Bounds of times that are read: a picosecond and thirty years. Ratios of others would not fit a float."""
ROUNDING_NS = 0.06
"""Largest error of rounding: files keep tenths of nanoseconds of a sample."""
POSITIVE = ("median_ns", "min_ns", "max_ns", "p50_ns", "p95_ns", "p99_ns", "mean_ns")


class Header(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="line", tag="header"):
    """Request, version and time of a run."""

    schema: int
    attnbench: str
    created: str
    suite: str = ""
    request: dict[str, Any] = {}
    """Whole request, with which `run --resume RUN` continues."""
    seed: int | None = None
    against: tuple[str, ...] = ()
    """Implementations that the others are compared with, if that was requested."""
    sources: dict[str, str] = {}
    """File or module of each function given by reference -> SHA-256 of its file."""


class EnvironmentLine(Struct, frozen=True, tag_field="line", tag="environment"):
    """An environment. `key` also covers soft facts and the framework, which `fingerprint` leaves out."""

    key: str
    fingerprint: str
    environment: Environment


class RecordLine(Struct, frozen=True, omit_defaults=True, tag_field="line", tag="record"):
    """A record with the key of its environment instead of the environment itself."""

    record: Record
    environment: str | None = None
    when: str = ""
    """When the record was written, if that was in a later sitting than the one that began the file."""


Line = Header | EnvironmentLine | RecordLine


class Run(Struct, frozen=True):
    """Content of a run file."""

    header: Header
    environments: dict[str, Environment]
    """Environments by key."""
    records: tuple[Record, ...]
    warnings: tuple[str, ...] = ()
    added: tuple[Header, ...] = ()
    """Headers of resumed runs with another request than the first."""
    dates: tuple[str, ...] = ()
    """When each record was made, in the order of the records: the file's date, or that of the resumed sitting."""

    @property
    def dated(self) -> list[tuple[str, Record]]:
        """The records, each with the date when it was made."""
        return list(zip(self.dates or [self.header.created] * len(self.records), self.records, strict=True))

    def only(self, keep: Callable[[Record], bool]) -> Run:
        """Return the run with some of its records."""
        kept = [one for one in self.dated if keep(one[1])]
        dates, records = zip(*kept) if kept else ((), ())
        return msgspec.structs.replace(self, records=records, dates=dates)

    @property
    def headers(self) -> tuple[Header, ...]:
        """All headers, in order."""
        return (self.header, *self.added)

    @property
    def against(self) -> tuple[str, ...]:
        """Implementations that the others are compared with, by the last header that names any."""
        return next((header.against for header in reversed(self.headers) if header.against), ())

    @property
    def done(self) -> frozenset[str]:
        """Ids of the cells that need not run again. That is all but those for which no process could be started, and
        those whose anchors are lost because the file was cut between them."""
        anchors = [record for record in self.records if record.implementation in ANCHORS]
        failed = {record.workload for record in anchors if record.status != "ok"}

        def is_cut(record: Record) -> bool:
            if not anchors or record.implementation in ANCHORS or not isinstance(record, Ok) or record.time is None:
                return False
            beside = {one.implementation for one in anchors_beside(record, self.records)}
            return record.workload not in failed and beside != set(ANCHORS)

        return frozenset(
            record.cell.id for record in self.records if not getattr(record, "unstarted", False) and not is_cut(record)
        )


class NamedRun(Struct, frozen=True):
    """A run file that was read, and its name on a page or in an export."""

    name: str
    run: Run
    path: str = ""
    """Path as the user gave it, for commands."""


def new_header(version: str, suite: str, request: Mapping[str, Any] | None = None, **facts: Any) -> Header:
    """Return the header of a run that starts now; `facts` are further fields of it."""
    asked = dict(request or {})
    return Header(schema=SCHEMA, attnbench=version, created=_now(), suite=suite, request=asked, **facts)


def _now() -> str:
    """Return the date and time of this second, as run files hold them."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunWriter:
    """A writer that appends to a run file; after `write` returns, the records survive `kill -9` and a power cut. The
    file is locked until `close`, or until the process ends: a second writer is refused. An incomplete last line of an
    earlier writer is cut off first; `warning` says so."""

    def __init__(self, path: Path, header: Header | None = None) -> None:
        self.path = path
        self._known: set[str] = set()
        with write_errors(path, OTHER_FOLDER):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        try:
            _lock(path, self._file)
            self.warning = _mend(path, self._file)
        except BaseException:
            self._file.close()
            raise
        self._is_resumed = self._file.tell() > 0
        if header is not None and not self._is_resumed:
            self._append([header])

    @classmethod
    def create(cls, runs_dir: Path, machine: str, suite: str, header: Header | None = None) -> RunWriter:
        """Start a new file runs_dir/<machine>/<timestamp>-<suite>-<id>.jsonl."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
        name = f"{stamp}-{slug(suite)}-{secrets.token_hex(2)}.jsonl"
        return cls(runs_dir / slug(machine) / name, header or new_header("", suite))

    def add_header(self, header: Header) -> None:
        """Append a header with the request of the records that follow."""
        self._append([header])

    def write(self, records: Sequence[Record]) -> None:
        """Append all records of a workload in one write; they are on disk when this returns."""
        lines: list[Line] = []
        when = _now() if self._is_resumed else ""
        for record in records:
            environment, key = record.environment, None
            if environment is not None:  # the key is the fingerprint, and six digits over everything else in it
                whole = msgspec.json.encode(environment, order="sorted")
                key = f"{environment.fingerprint}.{hashlib.sha256(whole).hexdigest()[:6]}"
                if key not in self._known:
                    self._known.add(key)
                    lines.append(EnvironmentLine(key, environment.fingerprint, environment))
            stored = msgspec.structs.replace(record, environment=None)
            if record.errors is not None:  # JSON has neither NaN nor infinity: the largest float replaces both
                values = msgspec.structs.asdict(record.errors)
                odd = [name for name, value in values.items() if isinstance(value, float) and not isfinite(value)]
                errors = msgspec.structs.replace(record.errors, **dict.fromkeys(odd, sys.float_info.max))
                stored = msgspec.structs.replace(stored, errors=errors)
            line = RecordLine(stored, key, when)
            if why := _unreadable(line):
                failed = Failed(implementation=record.implementation, workload=record.workload, reason=why)
                line = RecordLine(failed, key, when)
            lines.append(line)
        self._append(lines)

    def close(self) -> None:
        """Close the file; all records are on disk already."""
        with suppress(OSError):
            self._file.close()

    def _append(self, lines: Sequence[Line]) -> None:
        with write_errors(self.path, OTHER_FOLDER):
            self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            self._file.flush()
            os.fsync(self._file.fileno())


def _unreadable(line: RecordLine) -> str:
    """Return why a record could not be read again, or an empty text: a figure of a third party's may be anything."""
    text = msgspec.json.encode(line)
    if len(text) > LONGEST_LINE:
        return f"its record has {len(text):,} bytes, more than the {LONGEST_LINE:,} that a line of a run file may have"
    try:
        decode_json(text, Line)
    except (msgspec.DecodeError, UsageError) as error:
        return f"its record cannot be kept: {printable(str(error))} (a figure that is not finite?)"
    return ""


def check_writable(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be written to at once, and not after the first workload."""
    with write_errors(folder, f"Choose another folder with {option}."):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()


def slug(text: str) -> str:
    """Return a device or suite name as a folder name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_SLUG] or "unknown"


def read_run(path: Path) -> Run:
    """Read a run file; an incomplete last line gives a warning, and any other fault raises BrokenFile."""
    lines, torn = _split(path)
    warnings = (_torn_warning(path, len(lines) + 1, torn),) if torn else ()
    header, added = _read_header(path, lines[0] if lines else b""), []
    environments: dict[str, Environment] = {}
    records: dict[tuple[str, str], tuple[str, Record]] = {}
    for number, text in enumerate(lines[1:], start=2):
        line = _decode(path, number, text)
        if isinstance(line, Header):
            added.append(line)
        elif isinstance(line, EnvironmentLine):
            environments[line.key] = line.environment
        else:
            record = _rejoin(path, number, line, environments)
            sitting = ""
            if record.implementation in ANCHORS and isinstance(record, Ok) and record.time is not None:
                sitting = record.time.sitting  # each sitting of a resumed run has anchors of its own
            key = record.cell.id, sitting
            records.pop(key, None)
            records[key] = line.when or header.created, record
    dates, kept = zip(*records.values(), strict=True) if records else ((), ())
    return Run(header, environments, kept, warnings, tuple(added), dates)


def _mend(path: Path, file: BinaryIO) -> str | None:
    """Repair the last line through the file that holds the lock, so that no other process is writing it."""
    lines, torn = _split(path)
    whole = b"".join(line + b"\n" for line in lines)
    if not lines or path.stat().st_size == len(whole):
        return None
    with write_errors(path, OTHER_FOLDER):
        file.truncate(min(len(whole), path.stat().st_size))
        if not torn:
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
    return _torn_warning(path, len(lines) + 1, torn) if torn else None


def _lock(path: Path, file: BinaryIO) -> None:
    with write_errors(path, OTHER_FOLDER), suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    pid = _pid_of_writer(path)
    who, stop = f"pid {pid}", f"`kill {pid}` if it hangs"
    if pid is None:
        who, stop = "a process that is not visible from here", "end it there"
    elif pid == os.getpid():
        who, stop = "this process", "close it first"
    raise UsageError(f"{path} is being written by another attnbench ({who}): wait for it, or {stop}.")


def _pid_of_writer(path: Path) -> int | None:
    """Return a process that has the file open for writing, another one rather than this; None if none can be seen."""
    import psutil

    real, pid = str(path.resolve()), None
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            files = [one for one in process.open_files() if one.path == real]
            if process.pid != os.getpid() and files:
                return process.pid
            pid = process.pid if len(files) > 1 else pid
    return pid


def _split(path: Path) -> tuple[list[bytes], bytes]:
    """Return the whole lines, and the rest of a last line that was being written when the process died."""
    try:
        lines = read_lines(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    # One line alone is the header: a file without a readable header is no run file, torn or not.
    if len(lines) > 1:
        try:
            decode_json(lines[-1])
        except msgspec.DecodeError:
            return lines[:-1], lines[-1]
    return lines, b""


def _read_header(path: Path, text: bytes) -> Header:
    why = "not an attnbench run file: its first line is not a header."
    try:
        header = decode_json(text)
    except msgspec.DecodeError as error:
        raise BrokenFile(path, 1, why if text else "the file is empty.") from error
    if not isinstance(header, dict) or header.get("line") != "header":
        raise BrokenFile(path, 1, why)
    schema = header.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise BrokenFile(
            path,
            1,
            f"written by attnbench {header.get('attnbench', '?')} (schema {schema}; this one reads {SCHEMA}): upgrade.",
        )
    line = _decode(path, 1, text)
    assert isinstance(line, Header)
    return line


def _decode(path: Path, number: int, text: bytes) -> Line:
    try:
        return decode_json(text, Line)
    except (msgspec.DecodeError, UsageError) as error:
        raise BrokenFile(path, number, f"not a line of a run file ({error}).") from error


def _rejoin(path: Path, number: int, line: RecordLine, environments: Mapping[str, Environment]) -> Record:
    problem = impossible_times(line.record)
    if problem:
        raise BrokenFile(path, number, f"{problem}: measure it again, or remove the line.")
    if line.environment is None:
        return line.record
    if line.environment not in environments:
        raise BrokenFile(path, number, f'its environment "{line.environment}" is not defined on an earlier line.')
    environment = environments[line.environment]
    return _with_true_clock(msgspec.structs.replace(line.record, environment=environment), environment)


def _with_true_clock(record: Record, environment: Environment) -> Record:
    """Rename the clock of JAX's device times of versions whose estimator had no number yet. Those times left out copies
    and fills, which torch's clock counted, so the two must not be ranked together."""
    if environment.framework != "jax" or environment.device != "cuda" or "estimator" in environment.harness:
        return record
    if not isinstance(record, Ok) or record.time is None:
        return record

    def renamed(time: Time) -> Time:
        return msgspec.structs.replace(time, clock=KERNELS_ONLY) if time.clock == "kernel" else time

    also = {KERNELS_ONLY if name == "kernel" else name: renamed(time) for name, time in record.also.items()}
    return msgspec.structs.replace(record, time=renamed(record.time), also=also)


def _torn_warning(path: Path, number: int, torn: bytes) -> str:
    return f"{path}, line {number}: the last line was cut off after {len(torn)} bytes and is ignored."


def impossible_times(record: Record, trimmed: bool = False) -> str:
    """Return the first time of a record that no clock can have given, in words; empty if there is none. Readers take
    logarithms, so that impossible times must be refused first. With `trimmed` the samples are the medians of rounds, as
    a baseline keeps them."""
    if not isinstance(record, Ok):
        return ""
    times = {"time": record.time} | {f"also.{name}": time for name, time in record.also.items()}
    for name, time in times.items():
        problem = "" if time is None else _problem(time) or _not_of_samples(time, trimmed)
        if problem:
            return f"{name}.{problem} in the record of {record.cell.id}"
    return ""


def _problem(time: Time) -> str:
    if not time.samples_ns:
        return "samples_ns is empty"
    for name, value in [("samples_ns", one) for one in time.samples_ns] + [(n, getattr(time, n)) for n in POSITIVE]:
        if not (isfinite(value) and value > 0):
            return f"{name} holds {value:g}, which is not a positive number of nanoseconds"
        if not SHORTEST_NS <= value <= LONGEST_NS:
            return f"{name} holds {value:g}, which is no time of a call in nanoseconds"
    if not (isfinite(time.std_ns) and time.std_ns >= 0):
        return f"std_ns is {time.std_ns:g}, which is not a spread"
    if not time.min_ns <= time.median_ns <= time.max_ns:
        return f"median_ns {time.median_ns:g} is not between min_ns {time.min_ns:g} and max_ns {time.max_ns:g}"
    if time.ci95_ns is not None and not time.ci95_ns[0] <= time.median_ns <= time.ci95_ns[1]:
        return f"ci95_ns does not hold median_ns {time.median_ns:g}"
    if time.calls_per_sample < 1:
        return f"calls_per_sample is {time.calls_per_sample}"
    if time.rounds and (min(time.rounds) < 0 or sum(time.rounds) != len(time.samples_ns)):
        return f"rounds has {sum(time.rounds)} samples, but samples_ns {len(time.samples_ns)}"
    return ""


def _not_of_samples(time: Time, trimmed: bool) -> str:
    """Return which summary does not fit the samples; rankings read the summaries, intervals the samples."""
    least, most = min(time.samples_ns), max(time.samples_ns)
    if trimmed:
        # The median of all samples lies between the medians of the rounds.
        bounds = {"median_ns": (least, most), "min_ns": (0.0, least), "max_ns": (most, inf)}
    else:
        middle = median(time.samples_ns)
        exact = {"median_ns": middle, "p50_ns": middle, "min_ns": least, "max_ns": most}
        bounds = {name: (value, value) for name, value in exact.items()}
    for name, (low, high) in bounds.items():
        value = getattr(time, name)
        slack = ROUNDING_NS + 1e-6 * value
        if not low - slack <= value <= high + slack:
            return f"{name} {value:g} is not that of samples_ns"
    return ""
