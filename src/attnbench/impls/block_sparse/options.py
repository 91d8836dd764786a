"""Numbers that options of block-sparse attention may be."""

from __future__ import annotations

import math
from typing import Any

from attnbench.errors import UsageError


def number(value: Any) -> bool:
    """True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def check_scale(scale: Any) -> None:
    """Refuse what logits cannot be multiplied by."""
    if scale is not None and not (number(scale) and math.isfinite(scale)):
        raise UsageError(f"scale is a finite number, or None for head_dim ** -0.5, not {scale!r}.")
