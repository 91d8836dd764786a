"""Files that `attnbench gate --ci FOLDER` writes (JSON, Markdown, JUnit XML), and annotations for GitHub Actions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec

from attnbench.comparing.gate_text import control_text, figures, markdown, ordered, remark, verdict, word
from attnbench.comparing.text import sentence
from attnbench.comparison import FAILING, OPEN, Case, Control, GateReport
from attnbench.errors import UsageError
from attnbench.files import write_errors, write_texts
from attnbench.printable import printable, shortened
from attnbench.results.records import grouped, label, status_words
from attnbench.results.sentences import capped
from attnbench.spec import Incorrect, Ok, Record, Unsupported

FILES = ("gate.json", "gate.md", "gate.xml")
MOST_ANNOTATIONS = 10
"""Annotations of one kind that GitHub shows per step; it silently drops the rest."""
MOST_TEXT = 4000
"""Characters of one annotation that GitHub shows."""
KINDS = {**dict.fromkeys(FAILING, "error"), **dict.fromkeys(OPEN, "warning"), "improved": "notice"}
"""Kind of annotation by status; cases without a baseline or a measurement are counted in the warnings instead."""
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold in any form."""
COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def remove_files(folder: Path) -> None:
    """Remove what an earlier gate has left in a folder; raises UsageError if that fails."""
    for name in FILES:
        try:
            (folder / name).unlink(missing_ok=True)
        except (NotADirectoryError, IsADirectoryError):
            continue  # reported when the files are written
        except OSError as error:
            raise UsageError(f"cannot remove {folder / name}: {error.strerror or error}.") from error


def write_ci(report: GateReport, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Write gate.json, gate.md and gate.xml; on GitHub, add to the job's summary and annotate. Annotations go to
    stderr, which GitHub reads as well, so that `--json` keeps stdout to itself."""
    page = write_files(report, folder)
    if summary := environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(page)
        except OSError as error:
            print(f"warning: cannot write the job's summary: {error.strerror or error}", file=sys.stderr)
    if environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(report):
            print(line, file=sys.stderr)


def write_files(report: GateReport, folder: Path) -> str:
    """Write all three files or none, and return the Markdown."""
    page = markdown(report)
    texts = (msgspec.json.format(msgspec.json.encode(report), indent=2).decode(), page, junit(report))
    with write_errors(f"to {folder}", "Give --ci another folder."):
        write_texts({folder / name: text for name, text in zip(FILES, texts)})
    return page


def workflow_commands(report: GateReport) -> list[str]:
    """Return the annotations of a gate, lines that GitHub reads in the log: errors, warnings for open cases and notices
    for improvements."""
    found: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    warnings = list(report.warnings)
    if report.outcome == "nothing" or (report.outcome == "untrusted" and not warnings):
        warnings.insert(0, verdict(report))
    found["warning"] += [command("warning", "attnbench gate", warning) for warning in warnings]
    for case in ordered(report.cases):
        if kind := KINDS.get(case.status):
            message = ". ".join(filter(None, (case.workload.title, figures(case), remark(case))))
            found[kind].append(command(kind, f"{case.implementation}: {word(case)}", message))
    return [
        line for kind, lines in found.items() for line in _capped(kind, lines, "gate", "the job summary or gate.json")
    ]


def record_commands(records: Iterable[Record], place: str = "") -> list[str]:
    """Return an error per reason for wrong results, and a warning per reason for what crashed, hung or ran out of
    memory. `place` names where the records were measured, if there are several places."""
    lost = [record for record in records if not isinstance(record, Ok | Unsupported)]
    prefix, commands = f"{place}: " if place else "", []
    for kind in ("error", "warning"):
        events = grouped(
            (one for one in lost if isinstance(one, Incorrect) is (kind == "error")),
            lambda record: (label(record), status_words(record), record.reason),
        )
        lines = []
        for (name, status, reason), group in events.items():
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            lines.append(command(kind, f"{name}: {status}", f"{prefix}{group[0].workload.title}{more}. {reason}"))
        commands += _capped(kind, lines, "report", "the report")
    return commands


def _capped(kind: str, lines: list[str], what: str, source: str) -> list[str]:
    """Return at most ten lines, of which the last one gives the number of the rest if there are more."""
    more = command(kind, f"attnbench {what}", f"{{}} more: see {source}")
    return lines if len(lines) <= MOST_ANNOTATIONS else capped(lines, MOST_ANNOTATIONS - 1, more)


def command(kind: str, title: str, message: str) -> str:
    """Return `::kind title=...::message`, escaped as GitHub reads it."""
    escaped_title = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={escaped_title}::{_escaped(message)}"


def _escaped(text: str) -> str:
    text = shortened(text, MOST_TEXT).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return printable(text)


def junit(report: GateReport) -> str:
    """Return JUnit XML: bad cases are failures, a failed A/A control is an error, and open cases are skipped with a
    reason."""
    controls = [_control(control) for control in report.controls]
    if report.outcome == "untrusted" and not any(control.find("error") is not None for control in controls):
        missing = _testcase("control", "a/a", 0.0)
        _add(missing, "error", "untrusted: no control could be timed", "untrusted")
        controls.append(missing)
    suites = [_suite("attnbench.gate", list(map(_case, report.cases))), _suite("attnbench.controls", controls)]
    totals = {name: str(sum(int(suite.attrib[name]) for suite in suites)) for name in ("tests", *COUNTS)}
    root = ET.Element("testsuites", {"name": "attnbench", **totals, "time": f"{report.elapsed_s:.3f}"})
    root.extend(suites)
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"


def _suite(name: str, cases: Sequence[ET.Element]) -> ET.Element:
    counts = {plural: str(sum(case.find(tag) is not None for case in cases)) for plural, tag in COUNTS.items()}
    time = sum(float(case.attrib["time"]) for case in cases)
    suite = ET.Element("testsuite", {"name": name, "tests": str(len(cases)), **counts, "time": f"{time:.3f}"})
    suite.extend(cases)
    return suite


def _case(case: Case) -> ET.Element:
    spent = sum(comparison.elapsed_s for comparison in (case.first, case.second) if comparison is not None)
    element = _testcase(case.implementation, case.workload.id, spent)
    message = ". ".join(filter(None, (f"{word(case)} {figures(case)}".strip(), remark(case))))
    if case.status in FAILING:
        _add(element, "failure", message, case.status)
    elif case.status not in ("pass", "improved"):
        _add(element, "skipped", message, case.status)
    if case.comparison is not None:
        ET.SubElement(element, "system-out").text = _legal(sentence(case.comparison))
    return element


def _control(control: Control) -> ET.Element:
    element = _testcase("control", control.name, control.comparison.elapsed_s)
    if not control.passed:
        kind = "underpowered" if control.name != "a/a" else "inconclusive" if control.silent else "untrusted"
        _add(element, "error" if kind == "untrusted" else "skipped", f"{kind}: {control_text(control)}", kind)
    return element


def _testcase(classname: str, name: str, seconds: float) -> ET.Element:
    return ET.Element("testcase", classname=_legal(classname), name=_legal(name), time=f"{seconds:.3f}")


def _add(element: ET.Element, tag: str, message: str, kind: str) -> None:
    ET.SubElement(element, tag, message=_legal(message), type=kind).text = _legal(message)


def _legal(text: str) -> str:
    return NOT_IN_XML.sub("", text)
