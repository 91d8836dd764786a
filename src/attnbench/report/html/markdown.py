"""The page in brief as Markdown, for a pull request or a job's page; names and reasons are escaped as in the gate's."""

from __future__ import annotations

from attnbench.comparing.gate_text import LIMIT, clean
from attnbench.measuring.rates import HOST_LIMITED
from attnbench.report.html.cells import winner_rows
from attnbench.report.html.page import Page, PageSection
from attnbench.report.html.views import not_run
from attnbench.report.terminal import MARK
from attnbench.report.units import duration, half_interval, percent
from attnbench.results.sentences import capped, counted

MOST_ADVICE = 20
MOST_SHAPES = 60
MOST_REASONS = 20
HEADING = "| shape | fastest | time | next best | regret |\n| --- | --- | ---: | --- | ---: |"


def summarise(page: Page) -> str:
    """Return the answer, the winner of each shape and what did not run, cut to a length that GitHub accepts."""
    left = [f"Note: {clean_sentence(sentence)}." for sentence in page.left]
    blocks = [*left, *(block for part in page.parts for block in _blocks(part))]
    kept: list[str] = []
    for block in blocks:
        if sum(len(one) + 2 for one in (*kept, block)) > LIMIT - 200:
            kept.append("More is left out here: see the report.")
            break
        kept.append(block)
    return "\n\n".join(kept) + "\n"


def _blocks(part: PageSection) -> list[str]:
    blocks = [f"### {clean(part.title)}", "\n".join(map(clean_sentence, part.answer))]
    advice = [one for one in part.advice if one.kind != "overall"]
    if advice:
        lines = [f"- {clean_sentence(one.text)}" for one in advice]
        blocks.append("\n".join(capped(lines, MOST_ADVICE, "- {} more are in the report.")))
    blocks += [f"Note: {clean_sentence(note)}." for note in part.notes]
    return [*blocks, *_winners(part), *_left_out(part)]


def clean_sentence(text: str) -> str:
    """Return an escaped sentence, whole: `clean` cuts a text that is too long for a cell of a table."""
    return " ".join(clean(word) for word in text.split())


def _winners(part: PageSection) -> list[str]:
    found = winner_rows(part.cells.rows)
    rows: list[str] = []
    for row in found:
        interval = None if row.get("low") is None else (row["low"], row["high"])
        name = f"{row['label']} (the same kernel as {row['same']})" if row["same"] else row["label"]
        host = f" {MARK} {row['host']:.1f}x" if row.get("host") else ""
        time = f"{duration(row['ns'])} {half_interval(row['ns'], interval)}{host}"
        regret = "–" if row["regret"] is None else percent(row["regret"])
        regret += " (too close to call)" if row["close"] else ""
        fields = [row["shape"], name, time, row["next_label"] or "–", regret]
        rows.append(f"| {' | '.join(map(clean, fields))} |")
    if not rows:
        return []
    table = "\n".join([HEADING, *rows[:MOST_SHAPES]])
    if any(one.get("host") for one in found):
        table += f"\n\n{clean(MARK)} {HOST_LIMITED}: the call takes that many times its kernel time"
    left = len(rows) - MOST_SHAPES
    return [table, f"{left} more shapes are in the report."] if left > 0 else [table]


def _left_out(part: PageSection) -> list[str]:
    rows = sorted(not_run(part.cells.records, part.cells.names), key=lambda row: -row["cells"])
    if not rows:
        return []
    reasons = [
        f"- {row['status']}, {counted(row['cells'], 'cell')}: {clean(row['labels'])}: {clean(row['reason'])}"
        for row in rows
    ]
    lines = capped(reasons, MOST_REASONS, "- {} more reasons are in the report.")
    count = sum(row["cells"] for row in rows)
    title = f"<details><summary>{counted(count, 'cell')} without a result</summary>"
    return ["\n".join([title, "", *lines, "", "</details>"])]
