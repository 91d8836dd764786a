"""A family -> from which length fused attention (flash) pays, against the best of those that store the scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from attnbench.analyse.advice import Figure, Recommendation, listed, ratio_figure, tokens
from attnbench.analyse.crossover import Crossover, crossover
from attnbench.analyse.families import Family, Track, length
from attnbench.analyse.wording import format_ratio, hopeless
from attnbench.results.ratios import Ratio
from attnbench.results.records import exact, label
from attnbench.spec import Ok, Record
from attnbench.workloads.cost import demand

FUSED, PLAIN = "fused attention (flash)", "plain attention"
NO_DIFFERENCE = "no certain difference"
MOST_SHAPES = 6
"""More of them are counted instead of named."""


class Place(Struct, frozen=True):
    """A shape, and the time of the best plain implementation over that of the best fused one."""

    shape: str
    length: int
    gain: Ratio
    certain: bool
    """Whether one of the two is faster for certain."""
    fused: str
    plain: str


class Turn(Struct, frozen=True):
    """The fastest of both sides at each length of a track, and where they change places."""

    fused: dict[int, Ok]
    plain: dict[int, Ok]
    crossover: Crossover


def flash_of(family: Family, tracks: Mapping[Track, Mapping[str, Sequence[Record]]]) -> Recommendation | None:
    """One sentence for all batches of a family; None where fused and plain ones were not both timed at two lengths."""
    turns = {track: turn for track, names in tracks.items() if (turn := _turn(names)) is not None}
    places = [
        Place(_shape(track, n), n, ratio, bool(side), label(turn.fused[n]), label(turn.plain[n]))
        for track, turn in turns.items()
        for n, ratio, side in zip(turn.crossover.lengths, turn.crossover.ratios, turn.crossover.signs)
    ]
    if len({place.length for place in places}) < 2:
        return None
    kinds = {turn.crossover.kind for turn in turns.values()}
    one_sided = len(kinds) == 1 and kinds <= {"always", "never"}
    told = _one_sided(places, "always" in kinds, len(turns) == 1) if one_sided else _here_and_there(turns)
    figures = [ratio_figure(f"time of {at.plain} / {at.fused} at {at.shape}", at.gain) for at in places]
    figures += _lengths(turns)
    timed = [record for track in turns for records in tracks[track].values() for record in exact(records)]
    return Recommendation(
        kind="flash",
        family=family.title,
        device=family.device,
        text=f"{family.title}: {told}.",
        workloads=tuple(dict.fromkeys(record.workload.id for record in timed)),
        figures=tuple(figures),
    )


def stores_scores(record: Ok) -> bool:
    """Whether theory counts the scores among what this implementation keeps in memory."""
    return record.memory.theory_bytes > demand(record.workload).output_bytes


def _turn(names: Mapping[str, Sequence[Record]]) -> Turn | None:
    timed = [record for records in names.values() for record in exact(records)]
    plain = _fastest(record for record in timed if stores_scores(record))
    fused = _fastest(record for record in timed if not stores_scores(record))
    found = crossover(list(fused.values()), list(plain.values()))
    return None if found is None else Turn(fused, plain, found)


def _fastest(records: Iterable[Ok]) -> dict[int, Ok]:
    """Length -> the fastest."""
    best: dict[int, Ok] = {}
    for record in records:
        known = best.setdefault(length(record.workload), record)
        if record.time and known.time and record.time.median_ns < known.time.median_ns:
            best[length(record.workload)] = record
    return best


def _shape(track: Track, n: int) -> str:
    return f"{track.batch} x {n}" if track.q_len is None else f"{track.batch} x {track.q_len} x {n}"


def _one_sided(places: Sequence[Place], fused_leads: bool, one_track: bool) -> str:
    """One side leads wherever the two differ for certain: where that is, by how much least and most, and where not."""
    leader, other = (FUSED, PLAIN) if fused_leads else (PLAIN, FUSED)
    certain, close = ([at for at in places if at.certain is side] for side in (True, False))
    shortest, longest = (end(at.length for at in places) for end in (min, max))
    where = _named(certain, one_track) if close else f"every length measured, {shortest:,} to {longest:,} tokens"
    told = f"use {leader} instead of {other} at {where}: {_gains(certain, fused_leads)}"
    return f"{told}; {NO_DIFFERENCE} at {_named(close, one_track)}" if close else told


def _named(places: Sequence[Place], one_track: bool) -> str:
    """By their lengths, or of several batches by their shapes."""
    if one_track:
        return _tokens([at.length for at in places])
    return listed([at.shape for at in places]) if len(places) <= MOST_SHAPES else f"{len(places)} shapes"


def _gains(certain: Sequence[Place], fused_leads: bool) -> str:
    """Least and most, of those that have a figure."""
    known = [at for at in certain if not hopeless(at.gain)]
    if not known:
        return "how much faster cannot be told, times vary too much"
    ordered = sorted(known, key=lambda at: at.gain.value if fused_leads else 1 / at.gain.value)
    ends = [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered
    return " to ".join(_gain(at, fused_leads) for at in ends)


def _gain(at: Place, fused_leads: bool) -> str:
    names = (at.fused, at.plain) if fused_leads else (at.plain, at.fused)
    ratio = at.gain if fused_leads else at.gain.inverse
    return f"{format_ratio(ratio)} as fast at {at.shape} ({' against '.join(names)})"


def _here_and_there(turns: Mapping[Track, Turn]) -> str:
    subjects = [FUSED, *["it"] * (len(turns) - 1)]
    told = zip(turns.items(), subjects)
    return "; ".join(f"with {track.title}, {who} {_where(turn.crossover)}" for (track, turn), who in told)


def _lengths(turns: Mapping[Track, Turn]) -> list[Figure]:
    return [
        Figure(
            name=f"{FUSED} as fast as {PLAIN}, {track.title}",
            value=turn.crossover.point or high,
            low=low,
            high=high,
            unit="tokens",
        )
        for track, turn in turns.items()
        if turn.crossover.interval is not None
        for low, high in [turn.crossover.interval]
    ]


def _where(found: Crossover) -> str:
    if found.interval is not None:
        low, high = (f"{edge:,.0f}" for edge in found.interval)
        word = "pays from" if found.kind == "from" else "pays only up to"
        if found.point is None:
            return f"{word} somewhere between {low} and {high} tokens"
        return f"{word} about {tokens(found.point)} tokens ({low}-{high})"
    certain, close = ([n for n, one in zip(found.lengths, found.signs) if bool(one) is side] for side in (True, False))
    if not certain:
        return f"makes {NO_DIFFERENCE} at {_tokens(close)}"
    words = {"always": "pays", "never": "does not pay"}
    told = f"{words.get(found.kind, 'pays now and then')} at {_tokens(certain)}"
    return f"{told}, {NO_DIFFERENCE} at {_tokens(close)}" if close else told


def _tokens(lengths: Sequence[int]) -> str:
    return f"{listed([f'{n:,}' for n in lengths])} tokens"
