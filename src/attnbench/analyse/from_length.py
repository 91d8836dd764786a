"""A track -> which implementation to use from which length on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from attnbench.analyse.advice import Figure, Recommendation, tokens
from attnbench.analyse.crossover import crossover
from attnbench.analyse.families import Track, length
from attnbench.measuring.rates import told_host_limit
from attnbench.results.records import exact
from attnbench.results.tally import Tally
from attnbench.spec import Record

MOST_PARTS = 3
"""More changes of the lead than two are no rule to follow."""


class Part(Struct, frozen=True):
    """Neighbouring lengths that one implementation leads."""

    name: str
    lengths: tuple[int, ...]


def threshold_of(track: Track, names: Mapping[str, Sequence[Record]], tally: Tally) -> Recommendation | None:
    """Where the lead changes along the length; None where it does not, or too often. `tally` is the family's."""
    leaders = _leaders(names, tally)
    parts = _parts(leaders)
    if not 2 <= len(parts) <= MOST_PARTS:
        return None
    waiting = [told for part in parts if (told := _host_words(part, names))]
    told, figures = [f"use {parts[0].name} up to {parts[0].lengths[-1]:,} tokens"], []
    for below, above in pairwise(parts):
        figure = boundary(names, below, above)
        figures.append(figure)
        told.append(_from(figure, below, above))
    family = track.family
    return Recommendation(
        kind="threshold",
        family=family.title,
        device=family.device,
        text=f"{family.title}, {track.title}: {', '.join(told)}{''.join(f'; {one}' for one in waiting)}.",
        workloads=tuple(dict.fromkeys(record.workload.id for one in names.values() for record in exact(one))),
        figures=tuple(figures),
    )


def _host_words(part: Part, names: Mapping[str, Sequence[Record]]) -> str:
    told = told_host_limit(one for one in exact(names[part.name]) if length(one.workload) in part.lengths)
    return f"{part.name} is {told}" if told else ""


def _leaders(names: Mapping[str, Sequence[Record]], tally: Tally) -> dict[int, set[str]]:
    """Length -> those that are unbeaten there."""
    places = {length(record.workload): record.workload.id for one in names.values() for record in exact(one)}
    return {n: set(tally.standings[places[n]].unbeaten) for n in sorted(places)}


def _parts(leaders: Mapping[int, set[str]]) -> list[Part]:
    """The fewest stretches, each led from end to end (ties included) by one implementation."""
    parts: list[Part] = []
    left = list(leaders)
    while left:
        reaches = {name: _reach(name, left, leaders) for name in sorted(leaders[left[0]])}
        name = max(reaches, key=lambda one: reaches[one])
        parts.append(Part(name, tuple(left[: reaches[name]])))
        left = left[reaches[name] :]
    return parts


def _reach(name: str, lengths: Sequence[int], leaders: Mapping[int, set[str]]) -> int:
    return next((i for i, n in enumerate(lengths) if name not in leaders[n]), len(lengths))


def boundary(names: Mapping[str, Sequence[Record]], below: Part, above: Part) -> Figure:
    """Where the two take as long: between two measured lengths, or at the first of the upper part."""
    name = f"{above.name} instead of {below.name} from"
    found = crossover(exact(names[above.name]), exact(names[below.name]))
    if found is None or found.kind != "from" or found.length is None or found.interval is None:
        return Figure(name=name, value=above.lengths[0], unit="tokens")
    low, high = found.interval
    return Figure(name=name, value=found.point or high, low=low, high=high, unit="tokens")


def _from(figure: Figure, below: Part, above: Part) -> str:
    if figure.low is None or figure.high is None:
        return f"{above.name} from {above.lengths[0]:,} (nothing was measured after {below.lengths[-1]:,})"
    if figure.value == figure.high:
        return f"{above.name} from somewhere between {figure.low:,.0f} and {figure.high:,.0f}"
    return f"{above.name} from about {tokens(figure.value)} ({figure.low:,.0f}-{figure.high:,.0f})"
