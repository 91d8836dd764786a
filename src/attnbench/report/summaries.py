"""Summaries beside a report: `summary.txt` for people, `performance.json`, `memory.json` and `correctness.json` for
scripts; and the advice grouped by the questions that it answers, as `summary.txt` and the page print it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from attnbench.drafts import write_texts
from attnbench.errors import UsageError
from attnbench.printable import printable_lines
from attnbench.report.environment import environment_line
from attnbench.report.summary_documents import Document, Measured, correctness, memory, performance
from attnbench.results.advice import Kind, Pick, Recommendation
from attnbench.results.families import FRAMEWORKS, OVERALL
from attnbench.results.records import label
from attnbench.results.sentences import count_notes, name_wrong, wrong_sentences
from attnbench.spec import Ok, Record

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


def folder_of(page: Path) -> Path:
    """Return the folder for the summaries of a page, beside it."""
    return page.with_name(f"{page.stem}-summary")


def write_summaries(parts: Sequence[Measured], folder: Path, left: Sequence[str] = ()) -> list[Path]:
    """Write the four files into a folder, which is made if need be; nothing is replaced before all are on disk.

    `left` has a sentence for each run that ended early.
    """
    speed = performance(parts)
    documents = {"performance.json": speed, "memory.json": memory(parts), "correctness.json": correctness(parts)}
    texts = {name: _json(document) for name, document in documents.items()}
    texts["summary.txt"] = summary_text(parts, speed, left)
    try:
        write_texts({folder / name: texts[name] for name in FILES})
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror or error}. Choose another folder with --summaries."
        ) from error
    return [folder / name for name in FILES]


def _json(document: Document) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


class Told(Struct, frozen=True):
    """A sentence about one framework, and the figures it rests on."""

    framework: str
    text: str
    basis: str


class Answer(Struct, frozen=True):
    """The sentences about one kind of shapes."""

    shapes: str
    told: list[Told]


class Group(Struct, frozen=True):
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


def group_advice(advice: Iterable[Recommendation]) -> list[Group]:
    """Return the questions that the advice answers."""
    found = list(advice)
    groups: list[Group] = []
    for title, (shown, kinds) in GROUPS.items():
        answers = _answers(one for one in found if one.kind in kinds)
        table = pick_table(found) if title == WHICH else None
        groups += [Group(title, answers[:shown], answers[shown:], table)] if answers else []
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


def _answers(advice: Iterable[Recommendation]) -> list[Answer]:
    answers: dict[str, Answer] = {}
    for one in advice:
        framework, _, shapes = one.family.partition(" · ")
        text = one.text.removeprefix(one.family).lstrip(":, ")
        answers.setdefault(shapes, Answer(shapes, [])).told.append(Told(framework, text, one.basis))
    for answer in answers.values():
        answer.told.sort(key=lambda one: _place(one.framework))
    return list(answers.values())


class Block(Struct, frozen=True):
    """A section: whole entries until `most` lines are full, and the file with the rest."""

    title: str
    entries: Sequence[str]
    most: int
    rest: str = "performance.json"


def summary_text(parts: Sequence[Measured], speed: Document, left: Sequence[str] = ()) -> str:
    """Return the text of `summary.txt`, whose lines the machines share; `speed` is the document of performance, `left`
    has a sentence for each run that ended early."""
    tail = [*_wrapped(REST), *_early(left)]
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


def _blocks(part: Measured, speed: Document, titled: bool, wrong: bool) -> Iterator[Block]:
    """Yield the sections of one machine in the order of reading; the last ones are left out first."""
    shown = part.records
    heading = [part.title, "=" * len(part.title)] if titled else _machines(shown)
    yield Block("", [*heading, _counts(shown)], ANSWER)
    yield Block("", _wrong(shown) if wrong else [], MOST_LINES)
    yield Block("", part.answer, ANSWER)
    table = pick_table(part.advice)
    picks = []
    for shapes, row in table.rows:
        told = (f"{name}: {_pick(pick)}" for name, pick in zip(table.frameworks, row) if pick is not None)
        picks.append(f"{shapes}: {'; '.join(told)}")
    yield Block("Which one (= the same kernel, ≈ as fast; unbeaten on so many of the shapes)", picks, MOST_LINES // 3)
    for title, (_, kinds) in GROUPS.items():
        if title != WHICH:
            yield Block(title, [one.text for one in part.advice if one.kind in kinds], ADVICE)
    yield Block("Without a result", _lost(shown), REASONS, "correctness.json")
    rows = [row for row in speed["speedups"] if row["section"] == part.title]
    yield Block(f"Speed-up against {part.baseline}", _categories(rows), ADVICE)
    yield Block("Notes", count_notes(shown), ADVICE)


def _wrong(records: Sequence[Record]) -> list[str]:
    """Return all implementations with wrong results: with their reasons, or by name if they are many."""
    sentences = [sentence for told in wrong_sentences(records) for sentence in told]
    if len(sentences) <= MOST_WRONG:
        return [f"Wrong: {textwrap.shorten(one, 2 * WIDTH, placeholder=' ...')}" for one in sentences]
    return [_all_wrong(records)]


def _all_wrong(records: Sequence[Record]) -> str:
    return f"Wrong, and not ranked there: {name_wrong(records)}; why is in correctness.json."


def _early(left: Sequence[str]) -> list[str]:
    """Return the first run that ended early, and how many more did."""
    more = f" {len(left) - 1} more ended early: the report names them." if len(left) > 1 else ""
    return _wrapped(f"{textwrap.shorten(left[0], 3 * WIDTH, placeholder=' ...')}.{more}") if left else []


def _fitted(blocks: Iterable[Block], room: int) -> list[str]:
    """Return sections one below the other, a blank line after each, until the room is taken."""
    lines: list[str] = []
    for block in blocks:
        title = [block.title] if block.title else []
        left = min(block.most, room - len(lines) - len(title) - 1)
        found = _entries(block, left) if block.entries and left > 0 else []
        lines += [*title, *found, ""] if found else []
    return lines


def _entries(block: Block, most: int) -> list[str]:
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


def _pick(pick: Pick) -> str:
    others = "".join([f" = {name}" for name in pick.same] + [f" ≈ {pick.equal}"] * bool(pick.equal))
    mixed = "by shape, most often " if pick.mixed else ""
    return f"{mixed}{pick.name}{others} ({pick.led} of {pick.of})"


def _machines(records: Sequence[Record]) -> list[str]:
    """Return each machine and set of packages once."""
    environments = {r.environment.fingerprint: r.environment for r in records if r.environment is not None}
    return [environment_line(one) for one in environments.values()]


def _counts(records: Sequence[Record]) -> str:
    counts = Counter(record.status.replace("_", " ") for record in records)
    return f"{len(records)} cells: {', '.join(f'{n} {status}' for status, n in counts.most_common())}"


def _lost(records: Sequence[Record]) -> list[str]:
    """Return a line per reason with the implementations that it kept from a result; the most frequent reason first."""
    groups: dict[tuple[str, str], Counter[str]] = {}
    for record in records:
        if not isinstance(record, Ok):
            key = (record.status.replace("_", " "), " ".join(record.reason.split()))
            groups.setdefault(key, Counter())[label(record)] += 1
    found = sorted(groups.items(), key=lambda item: -item[1].total())
    return [
        textwrap.shorten(f"{status}: {_names(names)}: {reason}", WIDTH, placeholder=" ...")
        for (status, reason), names in found
    ]


def _names(names: Counter[str]) -> str:
    left = len(names) - MOST_NAMES
    return ", ".join([*list(names)[:MOST_NAMES], *([f"{left} more"] if left > 0 else [])])


def _categories(speedups: Sequence[Document]) -> list[str]:
    """Return a line per category with the implementations in it and how often."""
    groups: dict[str, Counter[str]] = {}
    for one in speedups:
        groups.setdefault(one["category"], Counter())[one["implementation"]] += 1
    return [f"{name}: {_counted(groups[name])}" for name in ORDER if name in groups]


def _counted(names: Counter[str]) -> str:
    left = len(names) - MOST_NAMES
    told = [f"{who} ({n})" for who, n in names.most_common(MOST_NAMES)]
    return ", ".join([*told, *([f"{left} more"] if left > 0 else [])])
