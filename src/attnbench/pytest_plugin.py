"""pytest plugin: a fixture, a marker and options, and the measurements of a session in the terminal and as a file.

pytest loads this in every project of an environment, so it imports nothing but pytest until a test needs more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnbench.pytest_bench import MARKER, OPTIONS, Bench, Collected

COLLECTED = pytest.StashKey[Collected]()
EARLIER = pytest.StashKey[list[Any]]()
"""Records to compare with."""


@pytest.fixture(name="attnbench")
def bench(request: pytest.FixtureRequest) -> Bench:
    """Verify, time and compare attention: `check`, `measure` and `compare`."""
    return Bench(request.node, request.config.stash[COLLECTED])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, in a group of their own."""
    group = parser.getgroup("attnbench", "attnbench: verify, time and compare attention")
    group.addoption("--attnbench-json", metavar="PATH", help="Write all records and comparisons of this session.")
    group.addoption(
        "--attnbench-compare", metavar="RUN_OR_JSON", help="Compare the times with a run file or an earlier JSON."
    )
    group.addoption("--attnbench-disable", action="store_true", help="Time nothing: measure and compare only check.")
    group.addoption(
        "--attnbench-inconclusive",
        choices=("warn", "fail"),
        default="warn",
        help="What a comparison that cannot tell does to its test (default: warn).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and refuse files that cannot be read or written."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}({', '.join(OPTIONS)}): uses the fixture of that name (every such test is marked by itself); "
        "the arguments are defaults of what it checks, measures and compares",
    )
    config.stash[COLLECTED] = Collected()
    earlier, path = (config.getoption(f"attnbench_{name}") for name in ("compare", "json"))
    if hasattr(config, "workerinput") or not (earlier or path):
        return
    from attnbench.errors import UsageError
    from attnbench.printable import printable
    from attnbench.report.pytest_session import check_path, read_earlier

    try:
        if earlier:
            config.stash[EARLIER] = read_earlier(Path(earlier))
        if path:
            check_path(Path(path))
    except UsageError as error:
        raise pytest.UsageError(printable(str(error))) from error


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses the fixture, so that `-m "not attnbench"` leaves them all out."""
    for item in items:
        if MARKER in getattr(item, "fixturenames", ()) and item.get_closest_marker(MARKER) is None:
            item.add_marker(MARKER)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file; in a worker of pytest-xdist, pass the records to the main process instead."""
    collected = session.config.stash[COLLECTED]
    output = getattr(session.config, "workeroutput", None)
    path = session.config.getoption("attnbench_json")
    if output is None and path:
        from attnbench.report.pytest_session import write_session

        write_session(Path(path), collected.document())
    elif output is not None and collected.tests:
        import msgspec

        output[MARKER] = msgspec.msgpack.encode(collected.document())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker of pytest-xdist collected."""
    packed = getattr(node, "workeroutput", {}).get(MARKER)
    if packed is not None:
        import msgspec

        from attnbench.report.pytest_session import SessionFile

        node.config.stash[COLLECTED].add(msgspec.msgpack.decode(packed, type=SessionFile))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was measured, and how that compares with the earlier file."""
    collected = config.stash[COLLECTED]
    if not collected.tests:
        return
    from attnbench.printable import printable
    from attnbench.report.pytest_session import earlier_lines, summary_lines

    lines = list(summary_lines(collected.document()))
    if (getattr(config.option, "numprocesses", None) or 0) > 1:
        lines.append(f"Several workers ran at once and their times disturb each other: time with `-m {MARKER} -n 0`.")
    if EARLIER in config.stash:
        lines.append(f"Against {config.getoption('attnbench_compare')}:")
        lines += earlier_lines(collected.records, config.stash[EARLIER])
    if path := config.getoption("attnbench_json"):
        lines.append(f"written to {path}")
    terminalreporter.section(MARKER)
    for line in lines:
        terminalreporter.write_line(printable(line))
