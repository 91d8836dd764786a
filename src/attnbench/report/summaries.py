"""Summaries beside a report: `summary.txt` for people, `performance.json`, `memory.json` and `correctness.json` for
scripts; and the advice grouped by the questions that it answers, as `summary.txt` and the page print it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from attnbench.files import write_errors, write_texts
from attnbench.measuring.rates import host_limit, notes_of
from attnbench.printable import printable_lines
from attnbench.report.environment import environment_line
from attnbench.results.advice import Kind, Pick, Recommendation
from attnbench.results.by_length import crossover
from attnbench.results.families import FRAMEWORKS, OVERALL, Track, tracks
from attnbench.results.growth import compute_bound, exponent, fits_until, memory_points, time_points
from attnbench.results.recommend import compared_families, compared_tracks
from attnbench.results.records import baseline, label, status_words, without_result
from attnbench.results.sentences import capped, count_notes, name_wrong, setback_sentences, speedups, wrong_sentences
from attnbench.results.standings import Standings
from attnbench.spec import Ok, Record

SCHEMA = 1
CHANGING = ("from", "until", "mixed")
"""Kinds of crossovers in which both sides are significantly faster somewhere."""
Document = dict[str, Any]
Tables = dict[str, Iterable[Document]]
FILES = ("correctness.json", "memory.json", "performance.json", "summary.txt")
WHICH = "Which one"
GROUPS: Mapping[str, tuple[int, tuple[Kind, ...]]] = {
    WHICH: (0, ("winner", "tie", "mixed")),
    "From which length": (2, ("flash", "threshold")),
    "What to do next": (2, ("launch-bound", "memory")),
}
"""Question -> number of kinds of shapes that are unfolded, kinds of advice that answer it. Which one to use stands in a
table, whose sentences are all folded."""
MOST_LINES = 60
WIDTH = 110
LEAST = 8
"""Fewest lines in which the part of one machine is of use."""
ROOMY = 20
"""Lines for each machine below which wrong results are listed once for all machines."""
MOST_NAMES = 4
ANSWER, ADVICE, REASONS = 10, 5, 5
"""Most lines of a section, except of the section that says which to use."""
ORDER = ("excellent", "good", "measured", "no significant difference", "cannot tell", "investigate")
REST = (
    "Every cell, every sentence with its figures, growth with length: performance.json, memory.json and "
    "correctness.json, which `attnbench report` writes with this file."
)
MOST_WRONG = 3
"""Most wrong implementations that are listed with their reasons; more are listed by name."""


class MachineStandings(Struct, frozen=True):
    """The standings of one machine with one set of packages, and the sentences about them."""

    title: str
    standings: Standings
    verdicts: Sequence[str]
    """Sentences of the answer, without those about wrong results."""
    advice: Sequence[Recommendation]

    @property
    def records(self) -> list[Record]:
        """The record of each cell that is shown."""
        return self.standings.records

    @property
    def baseline(self) -> str | None:
        """Name of the implementation that speed-ups are against."""
        return baseline(self.records, self.standings.against)


def performance(parts: Sequence[MachineStandings]) -> Document:
    """Return times, rates, speed-ups with their categories, growth with length, crossovers and advice."""

    def tables(part: MachineStandings) -> Tables:
        base, standings = part.baseline, part.standings
        apart = (one for key in standings.overall for one in standings.apart(key))
        return {
            "cells": (_cell(record) | _speed(record) for record in part.records if isinstance(record, Ok)),
            "speedups": (structs.asdict(gain) for one in apart if base is not None for gain in speedups(one, base)),
            "scaling": _growth(part.records, of_time=True),
            "crossovers": _crossovers(part),
            "recommendations": map(structs.asdict, part.advice),
        }

    bases = {part.baseline for part in parts}
    return _document(parts, tables, baseline=bases.pop() if len(bases) == 1 else None)


def memory(parts: Sequence[MachineStandings]) -> Document:
    """Return peaks with theory, their growth, and the length at which each implementation runs out of memory."""

    def tables(part: MachineStandings) -> Tables:
        cells = (_cell(r) | {"memory": r.memory, "reason": r.reason} for r in part.records)
        return {"cells": cells, "growth": _growth(part.records, of_time=False)}

    return _document(parts, tables)


def correctness(parts: Sequence[MachineStandings]) -> Document:
    """Return the checks of every cell with their errors, and the reasons of those that did not pass."""

    def checked(record: Record) -> Document:
        return _cell(record) | {
            "reason": record.reason,
            "errors": record.errors,
            "verified_at": record.verified_at,
            "deterministic": record.deterministic,
            "approximate": record.approximate if isinstance(record, Ok) else None,
        }

    statuses = Counter(record.status for part in parts for record in part.records)
    return _document(parts, lambda part: {"cells": map(checked, part.records)}, statuses=statuses)


def _document(
    parts: Sequence[MachineStandings], tables: Callable[[MachineStandings], Tables], **facts: object
) -> Document:
    """Return facts, and the tables of all parts below each other, each row with the title of its part."""
    sections = [{"title": part.title, "baseline": part.baseline} for part in parts]
    document: Document = {"schema": SCHEMA, "sections": sections} | facts
    for part in parts:
        for name, rows in tables(part).items():
            document.setdefault(name, []).extend(row | {"section": part.title} for row in rows)
    return document


def _growth(records: Sequence[Record], of_time: bool) -> Iterator[Document]:
    """Yield how time or memory grows along every track that was measured at enough lengths."""
    for track, names in tracks(records).items():
        for name, members in names.items():
            fit = exponent(time_points(members) if of_time else memory_points(members))
            if fit is None:
                continue
            if of_time:
                figures = {"time": fit, "compute_bound": compute_bound(r for one in names.values() for r in one)}
            else:
                classes = {"growth": fit.growth, "growth_in_theory": fit.growth_in_theory}
                figures = {"memory": fit, **classes, "fits_until": fits_until(members)}
            yield _line(track, name) | figures


def _crossovers(part: MachineStandings) -> Iterator[Document]:
    """Yield the crossover of every implementation that changes places with the baseline along a track."""
    if (base := part.baseline) is None:
        return
    for track, names in compared_tracks(compared_families(part.standings)).items():
        for name, records in names.items() if base in names else ():
            place = crossover(records, names[base]) if name != base else None
            if place is not None and place.kind in CHANGING:
                rounded_off = structs.replace(place, length=place.point)
                yield _line(track, name) | {"against": base, "crossover": rounded_off}


def _cell(record: Record) -> Document:
    environment = record.environment
    return {
        "implementation": label(record),
        "workload": record.workload.id,
        "axes": record.workload.axes,
        "status": record.status,
        "device": None if environment is None else environment.device_name,
        "fingerprint": None if environment is None else environment.fingerprint,
    }


def _speed(record: Ok) -> Document:
    time = None if record.time is None else structs.asdict(record.time)
    return {
        "time": time and {name: value for name, value in time.items() if name not in ("samples_ns", "rounds")},
        "also": {name: one.median_ns for name, one in record.also.items()},
        "compile_ns": record.compile_ns,
        "throughput": record.throughput,
        "cost": record.cost,
        "kernels": record.kernels,
        "notes": notes_of(record),
        "host_limited": host_limit(record),
    }


def _line(track: Track, name: str) -> Document:
    family = track.family
    return {"implementation": name, "family": family.title, "track": track.title, "device": family.device}


def folder_of(page: Path) -> Path:
    """Return the folder for the summaries of a page, beside it."""
    return page.with_name(f"{page.stem}-summary")


def write_summaries(parts: Sequence[MachineStandings], folder: Path, left: Sequence[str] = ()) -> list[Path]:
    """Write the four files into a folder, which is made if need be; nothing is replaced before all are on disk. `left`
    has a sentence for each run that ended early."""
    speed = performance(parts)
    documents = {"performance.json": speed, "memory.json": memory(parts), "correctness.json": correctness(parts)}
    texts = {
        name: msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
        for name, document in documents.items()
    }
    texts["summary.txt"] = summary_text(parts, speed, left)
    with write_errors(f"to {folder}", "Choose another folder with --summaries."):
        write_texts({folder / name: texts[name] for name in FILES})
    return [folder / name for name in FILES]


class Told(Struct, frozen=True):
    """A sentence about one framework, and the figures it rests on."""

    framework: str
    text: str
    basis: str


class Answer(Struct, frozen=True):
    """The sentences about one kind of shapes."""

    shapes: str
    told: list[Told]


class QuestionGroup(Struct, frozen=True):
    """A question and its answers."""

    title: str
    open: list[Answer]
    folded: list[Answer]
    table: PickTable | None = None


class PickTable(Struct, frozen=True):
    """Kinds of shapes -> the implementation to use in each framework."""

    frameworks: list[str]
    """The winner over all frameworks first, if several were timed together."""
    rows: list[tuple[str, list[Pick | None]]]
    common: str = ""
    """Axes that all kinds of shapes share, in words."""

    @property
    def short_rows(self) -> list[tuple[str, list[Pick | None]]]:
        """Rows whose kinds of shapes leave out the axes that all share."""
        shared = self.common.split(" · ")
        told = ([word for word in shapes.split(" · ") if word not in shared] for shapes, _ in self.rows)
        return [(" · ".join(words), picks) for words, (_, picks) in zip(told, self.rows)]


def group_advice(advice: Iterable[Recommendation]) -> list[QuestionGroup]:
    """Return the questions that the advice answers."""
    found = list(advice)
    groups: list[QuestionGroup] = []
    for title, (shown, kinds) in GROUPS.items():
        by_shapes: dict[str, Answer] = {}
        for one in found:
            if one.kind in kinds:
                framework, _, shapes = one.family.partition(" · ")
                text = one.text.removeprefix(one.family).lstrip(":, ")
                by_shapes.setdefault(shapes, Answer(shapes, [])).told.append(Told(framework, text, one.basis))
        for answer in by_shapes.values():
            answer.told.sort(key=lambda one: _place(one.framework))
        answers = list(by_shapes.values())
        table = pick_table(found) if title == WHICH else None
        groups += [QuestionGroup(title, answers[:shown], answers[shown:], table)] if answers else []
    return groups


def pick_table(advice: Iterable[Recommendation]) -> PickTable:
    """Return which implementation to use for every kind of shapes."""
    rows: dict[str, dict[str, Pick]] = {}
    for one in advice:
        if one.pick is not None and one.kind in GROUPS[WHICH][1]:
            framework, _, shapes = one.family.partition(" · ")
            rows.setdefault(shapes, {})[framework] = one.pick
    names = sorted({name for row in rows.values() for name in row}, key=_place)
    told = [(shapes, [row.get(name) for name in names]) for shapes, row in rows.items()]
    first, *others = [shapes.split(" · ") for shapes in rows] or [[]]
    common = [word for word in first if others and all(word in one for one in others)]
    return PickTable(names, told, " · ".join(common))


def _place(framework: str) -> int:
    return [OVERALL, *FRAMEWORKS.values(), framework].index(framework)


class SummarySection(Struct, frozen=True):
    """A section: whole entries until `most` lines are full, and the file with the rest."""

    title: str
    entries: Sequence[str]
    most: int
    rest: str = "performance.json"


def summary_text(parts: Sequence[MachineStandings], speed: Document, left: Sequence[str] = ()) -> str:
    """Return the text of `summary.txt`, whose lines the machines share; `speed` is the document of performance, `left`
    has a sentence for each run that ended early."""
    tail = _wrapped(REST)
    if left:  # the first run that ended early, and how many more did
        more = f" {len(left) - 1} more ended early: the report names them." if len(left) > 1 else ""
        tail += _wrapped(f"{textwrap.shorten(left[0], 3 * WIDTH, placeholder=' ...')}.{more}")
    scarce = MOST_LINES // max(1, len(parts)) < ROOMY
    every = [record for part in parts for record in part.records]
    lines = [*_wrapped(_all_wrong(every)), ""] if scarce and name_wrong(every) else []
    room = MOST_LINES - len(tail) - len(lines)
    shown = parts[: max(1, room // LEAST)]
    for part in shown:
        blocks = _blocks(part, speed, titled=len(parts) > 1, wrong=not scarce)
        lines += _fitted(blocks, room // len(shown) - 1)
    if len(shown) < len(parts):
        lines[-1] = f"{len(parts) - len(shown)} more machines or sets of packages are in performance.json."
    text = "\n".join([*lines, *tail]) + "\n"
    return printable_lines("".join(one for one in text if one.isprintable() or one == "\n"))


def _blocks(part: MachineStandings, speed: Document, titled: bool, wrong: bool) -> Iterator[SummarySection]:
    """Yield the sections of one machine in the order of reading; the last ones are left out first."""
    shown = part.records
    environments = {r.environment.fingerprint: r.environment for r in shown if r.environment is not None}
    heading = [part.title, "=" * len(part.title)] if titled else [*map(environment_line, environments.values())]
    statuses = Counter(map(status_words, shown)).most_common()
    counts = f"{len(shown)} cells: {', '.join(f'{n} {status}' for status, n in statuses)}"
    yield SummarySection("", [*heading, counts], ANSWER)
    sentences = [sentence for told in wrong_sentences(shown) for sentence in told] if wrong else []
    told = [f"Wrong: {textwrap.shorten(one, 2 * WIDTH, placeholder=' ...')}" for one in sentences]
    older = setback_sentences(part.standings.setbacks)
    yield SummarySection("", [*(told if len(told) <= MOST_WRONG else [_all_wrong(shown)]), *older], MOST_LINES)
    yield SummarySection("", part.verdicts, ANSWER)

    def pick_words(pick: Pick) -> str:
        others = "".join([f" = {name}" for name in pick.same] + [f" ≈ {pick.equal}"] * bool(pick.equal))
        mixed = "by shape, most often " if pick.mixed else ""
        return f"{mixed}{pick.name}{others} ({pick.led} of {pick.of})"

    table = pick_table(part.advice)
    picks = []
    for shapes, row in table.rows:
        told = [f"{name}: {pick_words(pick)}" for name, pick in zip(table.frameworks, row) if pick is not None]
        picks.append(f"{shapes}: {'; '.join(told)}")
    yield SummarySection(
        "Which one (= the same kernel, ≈ as fast; unbeaten on so many of the shapes)", picks, MOST_LINES // 3
    )
    for title, (_, kinds) in GROUPS.items():
        if title != WHICH:
            yield SummarySection(title, [one.text for one in part.advice if one.kind in kinds], ADVICE)
    yield SummarySection("Without a result", _lost(shown), REASONS, "correctness.json")
    rows = [row for row in speed["speedups"] if row["section"] == part.title]
    categories: dict[str, Counter[str]] = {}
    for row in rows:
        categories.setdefault(row["category"], Counter())[row["implementation"]] += 1
    gains: list[str] = []
    for name in ORDER:
        if name in categories:
            counts = [f"{who} ({n})" for who, n in categories[name].most_common()]
            gains.append(f"{name}: {', '.join(capped(counts, MOST_NAMES, '{} more'))}")
    yield SummarySection(f"Speed-up against {part.baseline}", gains, ADVICE)
    yield SummarySection("Notes", count_notes(shown), ADVICE)


def _all_wrong(records: Sequence[Record]) -> str:
    return f"Wrong, and not ranked there: {name_wrong(records)}; the reasons are in correctness.json."


def _fitted(blocks: Iterable[SummarySection], room: int) -> list[str]:
    """Return sections one below the other, a blank line after each, until the room is taken."""
    lines: list[str] = []
    for block in blocks:
        title = [block.title] if block.title else []
        left = min(block.most, room - len(lines) - len(title) - 1)
        found = _entries(block, left) if block.entries and left > 0 else []
        lines += [*title, *found, ""] if found else []
    return lines


def _entries(block: SummarySection, most: int) -> list[str]:
    lines: list[str] = []
    for place, entry in enumerate(block.entries):
        wrapped = _wrapped(entry) if block.title else _wrapped(entry, "")
        last = place == len(block.entries) - 1
        if len(lines) + len(wrapped) + (0 if last else 1) > most:
            left = len(block.entries) - place
            more = f"{left} more {'is' if left == 1 else 'are'} in {block.rest}" if lines else ""
            return [*lines, f"  ... {more}"] if more else wrapped[:most]
        lines += wrapped
    return lines


def _wrapped(text: str, indent: str = "    ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _lost(records: Iterable[Record]) -> list[str]:
    """Return a line per reason with the implementations that it kept from a result; the most frequent reason first."""
    lines: list[str] = []
    for (status, reason), group in sorted(without_result(records).items(), key=lambda item: -len(item[1])):
        told = ", ".join(capped(list(dict.fromkeys(map(label, group))), MOST_NAMES, "{} more"))
        lines.append(textwrap.shorten(f"{status}: {told}: {reason}", WIDTH, placeholder=" ..."))
    return lines
