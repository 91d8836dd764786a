"""`summary.txt`, `performance.json`, `memory.json` and `correctness.json`: a run for people and for scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from attnbench.analyse.ranking import label
from attnbench.analyse.scaling import Slope
from attnbench.analyse.summary import count_notes
from attnbench.errors import UsageError
from attnbench.report.detail import environment_line
from attnbench.report.summary_documents import Document, Measured, correctness, memory, performance
from attnbench.spec import Ok, Record
from attnbench.store.drafts import write_texts

FILES = ("correctness.json", "memory.json", "performance.json", "summary.txt")

CEILINGS = {"always": "at every length measured", "never": "at no length measured"}


def folder_of(page: Path) -> Path:
    """Where the summaries of a page lie: beside it."""
    return page.with_name(f"{page.stem}-summary")


def write_summaries(parts: Sequence[Measured], folder: Path, left: Sequence[str] = ()) -> list[Path]:
    """Write the four files into a folder, which is made if need be; nothing is replaced before all are on disk.

    `left` tells of runs that ended early.
    """
    speed, space = performance(parts), memory(parts)
    documents = {"performance.json": speed, "memory.json": space, "correctness.json": correctness(parts)}
    texts = {name: _json(document) for name, document in documents.items()}
    texts["summary.txt"] = "\n".join(
        [*(_text(part, speed, space, titled=len(parts) > 1) for part in parts), *(f"{one}.\n" for one in left)]
    )
    try:
        write_texts({folder / name: texts[name] for name in FILES})
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror or error}. Choose another folder with --summaries."
        ) from error
    return [folder / name for name in FILES]


def _text(part: Measured, speed: Document, space: Document, titled: bool) -> str:
    """The answer first, then what it rests on, then what did not run; `speed` and `space` are the documents."""
    shown = part.records
    heading = [part.title, "=" * len(part.title)] if titled else []
    speedups, scaling, growth = (
        [row for row in rows if row["section"] == part.title]
        for rows in (speed["speedups"], speed["scaling"], space["growth"])
    )
    sections = {
        "": [*heading, *_machines(shown), _counts(shown), "", *part.answer],
        "Recommendations": [f"{one.text}\n    rests on: {one.basis}" for one in part.advice],
        f"Speed-up against {part.baseline}": _categories(speedups),
        "Growth of time with length": [_time_line(one) for one in scaling],
        "Growth of memory with length": [_memory_line(one) for one in growth],
        "Without a result": _lost(shown),
        "Notes": count_notes(shown),
    }
    text = "\n".join(line for title, lines in sections.items() for line in _section(title, lines))
    return "".join(one for one in text if one.isprintable() or one == "\n")


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if not lines:
        return
    if title:
        yield title
        yield "-" * len(title)
    yield from lines
    yield ""


def _machines(records: Sequence[Record]) -> list[str]:
    """Each machine and set of packages once."""
    environments = {r.environment.fingerprint: r.environment for r in records if r.environment is not None}
    return [environment_line(one) for one in environments.values()]


def _counts(records: Sequence[Record]) -> str:
    counts = Counter(record.status.replace("_", " ") for record in records)
    return f"{len(records)} cells: {', '.join(f'{n} {status}' for status, n in counts.most_common())}"


def _lost(records: Sequence[Record]) -> list[str]:
    """One line per reason, with everybody whom it befell."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        if not isinstance(record, Ok):
            groups.setdefault((record.status.replace("_", " "), record.reason), {})[label(record)] = None
    return [f"{status}: {', '.join(names)}: {reason}" for (status, reason), names in groups.items()]


def _categories(speedups: Sequence[Document]) -> list[str]:
    """Category by category, who is in it how often."""
    groups: dict[str, Counter[str]] = {}
    for one in speedups:
        groups.setdefault(one["category"], Counter())[one["implementation"]] += 1
    order = ("excellent", "good", "measured", "no significant difference", "investigate")
    return [
        f"{name}: {', '.join(f'{who} ({n})' for who, n in groups[name].most_common())}"
        for name in order
        if name in groups
    ]


def _time_line(one: Document) -> str:
    fit, regime = one["time"], one["compute_bound"]
    bound = ""
    if regime is not None:
        edge = CEILINGS.get(regime.begins) or f"from somewhere between {regime.below:,} and {regime.length:,} tokens"
        bound = f"; the shapes are compute-bound {edge}"
    return f"{_who(one)}: n^{_slope(fit.overall)}, at the long end n^{_slope(fit.local)}{bound}"


def _memory_line(one: Document) -> str:
    fit, limit = one["memory"], one["fits_until"]
    grows = f"{one['growth']}, " if one["growth"] else ""
    told = f"{_who(one)}: {grows}n^{_slope(fit.local)} at the long end"
    theory = f" ({one['growth_in_theory']})" if one["growth_in_theory"] else ""
    fits = "" if limit is None else f"; {limit.memory_bytes / 1e9:.3g} GB hold about {limit.length:,} tokens"
    return f"{told}{theory}{fits}"


def _who(one: Document) -> str:
    return f"{one['implementation']} · {one['family']} · {one['track']}"


def _slope(slope: Slope) -> str:
    span = "" if slope.interval is None else f" ({slope.interval[0]:.2f}-{slope.interval[1]:.2f})"
    theory = "" if slope.theory is None else f", theory {slope.theory:.2f}"
    return f"{slope.exponent:.2f}{span}{theory}"


def _json(document: Document) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
