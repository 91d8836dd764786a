"""The learned gate of block-sparse attention and its training, for users of `attnbench.nn`.

gate = BlockGate(heads=16, head_dim=128)
losses = train_gate(gate, [(q, k), ...], masks.causal(), block_size=128)
attend = create_block_sparse_attention(0.9, "learned", causal=True, gate=gate)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnbench.errors import InvalidWorkload, UsageError
from attnbench.impls._arguments import check_whole
from attnbench.kernels.block_sparse import selection
from attnbench.kernels.block_sparse.selection import LEARNING_RATE, BlockGate
from attnbench.masks import Mask

__all__ = ["BlockGate", "train_gate"]


def train_gate(
    gate: BlockGate,
    examples: Sequence[tuple[torch.Tensor, torch.Tensor]],
    mask: Mask,
    block_size: int,
    *,
    steps: int = 200,
    learning_rate: float = LEARNING_RATE,
) -> list[float]:
    """Fit the gate to true attention; returns each step's loss (cross entropy).

    Examples are (q [b, t, h, d], k [b, s, g, d]), as the modules take them.
    """
    if not examples:
        raise UsageError("train_gate needs at least one example (q, k).")
    check_whole("steps", steps, 1)
    check_whole("block_size", block_size, 1)
    turned = [_turned(gate, q, k) for q, k in examples]
    return selection.train_gate(gate, turned, mask, block_size, steps=steps, learning_rate=learning_rate)


def _turned(gate: BlockGate, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    heads, dim = gate.query.shape[:2]
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0]:
        raise InvalidWorkload(f"examples are q and k of [batch, tokens, heads, dim], not {shapes}.")
    if q.shape[2:] != (heads, dim) or k.shape[3] != dim or heads % k.shape[2]:
        raise InvalidWorkload(
            f"this gate is for {heads} heads of {dim}, and heads of k must divide those: "
            f"give q and k of [batch, tokens, heads, dim], not {shapes}."
        )
    return q.transpose(1, 2), k.transpose(1, 2)
