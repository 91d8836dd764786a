"""pytest plugin: the fixture `attnbench` (check, measure, compare), its marker and options, and the measurements of a
session in the terminal and as a file.

pytest loads this in every project of an environment, so it imports nothing but pytest until a test needs more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnbench.comparison import Comparison
    from attnbench.report.pytest_session import Earlier, SessionFile
    from attnbench.runner import Subject
    from attnbench.spec import Record, Workload

    AnyWorkload = Workload | Mapping[str, Any] | None

MARKER = "attnbench"
OPTIONS = ("framework", "device", "budget_s", "threads")
"""Arguments of the marker: defaults of every call in the test."""
DISABLED = "not timed: --attnbench-disable"


class AttnbenchWarning(pytest.PytestWarning):
    """A warning about an inconclusive comparison."""


class Collected:
    """Records and comparisons that a session asked for, in order."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.comparisons: list[Comparison] = []
        self.tests: dict[str, list[str]] = {}
        self.sources: dict[str, str] = {}

    def document(self) -> SessionFile:
        """Return the document that `--attnbench-json` writes."""
        from attnbench.report.pytest_session import SessionFile

        return SessionFile(records=self.records, comparisons=self.comparisons, tests=self.tests, sources=self.sources)

    def add(self, other: SessionFile) -> None:
        """Add what another process collected."""
        self.records += other.records
        self.comparisons += other.comparisons
        self.sources |= other.sources
        for test, asked in other.tests.items():
            self.tests.setdefault(test, []).extend(asked)


class Bench:
    """The fixture's value. A workload is an `attnbench.Workload`, a mapping, or keywords: `q_len=128, causal=True`."""

    def __init__(self, node: pytest.Item, collected: Collected) -> None:
        self._node = node
        self._collected = collected
        self._timed = not node.config.getoption("attnbench_disable")

    def check(
        self,
        implementation: Subject,
        workload: AnyWorkload = None,
        framework: str | None = None,
        *,
        device: str | None = None,
        **shape: Any,
    ) -> Record:
        """Verify a name, function or Implementation; a wrong result fails the test, an unsupported case skips it."""
        __tracebackhide__ = True
        import attnbench

        settings = self._settings("budget_s", "threads", framework=framework, device=device)
        return self._keep(implementation, attnbench.verify(implementation, _workload(workload, shape), **settings))

    def measure(
        self,
        implementation: Subject,
        workload: AnyWorkload = None,
        framework: str | None = None,
        *,
        device: str | None = None,
        budget_s: float | None = None,
        **shape: Any,
    ) -> Record:
        """Verify, then time. With `--attnbench-disable` it only verifies, and `time` is None."""
        __tracebackhide__ = True
        import attnbench

        if not self._timed:
            return self.check(implementation, workload, framework, device=device, **shape)
        settings = self._settings("threads", framework=framework, device=device, budget_s=budget_s)
        return self._keep(implementation, attnbench.measure(implementation, _workload(workload, shape), **settings))

    def compare(
        self,
        a: Subject,
        b: Subject,
        workload: AnyWorkload = None,
        *,
        at_most: float | None = None,
        framework: str | None = None,
        device: str | None = None,
        budget_s: float | None = None,
        threads: int | None = None,
        **shape: Any,
    ) -> Comparison:
        """Fail if b is slower than a, or significantly slower than `at_most` times a; warn if that is inconclusive.

        `at_most` bounds `Comparison.ratio`: 1.1 allows 10 % more time, 0.8 demands 20 % less.
        """
        __tracebackhide__ = True
        import attnbench

        if at_most is not None and not 0 < at_most < float("inf"):
            from attnbench.errors import UsageError

            raise UsageError(f"at_most is a ratio such as 1.1, not {at_most!r}.")
        if not self._timed:
            return self._check_both(a, b, _workload(workload, shape), framework=framework, device=device)
        settings = self._settings(framework=framework, device=device, budget_s=budget_s, threads=threads)
        comparison = attnbench.compare(a, b, _workload(workload, shape), **settings)
        self._collected.comparisons.append(comparison)
        self._note(f"{comparison.a} {comparison.b} {comparison.workload.id}")
        self._judge(comparison, at_most)
        return comparison

    def _check_both(self, a: Subject, b: Subject, workload: Workload, **given: Any) -> Comparison:
        """Verify both, even if the first one fails."""
        __tracebackhide__ = True
        import attnbench
        from attnbench.comparison import Comparison

        settings = self._settings("budget_s", "threads", **given)
        records = [attnbench.verify(side, workload, **settings) for side in (a, b)]
        comparison = Comparison(
            a=records[0].implementation,
            b=records[1].implementation,
            workload=records[0].workload,
            verdict=None,
            reason=DISABLED,
            record_a=records[0],
            record_b=records[1],
        )
        for side, record in zip((a, b), records):
            self._add(side, record)
        lost = next((record for record in reversed(records) if record.status != "ok"), None)
        if lost is not None:
            self._give_up(comparison, _outcome_text(lost))
        return comparison

    def _give_up(self, comparison: Comparison, reason: str) -> None:
        """Skip a test whose first side is unsupported if the second one is not wrong, else fail it."""
        __tracebackhide__ = True
        a, b = (None if one is None else one.status for one in (comparison.record_a, comparison.record_b))
        pytest.skip(reason) if a == "unsupported" and b in ("unsupported", "ok") else pytest.fail(reason)

    def _settings(self, *unused: str, **given: Any) -> dict[str, Any]:
        """Return the options of the call, with those of the marker as defaults, apart from the unused ones."""
        marker = self._node.get_closest_marker(MARKER)
        defaults = {} if marker is None else dict(marker.kwargs)
        if unknown := sorted(set(defaults) - set(OPTIONS)):
            from attnbench.errors import UsageError

            raise UsageError(f"the marker attnbench takes {', '.join(OPTIONS)}, not {', '.join(unknown)}.")
        options = defaults | {name: value for name, value in given.items() if value is not None}
        return {name: value for name, value in options.items() if name not in unused}

    def _keep(self, asked: Subject, record: Record) -> Record:
        __tracebackhide__ = True
        self._add(asked, record)
        if record.status == "unsupported":
            pytest.skip(_outcome_text(record))
        if record.status != "ok":
            pytest.fail(_outcome_text(record))
        return record

    def _add(self, asked: Subject, record: Record) -> None:
        from attnbench.report.pytest_session import source_of

        self._collected.records.append(record)
        self._collected.sources[record.cell.id] = source_of(asked)
        self._note(record.cell.id)

    def _note(self, asked: str) -> None:
        self._collected.tests.setdefault(self._node.nodeid, []).append(asked)

    def _judge(self, comparison: Comparison, at_most: float | None) -> None:
        __tracebackhide__ = True
        from attnbench.comparing.text import sentence
        from attnbench.printable import printable

        text = printable(sentence(comparison)) + ("" if at_most is None else f" (at most {at_most:g}x was asked for)")
        if comparison.verdict is None:
            self._give_up(comparison, text)
        enough = fast_enough(comparison, at_most)
        unknown_fails = self._node.config.getoption("attnbench_inconclusive") == "fail"
        if enough is False or (enough is None and unknown_fails):
            pytest.fail(text)
        if enough is None:
            self._node.warn(AttnbenchWarning(text))


def fast_enough(comparison: Comparison, at_most: float | None) -> bool | None:
    """Return whether b is fast enough; None if that is inconclusive.

    If b is slower, `at_most` must hold by every metric, CPU time as well as wall time; one of 1 or less never does.
    """
    if at_most is None:
        return None if comparison.verdict == "inconclusive" else comparison.verdict != "slower"
    low, high = comparison.interval or (0.0, float("inf"))
    if comparison.verdict == "slower":
        bounds = [(low, high), *(one.interval for one in comparison.estimates.values())]
        low, high = (max(ends) for ends in zip(*bounds))
    if low > at_most or (comparison.verdict == "slower" and at_most <= 1):
        return False
    return True if high <= at_most and comparison.verdict != "inconclusive" else None


def _outcome_text(record: Record) -> str:
    from attnbench.printable import printable, printable_lines
    from attnbench.results.records import outcome_text

    text = printable(f"{record.implementation} on {record.workload.title}: {outcome_text(record)}")
    detail = getattr(record, "detail", "")
    return text + (f"\n{printable_lines(detail)}" if detail else "")


def _workload(workload: AnyWorkload, shape: Mapping[str, Any]) -> Workload:
    from attnbench.errors import UsageError
    from attnbench.runner import workload_from
    from attnbench.spec import Workload

    if not isinstance(workload, Workload):
        return workload_from({**(workload or {}), **shape})
    if shape:
        raise UsageError(f"a Workload already defines the whole shape: leave out {', '.join(sorted(shape))}.")
    return workload


COLLECTED = pytest.StashKey[Collected]()
EARLIER: pytest.StashKey[Earlier] = pytest.StashKey()
"""File to compare with."""


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
        help="What an inconclusive comparison does to its test (default: warn).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and refuse files that cannot be read or written."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}({', '.join(OPTIONS)}): added to every test that uses the fixture `{MARKER}`; "
        "its arguments are defaults for `check`, `measure` and `compare`",
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
    """Write the file; in a worker of pytest-xdist, pass the records to the main process instead.

    A session without any such test replaces no earlier file.
    """
    collected = session.config.stash[COLLECTED]
    output = getattr(session.config, "workeroutput", None)
    path = session.config.getoption("attnbench_json")
    if output is None and path and (collected.tests or not Path(path).exists() or not Path(path).stat().st_size):
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
        lines.append(
            f"Several pytest workers ran at once and disturbed each other's times: measure with `-m {MARKER} -n 0`."
        )
    if EARLIER in config.stash:
        lines.append(f"Against {config.getoption('attnbench_compare')}:")
        lines += earlier_lines(collected.document(), config.stash[EARLIER])
    if path := config.getoption("attnbench_json"):
        lines.append(f"written to {path}")
    terminalreporter.section(MARKER)
    for line in lines:
        terminalreporter.write_line(printable(line))
