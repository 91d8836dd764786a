"""The page, made of sections, and the page in brief as Markdown, for a pull request or a job's page.

Names and reasons come from run files: jinja2 escapes them in markup, `script_json` in data, both remove controls of
direction, and a content security policy by hash allows our scripts only. The Markdown escapes them as the gate's does.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup
from msgspec import Struct

from attnbench.comparing.gate_text import LIMIT, clean
from attnbench.measuring.rates import HOST_LIMITED
from attnbench.report.environment import section_facts
from attnbench.report.html.cells import Cells, make_cells, pack, winner_rows
from attnbench.report.html.charts import DARK, LIGHT, order_labels, ranges, vega_script
from attnbench.report.html.history import NO_HISTORY, History, history_view
from attnbench.report.html.sections import Section, gather
from attnbench.report.html.views import View, make_views, not_run
from attnbench.report.summaries import MachineStandings, group_advice
from attnbench.report.terminal import MARK
from attnbench.report.units import DASH, duration, half_interval, percent
from attnbench.results.advice import Recommendation
from attnbench.results.recommend import advise
from attnbench.results.records import by_workload, clock_of, is_timed
from attnbench.results.run_file import NamedRun
from attnbench.results.sentences import (
    answer,
    capped,
    count_notes,
    counted,
    describe_not_run,
    setback_sentences,
    wrong_sentences,
)
from attnbench.results.standings import by_date, setbacks
from attnbench.run.recorder import describe_unreached

TEMPLATES = files("attnbench.report.html") / "templates"
DEVICE_CLOCKS = ("kernel", "events", "graph")
DEVICE_TIMES = (
    "times are of the device's kernels: what the host takes to launch them and to wait for them is not in them, so "
    "short calls of eager code take longer than this (`attnbench show RUN --detail` has the wall times taken)"
)
"""Note if times are those of kernels and not of whole calls."""
DIRECTIONS = dict.fromkeys((0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))
"""Marks, embeddings and isolates: characters that turn the rest of a line around."""
SCRIPTS = ("data.js", "tables.js", "charts.js", "main.js")
MOST_ADVICE = 20
MOST_SHAPES = 60
MOST_REASONS = 20
HEADING = "| shape | fastest | time | next best | regret |\n| --- | --- | ---: | --- | ---: |"


class PageSection(MachineStandings, frozen=True):
    """A section with its views and sentences; its title names the runs if another section has the same words."""

    section: Section
    cells: Cells
    views: list[View]
    headline: list[Recommendation]
    """One sentence per framework and pass; none if there was no choice."""
    remarks: list[str]
    """Sentences in place of a headline."""
    wrong: list[str]
    """A sentence for each implementation with wrong results, and for each whose older times a newer run contradicts."""
    not_run: str
    """Number of cells that did not run and why, in one line; empty if all ran."""
    notes: list[str]

    @property
    def answer(self) -> list[str]:
        """Sentences about wrong results, and the verdicts."""
        return [*self.wrong, *self.verdicts]


class Page(Struct, frozen=True):
    """Sources and parts of which the page, the images and the Markdown are made."""

    sources: Sequence[NamedRun]
    parts: list[PageSection]
    labels: list[str]
    """Every implementation that was timed, in the order of its colours."""
    left: list[str]
    """A sentence for each run that ended before it had done what was asked."""


def compose(sources: Sequence[NamedRun], against: Sequence[str] = (), history: History = NO_HISTORY) -> Page:
    """Return the page of some runs: ranked, compared and laid out, but not drawn."""
    dated = [one for source in sources for one in source.run.dated]
    known, dates = setbacks([by_date(dated)]), {id(record): when for when, record in dated}
    made = [(section, make_cells(section, against, known, dates)) for section in gather(sources)]
    made = [(section, cells) for section, cells in made if cells.rows]
    labels = order_labels(cell for _, cells in made for cell in cells.rows)
    counts = Counter(section.title for section, _ in made)
    parts: list[PageSection] = []
    for section, cells in made:
        views = make_views(cells, labels, history_view(history, section, cells, labels))
        runs = ", ".join(sources[place].name for place in section.runs)
        title = section.title if counts[section.title] == 1 else f"{section.title} · {runs}"
        parts.append(_part(section, title, cells, views))
    held = {record.workload.id for source in sources for record in source.run.records}
    left = (describe_unreached(source.path or source.name, source.run, held) for source in sources)
    return Page(sources, parts, labels, [sentence for sentence in left if sentence])


def _part(section: Section, title: str, cells: Cells, views: list[View]) -> PageSection:
    standings, records = cells.standings, cells.records
    clocks = Counter(clock_of(record) for record in records if is_timed(record))
    notes = [DEVICE_TIMES] if clocks and clocks.most_common(1)[0][0] in DEVICE_CLOCKS else []
    notes += count_notes(records)
    groups = [group for run in section.runs.values() for group in by_workload(run).values()]
    mixed = [names for group in groups if len(names := {clock_of(one) for one in group if is_timed(one)}) > 1]
    if mixed:
        were = f"{counted(len(mixed), 'shape')} {'was' if len(mixed) == 1 else 'were'}"
        names = ", ".join(sorted(set().union(*mixed)))
        notes.append(f"{were} timed by different clocks ({names}): shown and compared by one that most of them hold")
    if cells.repeated:
        were = f"{counted(cells.repeated, 'cell')} {'was' if cells.repeated == 1 else 'were'}"
        notes.append(f"{were} measured in more than one of these runs: the run that decides its shape is shown")
    if cells.pooled:
        shapes = f"{counted(cells.pooled, 'shape')} {'holds' if cells.pooled == 1 else 'hold'}"
        notes.append(
            f"{shapes} cells of several runs, which did not share their rounds: one run decides who is faster, the "
            "newest that holds the leaders of the run before it or is clearly faster; cells of the others are shown "
            "and not ranked"
        )
    advice = advise(standings)
    headline = [one for one in advice if one.kind == "overall"]
    before, after = wrong_sentences(standings.newest)
    remarks = [] if headline else [answer(standings, wrong=False)]
    wrong = [*before, *after, *setback_sentences(standings.setbacks)]
    verdicts = [*(one.text for one in headline), *remarks]
    told = (headline, remarks, wrong, describe_not_run(records), notes)
    return PageSection(title, standings, verdicts, advice, section, cells, views, *told)


def render(page: Page) -> str:
    """Return the page as one HTML file that needs no network."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is ours, or was cleaned before.
        finalize=lambda value: one_way(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters |= {"capital": capital, "grouped": group_advice}
    scripts = [vega_script(), "\n".join(_template(name) for name in SCRIPTS)]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    days = sorted({source.run.header.created[:10] for source in page.sources})
    return environment.get_template("page.html").render(
        page=page,
        style=Markup(_template("style.css")),
        scripts=[Markup(script) for script in scripts],
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:",
        data=Markup(script_json(_data(page))),
        facts=[section_facts(part.section.environments, part.section.records) for part in page.parts],
        days=" to ".join(dict.fromkeys((days[0], days[-1]))),
        places=list(dict.fromkeys(part.section.title for part in page.parts)),
        timed=sum(is_timed(record) for part in page.parts for record in part.cells.records),
        asked=sum(len(part.cells.records) for part in page.parts),
    )


def capital(text: str) -> str:
    """Return a sentence with a capital at the beginning, unless it begins with the name of an implementation."""
    return text if "." in text.partition(" ")[0] else text[:1].upper() + text[1:]


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _data(page: Page) -> dict[str, Any]:
    """Return the data that the scripts read."""
    count = len(page.labels)
    return {
        "labels": page.labels,
        "ranges": {"light": ranges(count, LIGHT), "dark": ranges(count, DARK)},
        "sections": [
            {
                "cells": pack(part.cells.rows),
                "baselines": part.cells.baselines,
                "views": [{"name": view.name, "charts": view.charts, "table": view.table} for view in part.views],
            }
            for part in page.parts
        ],
    }


def one_way(text: str) -> str:
    """Return a text without controls of direction; letters that are written from the right stay."""
    return text.translate(DIRECTIONS)


def script_json(document: Any) -> str:
    """Return JSON without any character that could end a script element, begin markup or turn a line around."""
    text = one_way(msgspec.json.encode(document).decode())
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
        half = None if row.get("low") is None else (row["high"] - row["low"]) / 2 / row["ns"]
        name = f"{row['label']} (the same kernel as {row['same']})" if row["same"] else row["label"]
        host = f" {MARK} {row['host']:.1f}x" if row.get("host") else ""
        time = f"{duration(row['ns'])} {half_interval(half)}{host}"
        regret = DASH if row["regret"] is None else percent(row["regret"])
        regret += " (too close to call)" if row["close"] else ""
        fields = [row["shape"], name, time, row["next_label"] or DASH, regret]
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
