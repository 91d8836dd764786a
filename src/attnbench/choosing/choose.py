"""Records of one or several runs -> a policy: what to run for each shape, with its regret and the evidence.

The standings say who leads, which candidates are tied and which of several runs decides. This module adds constraints,
the pick among tied candidates (by a rule that noise does not move, so that reruns agree) and the regret of a choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from math import exp, log, log2

from msgspec import Struct, structs

from attnbench.choosing.candidates import NOT_ASKED_FOR, Ground, Refusal, check_names, survey
from attnbench.choosing.fitting import compile_s, prediction_of
from attnbench.measuring.rates import host_limit
from attnbench.policy import (
    REACH,
    Alternative,
    Choice,
    Constraints,
    Crossing,
    Entry,
    Place,
    Policy,
    Regret,
    Shape,
    coverings,
    pooled,
    shape_of,
)
from attnbench.results.by_length import LengthRange, boundary
from attnbench.results.ratios import RANK_LEVEL, TIE_LIMIT, Ratio, mean_log_ratio
from attnbench.results.records import label, share_of_allowed
from attnbench.results.run_file import NamedRun
from attnbench.results.standings import Setback, Standing
from attnbench.spec import Environment

SHOWN_REASONS = 3
UNSTABLE = "unstable samples"
"""Beginning of the note of a record whose samples vary too much."""


class Unchosen(Struct, frozen=True):
    """A workload without a choice, and why."""

    framework: str
    workload: str
    why: str


class Chosen(Struct, frozen=True):
    """A policy, what was measured for it, and the workloads that it does not cover."""

    policy: Policy
    unchosen: tuple[Unchosen, ...]
    grounds: tuple[Ground, ...]
    setbacks: tuple[Setback, ...] = ()
    """Candidates that are left out since a newer run found them incorrect, and those that a newer run could not run."""

    @property
    def placed(self) -> list[tuple[Place, Ground]]:
        """Each place of the policy, with its measurements."""
        places = {structs.replace(place, within=None).key: place for place in self.policy.places}
        return [(places[ground.place.key], ground) for ground in self.grounds if ground.place.key in places]

    @property
    def _measured(self) -> Iterator[tuple[Entry, list[Standing]]]:
        """Each entry of the policy, with the standings that it was chosen from."""
        for place, ground in self.placed:
            standings = ground.by_shape
            yield from ((entry, standings[entry.at]) for entry in place.entries)

    @property
    def unstable(self) -> int:
        """Number of choices whose samples, or those of the runner-up, are marked as unstable."""

        def is_unstable(entry: Entry, standings: Sequence[Standing]) -> bool:
            names = [one.label for one in (entry.use, entry.use.runner_up) if one is not None]
            records = (one.ranked[name] for one in standings for name in names)
            return any(note.startswith(UNSTABLE) for record in records for note in record.notes)

        return sum(is_unstable(*one) for one in self._measured)

    @property
    def host_limited(self) -> list[tuple[Entry, float]]:
        """Choices whose device waits for its host, each with time of the call / time of its kernels."""
        limits = [(entry, [host_limit(one.ranked[entry.use.label]) for one in ran]) for entry, ran in self._measured]
        return [(entry, max(filter(None, ratios))) for entry, ratios in limits if any(ratios)]


def choose(
    sources: Iterable[NamedRun],
    constraints: Constraints | None = None,
    left_out: Mapping[str, str] | None = None,
    known: Iterable[str] = (),
) -> Chosen:
    """Return the policy of some runs. `left_out`: implementations that are chosen only if `only` names them -> the
    reason. `known`: names that may be forbidden though no run holds them."""
    ordered = sorted(sources, key=lambda source: source.run.header.created)
    constraints = constraints or Constraints()
    check_names(constraints, (record for source in ordered for record in source.run.records), known)
    surveyed, refused, contradicted = survey(ordered, constraints, left_out or {})
    grounds = sorted(surveyed, key=lambda ground: repr(ground.place.key))
    places: list[Place] = []
    for ground in grounds:
        around = list(ground.standings.values())
        picked = {shape: pick(standings, around) for shape, standings in ground.by_shape.items()}
        entries = [Entry(at=shape, use=choice) for shape, choice in picked.items() if choice is not None]
        entries.sort(key=lambda entry: entry.at.order)
        place = structs.replace(ground.place, entries=tuple(entries), barred=ground.barred)
        if entries:
            facts = {"held_out": held_out_of(place, ground), "crossings": _crossings(place, ground)}
            facts |= {"prediction": prediction_of(place, ground)}
            places.append(structs.replace(place, within=constraints or None, **facts))
    policy = Policy() | Policy(places=tuple(places))
    return Chosen(policy, _unchosen(refused, grounds), tuple(grounds), tuple(contradicted))


def _crossings(place: Place, ground: Ground) -> tuple[Crossing, ...]:
    """Return every change of the choice between neighbouring lengths of otherwise equal workloads, with an interval."""
    picks = {entry.at: entry.use.label for entry in place.entries}
    found: list[Crossing] = []
    for track, names, workloads in ground.lines:
        chosen = [(n, picks[shape]) for n in sorted(workloads) if (shape := shape_of(workloads[n])) in picks]
        runs = groupby(chosen, key=lambda one: one[1])
        for below, above in pairwise(LengthRange(name, tuple(n for n, _ in group)) for name, group in runs):
            figure = boundary(names, below, above)
            low, high, tokens = below.lengths[-1], above.lengths[0], None
            if figure.low is not None and figure.high is not None:
                low, high = figure.low, figure.high
                tokens = round(figure.value) if figure.value != high else None
            found.append(
                Crossing(
                    track=f"{track.family.title}, {track.title}",
                    pass_=track.family.pass_,
                    below=below.name,
                    above=above.name,
                    tokens=tokens,
                    low=low,
                    high=high,
                )
            )
    return tuple(sorted(found, key=lambda one: (one.track, one.low)))


def _unchosen(refused: Sequence[Refusal], grounds: Sequence[Ground]) -> tuple[Unchosen, ...]:
    """Return the workloads without an eligible record, with the reasons, except those that --only leaves out."""
    covered = {(ground.place.framework, workload) for ground in grounds for workload in ground.standings}
    reasons: dict[tuple[str, str], dict[str, str]] = {}
    for record, why in refused:
        key = record.implementation.partition(".")[0], record.workload.id
        if key not in covered:
            reasons.setdefault(key, {})[label(record)] = why
    unchosen: list[Unchosen] = []
    for key, whys in reasons.items():
        common = [why for why, _ in Counter(whys.values()).most_common()]
        if common != [NOT_ASKED_FOR]:
            parts = [f"{', '.join(n for n in whys if whys[n] == why)}: {why}" for why in common[:SHOWN_REASONS]]
            parts += [f"{len(common) - SHOWN_REASONS} more reasons"] if len(common) > SHOWN_REASONS else []
            unchosen.append(Unchosen(*key, "; ".join(parts)))
    return tuple(unchosen)


COMFORTABLE = 0.5
"""Share of the allowed error below which all errors count as equal."""
MOST_ALTERNATIVES = 8


def pick(standings: Sequence[Standing], around: Sequence[Standing] = ()) -> Choice | None:
    """Return the choice for workloads that share one entry; None if no candidate was timed on all of them. `around`:
    all standings of the place, which decide between candidates that are tied here."""
    shared = ranked_on_all(standings)
    if not shared:
        return None
    fastest = fastest_of(shared, standings)
    tied = _tied(fastest, shared, standings)
    if len(wider := [one for one in around if all(name in one.ranked for name in tied)]) > 1:
        # A tie must hold on all of them, so that the choice does not depend on which candidates came near in this run.
        tied = _tied(fastest_of(tied, wider), tied, wider)
    name = min(tied, key=lambda name: (*_merit_key(name, tied, standings), name))
    others = {other: time_ratio(name, other, standings) for other in shared if other != name}
    order = sorted(others, key=lambda name: (others[name].value, name))
    record, ranked = standings[0].ranked[name], standings[0].ranked
    regret = max(1.0, time_ratio(fastest, name, standings).value)
    return Choice(
        implementation=record.implementation,
        config=dict(record.config),
        regret=round(regret, 4),
        regret_high=round(max([regret, *(1 / one.low for one in others.values())]), 4),
        candidates=len(shared),
        time_us=round(exp(sum(log(one.times[name]) for one in standings) / len(standings)) / 1e3, 3),
        compile_s=compile_s([one.ranked[name] for one in standings]),
        alternatives=tuple(
            Alternative(
                implementation=one.implementation,
                config=dict(one.config),
                ratio=round(others[other].value, 4),
                compile_s=compile_s([standing.ranked[other] for standing in standings]),
            )
            for other in order[:MOST_ALTERNATIVES]
            for one in (ranked[other],)
        ),
        measured=record.workload.id,
    )


def ranked_on_all(standings: Sequence[Standing]) -> list[str]:
    """Return the names that are ranked on every one of these workloads."""
    return sorted(set.intersection(*(set(standing.ranked) for standing in standings)))


def fastest_of(names: Sequence[str], standings: Sequence[Standing]) -> str:
    """Return the fastest name by paired rounds; on one workload the fastest that is unbeaten."""
    first = min(names, key=lambda name: sum(log(one.times[name]) for one in standings))
    led = [name for name in names if len(standings) > 1 or name in standings[0].unbeaten] or [first]
    return min(led, key=lambda name: (time_ratio(first, name, standings).value, name))


def time_ratio(a: str, b: str, standings: Sequence[Standing]) -> Ratio:
    """Return time of b / time of a, the geometric mean over the workloads, at the ranking's confidence."""
    if a == b:
        return Ratio(1, 1, 1)
    if len(standings) == 1:
        return standings[0].ratio(a, b)
    return mean_log_ratio([(one.ranked[a], one.ranked[b]) for one in standings]).ratio(RANK_LEVEL)


def _tied(fastest: str, names: Sequence[str], standings: Sequence[Standing]) -> list[str]:
    """Return the names that tie with the fastest: unbeaten (over several workloads: not significantly slower), and at
    most 5 % slower or the same kernel."""
    tied: list[str] = []
    for name in names:
        ratio = time_ratio(fastest, name, standings)
        unbeaten = ratio.sign <= 0 if len(standings) > 1 else name in standings[0].unbeaten
        near = ratio.value <= TIE_LIMIT or all(one.one_kernel(fastest, name) for one in standings)
        if name == fastest or (unbeaten and near):
            tied.append(name)
    return tied


def _merit_key(name: str, tied: Sequence[str], standings: Sequence[Standing]) -> tuple[bool, int, bool]:
    """Return the sort key of tied names, least first: whether the error is near the allowed one, memory (0 for the
    least known peak, peaks within 5 % of it and unknown ones; 1 more for each doubling), whether a config is needed."""
    octaves: dict[str, float] = {}
    for other in tied:
        peaks = [one.ranked[other].memory.peak_bytes for one in standings]
        known = [log2(max(peak, 1)) for peak in peaks if peak is not None]
        if len(known) == len(peaks):
            octaves[other] = sum(known) / len(known)
    more = octaves[name] - min(octaves.values()) if name in octaves else 0.0
    records = [one.ranked[name] for one in standings]
    inexact = any((share_of_allowed(record.errors) or 0.0) > COMFORTABLE for record in records)
    return inexact, 0 if more <= log2(TIE_LIMIT) else 1 + int(more), bool(records[0].config)


class Loss(Struct, frozen=True):
    """Regret of a policy or an implementation at one place; None if it is not known for any shape."""

    name: str
    regret: Regret | None


def policy_loss(policy: Policy, ground: Ground) -> Loss:
    """Return the loss of a policy on measured shapes; shapes without a choice that was timed count as `missed`."""
    here = environment_of(ground)
    return Loss(
        policy.name, _regret(ground, lambda _, ran: policy.choice(ran[0].workload, ground.place.framework, here))
    )


def fixed_losses(ground: Ground) -> list[Loss]:
    """Return the loss of each implementation used for all shapes, sorted by shapes missed, then by regret."""
    names = sorted({name for one in ground.standings.values() for name in one.ranked})
    found = [Loss(name, _regret(ground, lambda *_, one=name: Choice(implementation=one))) for name in names]
    return sorted(found, key=lambda one: (one.regret.missed, one.regret.mean) if one.regret else (10**9, 0.0))


def held_out_of(place: Place, ground: Ground) -> Regret | None:
    """Return the regret if each shape in turn is answered by its neighbours; None if no shape has a neighbour. Shapes
    without a neighbour are counted as missed."""

    def by_neighbours(shape: Shape, _: Sequence[Standing]) -> Choice | None:
        entries, barred = ([one for one in some if one.at != shape] for some in (place.entries, place.barred))
        others = structs.replace(place, entries=tuple(entries), barred=tuple(barred))
        found = (one.use for one in coverings([others], shape) if one.distance <= REACH)
        return next((use for use in found if use is not None), None)

    return _regret(ground, by_neighbours, {entry.at for entry in place.entries})


def environment_of(ground: Ground) -> Environment:
    """Return the environment in which the records of a place were made."""
    record = next(iter(next(iter(ground.standings.values())).ranked.values()))
    assert record.environment is not None
    return structs.replace(record.environment, framework=ground.place.framework)


def _regret(
    ground: Ground, choice: Callable[[Shape, Sequence[Standing]], Choice | None], shapes: set[Shape] | None = None
) -> Regret | None:
    """Return the pooled regret of `choice` over all shapes, or over those in `shapes`. At a shape it is time of the
    choice / time of the fastest; a shape is missed if neither the choice nor an alternative was timed there."""
    kept = {shape: ran for shape, ran in ground.by_shape.items() if shapes is None or shape in shapes}
    regrets: list[Regret] = []
    for shape, standings in kept.items():
        shared, chosen = ranked_on_all(standings), choice(shape, standings)
        wanted = [] if chosen is None else [chosen.label, *(one.label for one in chosen.alternatives)]
        if used := next((name for name in wanted if name in shared), None):
            loss = round(max(1.0, time_ratio(fastest_of(shared, standings), used, standings).value), 4)
            regrets.append(Regret(mean=loss, worst=loss, worst_at=shape.title, shapes=1))
    total, missed = pooled(regrets), len(kept) - len(regrets)
    return None if total is None else structs.replace(total, mean=round(total.mean, 4), missed=missed)
