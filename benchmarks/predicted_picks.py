"""What predicted picks lose: `python benchmarks/predicted_picks.py --runs RUN... [--unseen RUN...] [-o FILE]`.

The runs of each `--runs` make a policy, as `attnbench choose` does; several may be given. The regret of predicted picks
is that of shapes left out of the fit (one by one, all of a class, of a head_dim, of a mask), beside the fixed order on
the same shapes and, for single shapes, the nearest of the other measured ones. `--unseen` runs judge the policies on
shapes that no policy was made from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from publishing import publish

from attnbench.choosing.candidates import Ground
from attnbench.choosing.choose import environment_of as environment_at
from attnbench.choosing.choose import policy_loss
from attnbench.choosing.fitting import MeasuredTime, first_of, predicted_pick, samples_of
from attnbench.cli.choose import choose_from, read_sources
from attnbench.dispatch.choice import order_on
from attnbench.frameworks import environment_of
from attnbench.policy import Constraints, Place, Policy, Regret, Shape, pooled

FORBIDDEN = ("torch.compiled",)
"""As in the packaged policies."""


def regret(
    samples: Sequence[MeasuredTime], pick: Callable[[Shape, dict[str, MeasuredTime]], str | None]
) -> Regret | None:
    """Of picks at the shapes where several were timed."""
    at: dict[Shape, dict[str, MeasuredTime]] = {}
    for one in samples:
        at.setdefault(one.shape, {})[one.label] = one
    found: list[Regret] = []
    missed = 0
    for shape, timed in at.items():
        if len(timed) < 2:
            continue
        name = pick(shape, timed)
        if name is None:
            missed += 1
            continue
        loss = timed[name].time_ns / min(one.time_ns for one in timed.values())
        found.append(Regret(mean=loss, worst=loss, worst_at=shape.title, shapes=1))
    total = pooled(found)
    return total and msgspec.structs.replace(
        total, mean=round(total.mean, 4), worst=round(total.worst, 4), missed=missed
    )


def of_place(place: Place) -> dict[str, Any]:
    prediction = place.prediction
    assert prediction is not None
    parts = {
        part: {
            "followed": check.passed,
            "predicted": msgspec.to_builtins(check.predicted),
            "fixed": msgspec.to_builtins(check.fixed),
        }
        for part, check in prediction.checks.items()
    }
    return {
        "framework": place.framework,
        "device": place.device_name,
        "shapes": len(place.entries),
        "models": len(prediction.models),
        "units": prediction.units,
        "nearest": msgspec.to_builtins(place.held_out),
        "left_out": parts,
    }


def unseen(policy: Policy, ground: Ground) -> dict[str, Any] | None:
    """Regret on a ground that no policy was made from; None where no place with a prediction holds."""
    there = environment_at(ground)
    place = next((one for one in policy.places if one.prediction and one.stale(there) is None), None)
    if place is None or place.prediction is None:
        return None
    models, units = place.prediction.models, place.prediction.units
    samples, order = samples_of(ground), order_on(place.framework, place.device)
    found = {
        "nearest": policy_loss(policy, ground).regret,
        "predicted": regret(samples, lambda shape, timed: predicted_pick(shape, timed, models, units)),
        "fixed": regret(samples, lambda _, timed: first_of(order, timed)),
    }
    return {"framework": place.framework, "device": place.device_name} | msgspec.to_builtins(found)


def here() -> dict[str, Any]:
    """Software that did the fitting; what was measured says its own."""
    made = environment_of("numpy", "cpu")
    return {"python": made.python, "packages": made.packages, "processor": made.processor, "commit": made.commit}


def chosen(runs: Sequence[str]) -> Any:
    return choose_from(read_sources(runs), Constraints(forbid=FORBIDDEN))


def lines(found: dict[str, Any]) -> list[str]:
    def told(one: dict[str, Any] | None) -> str:
        return "-" if one is None else f"{one['mean']:.3f} ({one['worst']:.2f}, {one['shapes']} shapes)"

    rows = []
    for one in found["places"]:
        for part, check in one["left_out"].items():
            near = told(one["nearest"]) if part == "shape" else "-"
            how = "followed" if check["followed"] else "not followed"
            rows.append(
                [one["framework"], f"left out: {part}", near, told(check["predicted"]), told(check["fixed"]), how]
            )
    for one in found["unseen"]:
        rows.append([one["framework"], "unseen", *(told(one[how]) for how in ("nearest", "predicted", "fixed")), ""])
    heading = ["framework", "shapes", "nearest entry", "predicted", "fixed order", ""]
    return ["  ".join(cell.ljust(26) for cell in row).rstrip() for row in (heading, *rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", action="append", required=True)
    parser.add_argument("--unseen", nargs="+", action="append", default=[])
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    policies = [chosen(runs).policy for runs in options.runs]
    grounds = [ground for runs in options.unseen for ground in chosen(runs).grounds]
    judged = [unseen(policy, ground) for ground in grounds for policy in policies]
    places = [place for policy in policies for place in policy.places if place.prediction is not None]
    found = {
        "environment": here(),
        "places": [of_place(place) for place in places],
        "unseen": [one for one in judged if one is not None],
    }
    print("\n".join(lines(found)))
    publish(found, options.out)


if __name__ == "__main__":
    main()
