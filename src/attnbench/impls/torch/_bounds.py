"""Masks as two bounds, for libraries that take causal and window as numbers; the optional torch engines ask here."""

from __future__ import annotations

from attnbench.impls.conditions import first_reason, needs_mask
from attnbench.masks import Causal, Window
from attnbench.spec import Array, Workload

Bounds = tuple[int | None, int | None]


def bounds(workload: Workload) -> Bounds:
    """Keys seen to the left and right of a query after alignment; None where there is no bound."""
    mask = workload.visible_mask
    if isinstance(mask, Causal):
        return None, 0
    return (mask.left, mask.right) if isinstance(mask, Window) else (None, None)


def is_causal(workload: Workload) -> bool:
    """Whether the mask is causal, under whichever name."""
    return bounds(workload) == (None, 0)


def is_windowed(workload: Workload) -> bool:
    """Whether the mask is neither full nor causal."""
    return bounds(workload) not in ((None, None), (None, 0))


def is_top_left(workload: Workload) -> bool:
    """Whether the alignment is top-left and differs from bottom-right."""
    align = getattr(workload.visible_mask, "align", "bottom-right")
    return align == "top-left" and workload.q_len != workload.kv_len


def needs_bounds(workload: Workload) -> str | None:
    """One mask out of full, causal and window."""
    single = None if len(workload.visible_mask.kinds) == 1 else "takes one mask at a time"
    return first_reason(needs_mask(workload, "full", "causal", "window"), single)


def needs_bottom_right(workload: Workload) -> str | None:
    """The alignment that flash-attention and its kin have."""
    if is_top_left(workload):
        return f"aligns masks bottom-right; top-left needs q_len = kv_len, not {workload.q_len} and {workload.kv_len}"
    return None


def needs_visible_rows(workload: Workload) -> str | None:
    """Every query sees a key; says nothing of masks that are no interval a row (`needs_bounds` refuses them)."""
    interval = workload.visible_mask.interval(workload.mask_shape)
    if interval is None:
        return None
    low, high = (edge.clip(0, workload.kv_len) for edge in interval)
    return "does not define rows that see no key, and this mask has some" if (high <= low).any() else None


def natural_lse(lse: Array) -> Array:
    """LSE with -inf, not +inf, for rows that see no key."""
    return lse.masked_fill(lse == float("inf"), float("-inf"))
