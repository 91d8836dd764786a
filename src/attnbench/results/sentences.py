"""Standings in words: ratios with their intervals, speed-ups by category, and the sentences that end a run.

The terminal, `--json` and the report print the same sentences. `attnbench.analyse.summary` is the public path to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten
from typing import Literal

from msgspec import Struct

from attnbench.measuring.rates import HOST_LIMITED, notes_of
from attnbench.measuring.sampling import WAITED
from attnbench.printable import shortened
from attnbench.results.ratios import EXCELLENT, GOOD, LEAST_DIFFERENCE, RANK_LEVEL, TOO_WIDE, Ratio, paired_ratio
from attnbench.results.records import (
    baseline,
    by_workload,
    clock_of,
    device_of,
    grouped,
    is_one_machine,
    is_timed,
    label,
    labelled,
    named_record,
    outcome_text,
    sitting_of,
    status_words,
    without_result,
)
from attnbench.results.standings import NOT_COMPARED, NOT_TIMED, Row, Setback, Standing, Standings
from attnbench.results.tally import Tally
from attnbench.spec import Failed, Incorrect, Ok, OutOfMemory, Record, Timeout, Unsupported

CANNOT_TELL = "cannot tell"
NO_DIFFERENCE = "no significant difference"
Category = Literal["excellent", "good", "measured", "investigate", "no significant difference", "cannot tell"]
ADVICE = {
    "unstable": "samples vary; close other programs, raise --budget or set --threads",
    WAITED: "other programs use the cores; close them, or take as many threads as there are free cores (--threads 1)",
    HOST_LIMITED: "their device waits for the host, so that a call takes longer than its kernels; a graph may help",
}
"""The closed list of warnings: how a note begins -> what to do about it."""
MOST_NAMED = 3
"""Files or shapes that a sentence names."""
MOST_REASONS = 3
LONGEST_REASON = 110
ATTENTION = "attention"
"""Name of the computation in a workload without a step."""


def format_ratio(ratio: Ratio) -> str:
    """Return a ratio and its interval with as many digits as its size needs, such as 1.96x (1.94-1.98). Of an interval
    that is too wide, only the nearer edge is returned, or "cannot tell" if the interval covers 1."""
    if vague(ratio):
        return CANNOT_TELL
    if too_wide(ratio):
        edge = ratio.low if ratio.low > 1 else ratio.high
        return f"{'more' if ratio.low > 1 else 'less'} than {edge:.{_digits(edge)}f}x"
    digits = _digits(ratio.value)
    return f"{ratio.value:.{digits}f}x ({ratio.low:.{digits}f}-{ratio.high:.{digits}f})"


def _digits(value: float) -> int:
    return 3 if value < 0.1 else 2 if value < 10 else 1 if value < 100 else 0


def format_span(least: float, most: float) -> str:
    """Return two ratios as a span, such as 1.13x to 1.42x; as one figure if both read the same."""
    low, high = f"{least:.2f}x", f"{most:.2f}x"
    return low if low == high else f"{low} to {high}"


def too_wide(ratio: Ratio) -> bool:
    """Return whether the interval is too wide to print a figure."""
    return ratio.high > TOO_WIDE * ratio.low


def vague(ratio: Ratio) -> bool:
    """Return whether the interval is too wide and covers 1: too few rounds, or times that vary too much."""
    return ratio.low <= 1 <= ratio.high and too_wide(ratio)


def slightly_apart(ratio: Ratio) -> str:
    """Return words for a ratio whose interval leaves out 1 and is yet too near to 1 to rank by; an empty text for any
    other, and if it reaches as far as a good gain."""
    if ratio.low <= 1 <= ratio.high or category(ratio) != NO_DIFFERENCE:
        return ""
    sure = ratio.low >= 1 / LEAST_DIFFERENCE and ratio.high <= LEAST_DIFFERENCE
    return f"{'certainly' if sure else 'perhaps'} less than {100 * (LEAST_DIFFERENCE - 1):.0f} % apart"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: 1 shape, 2 shapes."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def all_of(count: int, noun: str) -> str:
    """Return a whole number of things in words: the one shape, both shapes, all 3 shapes."""
    return f"the one {noun}" if count == 1 else f"both {noun}s" if count == 2 else f"all {counted(count, noun)}"


def capped(parts: Sequence[str], most: int, more: str = "and {} more") -> list[str]:
    """Return the first parts, then one that says how many more there are."""
    left = len(parts) - most
    return list(parts) if left <= 0 else [*parts[:most], more.format(left)]


def some_of(names: Sequence[str]) -> str:
    """Return the first names as text, with the number of the rest."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def category(ratio: Ratio) -> Category:
    """Return the category of a time of the baseline over a time of this implementation. A ratio that the ranking takes
    for a tie is no gain and no loss; its interval says nothing if it reaches as far as a good gain, or as large a loss:
    more rounds would tell. A gain goes by the low edge of its interval."""
    if not ratio.sign:
        return NO_DIFFERENCE if ratio.low > 1 / GOOD and ratio.high < GOOD else CANNOT_TELL
    if ratio.sign < 0:
        return "investigate"
    return "excellent" if ratio.low > EXCELLENT else "good" if ratio.low >= GOOD else "measured"


class Speedup(Struct, frozen=True, kw_only=True):
    """One implementation against the baseline on one workload."""

    implementation: str
    workload: str
    baseline: str
    device: str
    ratio: Ratio
    """Time of the baseline / time of this implementation, at the ranking's confidence."""
    category: Category
    approximate: bool = False


def speedups(standing: Standing, base: str) -> Iterator[Speedup]:
    """Yield every other record that was timed together with the baseline; nothing if the baseline was not timed."""
    timed = [row.record for row in standing.rows if is_timed(row.record)]
    other = named_record(timed, base)
    for record in timed:
        name = label(record)
        if other is None or record is other or not is_one_machine(record, other):
            continue
        if (clock_of(record), sitting_of(record)) != (clock_of(other), sitting_of(other)):
            continue
        ranked = {name, label(other)} <= standing.ranked.keys()
        if not ranked:
            ratio = paired_ratio(record, other, RANK_LEVEL)
        elif standing.times[label(other)] < standing.times[name]:  # as the ranking resamples them: the faster one first
            ratio = standing.ratio(label(other), name).inverse
        else:
            ratio = standing.ratio(name, label(other))
        yield Speedup(
            implementation=name,
            workload=record.workload.id,
            baseline=base,
            device=device_of(record),
            ratio=ratio,
            category=category(ratio),
            approximate=record.approximate,
        )


def closing(
    records: Sequence[Record],
    against: Sequence[str] = (),
    focus: Sequence[str] = (),
    ranked: Sequence[Sequence[Row]] | None = None,
    wrong: bool = True,
) -> str:
    """Return the closing sentence of a run; the parameters are those of `answer`. `ranked` are the rows of each
    workload, if they were ranked already."""
    if ranked is None:
        return answer(Standings([records], against), focus, wrong)
    groups = by_workload(records).values()
    return _answer([Standing(rows) for rows in ranked], [r for group in groups for r in group], against, focus, wrong)


def answer(standings: Standings, focus: Sequence[str] = (), wrong: bool = True) -> str:
    """Return the sentence that answers the question, after what must be said first about implementations that are never
    right. `focus` names the implementations that the user asked about: if one of them does not win, the sentence says
    how far behind it is. Without `wrong` the sentences about wrong results are left to the caller."""
    text = _answer(list(standings.overall.values()), standings.newest, standings.against, focus, wrong)
    return " ".join([*(setback_sentences(standings.setbacks) if wrong else []), text])


def _answer(
    standings: Sequence[Standing], records: Sequence[Record], against: Sequence[str], focus: Sequence[str], wrong: bool
) -> str:
    before, after = wrong_sentences(records, focus) if wrong else ([], [])
    before += _lost_sentences(records, focus)
    by_step: dict[str, dict[str, Standing]] = {}
    for standing in standings:
        if standing.ranked:
            by_step.setdefault(standing.workload.step, {})[standing.workload.id] = standing
    if not by_step:
        return " ".join([*before, _nothing_timed(records), *after])
    told: list[str] = []
    for step, members in by_step.items():
        timed = [record for one in members.values() for record in one.ranked.values()]
        start = f"{step or ATTENTION}: " if len(by_step) > 1 else ""
        told.append(start + _verdict(Tally(members), labelled(baseline(timed, against), timed), focus))
    return " ".join([*before, *told, *_not_compared(standings), *after])


def _verdict(tally: Tally, base: str | None, focus: Sequence[str]) -> str:
    """Return who is recommended for the workloads of one step, against the baseline or the next best."""
    best = tally.recommended
    alone = Counter(one.first for one in tally.standings.values() if one.first is not None and not one.close)
    others = [f"{name} wins {n}" for name, n in alone.most_common() if name not in best.names]
    tail = f"; {', '.join(others)}" if others else ""
    for name in focus:
        if name in tally.names and name not in (*best.names, base):
            tail += f". {_comparison(tally, name, best.name)}"
    if host := tally.host_limit(best.name):
        tail += f". {best.name} is {host}"
    other = tally.next_best() if base is None or base in best.names else base
    if tally.won(best.names):
        return f"{_comparison(tally, best.name, other, str(best))}{tail}."
    tied = Counter(
        name
        for one in tally.standings.values()
        if not set(best.names).isdisjoint(one.unbeaten)
        for name in one.unbeaten
        if name not in best.names
    )
    near = ", ".join(name for name, _ in tied.most_common(3))
    text = f"No confident winner over {counted(len(tally.standings), 'shape')}: {best} is within the noise of {near}"
    if base is None or base in best.names or base in tied:
        return f"{text}{tail}."
    return f"{text}; {_comparison(tally, best.name, base)}{tail}."


def _not_compared(standings: Iterable[Standing]) -> list[str]:
    """Return one sentence for each reason, naming the implementations that were ranked nowhere."""
    rows = [row for standing in standings for row in standing.rows]
    ranked = {row.implementation for row in rows if row.rank is not None}
    names_by_reason: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.reason.startswith(NOT_COMPARED) and row.implementation not in ranked:
            names_by_reason.setdefault(row.reason, {})[row.implementation] = None
    return [
        f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} {why}." for why, names in names_by_reason.items()
    ]


def _comparison(tally: Tally, name: str, other: str | None, called: str = "") -> str:
    """Return how much faster or slower one is than another over the workloads of a tally; `called` is the name with
    the other names of its kernel."""
    every, called = len(tally.standings), called or name
    if other is None:
        alone = sum(name in standing.ranked for standing in tally.standings.values())
        where = f", over {counted(every, 'shape')}" if alone == every else f" on {alone} of {counted(every, 'shape')}"
        return f"{called} is the only one that was ranked{where}"
    shared = len(tally.pairs(name, other))
    if not shared:
        return f"{called} and {other} were not measured on any common shape"
    verdict = tally.verdict(name, other)
    ratio, (least, most) = verdict.ratio, verdict.span
    shapes = f"{'' if shared == every else f'{shared} of '}{counted(every, 'shape')}"
    if not verdict.sign:
        if near := slightly_apart(ratio):
            return f"{called} and {other} are {near} ({format_ratio(ratio)}) over {shapes}"
        why = "their times vary too much" if vague(ratio) else format_ratio(ratio)
        if verdict.mixed and vague(ratio):
            why = f"each is faster on some, {format_span(least, most)}"
        return f"{called} and {other} cannot be told apart ({why}) over {shapes}"
    if verdict.sign < 0:
        ratio_text = format_ratio(ratio.inverse) if verdict.on_average else format_span(1 / most, 1 / least)
        return f"{called} is {ratio_text} slower than {other} over {shapes}"
    ratio_text = format_ratio(ratio) if verdict.on_average else format_span(least, most)
    return f"{called} is {ratio_text} faster than {other} over {shapes}"


def _nothing_timed(records: Sequence[Record]) -> str:
    verified = sum(isinstance(r, Ok) for r in records)
    if verified:
        return f"{counted(verified, 'cell')} verified, none was timed."
    counts = Counter(map(status_words, records))
    statuses = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    return f"Nothing could be measured ({statuses or 'no cells'})."


def wrong_sentences(records: Sequence[Record], focus: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return a sentence per implementation and setting with wrong results: those to print before the answer (never
    right, or in `focus`), and those to print after it (right, and ranked, on other shapes)."""
    wrong = grouped((record for record in records if isinstance(record, Incorrect)), label)
    right = {label(record) for record in records if isinstance(record, Ok)}
    before, after = [], []
    for name, failures in wrong.items():
        shapes = counted(len(failures), "shape")
        where = f" on {shapes}" if name in right else "" if len(failures) == 1 else f" (wrong on {shapes})"
        told = after if name in right and failures[0].implementation not in focus else before
        told.append(f"{name} is not ranked{where}: {shortened(failures[0].reason).rstrip('.')}.")
    return before, after


def setback_sentences(found: Iterable[Setback]) -> list[str]:
    """Return a sentence per implementation whose older times a newer run contradicts (they are left out) or lacks (they
    count)."""
    groups: dict[tuple[str, bool, bool], dict[str, Setback]] = {}
    for one in found:
        groups.setdefault((label(one.record), one.is_wrong, one.right_elsewhere), {})[one.record.workload.id] = one
    sentences = []
    for (name, is_wrong, right_elsewhere), shapes in sorted(groups.items(), key=lambda item: not item[0][1]):
        newer, on = next(iter(shapes.values())).newer, counted(len(shapes), "shape")
        text = f"is compared by older times on {on}: a newer run has none ({_why(newer)})"
        if is_wrong:
            of = " with the versions, threads and processor of a newer run that" if right_elsewhere else ": a newer run"
            text = f"is left out on {on}{of} found it incorrect"
        sentences.append(f"{name} {text}.")
    return sentences


def _why(lost: Failed | OutOfMemory | Timeout | Unsupported | Incorrect) -> str:
    return f"{status_words(lost)}: {shortened(lost.reason).rstrip('.')}"


def _lost_sentences(records: Sequence[Record], focus: Sequence[str]) -> list[str]:
    """Return one sentence per implementation of `focus`, and per setting of it, that crashed, hung or ran out of memory
    everywhere."""
    asked = (record for name in focus for record in records if record.implementation == name)
    sentences = []
    for name, own in grouped(asked, label).items():
        lost = [record for record in own if not isinstance(record, Ok | Incorrect)]
        if lost and len(lost) == len(own):
            sentences.append(f"{name} is not ranked: {_why(lost[0])}.")
    return sentences


def count_notes(records: Iterable[Record]) -> list[str]:
    """Return the notes of records with how many cells have them, and what to do about those that `ADVICE` knows."""
    counts: Counter[str] = Counter()
    for record in records:
        if isinstance(record, Ok):
            notes = [note for note in notes_of(record) if not note.startswith(NOT_TIMED)]
            counts.update({next((k for k in ADVICE if note.startswith(k)), note) for note in notes})
    cells = ((shortened(note), counted(n, "cell")) for note, n in counts.most_common())
    return [f"{note}: {many}" + (f" ({ADVICE[note]})" if note in ADVICE else "") for note, many in cells]


def not_run(records: Iterable[Record]) -> list[tuple[str, list[str]]]:
    """Return reason -> implementations that were refused for it, each once; the reason that most share first."""
    groups = without_result(record for record in records if isinstance(record, Unsupported))
    found = [(reason, list(dict.fromkeys(map(label, group)))) for (_, reason), group in groups.items()]
    return sorted(found, key=lambda item: -len(item[1]))


def name_wrong(records: Iterable[Record]) -> str:
    """Return all implementations with wrong results and their number of shapes: mine (2 shapes), yours (1 shape)."""
    counts = Counter(label(record) for record in records if isinstance(record, Incorrect))
    return ", ".join(f"{name} ({counted(n, 'shape')})" for name, n in counts.most_common())


def describe_not_run(records: Sequence[Record]) -> str:
    """Return how many cells have no result for another reason than a wrong result, and the most frequent reasons."""
    lost = [record for record in records if not isinstance(record, Ok | Incorrect)]
    if not lost:
        return ""
    told = (record.reason if record.status == "unsupported" else outcome_text(record) for record in lost)
    reasons = (shorten(one, LONGEST_REASON, placeholder=" …") for one in told)
    shown = Counter(reason.rstrip(".") for reason in reasons).most_common(MOST_REASONS)
    left = len(lost) - sum(n for _, n in shown)
    parts = [*(f"{reason} ({n})" for reason, n in shown), *([f"other reasons ({left})"] if left else [])]
    return f"{len(lost):,} of {counted(len(records), 'cell')} did not run: {'; '.join(parts)}"
