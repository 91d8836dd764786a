"""A gate's report for the terminal and as Markdown, with the words that annotations and JUnit share.

Names and reasons come from other people's code, so all text in the Markdown, which is shown on a job's page or in a
comment on a pull request, is escaped: pipes do not break the table, HTML is inert and nobody is mentioned.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.comparing.text import effort, grounds_of, ratio_and_interval
from attnbench.comparison import ALPHA, EXIT_CODES, FAILING, Case, CaseStatus, Control, GateReport
from attnbench.printable import shortened
from attnbench.report import units
from attnbench.report.environment import environment_line
from attnbench.results.records import grouped
from attnbench.results.sentences import counted

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
    "no_baseline": ("without a baseline", "without a baseline"),
}
"""Words for one case and for several of a status that is not its own word."""
MARKER = "<!-- attnbench-gate -->"
"""First line of a comment, by which a later job finds and updates it instead of adding another."""
LIMIT = 65_000
"""Characters of the longest page; GitHub refuses a comment of more than 65,536."""
LONGEST = 300
"""Characters of the longest cell; the whole text is in gate.json."""
MOST_WARNINGS = 10
SIGNS = {"pass": "✅", "fail": "❌", "inconclusive": "❔", "untrusted": "⚠️", "nothing": "⚠️", "interrupted": "⚠️"}
HEADING = (
    "| | implementation | workload | time or memory, current / baseline | remark |\n| --- | --- | --- | --- | --- |"
)


def print_gate(console: Console, report: GateReport) -> None:
    """Print the controls, a line per case with the worst first, what was not measured, then the outcome."""
    _say(console, f"attnbench gate · {report.baseline} -> {report.current} · suite {report.suite}")
    if report.controls:
        _say(console, f"  controls: {'   '.join(control_text(control) for control in report.controls)}")
    measured = [case for case in report.cases if case.status != "not_measured"]
    if measured:
        console.print(_table(measured))
    for reason, names in not_measured(report.cases):
        _say(console, f"  not measured: {', '.join(map(shortened, names))} ({shortened(reason)})")
    for warning in report.warnings:
        _say(console, f"warning: {shortened(one_line(warning))}")
    sentences = ". ".join(filter(None, (verdict(report), geomean_text(report))))
    _say(console, f"{sentences}. exit {EXIT_CODES[report.outcome]}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


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
    left = (case for case in cases if case.status == "not_measured")
    groups = grouped(left, lambda case: one_line(case.reason) or "no reason given")
    return [
        (reason, list(dict.fromkeys(one_line(case.implementation) for case in group)))
        for reason, group in groups.items()
    ]


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
    usual = ""
    if case.status == "regression" and case.second is not None:
        usual = "confirmed on fresh launches"
    elif case.status == "pass" and case.first is not None and case.first.verdict == "slower":
        usual = "slower once, not confirmed on fresh launches"
    elif case.status == "inconclusive" and case.comparison is not None:
        usual = f"after {effort(case.comparison)}"
    parts = [one_line(case.reason) or usual]
    if case.status in ("improved", "regression", "inconclusive") and case.comparison is not None:
        parts += [note for note in map(one_line, case.comparison.notes) if note not in parts[0]]
    if case.status == "regression" and case.p_holm is not None:
        parts.append(f"p = {case.p_holm:.1g} after Holm")
    if case.culprit:
        parts.append(f"since {one_line(case.culprit)}")
    return "; ".join(part for part in parts if part)


def control_text(control: Control) -> str:
    """Return a control's name, verdict and figures, and whether that verdict is the right one."""
    comparison = control.comparison
    outcome = comparison.verdict or one_line(comparison.reason) or "not measured"
    grounds = grounds_of(comparison)
    ratio = "" if grounds is None else f" {grounds}"
    mark = "✓" if control.passed else "?" if control.silent else "✗"
    return f"{control.name} {outcome}{ratio} in {units.duration(comparison.elapsed_s * 1e9)} {mark}"


def verdict(report: GateReport) -> str:
    """Return the number of cases by status, and whether the verdicts can be trusted, without a full stop."""
    counts = Counter(case.status for case in report.cases)
    parts = [] if any(counts[status] for status in FAILING) else ["no regression"]
    for status in (one for one in ORDER if counts[one] and one != "pass"):
        what = status.replace("_", " ")
        parts.append(f"{counts[status]} {COUNTED.get(status, (what, what))[counts[status] != 1]}")
    told = f"{', '.join(parts)} in {counted(len(report.cases), 'case')} (Holm, {100 * ALPHA:g} %)"
    if report.outcome == "untrusted":
        failed = ", ".join(control.name for control in report.controls if not (control.passed or control.silent))
        why = f"the {failed} control failed" if failed else "see the warnings"
        if not report.controls:
            why = "no control could be timed"
        return f"Untrusted: {why}, so no verdict here is valid ({told})"
    if report.outcome == "interrupted":
        return f"Interrupted, so this is not a verdict ({told})"
    return f"Nothing could be measured ({told})" if report.outcome == "nothing" else told


def geomean_text(report: GateReport) -> str:
    """Return the ratio over all timed cases with its interval; empty if none was timed."""
    if report.geomean is None:
        return ""
    ratio, low, high = report.geomean
    return f"Over all timed cases {ratio_and_interval(ratio, (low, high))}"


def one_line(text: str) -> str:
    """Join the lines of a text: a log line that began with `::` would be a command to some CI systems."""
    return " ".join(text.split())


def markdown(report: GateReport) -> str:
    """Return the page: verdict, cases that need attention, then the others in a folded table, which is cut first if the
    page is too long."""
    cases = ordered(report.cases)
    rows = [case for case in cases if not _is_folded(case)]
    folded = sorted((case for case in cases if _is_folded(case)), key=lambda case: case.status != "pass")
    shown = _most_that_fit(len(folded), lambda n: _page(report, rows, folded, len(rows), n))
    kept = len(rows) if shown else _most_that_fit(len(rows), lambda n: _page(report, rows, folded, n, 0))
    return _page(report, rows, folded, kept, shown)


def _is_folded(case: Case) -> bool:
    return case.status == "not_measured" or (case.status == "pass" and not remark(case))


def _most_that_fit(count: int, page: Callable[[int], str]) -> int:
    """Return the largest number of rows whose page is short enough."""
    # GitHub counts a character beyond the basic plane as two.
    return bisect_right(range(1, count + 1), LIMIT, key=lambda rows: len(page(rows).encode("utf-16-le")) // 2)


def _page(report: GateReport, rows: Sequence[Case], folded: Sequence[Case], row_count: int, fold_count: int) -> str:
    facts = [f"{_code(report.baseline)} → {_code(report.current)}, suite {_code(report.suite)}"]
    facts += [f"control {clean(control_text(control))}" for control in report.controls]
    facts += filter(None, [clean(geomean_text(report))])
    facts += [f"warning: {clean(warning)}" for warning in report.warnings[:MOST_WARNINGS]]
    if len(report.warnings) > MOST_WARNINGS:
        facts.append(f"{len(report.warnings) - MOST_WARNINGS} more warnings: see gate.json.")
    parts = [f"{MARKER}\n### {SIGNS[report.outcome]} attnbench: {clean(verdict(report))}"]
    parts.append("\n".join(f"- {fact}" for fact in facts))
    if rows:
        parts.append(_markdown_table(rows[:row_count]))
    if row_count < len(rows):
        parts.append(f"{len(rows) - row_count} more of these are not shown here: see gate.json.")
    if folded:
        passed = sum(case.status == "pass" for case in folded)
        counts = {"passed": passed, "not measured": len(folded) - passed}
        title = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        inside = [_markdown_table(folded[:fold_count])] if fold_count else []
        if fold_count < len(folded):
            inside.append(f"{len(folded) - fold_count} are not shown here: see gate.json.")
        parts.append("\n\n".join([f"<details><summary>{title}</summary>", *inside, "</details>"]))
    comparisons = [case.comparison for case in report.cases if case.comparison is not None]
    records = [record for found in comparisons for record in (found.record_b, found.record_a) if record is not None]
    environment = next((record.environment for record in records if record.environment is not None), None)
    footer = [
        "" if environment is None else environment_line(environment),
        f"attnbench {report.attnbench}" if report.attnbench else "",
        units.duration(report.elapsed_s * 1e9),
    ]
    return "\n\n".join([*parts, f"<sub>{clean(' · '.join(filter(None, footer)))}</sub>"]) + "\n"


def _markdown_table(cases: Sequence[Case]) -> str:
    lines = [HEADING]
    for case in cases:
        status = word(case) if _is_folded(case) else f"**{word(case)}**"
        names, texts = (case.implementation, case.workload.id), (figures(case), remark(case))
        lines.append(f"| {' | '.join([status, *map(_code, names), *map(clean, texts)])} |")
    return "\n".join(lines)


def clean(text: str) -> str:
    """Return one line of plain text; what Markdown, HTML or GitHub would interpret becomes a character reference."""
    text = one_line("".join(c for c in text if c.isprintable() or c.isspace()))
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 1]}…"
    return re.sub(r"::|[&<>|`*_~\[\]\\@#$]", _reference, text)


def _reference(found: re.Match[str]) -> str:
    character = found.group()[-1]
    if character == ":":  # printed at the start of a line, it would be a command to GitHub
        return ":&#58;"
    # GitHub looks for mentions and issue numbers after it has read the references: only something in between helps.
    gap = "\N{ZERO WIDTH SPACE}" if character in "@#" else ""
    return f"&#{ord(character)};{gap}"


def _code(text: str) -> str:
    return f"<code>{clean(text)}</code>"
