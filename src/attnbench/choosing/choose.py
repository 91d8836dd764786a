"""Records of one or several runs -> a policy: what to run where, with its regret and the evidence.

Who leads, what is tied and which of several runs decides are read from the standings; constraints, the pick among
equals and the regret are added here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

from msgspec import Struct, structs

from attnbench.choosing.candidates import NOT_ASKED_FOR, Ground, Refusal, Source, check_names, survey
from attnbench.choosing.pick import pick
from attnbench.choosing.regret import held_out_of
from attnbench.measuring.host_limit import host_limit
from attnbench.policy import Choice, Constraints, Crossing, Entry, Place, Policy, shape_of
from attnbench.results.by_length import Part, boundary
from attnbench.results.families import length, tracks
from attnbench.results.records import label
from attnbench.results.standings import Standing

SHOWN_REASONS = 3
UNSTABLE = "unstable samples"
"""How the note begins of a record whose samples vary too much."""


class Unchosen(Struct, frozen=True):
    """A workload that nothing was chosen for."""

    framework: str
    workload: str
    why: str


class Chosen(Struct, frozen=True):
    """A policy, and what it is silent about."""

    policy: Policy
    unchosen: tuple[Unchosen, ...]
    grounds: tuple[Ground, ...]

    @property
    def placed(self) -> list[tuple[Place, Ground]]:
        """Each place that something was chosen for, with what was measured there."""
        places = {structs.replace(place, within=None).key: place for place in self.policy.places}
        return [(places[ground.place.key], ground) for ground in self.grounds if ground.place.key in places]

    @property
    def unstable(self) -> int:
        """Choices whose samples, or those of the next best, are marked as unstable."""
        return sum(
            _is_unstable(entry.use, standings[entry.at])
            for place, ground in self.placed
            for standings in [ground.by_shape]
            for entry in place.entries
        )

    @property
    def host_limited(self) -> list[tuple[Entry, float]]:
        """Choices whose device waits for its host, each with the time of its call / that of its kernels."""
        found: list[tuple[Entry, float]] = []
        for place, ground in self.placed:
            standings = ground.by_shape
            for entry in place.entries:
                ratios = [host_limit(one.ranked[entry.use.label]) for one in standings[entry.at]]
                if any(ratios):
                    found.append((entry, max(ratio for ratio in ratios if ratio is not None)))
        return found


def choose(
    sources: Iterable[Source],
    constraints: Constraints | None = None,
    left_out: Mapping[str, str] | None = None,
    known: Iterable[str] = (),
) -> Chosen:
    """Return the policy of some runs. `left_out` are implementations that are chosen only if `only` names them, with
    the reason; `known` are names that may be forbidden though no run holds them."""
    ordered = sorted(sources, key=lambda source: source.created)
    constraints = constraints or Constraints()
    check_names(constraints, (record for source in ordered for record in source.records), known)
    grounds, refused = survey(ordered, constraints, left_out or {})
    grounds.sort(key=lambda ground: repr(ground.place.key))
    within = constraints or None
    places = [structs.replace(place, within=within) for place in map(_filled, grounds) if place.entries]
    return Chosen(Policy() | Policy(places=tuple(places)), _unchosen(refused, grounds), tuple(grounds))


def _filled(ground: Ground) -> Place:
    """Return the place with its entries, its crossings and what it loses off the grid."""
    around = list(ground.standings.values())
    chosen = {shape: pick(standings, around) for shape, standings in ground.by_shape.items()}
    entries = [Entry(at=shape, use=choice) for shape, choice in chosen.items() if choice is not None]
    entries.sort(key=lambda entry: entry.at.order)
    place = structs.replace(ground.place, entries=tuple(entries))
    return structs.replace(place, held_out=held_out_of(place, ground), crossings=_crossings(place, ground))


def _crossings(place: Place, ground: Ground) -> tuple[Crossing, ...]:
    """Return every change of the choice between neighbouring lengths of what is alike otherwise, with an interval."""
    picks = {entry.at: entry.use.label for entry in place.entries}
    found: list[Crossing] = []
    lines = tracks(record for one in ground.standings.values() for record in one.ranked.values())
    for track, names in lines.items():
        workloads = {length(r.workload): r.workload for records in names.values() for r in records}
        chosen = [(n, picks[shape]) for n in sorted(workloads) if (shape := shape_of(workloads[n])) in picks]
        parts = [Part(name, tuple(n for n, _ in group)) for name, group in groupby(chosen, key=lambda one: one[1])]
        for below, above in pairwise(parts):
            figure = boundary(names, below, above)
            measured = below.lengths[-1], above.lengths[0]
            known = figure.low is not None and figure.high is not None
            found.append(
                Crossing(
                    track=f"{track.family.title}, {track.title}",
                    pass_=next(iter(workloads.values())).pass_,
                    below=below.name,
                    above=above.name,
                    tokens=round(figure.value) if known and figure.value != figure.high else None,
                    low=figure.low if known and figure.low is not None else measured[0],
                    high=figure.high if known and figure.high is not None else measured[1],
                )
            )
    return tuple(sorted(found, key=lambda one: (one.track, one.low)))


def _is_unstable(choice: Choice, standings: Sequence[Standing]) -> bool:
    held = [one.label for one in (choice, choice.runner_up) if one is not None]
    return any(note.startswith(UNSTABLE) for one in standings for name in held for note in one.ranked[name].notes)


def _unchosen(refused: Sequence[Refusal], grounds: Sequence[Ground]) -> tuple[Unchosen, ...]:
    """Return the workloads of which a framework has records, none of which may be chosen, unless nobody asked."""
    covered = {(ground.place.framework, workload) for ground in grounds for workload in ground.standings}
    reasons: dict[tuple[str, str], dict[str, str]] = {}
    for one in refused:
        key = one.record.implementation.partition(".")[0], one.record.workload.id
        if key not in covered:
            reasons.setdefault(key, {})[label(one.record)] = one.why
    asked = {key: found for key, found in reasons.items() if set(found.values()) != {NOT_ASKED_FOR}}
    return tuple(Unchosen(*key, _common_reasons(found)) for key, found in asked.items())


def _common_reasons(reasons: Mapping[str, str]) -> str:
    """Return the commonest reasons, each with the names it concerns."""
    common = [why for why, _ in Counter(reasons.values()).most_common()]
    told = [f"{', '.join(name for name in reasons if reasons[name] == why)}: {why}" for why in common[:SHOWN_REASONS]]
    left = len(common) - len(told)
    return "; ".join(told) + (f"; {left} more reasons" if left > 0 else "")
