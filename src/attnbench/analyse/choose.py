"""Records of one or several runs -> a policy: what to run where, with its regret and the evidence.

Implementations are held against each other within one run only. Of several runs of a workload the newest counts that
holds those that led in the one before it, or somebody who is clearly faster than they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from attnbench.analyse.candidates import NOT_ASKED_FOR, Refusal, check_names
from attnbench.analyse.crossings import crossings_of
from attnbench.analyse.held_out import held_out_of
from attnbench.analyse.ranking import label
from attnbench.analyse.settle import Field, settle
from attnbench.analyse.survey import Ground, Source, survey
from attnbench.measuring.host_limit import host_limit
from attnbench.policy import Choice, Constraints, Entry, Place, Policy

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
            _is_unstable(entry.use, fields[entry.at])
            for place, ground in self.placed
            for fields in [ground.by_shape]
            for entry in place.entries
        )

    @property
    def host_limited(self) -> list[tuple[Entry, float]]:
        """Choices whose device waits for its host, each with the time of its call / that of its kernels."""
        found: list[tuple[Entry, float]] = []
        for place, ground in self.placed:
            fields = ground.by_shape
            for entry in place.entries:
                ratios = [host_limit(field[entry.use.label]) for field in fields[entry.at]]
                if any(ratios):
                    found.append((entry, max(ratio for ratio in ratios if ratio is not None)))
        return found


def choose(
    sources: Iterable[Source],
    constraints: Constraints | None = None,
    left_out: Mapping[str, str] | None = None,
    known: Iterable[str] = (),
) -> Chosen:
    """The policy of some runs. `left_out`: implementations that are chosen only if `only` names them, with the why;
    `known`: names that may be forbidden though no run holds them."""
    ordered = sorted(sources, key=lambda source: source.created)
    constraints = constraints or Constraints()
    check_names(constraints, (record for source in ordered for record in source.records), known)
    grounds, refused = survey(ordered, constraints, left_out or {})
    grounds.sort(key=lambda ground: repr(ground.place.key))
    within = constraints or None
    places = [structs.replace(place, within=within) for place in map(_filled, grounds) if place.entries]
    return Chosen(Policy() | Policy(places=tuple(places)), _unchosen(refused, grounds), tuple(grounds))


def _filled(ground: Ground) -> Place:
    """The place with its entries, its crossings and what it loses off the grid."""
    around = list(ground.fields.values())
    chosen = {shape: settle(fields, around) for shape, fields in ground.by_shape.items()}
    entries = [Entry(at=shape, use=choice) for shape, choice in chosen.items() if choice is not None]
    entries.sort(key=lambda entry: entry.at.order)
    place = structs.replace(ground.place, entries=tuple(entries))
    return structs.replace(place, held_out=held_out_of(place, ground), crossings=crossings_of(place, ground))


def _is_unstable(choice: Choice, fields: Sequence[Field]) -> bool:
    held = [one.label for one in (choice, choice.runner_up) if one is not None]
    return any(note.startswith(UNSTABLE) for field in fields for name in held for note in field[name].notes)


def _unchosen(refused: Sequence[Refusal], grounds: Sequence[Ground]) -> tuple[Unchosen, ...]:
    """Workloads of which a framework has records, but none that may be chosen; not those nobody asked for."""
    covered = {(ground.place.framework, workload) for ground in grounds for workload in ground.fields}
    reasons: dict[tuple[str, str], dict[str, str]] = {}
    for one in refused:
        key = one.record.implementation.partition(".")[0], one.record.workload.id
        if key not in covered:
            reasons.setdefault(key, {})[label(one.record)] = one.why
    asked = {key: found for key, found in reasons.items() if set(found.values()) != {NOT_ASKED_FOR}}
    return tuple(Unchosen(*key, _common_reasons(found)) for key, found in asked.items())


def _common_reasons(reasons: Mapping[str, str]) -> str:
    """The commonest reasons, each with whom it concerns."""
    common = [why for why, _ in Counter(reasons.values()).most_common()]
    told = [f"{', '.join(name for name in reasons if reasons[name] == why)}: {why}" for why in common[:SHOWN_REASONS]]
    left = len(common) - len(told)
    return "; ".join(told) + (f"; {left} more reasons" if left > 0 else "")
