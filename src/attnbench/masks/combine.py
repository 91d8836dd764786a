"""Masks combined with `&`: every part must allow a pair, and log-weights add up; masks as plain nested tuples."""

from __future__ import annotations

from functools import reduce
from typing import Any, get_args

import numpy as np

from attnbench.errors import InvalidWorkload
from attnbench.masks.arrays import BlockCausal, Blocks, Dense, Documents, Lengths, Valid
from attnbench.masks.base import FrozenArray, Mask, MaskShape, Namespace, Predicate
from attnbench.masks.positional import Alibi, Causal, Dilated, Full, Prefix, Window
from attnbench.tracing import constant_when_traced

MOST_PARTS = 64
Positional = Full | Causal | Window | Prefix | Dilated | Alibi
"""A mask that depends on positions alone."""
Part = Positional | BlockCausal | Documents | Lengths | Valid | Blocks | Dense
"""A mask that is not a combination: what a run file may hold."""


class Both(Mask, frozen=True, tag="both"):
    """Two or more masks combined: a pair is visible if every part allows it."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if len(self.parts) > MOST_PARTS:
            raise InvalidWorkload(f"a mask can combine at most {MOST_PARTS} parts, not {len(self.parts)}.")

    def split(self) -> tuple[Mask, ...]:
        return self.parts

    @property
    def id(self) -> str:
        return "&".join(part.id for part in self.parts)

    @property
    def title(self) -> str:
        return "&".join(part.title for part in self.parts)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for part in self.parts for kind in part.kinds)

    @property
    def weighted(self) -> bool:
        return any(part.weighted for part in self.parts)

    @property
    def per_batch(self) -> bool:
        return any(part.per_batch for part in self.parts)

    @property
    def per_head(self) -> bool:
        return any(part.per_head for part in self.parts)

    @property
    def per_block(self) -> bool:
        return all(part.per_block for part in self.parts)

    def check(self, shape: MaskShape) -> None:
        for part in self.parts:
            part.check(shape)

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        tests = [part.predicate(shape, namespace) for part in self.parts]
        return lambda b, h, q, kv: reduce(lambda seen, test: seen & test(b, h, q, kv), tests[1:], tests[0](b, h, q, kv))

    def log_weight(self, shape: MaskShape, namespace: Namespace) -> Predicate | None:
        wide = _InFloat64(namespace) if sum(part.weighted for part in self.parts) > 1 else namespace
        weights = [weight for part in self.parts if (weight := part.log_weight(shape, wide)) is not None]
        if not weights:
            return None

        def total(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return reduce(lambda value, weight: value + weight(b, h, q, kv), weights[1:], weights[0](b, h, q, kv))

        return total

    def interval(self, shape: MaskShape) -> tuple[np.ndarray, np.ndarray] | None:
        known = [interval for part in self.parts if (interval := part.interval(shape)) is not None]
        if len(known) < len(self.parts):
            return None
        lows, highs = zip(*known)
        return reduce(np.maximum, lows), reduce(np.minimum, highs)


class _InFloat64:
    """A namespace whose floating arrays are float64: a sum of float32 weights would be rounded for float64 inputs."""

    def __init__(self, namespace: Namespace) -> None:
        self.log, self.where, self._asarray = namespace.log, namespace.where, namespace.asarray

    def asarray(self, array: np.ndarray, /) -> Any:
        """Return the array in the framework, float64 if it is floating."""
        return self._asarray(array.astype(np.float64) if array.dtype.kind == "f" else array)


KINDS: dict[str, type[Mask]] = {kind.__name__: kind for kind in (*get_args(Part), Both)}
for _kind in KINDS.values():
    _kind.name_and_fields = (_kind.__name__, *_kind.__struct_fields__)


def both(a: Mask, b: Mask) -> Mask:
    """Return `a & b` without nesting; `full()` is dropped."""
    return _joined(literal(a), literal(b)) if isinstance(b, Mask) else NotImplemented


@constant_when_traced
def _joined(*literals: Any) -> Mask:
    parts = [part for mask in map(mask_of, literals) for part in mask.split() if not isinstance(part, Full)]
    if not parts:
        return Full()
    return parts[0] if len(parts) == 1 else Both(tuple(parts))


def literal(value: Any) -> Any:
    """Return a mask, or a field of a mask, as nested tuples of plain values that begin with a name.

    torch.compile can follow such tuples, guard on them and pass them on.
    """
    if isinstance(value, Mask):
        name, *fields = value.name_and_fields
        return (name, *[literal(getattr(value, field)) for field in fields])
    if isinstance(value, FrozenArray):
        return ("FrozenArray", value.shape, value.dtype, value.data)
    return ("tuple", *[literal(part) for part in value]) if isinstance(value, tuple) else value


def mask_of(plain: Any) -> Any:
    """Return the mask (or a field of one, or None) that `literal` turned into plain values."""
    if not isinstance(plain, tuple):
        return plain
    name, *fields = plain
    if name == "FrozenArray":
        return FrozenArray(*fields)
    parts = [mask_of(field) for field in fields]
    return tuple(parts) if name == "tuple" else KINDS[name](*parts)
