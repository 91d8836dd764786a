"""What the options of block-sparse modules may be: each check raises one sentence that says what to give instead."""

from __future__ import annotations

import math
from typing import Any

from attnbench.errors import UsageError
from attnbench.impls._arguments import check_causal, check_scale, check_whole, number
from attnbench.kernels.block_sparse.selection import POOL, BlockGate


def check_common(block_size: Any, causal: Any, scale: Any) -> None:
    """What every block-sparse module takes."""
    check_whole("block_size", block_size, 1)
    check_scale(scale)
    check_causal(causal)


def check_share(name: str, value: Any) -> None:
    """Refuse what is no share of attention mass."""
    if not number(value) or not 0 < value <= 1:
        raise UsageError(f"{name} is the share of attention to keep, above 0 and at most 1, not {value!r}.")


def refuse_unused(name: str, value: Any, pattern: str, patterns: tuple[str, ...]) -> None:
    """Refuse an option that the pattern would ignore."""
    if value is not None and pattern not in patterns:
        raise UsageError(f'{name}= belongs to {" and ".join(patterns)}, pattern "{pattern}" does not use it.')


def checked_seed(seed: int | None, pattern: str) -> int:
    """0 where none was given."""
    refuse_unused("seed", seed, pattern, ("random",))
    if seed is not None:
        check_whole("seed", seed, 0)
    return seed or 0


def checked_pool(pool: int | None, gate: BlockGate | None, block_size: int, scale: float | None) -> int:
    """The pool of the estimate, a gate's own where there is one; it and the gate's scale must fit the module."""
    if gate is not None and not isinstance(gate, BlockGate):
        raise UsageError(f"gate is a BlockGate(heads, head_dim) trained with train_gate, not {gate!r}.")
    if gate is not None and pool is not None:
        raise UsageError("pool belongs to the estimate without a gate; a gate has its own.")
    found = POOL if pool is None else pool
    if gate is not None:
        found, wanted = gate.pool, gate.query.shape[-1] ** -0.5 if scale is None else scale
        if not math.isclose(gate.scale, wanted):
            raise UsageError(f"the gate was made for scale {gate.scale:g}: give scale={gate.scale:g}, not {wanted:g}.")
    check_whole("pool", found, 1)
    if block_size % found:
        raise UsageError(f"pool must divide the block size, and {found} does not divide {block_size}.")
    return found
