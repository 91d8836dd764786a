"""Masks as nested tuples of plain values and back: what torch.compile can follow, guard on and hand over."""

from __future__ import annotations

from typing import Any

from attnbench.masks.base import Mask
from attnbench.masks.data import FrozenArray


def literal(value: Any) -> Any:
    """A mask, or a field of one, in numbers, strings, bytes and tuples that begin with a name."""
    if isinstance(value, Mask):
        name, *fields = value.name_and_fields
        return (name, *[literal(getattr(value, field)) for field in fields])
    if isinstance(value, FrozenArray):
        return ("FrozenArray", value.shape, value.dtype, value.data)
    return ("tuple", *[literal(one) for one in value]) if isinstance(value, tuple) else value


def from_literal(value: Any, kinds: dict[str, type[Mask]]) -> Any:
    """What `literal` was given, from the mask classes by name."""
    if not isinstance(value, tuple):
        return value
    name, *fields = value
    if name == "FrozenArray":
        return FrozenArray(*fields)
    parts = [from_literal(field, kinds) for field in fields]
    return tuple(parts) if name == "tuple" else kinds[name](*parts)
