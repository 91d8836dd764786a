"""A gate's report for the terminal, and the words that its other forms (Markdown, annotations, JUnit) share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.comparing.text import effort, grounds_of, ratio_and_interval
from attnbench.comparison import ALPHA, EXIT_CODES, FAILING, Case, CaseStatus, Control, GateReport
from attnbench.printable import shortened
from attnbench.report import units

ORDER: tuple[CaseStatus, ...] = (
    "regression", "wrong", "memory", "missing", "inconclusive", "no_baseline", "not_measured", "improved", "pass",
)  # fmt: skip
"""Statuses, the worst first."""
NO_ANSWER = ("failed", "timeout", "out of memory", "unsupported")
STYLES = {"regression": "red", "wrong": "red", "memory": "red", "improved": "green", "pass": "green"}
COUNTED = {
    "regression": ("regression", "regressions"),
    "wrong": ("wrong or broken", "wrong or broken"),
    "memory": ("case needs more memory", "cases need more memory"),
    "missing": ("missing", "missing"),
    "inconclusive": ("inconclusive", "inconclusive"),
    "no_baseline": ("without a baseline", "without a baseline"),
    "not_measured": ("not measured", "not measured"),
    "improved": ("improved", "improved"),
}


def print_gate(console: Console, report: GateReport) -> None:
    """Print the controls, a line per case with the worst first, what was not measured, then the outcome."""
    head = f"attnbench gate · {report.baseline} -> {report.current} · suite {report.suite}"
    _say(console, head)
    if report.controls:
        _say(console, f"  controls: {'   '.join(control_text(control) for control in report.controls)}")
    measured = [case for case in report.cases if case.status != "not_measured"]
    if measured:
        console.print(_table(measured), highlight=False)
    for reason, names in not_measured(report.cases):
        _say(console, f"  not measured: {', '.join(map(shortened, names))} ({shortened(reason)})")
    for warning in report.warnings:
        _say(console, f"warning: {shortened(one_line(warning))}")
    _say(console, f"{closing(report)} exit {EXIT_CODES[report.outcome]}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(cases: Iterable[Case]) -> Table:
    table = Table(box=None, show_header=False, show_edge=False, padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    for _ in range(4):
        table.add_column(overflow="fold")
    for case in ordered(cases):
        style = STYLES.get(case.status, "yellow")
        table.add_row(
            escape(f"  {shortened(one_line(case.implementation))}"),
            escape(shortened(case.workload.id)),
            f"[{style}]{word(case)}[/{style}]",
            escape(figures(case)),
            escape(shortened(remark(case))),
        )
    return table


def not_measured(cases: Iterable[Case]) -> list[tuple[str, list[str]]]:
    """Return each reason with the implementations that were not measured because of it."""
    groups: dict[str, list[str]] = {}
    for case in cases:
        if case.status == "not_measured":
            names = groups.setdefault(one_line(case.reason) or "no reason given", [])
            if case.implementation not in names:
                names.append(one_line(case.implementation))
    return list(groups.items())


def ordered(cases: Iterable[Case]) -> list[Case]:
    """Sort the cases with the worst first, otherwise in the order given."""
    return sorted(cases, key=lambda case: ORDER.index(case.status))


def word(case: Case) -> str:
    """Return the verdict on one case in a word or two."""
    if case.status == "pass":
        verdict = case.comparison.verdict if case.comparison is not None else None
        return "same" if verdict == "same" else "pass"
    words = {"regression": "slower", "improved": "faster", "memory": "more memory"}
    if case.status == "wrong" and (case.reason.startswith(NO_ANSWER) or "could not be loaded" in case.reason):
        return "broken"
    return words.get(case.status, case.status.replace("_", " "))


def figures(case: Case) -> str:
    """Return the ratio that a case was judged by, or both peaks if it is about memory."""
    if case.status == "memory":
        before, after = case.memory
        grown = f" (+{units.percent(after / before - 1)})" if before and after else ""
        return f"{units.size(before)} -> {units.size(after)}{grown}"
    comparison = case.comparison
    if comparison is None or case.status == "wrong":
        return ""
    return str(grounds_of(comparison) or "")


def remark(case: Case) -> str:
    """Return everything else that a reader should know about a case, on one line."""
    parts = [one_line(case.reason) or _usual_reason(case)]
    if case.status in ("improved", "regression", "inconclusive") and case.comparison is not None:
        parts += [note for note in map(one_line, case.comparison.notes) if note not in parts[0]]
    if case.status == "regression" and case.p_holm is not None:
        parts.append(f"p = {case.p_holm:.1g} after Holm")
    if case.culprit:
        parts.append(f"since {one_line(case.culprit)}")
    return "; ".join(part for part in parts if part)


def _usual_reason(case: Case) -> str:
    if case.status == "regression" and case.second is not None:
        return "confirmed on fresh launches"
    if case.status == "pass" and case.first is not None and case.first.verdict == "slower":
        return "slower once, not confirmed on fresh launches"
    if case.status == "inconclusive" and case.comparison is not None:
        return f"after {effort(case.comparison)}"
    return ""


def control_text(control: Control) -> str:
    """Return a control's name, verdict and figures, and whether that verdict is the right one."""
    comparison = control.comparison
    outcome = comparison.verdict or one_line(comparison.reason) or "not measured"
    grounds = grounds_of(comparison)
    ratio = "" if grounds is None else f" {grounds}"
    mark = "✓" if control.passed else "?" if control.silent else "✗"
    return f"{control.name} {outcome}{ratio} in {units.duration(comparison.elapsed_s * 1e9)} {mark}"


def closing(report: GateReport) -> str:
    """Return the answer: how many cases ended how, and whether that can be trusted."""
    return " ".join([f"{verdict(report)}.", *([] if report.geomean is None else [f"{geomean_text(report)}."])])


def verdict(report: GateReport) -> str:
    """Return the outcome as a clause without a full stop."""
    told = counts_text(report)
    if report.outcome == "untrusted":
        failed = ", ".join(control.name for control in report.controls if not (control.passed or control.silent))
        why = f"the {failed} control failed" if failed else "see the warnings"
        if not report.controls:
            why = "no control could be timed"
        return f"Untrusted: {why}, so nothing here counts ({told})"
    if report.outcome == "interrupted":
        return f"Interrupted, so this is not a verdict ({told})"
    if report.outcome == "nothing":
        return f"Nothing could be measured ({told})"
    return told


def counts_text(report: GateReport) -> str:
    """Return how many cases ended how, the worst first."""
    counts = Counter(case.status for case in report.cases)
    shown = [(status, counts[status]) for status in ORDER if counts[status] and status in COUNTED]
    found = [f"{n} {COUNTED[status][n != 1]}" for status, n in shown]
    if not any(counts[status] for status in FAILING):
        found.insert(0, "no regression")
    cases = f"{len(report.cases)} case{'' if len(report.cases) == 1 else 's'}"
    return f"{', '.join(found)} in {cases} (Holm, {100 * ALPHA:g} %)"


def geomean_text(report: GateReport) -> str:
    """Return the ratio over all timed cases with its interval."""
    if report.geomean is None:
        return "No case was timed"
    ratio, low, high = report.geomean
    return f"Over all timed cases {ratio_and_interval(ratio, (low, high))}"


def one_line(text: str) -> str:
    """Join the lines of a text: a log line that began with `::` would be a command to some CI systems."""
    return " ".join(text.split())
