"""A gate as JUnit XML, which every CI system reads: one suite of cases, one of controls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from attnbench.comparing.gate_text import control_text, figures, remark, word
from attnbench.comparing.text import sentence
from attnbench.comparison import FAILING, Case, Control, GateReport

ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold in any form."""
COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def junit(report: GateReport) -> str:
    """Bad cases are failures, a failed A/A control is an error, what gave no answer is skipped with the reason."""
    suites = [
        _suite("attnbench.gate", [_case(case) for case in report.cases]),
        _suite("attnbench.controls", _controls(report)),
    ]
    root = ET.Element("testsuites", {"name": "attnbench", **_totals(suites), "time": _seconds(report.elapsed_s)})
    root.extend(suites)
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"


def _suite(name: str, cases: Sequence[ET.Element]) -> ET.Element:
    counts = {plural: str(sum(case.find(tag) is not None for case in cases)) for plural, tag in COUNTS.items()}
    time = _seconds(sum(float(case.attrib["time"]) for case in cases))
    suite = ET.Element("testsuite", {"name": name, "tests": str(len(cases)), **counts, "time": time})
    suite.extend(cases)
    return suite


def _totals(suites: Sequence[ET.Element]) -> dict[str, str]:
    return {name: str(sum(int(suite.attrib[name]) for suite in suites)) for name in ("tests", *COUNTS)}


def _case(case: Case) -> ET.Element:
    spent = sum(comparison.elapsed_s for comparison in (case.first, case.second) if comparison is not None)
    element = _testcase(case.implementation, case.workload.id, spent)
    told = ". ".join(part for part in (f"{word(case)} {figures(case)}".strip(), remark(case)) if part)
    if case.status in FAILING:
        _add(element, "failure", told, case.status)
    elif case.status not in ("pass", "improved"):
        _add(element, "skipped", told, case.status)
    if case.comparison is not None:
        ET.SubElement(element, "system-out").text = _legal(sentence(case.comparison))
    return element


def _controls(report: GateReport) -> list[ET.Element]:
    found = [_control(control) for control in report.controls]
    if report.outcome == "untrusted" and not any(one.find("error") is not None for one in found):
        missing = _testcase("control", "a/a", 0.0)
        _add(missing, "error", "untrusted: no control could be timed", "untrusted")
        found.append(missing)
    return found


def _control(control: Control) -> ET.Element:
    element = _testcase("control", control.name, control.comparison.elapsed_s)
    if control.passed:
        return element
    if control.name == "a/a" and control.silent:
        _add(element, "skipped", f"inconclusive: {control_text(control)}", "inconclusive")
    elif control.name == "a/a":
        _add(element, "error", f"untrusted: {control_text(control)}", "untrusted")
    else:
        _add(element, "skipped", f"underpowered: {control_text(control)}", "underpowered")
    return element


def _testcase(classname: str, name: str, seconds: float) -> ET.Element:
    return ET.Element("testcase", classname=_legal(classname), name=_legal(name), time=_seconds(seconds))


def _add(element: ET.Element, tag: str, message: str, kind: str) -> None:
    found = ET.SubElement(element, tag, message=_legal(message), type=kind)
    found.text = _legal(message)


def _legal(text: str) -> str:
    return ILLEGAL.sub("", text)


def _seconds(value: float) -> str:
    return f"{value:.3f}"
