"""The page in brief as Markdown, for a pull request or a job's page; names and reasons are escaped as in the gate's."""

from __future__ import annotations

from attnbench.analyse.ranking import Row
from attnbench.report.gate_markdown import LIMIT, clean
from attnbench.report.html.derived import not_run
from attnbench.report.html.page import Page, Part
from attnbench.report.units import duration, half_interval

MOST_ADVICE = 20
MOST_SHAPES = 60
MOST_REASONS = 20
HEADING = "| shape | fastest | time | next best | regret |\n| --- | --- | ---: | --- | ---: |"


def summarise(page: Page) -> str:
    """The answer, the winner of each shape, what did not run; cut where GitHub would refuse it."""
    blocks = [block for part in page.parts for block in _blocks(part)]
    kept: list[str] = []
    for block in blocks:
        if sum(len(one) + 2 for one in (*kept, block)) > LIMIT - 200:
            kept.append("More is left out here: see the report.")
            break
        kept.append(block)
    return "\n\n".join(kept) + "\n"


def _blocks(part: Part) -> list[str]:
    blocks = [f"### {clean(part.title)}", clean_sentence(part.sentence)]
    if part.advice:
        blocks.append("\n".join(f"- {clean_sentence(one.text)}" for one in part.advice[:MOST_ADVICE]))
    blocks += [f"Note: {clean_sentence(note)}." for note in part.notes]
    return [*blocks, *_winners(part), *_left_out(part)]


def clean_sentence(text: str) -> str:
    """Escaped and whole: `clean` cuts what is too long for a cell of a table."""
    return " ".join(clean(word) for word in text.split())


def _winners(part: Part) -> list[str]:
    rows = []
    for group in part.cells.groups:
        ranked = [row for row in group if row.rank is not None and row.record.time is not None]
        if not ranked:
            continue
        best = ranked[0].record.time
        assert best is not None
        second = ranked[1] if len(ranked) > 1 else None
        cells = [
            part.cells.families.shape(ranked[0].record.workload),
            ranked[0].implementation,
            f"{duration(best.median_ns)} {half_interval(best.median_ns, best.ci95_ns)}",
            "–" if second is None else second.implementation,
            "–" if second is None else _regret(best.median_ns, second),
        ]
        rows.append(f"| {' | '.join(map(clean, cells))} |")
    if not rows:
        return []
    table = "\n".join([HEADING, *rows[:MOST_SHAPES]])
    left = len(rows) - MOST_SHAPES
    return [table, f"{left} more shapes are in the report."] if left > 0 else [table]


def _regret(best_ns: float, second: Row) -> str:
    assert second.record.time is not None
    share = second.record.time.median_ns / best_ns - 1
    return f"{100 * share:.1f} %" + (" (too close to call)" if second.tied else "")


def _left_out(part: Part) -> list[str]:
    rows = sorted(not_run(part.cells.records, part.cells.families), key=lambda row: -row["cells"])
    if not rows:
        return []
    lines = [
        f"- {row['status']}, {row['cells']} cells: {clean(row['labels'])}: {clean(row['reason'])}"
        for row in rows[:MOST_REASONS]
    ]
    left = len(rows) - MOST_REASONS
    lines += [f"- {left} more reasons are in the report."] if left > 0 else []
    count = sum(row["cells"] for row in rows)
    return ["\n".join([f"<details><summary>{count} cells without a result</summary>", "", *lines, "", "</details>"])]
