"""Along the length, where the choice changes: from how many tokens on, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from attnbench.analyse.families import Track, length, tracks
from attnbench.analyse.from_length import Part, boundary
from attnbench.analyse.survey import Ground
from attnbench.policy import Crossing, Place, shape_of


def crossings_of(place: Place, ground: Ground) -> tuple[Crossing, ...]:
    """Every change of the choice between neighbouring lengths of what is alike otherwise."""
    picks = {entry.at: entry.use.label for entry in place.entries}
    found: list[Crossing] = []
    lines = tracks(record for field in ground.fields.values() for record in field.values())
    for track, names in lines.items():
        workloads = {length(r.workload): r.workload for records in names.values() for r in records}
        chosen = [(n, picks[shape]) for n in sorted(workloads) if (shape := shape_of(workloads[n])) in picks]
        for below, above in pairwise(_parts(chosen)):
            figure = boundary(names, below, above)
            measured = below.lengths[-1], above.lengths[0]
            known = figure.low is not None and figure.high is not None
            found.append(
                Crossing(
                    track=_title(track),
                    pass_=next(iter(workloads.values())).pass_,
                    below=below.name,
                    above=above.name,
                    tokens=round(figure.value) if known and figure.value != figure.high else None,
                    low=figure.low if known and figure.low is not None else measured[0],
                    high=figure.high if known and figure.high is not None else measured[1],
                )
            )
    return tuple(sorted(found, key=lambda one: (one.track, one.low)))


def _parts(chosen: Sequence[tuple[int, str]]) -> list[Part]:
    return [Part(name, tuple(n for n, _ in group)) for name, group in groupby(chosen, key=lambda one: one[1])]


def _title(track: Track) -> str:
    return f"{track.family.title}, {track.title}"
