"""Fitting of the models by which a policy predicts times where no measured shape is near, and what such picks lose.

Times are fitted by relative error, with rates of 0 or more. The factor of a class (mask, soft cap, head_dim) is drawn
towards 1 by what few shapes say, so that a class measured once does not move a model much. Regret is that of picks for
shapes that were left out of the fit: one at a time, then all of a class, of a mask and of a head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from math import exp, log
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import structs

from attnbench import registry
from attnbench.choosing.candidates import Ground
from attnbench.dispatch.choice import for_mask, order_on, plan_may_vary
from attnbench.errors import AttnBenchError
from attnbench.policy import HeldOutCheck, Place, Prediction, Regret, Shape, TimeModel, pooled
from attnbench.policy.prediction import COSTS, LEFT_OUT, classes, costs, sizes
from attnbench.spec import Config, Environment, Ok, Workload

T = TypeVar("T")
K = TypeVar("K")
DIGITS = 4
PRIOR = 0.03
"""Weight of a typical implementation of the place beside the measured shapes of one, in numbers of shapes."""
FEWEST = 8
"""Fewest measured shapes of a place for which models are fitted."""
FEW = 1.0
"""Number of shapes whose weight draws the factor of a class towards 1."""
MOST_STEPS = 50
UNITS = tuple(2**n for n in range(9))
"""Numbers of units of a device that are tried, 1 to 256."""


class MeasuredTime(NamedTuple):
    """Measured time of an implementation at a shape."""

    record: Ok
    shape: Shape
    computes_hidden: bool
    time_ns: float
    label: str


def computes_hidden(name: str, config: Config, workload: Workload, environment: Environment) -> bool:
    """Return what an implementation says of hidden pairs; False of one that is not registered here."""
    try:
        return registry.configured(name, config).computes_hidden(workload, environment)
    except AttnBenchError:
        return False


def samples_of(ground: Ground) -> list[MeasuredTime]:
    """Return the times of all candidates of a place, one for each shape."""
    found: list[MeasuredTime] = []
    for shape, standings in ground.by_shape.items():
        for label in sorted(set.intersection(*(set(one.ranked) for one in standings))):
            record = standings[0].ranked[label]
            assert record.environment is not None
            hidden = computes_hidden(record.implementation, record.config, record.workload, record.environment)
            time_ns = exp(sum(log(one.times[label]) for one in standings) / len(standings))
            found.append(MeasuredTime(record, shape, hidden, time_ns, label))
    return found


def prediction_of(place: Place, ground: Ground) -> Prediction | None:
    """Return the models of a place with their checks; None if fewer than FEWEST shapes were measured, or if nothing can
    be checked."""
    samples = samples_of(ground)
    if len({one.shape for one in samples}) < FEWEST:
        return None
    units = place.threads or fitted_units(samples)
    order = order_on(place.framework, place.device)
    checks = {part: check_of(samples, PARTS[part], units, order) for part in LEFT_OUT}
    kept = {part: check for part, check in checks.items() if check is not None}
    return Prediction(units=units, models=fitted(samples, units), checks=kept) if kept else None


PARTS: dict[str, Callable[[Shape], Hashable]] = {
    "shape": lambda shape: shape,
    "class": lambda shape: tuple(shape.hard.items()),
    "head_dim": lambda shape: shape.head_dim,
    "mask": lambda shape: shape.mask,
}
"""Part that is left out -> a function of a shape: all shapes with the same value are left out with it."""


def check_of(
    samples: Sequence[MeasuredTime], part: Callable[[Shape], Hashable], units: int, order: tuple[str, ...]
) -> HeldOutCheck | None:
    """Return the regret of predictions for shapes that were left out of the fit with all of their part, and that of
    the fixed order; None if no shape is known by both."""
    at: dict[Shape, dict[str, MeasuredTime]] = {}
    for one in samples:
        at.setdefault(one.shape, {})[one.label] = one
    predicted: list[Regret] = []
    fixed: list[Regret] = []
    for key, shapes in grouped(at, part).items():
        wanted = {(label, shape.pass_) for shape in shapes for label in at[shape]}
        models = fitted([one for one in samples if part(one.shape) != key], units, wanted)
        for shape in shapes:
            timed = at[shape]
            picks = predicted_pick(shape, timed, models, units), first_of(order, timed)
            if len(timed) > 1 and None not in picks:
                fastest = min(one.time_ns for one in timed.values())
                for found, pick in zip((predicted, fixed), picks, strict=True):
                    loss = round(timed[str(pick)].time_ns / fastest, DIGITS)
                    found.append(Regret(mean=loss, worst=loss, worst_at=shape.title, shapes=1))
    both = pooled(predicted), pooled(fixed)
    missed = sum(len(timed) > 1 for timed in at.values()) - len(predicted)
    first, second = (one and structs.replace(one, mean=round(one.mean, DIGITS), missed=missed) for one in both)
    return None if first is None or second is None else HeldOutCheck(predicted=first, fixed=second)


def predicted_pick(
    shape: Shape, timed: Mapping[str, MeasuredTime], models: Iterable[TimeModel], units: int
) -> str | None:
    """Return the label that models predict to be fastest of those that were timed at a shape; None without one."""
    times = {
        one.label: one.time_ns(shape, timed[one.label].computes_hidden, units)
        for one in models
        if one.label in timed and one.covers(shape)
    }
    return min(times, key=lambda label: (times[label], label), default=None)


def first_of(order: tuple[str, ...], timed: Mapping[str, MeasuredTime]) -> str | None:
    """Return the first of a fixed order that was timed at a shape; torch's own pick (torch.sdpa) stands for a backend
    that was not. None without one."""
    record = next(iter(timed.values())).record
    workload, environment = record.workload, record.environment
    assert environment is not None

    def hidden(name: str) -> bool:
        return computes_hidden(name, {}, workload, environment)

    names = for_mask(order, workload, plan_may_vary(workload), hidden)
    return next((label for name in names for label in (name, *OWN_PICK.get(name, ())) if label in timed), None)


OWN_PICK = {"torch.sdpa-cudnn": ("torch.sdpa",)}
"""Backend -> the implementation that takes it where it can, which newer runs measure in its place."""


def fitted_units(samples: Sequence[MeasuredTime]) -> int:
    """Return the number of units with which models fit best."""

    def misfit(units: int) -> float:
        known = {(model.label, model.pass_): model for model in fitted(samples, units)}
        models = (known[one.label, one.shape.pass_] for one in samples)
        times = (model.time_ns(one.shape, one.computes_hidden, units) for model, one in zip(models, samples))
        return sum(log(time / one.time_ns) ** 2 for time, one in zip(times, samples))

    return min(UNITS, key=lambda units: (misfit(units), units))


def fitted(
    samples: Sequence[MeasuredTime], units: int, wanted: Container[tuple[str, str]] | None = None
) -> tuple[TimeModel, ...]:
    """Return a model of each implementation in each pass that was measured, or only of the labels and passes wanted."""
    models: list[TimeModel] = []
    for pass_, of_pass in grouped(samples, lambda one: one.shape.pass_).items():
        typical = _rates(*_scaled(of_pass, units))
        for label, some in sorted(grouped(of_pass, lambda one: one.label).items()):
            if wanted is None or (label, pass_) in wanted:
                models.append(_model(some, units, typical))
    return tuple(models)


def grouped(members: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return members by key, in their order."""
    found: dict[K, list[T]] = {}
    for one in members:
        found.setdefault(key(one), []).append(one)
    return found


def _model(samples: Sequence[MeasuredTime], units: int, typical: np.ndarray) -> TimeModel:
    amounts, times = _scaled(samples, units)
    scale = exp(float(np.log(times / (amounts @ typical)).mean()))
    rates = _rates(amounts, times, typical * scale)
    rest = np.log(times / (amounts @ rates))
    shapes, record = [one.shape for one in samples], samples[0].record
    ranges = {name: [sizes(shape)[name] for shape in shapes] for name in sizes(shapes[0])}
    return TimeModel(
        implementation=record.implementation,
        config=dict(record.config),
        pass_=shapes[0].pass_,
        dtypes=tuple(sorted({shape.dtype for shape in shapes})),
        shapes=len(shapes),
        rates={name: _rounded(rate) for name, rate in zip(COSTS, rates, strict=True) if rate > 0},
        factors=_factors([classes(shape) for shape in shapes], rest),
        compile_s=compile_s([one.record for one in samples]),
        ranges={name: (min(some), max(some)) for name, some in ranges.items()},
    )


def _scaled(samples: Sequence[MeasuredTime], units: int) -> tuple[np.ndarray, np.ndarray]:
    amounts = np.array([costs(one.shape, one.computes_hidden, units) for one in samples])
    return amounts, np.array([one.time_ns for one in samples])


def _rates(amounts: np.ndarray, times: np.ndarray, typical: np.ndarray | None = None) -> np.ndarray:
    """Return rates of 0 or more with the least squares of relative errors, drawn a little towards typical ones."""
    lines, wanted = amounts / times[:, None], np.ones(len(times))
    # Without typical rates, each rate is drawn towards 0 a little, so that few shapes have one answer too.
    weak = (
        np.diag(1e-3 * np.maximum(np.median(lines, axis=0), 1e-12))
        if typical is None
        else np.diag(np.sqrt(PRIOR) / np.maximum(typical, 1e-6))
    )
    drawn = np.zeros(len(COSTS)) if typical is None else np.where(typical > 0, np.sqrt(PRIOR), 0.0)
    return _nonnegative(np.vstack([lines, weak]), np.concatenate([wanted, drawn]))


def _nonnegative(lines: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the least squares solution without a negative number (Lawson and Hanson's active sets)."""
    square, product = lines.T @ lines, lines.T @ wanted
    scale = 1 / np.sqrt(np.diag(square))  # so that all columns count alike
    square, product = square * scale * scale[:, None], product * scale
    found, kept = np.zeros(len(product)), np.zeros(len(product), dtype=bool)
    for _ in range(MOST_STEPS):
        slope = np.where(kept, -np.inf, product - square @ found)
        if slope.max() <= 1e-9:
            break
        kept[slope.argmax()] = True
        while True:
            some = np.zeros(len(product))
            some[kept] = np.linalg.solve(square[kept][:, kept] + 1e-12 * np.eye(kept.sum()), product[kept])
            down = kept & (some <= 0)
            if not down.any():
                break
            step = (found[down] / (found[down] - some[down])).min()
            found = found + step * (some - found)
            kept &= ~(down & (found <= 1e-12))
        found = some
    return found * scale


def _factors(known: Sequence[dict[str, str]], rest: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the factor of each class, from the logs of what the rates leave unexplained."""
    values = sorted({item for one in known for item in one.items()})
    member = np.array([[item in one.items() for item in values] for one in known], dtype=float)
    logs = np.linalg.solve(member.T @ member + FEW * np.eye(len(values)), member.T @ rest)
    found: dict[str, dict[str, float]] = {}
    for (axis, value), log_ in zip(values, logs, strict=True):
        found.setdefault(axis, {})[value] = _rounded(exp(log_))
    return found


def compile_s(records: Sequence[Ok]) -> float | None:
    """Return the median seconds for which records compiled; None if they did not."""
    return round(median((record.compile_ns or 0) / 1e9 for record in records), 2) or None


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
