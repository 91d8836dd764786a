"""The value of the pytest fixture `attnbench`: check, measure, compare. Heavy modules are imported only in calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnbench.comparison import Comparison
    from attnbench.report.pytest_session import SessionFile
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

    def document(self) -> SessionFile:
        """Return the document that `--attnbench-json` writes."""
        from attnbench.report.pytest_session import SessionFile

        return SessionFile(records=self.records, comparisons=self.comparisons, tests=self.tests)

    def add(self, other: SessionFile) -> None:
        """Add what another process collected."""
        self.records += other.records
        self.comparisons += other.comparisons
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

        settings = self._settings(framework=framework, device=device)
        settings.pop("budget_s", None)
        settings.pop("threads", None)
        return self._keep(attnbench.verify(implementation, _workload(workload, shape), **settings))

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
        settings = self._settings(framework=framework, device=device, budget_s=budget_s)
        settings.pop("threads", None)
        return self._keep(attnbench.measure(implementation, _workload(workload, shape), **settings))

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

        settings = self._settings(**given)
        settings.pop("budget_s", None)
        settings.pop("threads", None)
        records = [attnbench.verify(side, workload, **settings) for side in (a, b)]
        comparison = _untimed(*records)
        for record in records:
            self._collected.records.append(record)
            self._note(record.cell.id)
        lost = next((record for record in reversed(records) if record.status != "ok"), None)
        if lost is not None:
            self._give_up(comparison, _told(lost))
        return comparison

    def _give_up(self, comparison: Comparison, told: str) -> None:
        """Skip a test whose first side is unsupported if the second one is not wrong, else fail it."""
        __tracebackhide__ = True
        a, b = (None if one is None else one.status for one in (comparison.record_a, comparison.record_b))
        pytest.skip(told) if a == "unsupported" and b in ("unsupported", "ok") else pytest.fail(told)

    def _settings(self, **given: Any) -> dict[str, Any]:
        """Return the options of the call, with those of the marker as defaults."""
        marker = self._node.get_closest_marker(MARKER)
        defaults = {} if marker is None else dict(marker.kwargs)
        if unknown := sorted(set(defaults) - set(OPTIONS)):
            from attnbench.errors import UsageError

            raise UsageError(f"the marker attnbench takes {', '.join(OPTIONS)}, not {', '.join(unknown)}.")
        return defaults | {name: value for name, value in given.items() if value is not None}

    def _keep(self, record: Record) -> Record:
        __tracebackhide__ = True
        self._collected.records.append(record)
        self._note(record.cell.id)
        if record.status == "unsupported":
            pytest.skip(_told(record))
        if record.status != "ok":
            pytest.fail(_told(record))
        return record

    def _note(self, asked: str) -> None:
        self._collected.tests.setdefault(self._node.nodeid, []).append(asked)

    def _judge(self, comparison: Comparison, at_most: float | None) -> None:
        __tracebackhide__ = True
        from attnbench.comparing.text import sentence
        from attnbench.printable import printable

        told = printable(sentence(comparison)) + ("" if at_most is None else f" (at most {at_most:g}x was asked for)")
        if comparison.verdict is None:
            self._give_up(comparison, told)
        enough = fast_enough(comparison, at_most)
        unknown_fails = self._node.config.getoption("attnbench_inconclusive") == "fail"
        if enough is False or (enough is None and unknown_fails):
            pytest.fail(told)
        if enough is None:
            self._node.warn(AttnbenchWarning(told))


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


def _told(record: Record) -> str:
    from attnbench.printable import printable, printable_lines

    status = record.status.replace("_", " ")
    told = printable(f"{record.implementation} on {record.workload.title}: {status}: {record.reason}")
    detail = getattr(record, "detail", "")
    return told + (f"\n{printable_lines(detail)}" if detail else "")


def _workload(workload: AnyWorkload, shape: Mapping[str, Any]) -> Workload:
    from attnbench.errors import UsageError
    from attnbench.runner import workload_from
    from attnbench.spec import Workload

    if not isinstance(workload, Workload):
        return workload_from({**(workload or {}), **shape})
    if shape:
        raise UsageError(f"a Workload says everything: leave out {', '.join(sorted(shape))}.")
    return workload


def _untimed(a: Record, b: Record) -> Comparison:
    from attnbench.comparison import Comparison

    return Comparison(
        a=a.implementation,
        b=b.implementation,
        workload=a.workload,
        verdict=None,
        reason=DISABLED,
        record_a=a,
        record_b=b,
    )
