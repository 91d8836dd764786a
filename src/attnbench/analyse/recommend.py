"""Records -> what to do, in words, each sentence with the figures it rests on.

Nothing is said that the records do not carry: no wall time, no word about launches; one length, no word about growth.
What is approximate or wrong is never recommended.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.analyse.advice import Recommendation
from attnbench.analyse.families import Family, Tracks, by_family, tracks_of
from attnbench.analyse.fitting import fitting_of
from attnbench.analyse.flash import flash_of
from attnbench.analyse.from_length import threshold_of
from attnbench.analyse.fronts import front_of
from attnbench.analyse.launch_bound import launch_bound_of
from attnbench.analyse.winners import winner_of
from attnbench.spec import Record


def recommend(records: Sequence[Record]) -> list[Recommendation]:
    """Winners first, then where flash pays and the lead changes, then what is launch-bound, then what stops fitting."""
    families = by_family(records)
    fronts = {family: front_of(members) for family, members in families.items()}
    lines = tracks_of(families)
    within: dict[Family, Tracks] = {}
    for track, names in lines.items():
        within.setdefault(track.family, {})[track] = names
    found = [
        *(winner_of(family, front) for family, front in fronts.items()),
        *(flash_of(family, members) for family, members in within.items()),
        *(threshold_of(track, names, fronts[track.family]) for track, names in lines.items()),
        *(launch_bound_of(family, members) for family, members in within.items()),
        *(fitting_of(track, names) for track, names in lines.items()),
    ]
    return [one for one in found if one is not None]
