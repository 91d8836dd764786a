"""What workloads the dilated implementations take, and how they read them."""

from __future__ import annotations

from attnbench.kernels.dilated.pieces import Problem
from attnbench.masks import Causal, Dilated, Lengths
from attnbench.spec import Workload


def problem_of(workload: Workload) -> Problem:
    """The mask's parts, read."""
    parts = workload.visible_mask.split()
    pattern = next(part for part in parts if isinstance(part, Dilated))
    limits = [part.kv_lengths.array for part in parts if isinstance(part, Lengths)]
    lengths = tuple(int(min(row)) for row in zip(*limits)) if limits else None
    causal = any(isinstance(part, Causal) for part in parts)
    w = workload
    return Problem(pattern, w.batch, w.q_len, w.heads, w.kv_heads, causal, lengths)


def needs_dilated(workload: Workload) -> str | None:
    """One dilated mask, and besides it nothing but causal and lengths."""
    kinds = workload.visible_mask.kinds
    other = [kind for kind in kinds if kind not in ("dilated", "causal", "lengths")]
    if kinds.count("dilated") != 1:
        return "takes one dilated mask" + (f", not {kinds.count('dilated')}" if "dilated" in kinds else " and no other")
    return f"takes a dilated mask with causal and lengths, not with {other[0]}" if other else None
