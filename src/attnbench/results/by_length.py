"""Advice along the length of a track: which implementation from which length on, when fused attention pays, and up to
which length a GPU waits for its host.

Who is fastest at a length, and whether two differ there, comes from the standings.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from msgspec import Struct

from attnbench.measuring.rates import CallTime, call_time, describe_host_limit
from attnbench.results.advice import Figure, Recommendation, advise_family, listed, ratio_figure, tokens
from attnbench.results.families import Family, Track, length
from attnbench.results.growth import stores_scores
from attnbench.results.ratios import RANK_LEVEL, SEED, LogRatio, Ratio, log_ratio, paired_ratio
from attnbench.results.records import exact, is_timed, label
from attnbench.results.sentences import format_ratio, too_wide
from attnbench.results.standings import Standing
from attnbench.results.tally import Tally
from attnbench.spec import Ok, Record

Names = Mapping[str, Sequence[Record]]
"""Name of the implementation -> its records along a track."""
NARROW = 2.0
"""Largest ratio of two measured lengths between which a crossover may be interpolated."""
FUSED, PLAIN = "fused attention (flash)", "plain attention"
NO_DIFFERENCE = "no certain difference"
MOST_SHAPES = 6
"""Most shapes that a sentence names; more are counted."""
MOST_PARTS = 3
"""Most parts of a track with a leader each: more changes of the lead are no rule to follow."""
CAPTURE = "capture a CUDA graph"
LAUNCH_ADVICE = {"jax": "put the whole step under one jax.jit, so that XLA can launch it as a CUDA graph"}
"""Framework -> what to do if calls are launch-bound; for any other it is `CAPTURE`."""


class Crossover(Struct, frozen=True, kw_only=True):
    """Lengths at which a and b change places."""

    kind: Literal["always", "never", "from", "until", "same", "mixed"]
    """Measured lengths at which a is faster than b: all that differ, none, those from a length on, those up to one, no
    difference anywhere, or to and fro."""
    length: float | None = None
    """Length at which both take as long, interpolated in logarithms, for `from` and `until`; `point` is the one to
    print."""
    interval: tuple[float, float] | None = None
    """Nearest measured lengths around the 95 % interval: between two measured lengths anything may happen."""
    lengths: tuple[int, ...]
    """Lengths at which both were timed."""
    ratios: tuple[Ratio, ...]
    """Time of b / time of a at each length."""
    signs: tuple[int, ...]
    """Sign at each length: +1 if a is significantly faster, -1 if b is, 0 if the ranking calls them tied."""

    @property
    def point(self) -> float | None:
        """Length of the crossover, if the measured lengths around it are near enough to interpolate."""
        if self.length is None or self.interval is None or self.interval[1] > NARROW * self.interval[0]:
            return None
        return self.length


def crossover(a_records: Sequence[Record], b_records: Sequence[Record]) -> Crossover | None:
    """Return where two implementations change places along one track; None if no length has both."""
    ours, theirs = ({length(r.workload): r for r in records if is_timed(r)} for records in (a_records, b_records))
    lengths = sorted(ours.keys() & theirs.keys())
    if not lengths:
        return None
    logs = [log_ratio(ours[n], theirs[n], SEED + index) for index, n in enumerate(lengths)]
    signs = tuple(paired_ratio(ours[n], theirs[n], RANK_LEVEL).sign for n in lengths)
    facts = {"lengths": tuple(lengths), "ratios": tuple(one.ratio() for one in logs), "signs": signs}
    certain = [index for index, one in enumerate(signs) if one]
    turns = [(i, j) for i, j in pairwise(certain) if signs[i] != signs[j]]
    if not certain:
        return Crossover(kind="same", **facts)
    if not turns:
        return Crossover(kind="always" if signs[certain[0]] > 0 else "never", **facts)
    if len(turns) > 1:
        return Crossover(kind="mixed", **facts)
    first, last = turns[0]
    where, interval = _place(lengths[first : last + 1], logs[first : last + 1], signs[last])
    return Crossover(kind="from" if signs[last] > 0 else "until", length=where, interval=interval, **facts)


def _place(lengths: Sequence[int], logs: Sequence[LogRatio], side: int) -> tuple[float, tuple[float, float]]:
    """Return where the ratio passes 1 between two lengths of opposite sign, and the measured lengths around it."""
    x = np.log(lengths)
    points = side * np.array([[one.point] for one in logs])
    draws = side * np.stack([one.draws for one in logs])
    where = float(np.exp(_last_zero(x, points)[0]))
    low, high = (float(np.exp(edge)) for edge in np.quantile(_last_zero(x, draws), [0.025, 0.975]))
    below = max(0, bisect_right(lengths, min(low, where)) - 1)
    above = min(len(lengths) - 1, bisect_left(lengths, max(high, where)))
    if below == above:
        below, above = max(0, below - 1), min(len(lengths) - 1, above + 1)
    return where, (float(lengths[below]), float(lengths[above]))


def _last_zero(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return per column where the line through the points last rises above 0; the first or last x if it never does."""
    rises = (values[:-1] <= 0) & (values[1:] > 0)
    index = len(rises) - 1 - np.argmax(rises[::-1], axis=0)
    columns = np.arange(values.shape[1])
    before, after = values[index, columns], values[index + 1, columns]
    share = np.where(after > before, -before / np.where(after > before, after - before, 1), 0.0)
    inside = x[index] + share * (x[index + 1] - x[index])
    return np.where(rises.any(axis=0), inside, np.where(values[0] > 0, x[0], x[-1]))


def _standings(names: Names, tally: Tally) -> dict[int, Standing]:
    """Return length -> standing of each length of a track that was timed, shortest first; `tally` is the family's."""
    places = {length(record.workload): record.workload.id for records in names.values() for record in exact(records)}
    return {n: tally.standings[places[n]] for n in sorted(places)}


def _in_order(standing: Standing) -> Iterator[Ok]:
    """Yield the ranked records in the order of kernels, of each kernel the plainest name first."""
    return (standing.ranked[row.implementation] for kernel in standing.kernels for row in kernel)


class LengthRange(Struct, frozen=True):
    """Neighbouring lengths that one implementation leads."""

    name: str
    lengths: tuple[int, ...]


def threshold_of(track: Track, names: Names, tally: Tally) -> Recommendation | None:
    """Return from which length to use which implementation; None if the lead never changes, or too often."""
    parts = _parts({n: set(standing.unbeaten) for n, standing in _standings(names, tally).items()})
    if not 2 <= len(parts) <= MOST_PARTS:
        return None
    text, figures = [f"use {parts[0].name} up to {parts[0].lengths[-1]:,} tokens"], []
    for below, above in pairwise(parts):
        figure = boundary(names, below, above)
        figures.append(figure)
        if figure.low is None or figure.high is None:
            start = f"{above.lengths[0]:,} (nothing was measured after {below.lengths[-1]:,})"
        elif figure.value == figure.high:
            start = f"somewhere between {figure.low:,.0f} and {figure.high:,.0f}"
        else:
            start = f"about {tokens(figure.value)} ({figure.low:,.0f}-{figure.high:,.0f})"
        text.append(f"{above.name} from {start}")
    waiting = ""
    for part in parts:
        led = (one for one in exact(names[part.name]) if length(one.workload) in part.lengths)
        limit = describe_host_limit(led)
        waiting += f"; {part.name} is {limit}" if limit else ""
    timed = [record.workload.id for records in names.values() for record in exact(records)]
    return advise_family("threshold", track.family, f", {track.title}: {', '.join(text)}{waiting}", timed, figures)


def _parts(leaders: Mapping[int, set[str]]) -> list[LengthRange]:
    """Return the fewest parts of a track, each of which one implementation leads from end to end, ties included."""
    parts: list[LengthRange] = []
    left = list(leaders)
    while left:
        reaches = {
            name: next((i for i, n in enumerate(left) if name not in leaders[n]), len(left))
            for name in sorted(leaders[left[0]])
        }
        name = max(reaches, key=lambda one: reaches[one])
        parts.append(LengthRange(name, tuple(left[: reaches[name]])))
        left = left[reaches[name] :]
    return parts


def boundary(names: Names, below: LengthRange, above: LengthRange) -> Figure:
    """Return the length at which the leaders of two parts take as long: between two measured lengths, or at the first
    length of the upper part."""
    name = f"{above.name} instead of {below.name} from"
    found = crossover(exact(names[above.name]), exact(names[below.name]))
    if found is None or found.kind != "from" or found.length is None or found.interval is None:
        return Figure(name=name, value=above.lengths[0], unit="tokens")
    low, high = found.interval
    return Figure(name=name, value=found.point or high, low=low, high=high, unit="tokens")


class ShapeGain(Struct, frozen=True):
    """A shape, and the time of the best plain implementation over that of the best fused one."""

    shape: str
    length: int
    gain: Ratio
    certain: bool
    """Whether one of the two is significantly faster."""
    fused: str
    plain: str


def flash_of(family: Family, tracks: Mapping[Track, Names], tally: Tally) -> Recommendation | None:
    """Return from which length fused attention pays, in one sentence for all batches of a family; None if fused and
    plain implementations were not both timed at two lengths."""
    turns: dict[Track, Crossover] = {}
    places: list[ShapeGain] = []
    for track, names in tracks.items():
        fused: dict[int, Ok] = {}  # the first of both sides at each length
        plain: dict[int, Ok] = {}
        for n, standing in _standings(names, tally).items():
            for record in _in_order(standing):
                (plain if stores_scores(record) else fused).setdefault(n, record)
        turn = crossover(list(fused.values()), list(plain.values()))
        if turn is None:
            continue
        turns[track] = turn
        start = f"{track.batch} x" if track.q_len is None else f"{track.batch} x {track.q_len} x"
        for n, ratio, side in zip(turn.lengths, turn.ratios, turn.signs):
            places.append(ShapeGain(f"{start} {n}", n, ratio, bool(side), label(fused[n]), label(plain[n])))
    if len({place.length for place in places}) < 2:
        return None
    kinds = {turn.kind for turn in turns.values()}
    if len(kinds) == 1 and kinds <= {"always", "never"}:
        text = _one_sided(places, "always" in kinds, len(turns) == 1)
    else:
        subjects = [FUSED, *["it"] * (len(turns) - 1)]
        sides = zip(turns.items(), subjects)
        text = "; ".join(f"with {track.title}, {who} {_pays(turn)}" for (track, turn), who in sides)
    figures = [ratio_figure(f"time of {at.plain} / {at.fused} at {at.shape}", at.gain) for at in places]
    for track, turn in turns.items():
        if turn.interval is not None:
            low, high = turn.interval
            name = f"{FUSED} as fast as {PLAIN}, {track.title}"
            figures.append(Figure(name=name, value=turn.point or high, low=low, high=high, unit="tokens"))
    timed = [one.workload.id for track in turns for records in tracks[track].values() for one in exact(records)]
    return advise_family("flash", family, f": {text}", timed, figures)


def _one_sided(places: Sequence[ShapeGain], fused_leads: bool, one_track: bool) -> str:
    """Return words for one side that leads wherever the two differ: where that is, the least and the most gain, and
    where not."""
    leader, other = (FUSED, PLAIN) if fused_leads else (PLAIN, FUSED)
    certain, close = ([at for at in places if at.certain is side] for side in (True, False))
    shortest, longest = (end(at.length for at in places) for end in (min, max))
    where = _named(certain, one_track) if close else f"every length measured, {shortest:,} to {longest:,} tokens"
    gains: list[tuple[float, str]] = []
    for at in certain:
        if not too_wide(at.gain):
            names = (at.fused, at.plain) if fused_leads else (at.plain, at.fused)
            ratio = at.gain if fused_leads else at.gain.inverse
            gains.append((ratio.value, f"{format_ratio(ratio)} as fast at {at.shape} ({' against '.join(names)})"))
    gains.sort(key=lambda gain: gain[0])
    ends = gains if len(gains) < 2 else [gains[0], gains[-1]]
    much = " to ".join(words for _, words in ends) or "how much faster cannot be told, times vary too much"
    text = f"use {leader} instead of {other} at {where}: {much}"
    return f"{text}; {NO_DIFFERENCE} at {_named(close, one_track)}" if close else text


def _named(places: Sequence[ShapeGain], one_track: bool) -> str:
    """Return places by their lengths, or of several batches by their shapes."""
    if one_track:
        return _tokens([at.length for at in places])
    return listed([at.shape for at in places]) if len(places) <= MOST_SHAPES else f"{len(places)} shapes"


def _pays(change: Crossover) -> str:
    """Return words for the lengths of one track at which fused attention pays."""
    if change.interval is not None:
        low, high = (f"{edge:,.0f}" for edge in change.interval)
        word = "pays from" if change.kind == "from" else "pays only up to"
        if change.point is None:
            return f"{word} somewhere between {low} and {high} tokens"
        return f"{word} about {tokens(change.point)} tokens ({low}-{high})"
    certain, close = (
        [n for n, one in zip(change.lengths, change.signs) if bool(one) is side] for side in (True, False)
    )
    if not certain:
        return f"makes {NO_DIFFERENCE} at {_tokens(close)}"
    words = {"always": "pays", "never": "does not pay"}
    text = f"{words.get(change.kind, 'pays now and then')} at {_tokens(certain)}"
    return f"{text}, {NO_DIFFERENCE} at {_tokens(close)}" if close else text


def _tokens(lengths: Sequence[int]) -> str:
    return f"{listed([f'{n:,}' for n in lengths])} tokens"


def launch_bound_of(family: Family, tracks: Mapping[Track, Names], tally: Tally) -> Recommendation | None:
    """Return up to which lengths the device waits for the host, in one sentence for all batches of a family; None if
    no record has both clocks, or no call waits."""
    parts, figures, timed = [], [], []
    for track, names in tracks.items():
        waits = list(_waits(_standings(names, tally)))
        bound = [wait for wait in waits if wait[2].bound]
        if not bound:
            continue
        longest, record, call = bound[-1]
        lengths = [f"{n:,}" for n, _, _ in bound]
        every_shorter = len(bound) > 1 and bound == waits[: len(bound)]
        reach = f"up to {lengths[-1]}" if every_shorter else f"at {listed(lengths)}"
        by = "" if call.clock == "wall" else f" by {call.clock}"
        times = f"{label(record)}: {_time(call.kernel_ns)} of kernels in {_time(call.call_ns)}{by}"
        beyond = next((f"; no longer at {n:,}" for n, _, _ in waits if n > longest), "")
        parts.append(f"{track.title} {reach} tokens ({times}{beyond})")
        for name, value in (("kernel", call.kernel_ns), (call.clock, call.call_ns)):
            figures.append(Figure(name=f"{name} time, {record.cell.id}", value=value, unit="ns"))
        timed += [one.workload.id for _, one, _ in waits]
    if not parts:
        return None
    advice = LAUNCH_ADVICE.get(family.framework, CAPTURE)
    return advise_family("launch-bound", family, f": launch-bound with {listed(parts)}: {advice}", timed, figures)


def _waits(standings: Mapping[int, Standing]) -> Iterator[tuple[int, Ok, CallTime]]:
    """Yield length by length the first implementation whose kernels and whole call were both timed on a device."""
    for n, standing in standings.items():
        for record in _in_order(standing):
            on_device = record.environment is not None and record.environment.device != "cpu"
            if on_device and (call := call_time(record)) is not None:
                yield n, record, call
                break


def _time(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms" if ns >= 1e6 else f"{ns / 1e3:.3g} us"
