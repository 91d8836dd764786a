"""What a policy, or one implementation for everything, loses on what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from attnbench.analyse.held_out import regret_at
from attnbench.analyse.settle import Field
from attnbench.analyse.survey import Ground
from attnbench.policy import Choice, Policy, Regret, pooled
from attnbench.spec import Environment


class Standing(Struct, frozen=True):
    """Somebody's regret at one place; None where nothing could be said of any shape."""

    name: str
    regret: Regret | None


def policy_standing(policy: Policy, ground: Ground) -> Standing:
    """Of a policy on shapes that it need not have seen; `missed` are those it has no choice for that ran."""

    def choice(fields: Sequence[Field]) -> Choice | None:
        workload = next(iter(fields[0].values())).workload
        return policy.choice(workload, ground.place.framework, environment_of(ground))

    return Standing(policy.name, _regret(ground, choice))


def fixed_standings(ground: Ground) -> list[Standing]:
    """Of each implementation taken for everything, those that run everywhere first, then the least regret."""
    names = sorted({name for field in ground.fields.values() for name in field})
    found = [Standing(name, _regret(ground, lambda _, one=name: Choice(implementation=one))) for name in names]
    return sorted(found, key=lambda one: (one.regret.missed, one.regret.mean) if one.regret else (10**9, 0.0))


def environment_of(ground: Ground) -> Environment:
    """Where its records were made."""
    record = next(iter(next(iter(ground.fields.values())).values()))
    assert record.environment is not None
    return structs.replace(record.environment, framework=ground.place.framework)


def _regret(ground: Ground, choice: Callable[[Sequence[Field]], Choice | None]) -> Regret | None:
    found: list[Regret] = []
    missed = 0
    for shape, fields in ground.by_shape.items():
        chosen = choice(fields)
        loss = None if chosen is None else regret_at(fields, chosen)
        if loss is None:
            missed += 1
        else:
            found.append(Regret(mean=loss, worst=loss, worst_at=shape.title, shapes=1))
    total = pooled(found)
    return None if total is None else structs.replace(total, mean=round(total.mean, 4), missed=missed)
