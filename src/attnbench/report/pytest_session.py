"""Records and comparisons of a pytest session: its file, its lines in the terminal, ratios to an earlier session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from inspect import unwrap
from pathlib import Path
from typing import Any

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
from attnbench.run.user_functions import one_source, sources_of
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
    sources: dict[str, str] = {}
    """Id of a cell -> file or module of the function that was asked for."""
    attnbench: str = ""
    created: str = ""
    schema: int = 1


class Earlier(Struct, frozen=True):
    """Part of the file that is read again; `attnbench run --json` has the records too."""

    records: list[Record]
    tests: dict[str, list[str]] | None = None
    """Cells that each test of a session asked for; None if the file is of no session."""
    sources: dict[str, str] = {}
    """Id of a cell -> file or module of the function that was given."""


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


def source_of(what: Any) -> str:
    """Return the file or module of a function that a test asks for; empty text for a name."""
    if isinstance(what, str):
        return what.rpartition(":")[0]
    while isinstance(what, partial):
        what = what.func
    return getattr(unwrap(what) if callable(what) else what, "__module__", None) or ""


def read_earlier(path: Path) -> Earlier:
    """Return the records of a run file, of an earlier `--attnbench-json`, or of `attnbench run --json`, and what the
    file knows of their functions."""
    if not path.is_file():
        raise UsageError(f"--attnbench-compare: there is no file {path}; --attnbench-json PATH makes one.")
    if path.suffix == ".jsonl":
        run = read_run(path)
        sources = sources_of(run)
        return Earlier(list(run.records), None, {r.cell.id: sources.get(r.implementation, "") for r in run.records})
    try:
        earlier = decode_json(read_content(path), Earlier)
    except (msgspec.DecodeError, UsageError) as error:
        raise BrokenFile(path, None, f"neither a run file nor a JSON document with records ({error}).") from error
    problem = next(filter(None, map(impossible_times, earlier.records)), "")
    if problem:
        raise BrokenFile(path, None, f"{problem}: make it again with --attnbench-json.")
    return earlier


def summary_lines(session: SessionFile) -> Iterator[str]:
    """Yield a line per time and per comparison, then the counts."""
    times = [(record, record.time) for record in session.records if record.time is not None]
    for record, time in times:
        yield f"{_what(record)}: {units.duration(time.median_ns)} {units.half_interval(time.half_width)}"
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


def earlier_lines(now: SessionFile, then: Earlier) -> Iterator[str]:
    """Yield the ratio of every time to the earlier one, if both come from the same environment and the same function;
    else what differs."""
    known = {record.cell.id: record for record in sorted(then.records, key=is_timed)}  # a time counts before a check
    refused: dict[str, list[str]] = {}
    timed = [record for record in now.records if is_timed(record)]
    ids = Counter(record.cell.id for record in timed)
    others = _other_functions(now, then)
    for record in timed:
        earlier = known.get(record.cell.id)
        reason = "measured more than once in this session" if ids[record.cell.id] > 1 else _obstacle(record, earlier)
        reason = reason or others.get(record.cell.id)
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


def _other_functions(now: SessionFile, then: Earlier) -> dict[str, str]:
    """Return the cells whose earlier time may be that of another function of the same name, and why.

    A session measures what its tests define, under names such as `attend` or `<lambda>`: only the test that asked for
    it tells which one that is. Other files know the file of a function that was given by reference.
    """
    found: dict[str, str] = {}
    here, there = _by_cell(now.tests), _by_cell(then.tests or {})
    times = Counter(record.cell.id for record in then.records if is_timed(record))
    for cell, tests in here.items():
        before, source = then.sources.get(cell, ""), now.sources.get(cell, "")
        if not one_source(before, source):
            found[cell] = f"the earlier file measured another function of that name, from {before}, not {source}"
        elif then.tests is not None and times[cell] > 1:
            found[cell] = "measured more than once in the earlier session"
        elif then.tests is not None and tests.isdisjoint(there.get(cell, ())):
            found[cell] = "another test asked for it in the earlier session"
    return found


def _by_cell(tests: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """Return the tests that asked for each cell."""
    found: dict[str, set[str]] = {}
    for test, cells in tests.items():
        for cell in cells:
            found.setdefault(cell, set()).add(test)
    return found


def _obstacle(now: Ok, then: Record | None) -> str | None:
    """Return why two times may not be compared; None if they may."""
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
