"""A gate's report as Markdown, for a job's page or a comment on a pull request.

Names and reasons come from other people's code, so all text is escaped: no pipe breaks the table, no HTML gets through
and nobody is mentioned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from attnbench.comparing.gate_text import control_text, figures, geomean_text, one_line, ordered, remark, verdict, word
from attnbench.comparison import Case, GateReport
from attnbench.report.environment import environment_line
from attnbench.report.units import duration
from attnbench.spec import Environment

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


def markdown(report: GateReport) -> str:
    """Return the page: verdict, cases that call for attention, then the others folded, which are cut first if it is too
    long."""
    cases = ordered(report.cases)
    rows = [case for case in cases if not _is_dull(case)]
    folded = sorted((case for case in cases if _is_dull(case)), key=lambda case: case.status != "pass")
    shown = _most_that_fit(len(folded), lambda n: _page(report, rows, folded, len(rows), n))
    if shown:
        return _page(report, rows, folded, len(rows), shown)
    return _page(report, rows, folded, _most_that_fit(len(rows), lambda n: _page(report, rows, folded, n, 0)), 0)


def _is_dull(case: Case) -> bool:
    return case.status == "not_measured" or (case.status == "pass" and not remark(case))


def _most_that_fit(count: int, page: Callable[[int], str]) -> int:
    """Return the largest number of rows whose page is short enough."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        fits = (
            len(page(middle).encode("utf-16-le")) // 2 <= LIMIT
        )  # GitHub counts a character beyond the basic plane as two
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _page(report: GateReport, rows: Sequence[Case], folded: Sequence[Case], row_count: int, fold_count: int) -> str:
    parts = [f"{MARKER}\n### {SIGNS[report.outcome]} attnbench: {clean(verdict(report))}", _facts(report)]
    if rows:
        parts.append(_table(rows[:row_count]))
    if row_count < len(rows):
        parts.append(f"{len(rows) - row_count} more of these are left out here: see gate.json.")
    if folded:
        passed = sum(case.status == "pass" for case in folded)
        counts = {"passed": passed, "not measured": len(folded) - passed}
        title = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        inside = [_table(folded[:fold_count])] if fold_count else []
        if fold_count < len(folded):
            inside.append(f"{len(folded) - fold_count} are left out here: see gate.json.")
        parts.append("\n\n".join([f"<details><summary>{title}</summary>", *inside, "</details>"]))
    return "\n\n".join([*parts, _footer(report)]) + "\n"


def _table(cases: Sequence[Case]) -> str:
    return "\n".join([HEADING, *map(_row, cases)])


def _facts(report: GateReport) -> str:
    lines = [f"{_code(report.baseline)} → {_code(report.current)}, suite {_code(report.suite)}"]
    lines += [f"control {clean(control_text(control))}" for control in report.controls]
    if report.geomean is not None:
        lines.append(clean(geomean_text(report)))
    lines += [f"warning: {clean(warning)}" for warning in report.warnings[:MOST_WARNINGS]]
    if len(report.warnings) > MOST_WARNINGS:
        lines.append(f"{len(report.warnings) - MOST_WARNINGS} more warnings: see gate.json.")
    return "\n".join(f"- {line}" for line in lines)


def _row(case: Case) -> str:
    cells = (
        word(case) if _is_dull(case) else f"**{word(case)}**",
        _code(case.implementation),
        _code(case.workload.id),
        clean(figures(case)),
        clean(remark(case)),
    )
    return f"| {' | '.join(cells)} |"


def _footer(report: GateReport) -> str:
    environment = environment_of(report)
    facts = [
        "" if environment is None else environment_line(environment),
        f"attnbench {report.attnbench}" if report.attnbench else "",
        duration(report.elapsed_s * 1e9),
    ]
    return f"<sub>{clean(' · '.join(fact for fact in facts if fact))}</sub>"


def environment_of(report: GateReport) -> Environment | None:
    """Return the environment of the first record that has one."""
    for comparison in (case.comparison for case in report.cases):
        if comparison is None:
            continue
        for record in (comparison.record_b, comparison.record_a):
            if record is not None and record.environment is not None:
                return record.environment
    return None


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
