"""Prediction of times where no measured shape is near: for each implementation a sum of costs with fitted rates, times
a factor for each class of problems (mask, head_dim, soft cap) that it was measured on.

Only the formula is here, in plain numbers; `attnbench.choosing.fitting` fits the rates on measured records. What an
implementation was never measured on makes its prediction longer, by factors that are named below: who is known there
goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, log2

from msgspec import Struct, field

from attnbench.policy.labels import Labelled
from attnbench.policy.regret import Regret
from attnbench.policy.shapes import Shape
from attnbench.spec import DTYPE_BYTES, Pass

TILE = 128
"""Queries of a tile, the piece of work that one unit of the device computes at a time."""
COSTS = ("launch", "work", "tiles", "bytes", "group_bytes", "scores")
"""Names of the costs, in the order of `costs`."""
FEW_QUERIES = 64
"""Most queries of a call whose keys are split among the units, by kernels that can."""
UNKNOWN = {"mask": 1.3, "softcap": 1.3, "head_dim": 1.1, "queries": 1.3}
"""Factor on the predicted time if an implementation was never measured on a kind of mask, with (or without) a soft cap,
or for each octave between a head_dim and the nearest one that it was measured on."""
OUTSIDE = 1.15
"""Factor on the predicted time for each octave that a size lies outside those that were measured."""
SIXTEEN_BITS = ("float16", "bfloat16")


def costs(shape: Shape, computes_hidden: bool, units: int) -> tuple[float, ...]:
    """Return what a call has to do: a launch, operations, operations with idle units and rows of tiles counted, bytes
    of inputs and output, of keys and values read once for each query head, and of scores if hidden pairs are computed.

    Operations are in units of a billion, bytes of a million.
    """
    rows, width = shape.batch * shape.heads, shape.head_dim + (shape.v_head_dim or shape.head_dim)
    pairs = rows * shape.q_len * shape.kv_len
    work = 2e-9 * pairs * width * (1.0 if computes_hidden else max(shape.share, 1 / pairs))
    group = shape.heads // shape.kv_heads
    tiles = shape.batch * shape.kv_heads * ceil(shape.q_len * group / TILE)
    idle = ceil(tiles / units) * units * TILE / (rows * shape.q_len)
    size = 1e-6 * DTYPE_BYTES[shape.dtype]
    keys = size * shape.batch * shape.kv_len * width
    read = size * rows * shape.q_len * width + keys * shape.kv_heads
    return 1.0, work, work * idle, read, keys * shape.heads, 4e-6 * pairs if computes_hidden else 0.0


def classes(shape: Shape) -> dict[str, str]:
    """Return the classes of a shape that a model has a factor for."""
    return {
        "mask": shape.mask,
        "softcap": "yes" if shape.softcap else "no",
        "head_dim": str(shape.head_dim),
        "queries": "few" if shape.q_len <= FEW_QUERIES else "many",
    }


def sizes(shape: Shape) -> dict[str, int]:
    """Return the sizes of a shape whose measured range a model knows."""
    return {
        "rows": shape.batch * shape.heads,
        "group": shape.heads // shape.kv_heads,
        "q_len": shape.q_len,
        "kv_len": shape.kv_len,
    }


class TimeModel(Labelled, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Formula of the time of one implementation in one pass, fitted on measured shapes."""

    pass_: Pass = field(name="pass")
    dtypes: tuple[str, ...]
    """Types that it was measured with; of the two 16-bit ones, each stands for the other."""
    shapes: int
    """Number of measured shapes."""
    rates: dict[str, float]
    """Nanoseconds for each unit of a cost; a cost that is not named has none."""
    factors: dict[str, dict[str, float]]
    """Factor on the time for each class it was measured on, by axis: mask, softcap and head_dim."""
    compile_s: float | None = None
    """Seconds for which it compiled before its first call, the median; null if it compiles nothing."""
    ranges: dict[str, tuple[int, int]]
    """Smallest and largest measured sizes."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.rates) - set(COSTS)):
            raise ValueError(f"a model has rates for {', '.join(COSTS)}, not for {unknown[0]}")
        if not self.rates or min(self.rates.values()) <= 0:
            raise ValueError("a model needs rates, all positive")
        if odd := [dim for dim in self.factors.get("head_dim", {}) if not dim.isdecimal() or int(dim) < 1]:
            raise ValueError(f"head_dim must be a whole number, not {odd[0]}")
        wrong = [factor for some in self.factors.values() for factor in some.values() if not factor > 0]
        wrong += [low for low, high in self.ranges.values() if not 1 <= low <= high]
        if wrong:
            raise ValueError(f"a model's factors and ranges must be positive, not {wrong[0]}")

    def covers(self, shape: Shape) -> bool:
        """Return whether the pass and the width of the dtype are those that were measured."""
        half = shape.dtype in SIXTEEN_BITS and any(one in SIXTEEN_BITS for one in self.dtypes)
        return shape.pass_ == self.pass_ and (half or shape.dtype in self.dtypes)

    def time_ns(self, shape: Shape, computes_hidden: bool, units: int) -> float:
        """Return the predicted time of a shape that is covered; `computes_hidden`: as the implementation says of it."""
        amounts = zip(COSTS, costs(shape, computes_hidden, units), strict=True)
        time = sum(self.rates.get(name, 0.0) * amount for name, amount in amounts)
        for axis, value in classes(shape).items():
            time *= _factor(axis, value, self.factors.get(axis, {}))
        for name, size in sizes(shape).items():
            low, high = self.ranges.get(name, (size, size))
            time *= OUTSIDE ** max(0.0, log2(low / size), log2(size / high))
        return max(time, 1e-3)


def _factor(axis: str, value: str, known: Mapping[str, float]) -> float:
    """Return the factor of a class: the measured one, between two head_dims by interpolation, else that of all known
    classes together (1) or of the nearest head_dim, made longer."""
    if value in known:
        return known[value]
    if axis != "head_dim" or not known:
        return UNKNOWN[axis]
    wanted = log2(int(value))
    at = sorted((log2(int(dim)), factor) for dim, factor in known.items())
    below, above = [one for one in at if one[0] < wanted], [one for one in at if one[0] > wanted]
    octaves = min(abs(dim - wanted) for dim, _ in at)
    if not below or not above:
        return min(at, key=lambda one: abs(one[0] - wanted))[1] * UNKNOWN[axis] ** octaves
    (low, before), (high, after) = below[-1], above[0]
    share = (wanted - low) / (high - low)
    return before ** (1 - share) * after**share * UNKNOWN[axis] ** octaves


LEFT_OUT = ("shape", "class", "head_dim", "mask")
"""Parts of the measured shapes that are left out in turn to check predictions: single shapes, all of a class, of a
head_dim, or of a kind of mask."""
FEWEST_HELD_OUT = 4
"""Fewest left-out shapes for which a check counts."""


class HeldOutCheck(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Regret of predicted picks for shapes that were left out of the fit, and that of the fixed order there."""

    predicted: Regret
    fixed: Regret

    @property
    def passed(self) -> bool:
        """Whether the predicted picks lose no more than the fixed order, on enough shapes to tell."""
        return self.predicted.shapes >= FEWEST_HELD_OUT and self.predicted.mean <= self.fixed.mean


class Prediction(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Models of the times at one place, and what their picks lost on shapes that were left out."""

    units: int
    """Number of units of the device that work side by side, as fitted."""
    models: tuple[TimeModel, ...]
    checks: dict[str, HeldOutCheck] = {}
    """Part that was left out, one of LEFT_OUT, -> the check."""

    def __post_init__(self) -> None:
        if self.units < 1:
            raise ValueError(f"units must be at least 1, not {self.units}")
        if unknown := sorted(set(self.checks) - set(LEFT_OUT)):
            raise ValueError(f"checks are of {', '.join(LEFT_OUT)}, not of {unknown[0]}")

    def check(self, shape: Shape, measured: Iterable[Shape]) -> tuple[HeldOutCheck | None, str]:
        """Return the check that stands for a shape beside the measured ones, None if there is none, and why no
        measurement answers. If neither mask nor head_dim were, the check that lost more stands."""
        known = [one for one in measured if one.pass_ == shape.pass_]
        asked = {"mask": shape.mask, "head_dim": shape.head_dim}
        new = [axis for axis, value in asked.items() if all(getattr(one, axis) != value for one in known)]
        told = (
            " and ".join(f"{axis} {asked[axis]}" for axis in new) + f" {'were' if len(new) > 1 else 'was'} not measured"
        )
        if not new:
            near = any(one.hard == shape.hard for one in known)
            new = ["shape"] if near else ["class"]
            told = "no measured shape is near" if near else "these axes were not measured together"
        checks = [self.checks.get(axis) for axis in new]
        if any(one is None for one in checks):
            return None, told
        return max((one for one in checks if one is not None), key=lambda one: one.predicted.mean), told
