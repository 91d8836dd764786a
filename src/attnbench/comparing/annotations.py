"""A gate or a run as GitHub workflow commands: lines in the log that become annotations of the job and the pull
request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attnbench.comparing.gate_text import figures, ordered, remark, verdict, word
from attnbench.comparison import FAILING, OPEN, Case, GateReport
from attnbench.printable import printable, shortened
from attnbench.results.records import label
from attnbench.spec import Incorrect, Ok, Record, Unsupported

MOST = 10
"""GitHub shows so many of each kind per step and hides the rest without a word."""
MOST_TEXT = 4000
"""Characters of one annotation; GitHub shows no more."""
KINDS = {**dict.fromkeys(FAILING, "error"), **dict.fromkeys(OPEN, "warning"), "improved": "notice"}
"""What has no baseline or was not measured is counted in the report's warnings, not listed."""


def workflow_commands(report: GateReport) -> list[str]:
    """Errors for what is bad, warnings for what is unknown, notices for improvements; where there are too many, the
    last says how many more."""
    found: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    for kind, title, message in _annotations(report):
        found[kind].append(command(kind, title, message))
    return [
        line for kind, lines in found.items() for line in _capped(kind, lines, "gate", "the job summary or gate.json")
    ]


def record_commands(records: Iterable[Record], place: str = "") -> list[str]:
    """Errors for what is wrong, warnings for what crashed, hung or did not fit, once per reason; what was refused is
    no event. `place` names where they were measured, if there are several."""
    found: dict[str, dict[tuple[str, str, str], list[str]]] = {"error": {}, "warning": {}}
    for record in records:
        if not isinstance(record, Ok | Unsupported):
            kind = "error" if isinstance(record, Incorrect) else "warning"
            event = (label(record), record.status.replace("_", " "), record.reason)
            found[kind].setdefault(event, []).append(record.workload.title)
    return [
        line
        for kind, events in found.items()
        for line in _capped(
            kind, [_event(kind, *event, shapes, place) for event, shapes in events.items()], "report", "the report"
        )
    ]


def _event(kind: str, name: str, status: str, reason: str, shapes: Sequence[str], place: str) -> str:
    more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
    where = f"{place}: " if place else ""
    return command(kind, f"{name}: {status}", f"{where}{shapes[0]}{more}. {reason}")


def _annotations(report: GateReport) -> Iterator[tuple[str, str, str]]:
    if report.outcome == "nothing" or (report.outcome == "untrusted" and not report.warnings):
        yield "warning", "attnbench gate", verdict(report)
    for warning in report.warnings:
        yield "warning", "attnbench gate", warning
    for case in ordered(report.cases):
        if case.status in KINDS:
            yield KINDS[case.status], f"{case.implementation}: {word(case)}", _message(case)


def _message(case: Case) -> str:
    return ". ".join(part for part in (case.workload.title, figures(case), remark(case)) if part)


def _capped(kind: str, lines: list[str], what: str, where: str) -> list[str]:
    if len(lines) <= MOST:
        return lines
    more = len(lines) - (MOST - 1)
    return [*lines[: MOST - 1], command(kind, f"attnbench {what}", f"{more} more: see {where}")]


def command(kind: str, title: str, message: str) -> str:
    """`::kind title=...::message`, escaped as GitHub reads it."""
    return f"::{kind} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    text = shortened(text, MOST_TEXT).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return printable(text)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
