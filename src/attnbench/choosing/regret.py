"""What a choice loses on measured shapes: a policy, one implementation for everything, or a shape's neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from attnbench.choosing.candidates import Ground
from attnbench.choosing.pick import fastest_of, ranked_on_all, time_ratio
from attnbench.policy import REACH, Choice, Place, Policy, Regret, Shape, pooled
from attnbench.results.standings import Standing
from attnbench.spec import Environment


class Loss(Struct, frozen=True):
    """Regret of a policy or an implementation at one place; None if nothing can be said of any shape."""

    name: str
    regret: Regret | None


def policy_loss(policy: Policy, ground: Ground) -> Loss:
    """Return the loss of a policy on shapes that it need not have seen; `missed` are those it has no choice for that
    ran."""
    here = environment_of(ground)
    return Loss(
        policy.name, _regret(ground, lambda _, ran: policy.choice(ran[0].workload, ground.place.framework, here))
    )


def fixed_losses(ground: Ground) -> list[Loss]:
    """Return the loss of each implementation taken for everything, those that run everywhere first, then the least."""
    names = sorted({name for one in ground.standings.values() for name in one.ranked})
    found = [Loss(name, _regret(ground, lambda *_, one=name: Choice(implementation=one))) for name in names]
    return sorted(found, key=lambda one: (one.regret.missed, one.regret.mean) if one.regret else (10**9, 0.0))


def held_out_of(place: Place, ground: Ground) -> Regret | None:
    """Return the regret if each shape in turn is chosen for by its neighbours alone; None if no shape has a neighbour.
    Shapes without one are counted as missed."""

    def by_neighbours(shape: Shape, _: Sequence[Standing]) -> Choice | None:
        others = tuple(one for one in place.entries if one.at != shape)
        near = structs.replace(place, entries=others).nearest(shape)
        return None if near is None or near[0] > REACH else near[1].use

    return _regret(ground, by_neighbours, {entry.at for entry in place.entries})


def environment_of(ground: Ground) -> Environment:
    """Return the environment that the records of a place were made in."""
    record = next(iter(next(iter(ground.standings.values())).ranked.values()))
    assert record.environment is not None
    return structs.replace(record.environment, framework=ground.place.framework)


def _regret(
    ground: Ground, choice: Callable[[Shape, Sequence[Standing]], Choice | None], shapes: set[Shape] | None = None
) -> Regret | None:
    """Return the pooled regret of a choice for each shape, or each of `shapes`."""
    kept = {shape: ran for shape, ran in ground.by_shape.items() if shapes is None or shape in shapes}
    losses = {shape: _loss_at(ran, choice(shape, ran)) for shape, ran in kept.items()}
    known = {shape: loss for shape, loss in losses.items() if loss is not None}
    total = pooled(Regret(mean=loss, worst=loss, worst_at=at.title, shapes=1) for at, loss in known.items())
    missed = len(losses) - len(known)
    return None if total is None else structs.replace(total, mean=round(total.mean, 4), missed=missed)


def _loss_at(standings: Sequence[Standing], choice: Choice | None) -> float | None:
    """Return time of what a choice leads to / time of the fastest: the pick, or the first of its alternatives that ran;
    None if none of them did."""
    shared = ranked_on_all(standings)
    wanted = [] if choice is None else [choice.label, *(one.label for one in choice.alternatives)]
    used = next((name for name in wanted if name in shared), None)
    if used is None:
        return None
    return round(max(1.0, time_ratio(fastest_of(shared, standings), used, standings).value), 4)
