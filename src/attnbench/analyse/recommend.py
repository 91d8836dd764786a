"""Standings -> what to do, in words, each sentence with the figures it rests on.

Nothing is said that the records do not carry: no wall time, no word about launches; one length, no word about growth.
What is approximate or wrong is never recommended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from attnbench.analyse.advice import Recommendation
from attnbench.analyse.families import OVERALL, Family, Tracks, family_of, tracks, tracks_of
from attnbench.analyse.fitting import fitting_of
from attnbench.analyse.flash import flash_of
from attnbench.analyse.from_length import threshold_of
from attnbench.analyse.launch_bound import launch_bound_of
from attnbench.analyse.winners import overall_of, winner_of
from attnbench.results.records import device_of, framework_of
from attnbench.results.standings import Standing, Standings
from attnbench.results.tally import Tally
from attnbench.spec import Record


def recommend(*runs: Sequence[Record], against: Sequence[str] = ()) -> list[Recommendation]:
    """Return the advice that runs support, the oldest first, device by device; `against` is what the headline compares
    with."""
    devices = dict.fromkeys(device_of(record) for run in runs for record in run)
    return [
        one
        for device in devices
        for one in advise(Standings([[r for r in run if device_of(r) == device] for run in runs], against))
    ]


def advise(standings: Standings) -> list[Recommendation]:
    """Return the headline, the winner of each family of shapes, from which length flash pays and the lead changes, what
    is launch-bound and what stops fitting."""
    families = compared_families(standings)
    tallies = {family: Tally(members) for family, members in families.items()}
    lines = tracks_of({family: _compared(members) for family, members in families.items()})
    every, within = tracks(standings.records), _by_family(lines)
    found = [
        *overall_of(tallies, standings.against),
        *(winner_of(kind, tally) for kind, tally in _across_frameworks(standings).items()),
        *(winner_of(family, tally) for family, tally in tallies.items()),
        *(flash_of(family, members) for family, members in within.items()),
        *(threshold_of(track, names, tallies[track.family]) for track, names in lines.items()),
        *(launch_bound_of(family, members) for family, members in within.items()),
        *(fitting_of(track, names) for track, names in every.items()),
    ]
    return [one for one in found if one is not None]


def compared_families(standings: Standings) -> dict[Family, dict[str, Standing]]:
    """Return family -> workload id -> its standing, by the run that decides for the framework of the family."""
    found: dict[Family, dict[str, Standing]] = {}
    for key in standings.overall:
        for standing in (members[key] for members in standings.frameworks.values() if key in members):
            found.setdefault(family_of(standing.compared[0]), {})[key] = standing
    return found


def _across_frameworks(standings: Standings) -> dict[Family, Tally]:
    """Return kind of shapes -> its workloads on which one run decides for several frameworks."""
    found: dict[Family, dict[str, Standing]] = {}
    for key, standing in standings.overall.items():
        if len({framework_of(record) for record in standing.ranked.values()}) > 1:
            kind = structs.replace(family_of(standing.compared[0]), framework=OVERALL)
            found.setdefault(kind, {})[key] = standing
    return {kind: Tally(members) for kind, members in found.items()}


def _compared(members: Mapping[str, Standing]) -> list[Record]:
    return [record for standing in members.values() for record in standing.compared]


def _by_family(lines: Tracks) -> dict[Family, Tracks]:
    found: dict[Family, Tracks] = {}
    for track, names in lines.items():
        found.setdefault(track.family, {})[track] = names
    return found
