"""Records -> what to do, in words, each sentence with the figures it rests on.

Nothing is said that the records do not carry: no wall time, no word about launches; one length, no word about growth.
What is approximate or wrong is never recommended.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.analyse.advice import Recommendation
from attnbench.analyse.families import Family, Tracks, tracks, tracks_of
from attnbench.analyse.fitting import fitting_of
from attnbench.analyse.flash import flash_of
from attnbench.analyse.from_length import threshold_of
from attnbench.analyse.fronts import front_of
from attnbench.analyse.launch_bound import launch_bound_of
from attnbench.analyse.overall import overall_of
from attnbench.analyse.together import across_frameworks, families_together, newest
from attnbench.analyse.winners import winner_of
from attnbench.spec import Record


def recommend(*runs: Sequence[Record], against: Sequence[str] = ()) -> list[Recommendation]:
    """The headline, winners, where flash pays and the lead changes, what is launch-bound, what stops fitting.

    Of several runs, the oldest first, only records of one are held against each other. `against` is what the headline
    compares with.
    """
    families = families_together(runs)
    fronts = {family: front_of(members) for family, members in families.items()}
    lines, every = tracks_of(families), tracks(newest(runs))
    within, waiting = _by_family(lines), _by_family(every)
    found = [
        *overall_of(fronts, against),
        *(winner_of(kind, front_of(members)) for kind, members in across_frameworks(runs).items()),
        *(winner_of(family, front) for family, front in fronts.items()),
        *(flash_of(family, members) for family, members in within.items()),
        *(threshold_of(track, names, fronts[track.family]) for track, names in lines.items()),
        *(launch_bound_of(family, members) for family, members in waiting.items()),
        *(fitting_of(track, names) for track, names in every.items()),
    ]
    return [one for one in found if one is not None]


def _by_family(lines: Tracks) -> dict[Family, Tracks]:
    found: dict[Family, Tracks] = {}
    for track, names in lines.items():
        found.setdefault(track.family, {})[track] = names
    return found
