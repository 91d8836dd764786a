"""A small gate that learns where attention goes: linear maps of pooled Q and K, trained against true attention.

Untrained it is the plain estimate of `select.block_mass`: the maps start as the identity. Training undoes what pooling
does to single keys: directions that matter are amplified, noise is damped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnbench.errors import UsageError
from attnbench.impls._arguments import check_scale, check_whole
from attnbench.kernels.block_sparse.select import POOL, Choice, block_mass, choice, pooled
from attnbench.masks import Mask, MaskShape

LEARNING_RATE = 4e-3
CHUNK_LOGITS = 1 << 26


class BlockGate(torch.nn.Module):
    """Estimates block mass for q [b, h, t, d] and k [b, g, s, d]; 2 * heads * head_dim^2 parameters."""

    def __init__(self, heads: int, head_dim: int, *, pool: int = POOL, scale: float | None = None) -> None:
        super().__init__()
        for name, value in (("heads", heads), ("head_dim", head_dim), ("pool", pool)):
            check_whole(name, value, 1)
        check_scale(scale)
        self.pool, self.scale = pool, head_dim**-0.5 if scale is None else scale
        self.query, self.key = (torch.nn.Parameter(torch.eye(head_dim).repeat(heads, 1, 1)) for _ in range(2))

    def forward(self, q: torch.Tensor, k: torch.Tensor, choice: Choice) -> torch.Tensor:
        """[b, h, q blocks, kv blocks], as `select.block_mass`."""
        heads, dim = self.query.shape[:2]
        if q.shape[1] != heads or q.shape[3] != dim:
            raise UsageError(f"this gate is for {heads} heads of {dim}, not for {q.shape[1]} of {q.shape[3]}.")
        k = pooled(k, self.pool).repeat_interleave(heads // k.shape[1], 1)
        own, keys = (
            torch.einsum("bhtd,hde->bhte", x, weight)
            for x, weight in ((pooled(q, self.pool), self.query), (k, self.key))
        )
        return block_mass(own, keys, choice.free, choice.tables.block_size, self.pool, self.scale)

    def extra_repr(self) -> str:
        """Its sizes."""
        heads, dim = self.query.shape[:2]
        return f"heads={heads}, head_dim={dim}, pool={self.pool}, scale={self.scale:g}"


def true_mass(q: torch.Tensor, k: torch.Tensor, choice: Choice, scale: float) -> torch.Tensor:
    """[b, h, q blocks, kv blocks] mean attention of a block row's queries to each block, from all of QK^T."""
    size, (low, high) = choice.tables.block_size, (choice.tables.low, choice.tables.high)
    rows, columns = choice.free.shape[2:]
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    keys = torch.arange(k.shape[2], device=k.device)
    step = max(1, CHUNK_LOGITS // (q.shape[0] * q.shape[1] * k.shape[2] * size)) * size
    parts = []
    for first in range(0, q.shape[2], step):
        logits = q[:, :, first : first + step].float() @ k.transpose(-1, -2) * scale
        bounds = (edge[:, None, first : first + step, None] for edge in (low, high))
        begin, end = bounds
        weights = logits.masked_fill((keys < begin) | (keys >= end), -torch.inf).softmax(-1).nan_to_num(0.0)
        padded = torch.nn.functional.pad(weights, (0, columns * size - k.shape[2], 0, -weights.shape[2] % size))
        by_block = padded.unflatten(3, (columns, size)).sum(-1).unflatten(2, (-1, size)).sum(3)
        parts.append(by_block)
    real = (q.shape[2] - torch.arange(rows, device=q.device) * size).clamp(max=size)
    return torch.cat(parts, 2) / real[:, None]


def train_gate(
    gate: BlockGate,
    examples: Sequence[tuple[torch.Tensor, torch.Tensor]],
    mask: Mask,
    block_size: int,
    *,
    steps: int = 200,
    learning_rate: float = LEARNING_RATE,
) -> list[float]:
    """Fit the gate to true attention on examples (q, k) in layout bhsd; returns each step's loss (cross entropy)."""
    targets = []
    for q, k in examples:
        chosen = choice(mask, MaskShape(q.shape[0], q.shape[1], q.shape[2], k.shape[2]), block_size, q.device)
        mass = true_mass(q, k, chosen, gate.scale) * chosen.free
        targets.append((chosen, mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)))
    optimiser = torch.optim.Adam(gate.parameters(), lr=learning_rate)
    losses = []
    for step in range(steps):
        (q, k), (chosen, target) = examples[step % len(examples)], targets[step % len(examples)]
        loss = -(target * gate(q, k, chosen).clamp(min=1e-9).log()).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses
