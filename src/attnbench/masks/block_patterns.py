"""Fixed block-sparse patterns: which blocks a query block keeps, decided by position (and a seed) alone.

`sparsity` is the share of blocks dropped, out of those that the mask without blocks lets be seen. Each row of blocks
keeps a share of its own candidates, so that every row is within one block of the request, and always the block that
its first query lies in, so that no query is left without a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnbench import masks
from attnbench.errors import InvalidWorkload, UnknownName
from attnbench.masks import AnyMask, MaskShape
from attnbench.masks.base import whole_number

if TYPE_CHECKING:
    from jaxtyping import Bool

SPARSITIES = (0.5, 0.75, 0.9, 0.95)
BLOCK_SIZE = 128
GLOBAL_SHARE = 4
"""Number of kept blocks of `global_local` of which one is global."""
ROUNDING = 1e-9
MOST_BLOCKS = 1 << 32
"""Largest number of blocks, 4 GiB while a pattern is made: 128k tokens in blocks of 2, or 1M in blocks of 128 with 64
heads."""


class BlockRow(NamedTuple):
    """One row of blocks: of the candidates 0 ... visible - 1 it keeps `budget`, always including `own`."""

    own: int
    visible: int
    budget: int
    stride: float
    """Distance between kept blocks if they were evenly spaced."""


def _local(row: BlockRow, rng: np.random.Generator) -> Any:
    """Return the nearest blocks; at an edge the window moves inwards and keeps its width."""
    start = min(max(row.own - row.budget // 2, 0), row.visible - row.budget)
    return np.arange(start, start + row.budget)


def _strided(row: BlockRow, rng: np.random.Generator) -> Any:
    """Return the row's own block and others before it at one stride, continued from the end if rows see that far."""
    distances = np.floor(np.arange(row.budget) * row.stride + ROUNDING).astype(int)
    return (row.own - distances) % row.visible


def _global_local(row: BlockRow, rng: np.random.Generator) -> Any:
    """Return the first blocks of the sequence, and the nearest blocks for the rest of the budget."""
    first = min(-(-row.budget // GLOBAL_SHARE), row.budget - 1)
    rest = row._replace(own=max(row.own - first, 0), visible=row.visible - first, budget=row.budget - first)
    near = _local(rest, rng) + first
    return np.concatenate([np.arange(first), near])


def _random(row: BlockRow, rng: np.random.Generator) -> Any:
    """Return the row's own block and random others."""
    others = rng.permutation(row.visible - 1)[: row.budget - 1]
    return np.append(others + (others >= row.own), row.own)


PATTERNS: Mapping[str, Callable[[BlockRow, np.random.Generator], Any]] = {
    "local": _local,
    "strided": _strided,
    "global_local": _global_local,
    "random": _random,
}


def block_pattern(
    pattern: str,
    sparsity: float,
    shape: MaskShape,
    *,
    block_size: int = BLOCK_SIZE,
    causal: bool = False,
    seed: int = 0,
) -> Bool[np.ndarray, "h q kv"]:
    """Return the kept blocks; `random` draws every head anew (axis 0 is shape.heads), others have one plane for all."""
    if pattern not in PATTERNS:
        raise UnknownName("block pattern", str(pattern), PATTERNS, "attnbench.masks.block_patterns")
    check_sparsity(sparsity)
    block_size = whole_number(block_size, "block_size", least=1)
    heads = shape.heads if pattern == "random" else 1
    counts = tuple(-(-length // block_size) for length in (shape.q_len, shape.kv_len))
    if heads * counts[0] * counts[1] > MOST_BLOCKS:
        raise InvalidWorkload(
            f"{heads} x {counts[0]} x {counts[1]} blocks are more than the {MOST_BLOCKS} that a mask may have: "
            "take larger blocks or fewer tokens."
        )
    kept = np.zeros((heads, *counts), bool)
    rng = np.random.default_rng(seed)
    offset = shape.kv_len - shape.q_len
    for head in range(heads):
        for number in range(counts[0]):
            last = min((number + 1) * block_size, shape.q_len) - 1 + offset
            visible = min(max(last // block_size + 1, 0), counts[1]) if causal else counts[1]
            if visible:
                own = min(max((number * block_size + offset) // block_size, 0), visible - 1)
                budget = max(1, int((1 - sparsity) * visible + 0.5))
                row = BlockRow(own, visible, budget, 1 / (1 - sparsity))
                kept[head, number, PATTERNS[pattern](row, rng)] = True
    return kept


def sparse_mask(
    pattern: str,
    sparsity: float,
    shape: MaskShape,
    *,
    block_size: int = BLOCK_SIZE,
    causal: bool = False,
    seed: int = 0,
) -> AnyMask:
    """Return the pattern as a mask; `causal() & blocks(...)` if `causal`."""
    kept = block_pattern(pattern, sparsity, shape, block_size=block_size, causal=causal, seed=seed)
    rest = masks.causal() if causal else masks.full()
    return rest & masks.blocks(kept[0] if len(kept) == 1 else kept, block_size)  # pyright: ignore[reportReturnType]


def check_sparsity(sparsity: float) -> None:
    """Refuse a value that is not a share of blocks to drop; 1 would leave nothing."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0 <= sparsity < 1:
        raise InvalidWorkload(
            f"sparsity, the share of blocks dropped, must be at least 0 and less than 1, not {sparsity!r}."
        )
