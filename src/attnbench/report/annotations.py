"""A gate as GitHub workflow commands: lines in the log that become annotations of the job and the pull request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnbench.comparison import FAILING, Case, GateReport
from attnbench.report.gate import figures, ordered, remark, verdict, word

MOST = 10
"""GitHub shows so many of each kind per step and hides the rest without a word."""
KINDS = {**dict.fromkeys(FAILING, "error"), "inconclusive": "warning", "improved": "notice"}
"""What has no baseline or was not measured is counted in the report's warnings, not listed."""


def workflow_commands(report: GateReport) -> list[str]:
    """Errors for what is bad, warnings for what is unknown, notices for improvements; where there are too many, the
    last says how many more."""
    found: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    for kind, title, message in _told(report):
        found[kind].append(command(kind, title, message))
    return [line for kind, lines in found.items() for line in _capped(kind, lines)]


def _told(report: GateReport) -> Iterator[tuple[str, str, str]]:
    if report.outcome == "nothing" or (report.outcome == "untrusted" and not report.warnings):
        yield "warning", "attnbench gate", verdict(report)
    for warning in report.warnings:
        yield "warning", "attnbench gate", warning
    for case in ordered(report.cases):
        if case.status in KINDS:
            yield KINDS[case.status], f"{case.implementation}: {word(case)}", _message(case)


def _message(case: Case) -> str:
    return ". ".join(part for part in (case.workload.title, figures(case), remark(case)) if part)


def _capped(kind: str, lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    if len(lines) <= MOST:
        return lines
    more = len(lines) - (MOST - 1)
    return [*lines[: MOST - 1], command(kind, "attnbench gate", f"{more} more: see the job summary or gate.json")]


def command(kind: str, title: str, message: str) -> str:
    """`::kind title=...::message`, escaped as GitHub reads it."""
    return f"::{kind} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
