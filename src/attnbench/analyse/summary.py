"""Records of a run -> the sentence that answers the question, and what must be said beside it.

Pure functions; the terminal and `--json` print the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attnbench.analyse.ranking import (
    NOT_COMPARED,
    NOT_TIMED,
    Row,
    baseline,
    by_workload,
    is_timed,
    label,
    labelled,
    rank,
)
from attnbench.analyse.verdicts import judge
from attnbench.analyse.wording import counted, format_ratio, format_span, slightly_apart, vague
from attnbench.measuring.host_limit import HOST_LIMITED, notes_of, told_host_limit
from attnbench.printable import shortened
from attnbench.spec import Incorrect, Ok, Record, Unsupported

__all__ = [
    "ADVICE",
    "Row",
    "baseline",
    "by_workload",
    "closing",
    "count_notes",
    "format_ratio",
    "not_run",
    "rank",
    "wrong_sentences",
]

ADVICE = {
    "unstable": "samples vary; close other programs, raise --budget or set --threads",
    HOST_LIMITED: "their device waits for the host, so that a call takes longer than its kernels; a graph may help",
}
"""The closed list of honest warnings: how a note begins -> what to do about it."""

ATTENTION = "attention"
"""What is computed where there is no step."""

Rankings = dict[str, list[Row]]
"""Workload id -> its ranked rows."""


def closing(
    records: Sequence[Record],
    against: Sequence[str] = (),
    focus: Sequence[str] = (),
    ranked: Sequence[Sequence[Row]] | None = None,
    wrong: bool = True,
) -> str:
    """The sentence that answers the question, after what must be said first about ones that are never right.

    `focus` names what the user came to look at: where it does not win, how far behind it is. `ranked` are the
    records ranked workload by workload, where that was done already; of several runs each workload by one of them.
    Without `wrong` the sentences about wrong results are left to the caller.
    """
    groups = by_workload(records)
    kept = [r for group in groups.values() for r in group]
    before, after = wrong_sentences(kept, focus) if wrong else ([], [])
    before += _lost_sentences(kept, focus)
    found = [rank(group) for group in groups.values()] if ranked is None else ranked
    ordered = ([row for row in rows if row.rank is not None] for rows in found)
    rankings = {rows[0].record.workload.id: rows for rows in ordered if rows}
    if not rankings:
        return " ".join([*before, _nothing_timed(kept), *after])
    verdicts = _verdicts(rankings, against, focus)
    return " ".join([*before, *verdicts, *_not_compared(found), *after])


def _verdicts(rankings: Rankings, against: Sequence[str], focus: Sequence[str]) -> list[str]:
    """One sentence, or one for each step that was timed: nobody computes two."""
    by_step: dict[str, Rankings] = {}
    for key, rows in rankings.items():
        by_step.setdefault(rows[0].record.workload.step, {})[key] = rows
    told = []
    for step, mine in by_step.items():
        records = [row.record for rows in mine.values() for row in rows]
        start = f"{step or ATTENTION}: " if len(by_step) > 1 else ""
        told.append(start + _verdict(mine, labelled(baseline(records, against), records), focus))
    return told


def _verdict(rankings: Rankings, base: str | None, focus: Sequence[str]) -> str:
    first = {
        key: [row.implementation for row in rows if row.rank == 1 and not row.behind] for key, rows in rankings.items()
    }
    in_front = Counter(name for names in first.values() for name in names)
    most = max(in_front.values())
    champion = max((name for name, n in in_front.items() if n == most), key=lambda name: _total_gain(rankings, name))
    alone = Counter(names[0] for names in first.values() if len(names) == 1)
    others = [f"{name} wins {n}" for name, n in alone.most_common() if name != champion]
    tail = f"; {', '.join(others)}" if others else ""
    measured = {row.implementation for rows in rankings.values() for row in rows}
    for name in focus:
        if name in measured and name not in (champion, base):
            tail += f". {_comparison(name, champion, rankings)}"
    mine = [row.record for rows in rankings.values() for row in rows if row.implementation == champion]
    if host := told_host_limit(record for record in mine if isinstance(record, Ok)):
        tail += f". {champion} is {host}"
    if not alone[champion]:
        return f"{_no_winner(first, champion, rankings, base)}{tail}."
    return f"{_against_baseline(champion, rankings, base)}{tail}."


def _not_compared(found: Iterable[Sequence[Row]]) -> list[str]:
    """One sentence for each reason, of those that were ranked nowhere."""
    rows = [row for group in found for row in group]
    ranked = {row.implementation for row in rows if row.rank is not None}
    told: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.reason.startswith(NOT_COMPARED) and row.implementation not in ranked:
            told.setdefault(row.reason, {})[row.implementation] = None
    return [f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} {why}." for why, names in told.items()]


def _total_gain(rankings: Rankings, name: str) -> float:
    """How far ahead of the slowest exact one, over all workloads: breaks ties between champions."""
    gain = 0.0
    for rows in rankings.values():
        mine = next((row for row in rows if row.implementation == name), None)
        if mine is not None:
            gain += _median_of(rows[-1]) / _median_of(mine)
    return gain


def _median_of(row: Row) -> float:
    assert row.record.time is not None
    return row.record.time.median_ns


def _no_winner(first: dict[str, list[str]], champion: str, rankings: Rankings, base: str | None) -> str:
    rivals = Counter(name for names in first.values() if champion in names for name in names if name != champion)
    near = ", ".join(name for name, _ in rivals.most_common(3))
    text = f"No confident winner over {_shapes(len(first))}: {champion} is within the noise of {near}"
    if base is None or base == champion or base in rivals:
        return text
    return f"{text}; {_against_baseline(champion, rankings, base)}"


def _against_baseline(champion: str, rankings: Rankings, base: str | None) -> str:
    every = len(rankings)
    if base is None or base == champion:
        other = _runner_up(champion, rankings)
        if other is None:
            return f"{champion} is the only one that was ranked, over {_shapes(every)}"
        return _comparison(champion, other, rankings)
    return _comparison(champion, base, rankings)


def _runner_up(champion: str, rankings: Rankings) -> str | None:
    seconds = Counter(
        next((row.implementation for row in rows if row.implementation != champion), None) for rows in rankings.values()
    )
    seconds.pop(None, None)
    return seconds.most_common(1)[0][0] if seconds else None


def _comparison(champion: str, other: str, rankings: Rankings) -> str:
    pairs: list[tuple[Ok, Ok]] = []
    for rows in rankings.values():
        found = {row.implementation: row.record for row in rows}
        a, b = found.get(champion), found.get(other)
        if a is not None and b is not None and is_timed(a) and is_timed(b):
            pairs.append((a, b))
    if not pairs:
        return f"{champion} was never measured where {other} was"
    verdict = judge(pairs)
    ratio, (least, most) = verdict.ratio, verdict.span
    shapes = _shapes(len(rankings)) if len(pairs) == len(rankings) else f"{len(pairs)} of {_shapes(len(rankings))}"
    if not verdict.sign:
        if near := slightly_apart(ratio):
            return f"{champion} and {other} are {near} ({format_ratio(ratio)}) over {shapes}"
        why = "their times vary too much" if vague(ratio) else format_ratio(ratio)
        return f"{champion} and {other} cannot be told apart ({why}) over {shapes}"
    if verdict.sign < 0:
        told = format_ratio(ratio.inverse) if verdict.on_average else format_span(1 / most, 1 / least)
        return f"{champion} is {told} slower than {other} over {shapes}"
    told = format_ratio(ratio) if verdict.on_average else format_span(least, most)
    return f"{champion} is {told} faster than {other} over {shapes}"


def _shapes(count: int) -> str:
    return counted(count, "shape")


def _nothing_timed(records: Sequence[Record]) -> str:
    verified = sum(isinstance(r, Ok) for r in records)
    if verified:
        return f"{counted(verified, 'cell')} verified, none was timed."
    counts = Counter(r.status.replace("_", " ") for r in records)
    told = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    return f"Nothing could be measured ({told or 'no cells'})."


def wrong_sentences(records: Sequence[Record], focus: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """One sentence per implementation that computed something else: what must be said before the answer (of those never
    right, and of what the user came for), and what after it (of those that are right, and ranked, on other shapes)."""
    wrong: dict[str, list[Incorrect]] = {}
    for record in records:
        if isinstance(record, Incorrect):
            wrong.setdefault(record.implementation, []).append(record)
    right = {record.implementation for record in records if isinstance(record, Ok)}
    before, after = [], []
    for name, found in wrong.items():
        where = "" if len(found) == 1 else f" (wrong on {_shapes(len(found))})"
        where = f" on {_shapes(len(found))}" if name in right else where
        told = after if name in right and name not in focus else before
        told.append(f"{name} is not ranked{where}: {shortened(found[0].reason).rstrip('.')}.")
    return before, after


def _lost_sentences(records: Sequence[Record], focus: Sequence[str]) -> list[str]:
    """One sentence per implementation the user came for that crashed, hung or ran out of memory everywhere."""
    sentences = []
    for name in focus:
        mine = [record for record in records if record.implementation == name]
        lost = [record for record in mine if not isinstance(record, Ok | Incorrect)]
        if lost and len(lost) == len(mine):
            told = lost[0].status.replace("_", " ")
            sentences.append(f"{name} is not ranked: {told}: {shortened(lost[0].reason).rstrip('.')}.")
    return sentences


def count_notes(records: Iterable[Record]) -> list[str]:
    """Honest warnings of the closed list with how many cells they befell and what to do; others as they are."""
    counts: Counter[str] = Counter()
    for record in records:
        if isinstance(record, Ok):
            notes = [note for note in notes_of(record) if not note.startswith(NOT_TIMED)]
            counts.update({next((k for k in ADVICE if note.startswith(k)), note) for note in notes})
    cells = ((shortened(note), counted(n, "cell")) for note, n in counts.most_common())
    return [f"{note}: {many}" + (f" ({ADVICE[note]})" if note in ADVICE else "") for note, many in cells]


def not_run(records: Iterable[Record]) -> list[tuple[str, list[str]]]:
    """Reason -> implementations that were refused for it, each once; the reason most share first."""
    groups: dict[str, list[str]] = {}
    for record in records:
        if isinstance(record, Unsupported):
            names = groups.setdefault(record.reason, [])
            if label(record) not in names:
                names.append(label(record))
    return sorted(groups.items(), key=lambda item: -len(item[1]))
