"""What was measured -> `summary.txt`: the answer first, no more than a person reads; the rest is in the documents."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from attnbench.analyse.advice import Kind, Pick
from attnbench.analyse.summary import count_notes, name_wrong, wrong_sentences
from attnbench.printable import printable_lines
from attnbench.report.detail import environment_line
from attnbench.report.html.answers import GROUPS, WHICH, pick_table
from attnbench.report.summary_documents import Document, Measured
from attnbench.results.records import label
from attnbench.spec import Ok, Record

MOST_LINES = 60
WIDTH = 110
LEAST = 8
"""Lines that the part of one machine needs to say anything."""
ROOMY = 20
"""With fewer lines for each machine, what is wrong is told once for all of them."""
MOST_NAMES = 4
ANSWER, ADVICE, REASONS = 10, 5, 5
"""Lines of a section at most, where it is not the one that says which to use."""
ORDER = ("excellent", "good", "measured", "no significant difference", "cannot tell", "investigate")
REST = (
    "Every cell, every sentence with its figures, growth with length: performance.json, memory.json and "
    "correctness.json, which `attnbench report` writes with this file."
)
MOST_WRONG = 3
"""Wrong implementations that are told with their reason where there is little room; the others by name."""


class Block(Struct, frozen=True):
    """A section: whole entries until `most` lines are full, and where the rest of them is."""

    title: str
    entries: Sequence[str]
    most: int
    rest: str = "performance.json"


def summary_text(parts: Sequence[Measured], speed: Document, left: Sequence[str] = ()) -> str:
    """At most `MOST_LINES` lines, shared by the machines; `speed` is the document of performance, `left` tells of runs
    that ended early."""
    tail = [*_wrapped(REST), *_early(left)]
    scarce = MOST_LINES // max(1, len(parts)) < ROOMY
    lines = _named_wrong([record for part in parts for record in part.records]) if scarce else []
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
    """In the order in which they are read, and given up from the end."""
    shown = part.records
    heading = [part.title, "=" * len(part.title)] if titled else _machines(shown)
    yield Block("", [*heading, _counts(shown)], ANSWER)
    yield Block("", _wrong(shown) if wrong else [], MOST_LINES)
    yield Block("", part.answer, ANSWER)
    table = pick_table(part.advice)
    picks = [f"{shapes}: {_picks_text(table.frameworks, row)}" for shapes, row in table.rows]
    yield Block("Which one (= the same kernel, ≈ as fast; unbeaten on so many of the shapes)", picks, MOST_LINES // 3)
    for title, (_, kinds) in GROUPS.items():
        if title != WHICH:
            yield Block(title, _advice(part, kinds), ADVICE)
    yield Block("Without a result", _lost(shown), REASONS, "correctness.json")
    rows = [row for row in speed["speedups"] if row["section"] == part.title]
    yield Block(f"Speed-up against {part.baseline}", _categories(rows), ADVICE)
    yield Block("Notes", count_notes(shown), ADVICE)


def _wrong(records: Sequence[Record]) -> list[str]:
    """Everybody who computed something else: the first with their reasons, the others by name; none is left out."""
    sentences = [sentence for told in wrong_sentences(records) for sentence in told]
    if len(sentences) <= MOST_WRONG:
        return [f"Wrong: {textwrap.shorten(one, 2 * WIDTH, placeholder=' ...')}" for one in sentences]
    return [_all_wrong(records)]


def _named_wrong(records: Sequence[Record]) -> list[str]:
    """The same by name only, in lines of its own before the machines."""
    return [*_wrapped(_all_wrong(records)), ""] if name_wrong(records) else []


def _all_wrong(records: Sequence[Record]) -> str:
    return f"Wrong, and not ranked there: {name_wrong(records)}; why is in correctness.json."


def _early(left: Sequence[str]) -> list[str]:
    """Of runs that ended early the first, and how many more."""
    more = f" {len(left) - 1} more ended early: the report names them." if len(left) > 1 else ""
    return _wrapped(f"{textwrap.shorten(left[0], 3 * WIDTH, placeholder=' ...')}.{more}") if left else []


def _fitted(blocks: Iterable[Block], room: int) -> list[str]:
    """Blocks one below the other, a blank line after each, until the room is taken."""
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


def _picks_text(frameworks: Sequence[str], picks: Sequence[Pick | None]) -> str:
    return "; ".join(f"{name}: {_pick(pick)}" for name, pick in zip(frameworks, picks) if pick is not None)


def _pick(pick: Pick) -> str:
    others = "".join([f" = {name}" for name in pick.same] + [f" ≈ {pick.equal}"] * bool(pick.equal))
    mixed = "by shape, most often " if pick.mixed else ""
    return f"{mixed}{pick.name}{others} ({pick.led} of {pick.of})"


def _advice(part: Measured, kinds: Iterable[Kind]) -> list[str]:
    return [one.text for one in part.advice if one.kind in kinds]


def _machines(records: Sequence[Record]) -> list[str]:
    """Each machine and set of packages once."""
    environments = {r.environment.fingerprint: r.environment for r in records if r.environment is not None}
    return [environment_line(one) for one in environments.values()]


def _counts(records: Sequence[Record]) -> str:
    counts = Counter(record.status.replace("_", " ") for record in records)
    return f"{len(records)} cells: {', '.join(f'{n} {status}' for status, n in counts.most_common())}"


def _lost(records: Sequence[Record]) -> list[str]:
    """One line per reason, with everybody whom it befell; what befell most cells first."""
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
    """Category by category, who is in it how often."""
    groups: dict[str, Counter[str]] = {}
    for one in speedups:
        groups.setdefault(one["category"], Counter())[one["implementation"]] += 1
    return [f"{name}: {_counted(groups[name])}" for name in ORDER if name in groups]


def _counted(names: Counter[str]) -> str:
    left = len(names) - MOST_NAMES
    told = [f"{who} ({n})" for who, n in names.most_common(MOST_NAMES)]
    return ", ".join([*told, *([f"{left} more"] if left > 0 else [])])
