"""Records and comparisons of a pytest session: its file, its lines in the terminal, ratios to an earlier session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import Struct

from attnbench.comparing.stored import differences
from attnbench.comparing.text import sentence
from attnbench.comparison import Comparison
from attnbench.errors import BrokenFile, UsageError
from attnbench.files import decode_json, draft_of, read_content, refuse_run_file
from attnbench.report import units
from attnbench.results.records import clock_of, is_timed, median_ns
from attnbench.results.run_file import impossible_times, read_run
from attnbench.spec import Ok, Record

CAVEAT = (
    "The two sessions ran at different times: on a shared machine such ratios vary by 10 to 50 % without any change. "
    "`attnbench gate` and the fixture's `compare` measure both sides in turn."
)


class SessionFile(Struct, frozen=True, kw_only=True):
    """File that `--attnbench-json` writes."""

    records: list[Record]
    comparisons: list[Comparison]
    tests: dict[str, list[str]]
    """Id of a test -> ids of the cells that it asked for."""
    attnbench: str = ""
    created: str = ""
    schema: int = 1


class _WithRecords(Struct, frozen=True):
    """Part of the file that is read again; `attnbench run --json` has it too."""

    records: list[Record]


def check_path(path: Path) -> None:
    """Refuse a file that cannot be written, or a run file, before the tests run."""
    refuse_run_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"--attnbench-json: cannot write {path} ({error.strerror or error}).") from error


def write_session(path: Path, session: SessionFile) -> None:
    """Write the session as one JSON document."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    stamped = msgspec.structs.replace(session, created=now, attnbench=version("attnbench"))
    with draft_of(path) as draft:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(stamped), indent=2) + b"\n")


def read_earlier(path: Path) -> list[Record]:
    """Return the records of a run file, of an earlier `--attnbench-json`, or of `attnbench run --json`."""
    if not path.is_file():
        raise UsageError(f"--attnbench-compare: there is no file {path}; --attnbench-json PATH makes one.")
    if path.suffix == ".jsonl":
        return list(read_run(path).records)
    try:
        records = decode_json(read_content(path), _WithRecords).records
    except (msgspec.DecodeError, UsageError) as error:
        raise BrokenFile(path, None, f"neither a run file nor a JSON document with records ({error}).") from error
    problem = next(filter(None, map(impossible_times, records)), "")
    if problem:
        raise BrokenFile(path, None, f"{problem}: make it again with --attnbench-json.")
    return records


def summary_lines(session: SessionFile) -> Iterator[str]:
    """Yield a line per time and per comparison, then the counts."""
    times = [(record, record.time) for record in session.records if record.time is not None]
    for record, time in times:
        interval = units.half_interval(time.median_ns, time.ci95_ns)
        yield f"{_what(record)}: {units.duration(time.median_ns)} {interval}"
    for comparison in session.comparisons:
        yield f"{comparison.workload.id}: {sentence(comparison)}"
    compared = sum(one.verdict is not None for one in session.comparisons)
    counts = {
        "checked": len(session.records) - len(times),
        "measured": len(times),
        "compared": compared,
        "not compared": len(session.comparisons) - compared,
    }
    yield ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing was asked for"


def earlier_lines(now: Sequence[Record], then: Iterable[Record]) -> Iterator[str]:
    """Yield the ratio of every time to the earlier one, if both come from the same environment; else what differs."""
    known = {record.cell.id: record for record in then}
    refused: dict[str, list[str]] = {}
    timed = [record for record in now if is_timed(record)]
    ids = [record.cell.id for record in timed]
    for record in timed:
        earlier = known.get(record.cell.id)
        reason = _obstacle(record, earlier, ids)
        if reason is not None or earlier is None or not is_timed(earlier):
            refused.setdefault(reason or "", []).append(record.cell.id)
            continue
        here, there = median_ns(record), median_ns(earlier)
        ratio = f"{here / there:.2f}x the earlier time ({units.duration(here)}, was {units.duration(there)})"
        yield f"{_what(record)}: {ratio}"
    for reason, cells in refused.items():
        yield f"not compared ({reason}): {', '.join(dict.fromkeys(cells))}"
    if sum(map(len, refused.values())) < len(timed):
        yield CAVEAT


def _obstacle(now: Ok, then: Record | None, measured: Sequence[str]) -> str | None:
    """Return why two times may not be compared; None if they may."""
    if measured.count(now.cell.id) > 1:
        return "measured more than once in this session"
    if then is None:
        return "not in the earlier file"
    if not is_timed(then):
        return "has no time in the earlier file"
    if now.environment is None or then.environment is None:
        return "its environment is not known"
    if differing := differences(then.environment, now.environment):
        return f"another environment: {'; '.join(differing)}"
    clock, earlier = clock_of(now), clock_of(then)
    return None if clock == earlier else f"clock is {clock}, was {earlier}"


def _what(record: Record) -> str:
    return f"{record.implementation} on {record.workload.title}"
