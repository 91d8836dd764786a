"""What a policy loses between the measured shapes: each shape in turn is chosen for by its neighbours alone."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from attnbench.analyse.settle import Field, fastest_of, time_ratio
from attnbench.analyse.survey import Ground
from attnbench.policy import REACH, Choice, Place, Regret, pooled


def held_out_of(place: Place, ground: Ground) -> Regret | None:
    """Leave one shape out at a time; None where no shape has a neighbour. Shapes without one are counted as missed."""
    found: list[Regret] = []
    missed = 0
    fields = ground.by_shape
    for entry in place.entries:
        others = tuple(one for one in place.entries if one.at != entry.at)
        near = structs.replace(place, entries=others).nearest(entry.at)
        loss = None if near is None or near[0] > REACH else regret_at(fields[entry.at], near[1].use)
        if loss is None:
            missed += 1
        else:
            found.append(Regret(mean=loss, worst=loss, worst_at=entry.at.title, shapes=1))
    total = pooled(found)
    return None if total is None else structs.replace(total, mean=round(total.mean, 4), missed=missed)


def regret_at(fields: Sequence[Field], choice: Choice) -> float | None:
    """Time of what a choice leads to over the fastest there: the pick, or the first of its alternatives that ran."""
    shared = sorted(set.intersection(*(set(field) for field in fields)))
    wanted = [choice.label, *(one.label for one in choice.alternatives)]
    used = next((name for name in wanted if name in shared), None)
    if used is None:
        return None
    return round(max(1.0, time_ratio(fastest_of(shared, fields), used, fields).value), 4)
