"""Selection by content made ready for a workload: estimate, threshold calibrated on draws of its own, trained gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from attnbench.kernels.block_sparse.gate import BlockGate, train_gate
from attnbench.kernels.block_sparse.select import POOL, Choice, block_mass, by_threshold, calibrated, choice, pooled
from attnbench.kernels.block_sparse.tables import BlockTables
from attnbench.spec import Workload
from attnbench.workloads.inputs import draw

CALIBRATION, TRAINING = (10_000, 10_001), range(20_000, 20_016)
"""Seeds of draws that no check and no measurement uses."""
STEPS = 200
Select = Callable[[torch.Tensor, torch.Tensor], tuple[BlockTables, float]]
"""(q, k) in layout bhsd -> the blocks to keep, and their achieved sparsity."""


def estimate(
    q: torch.Tensor, k: torch.Tensor, chosen: Choice, scale: float, pool: int = POOL, gate: BlockGate | None = None
) -> torch.Tensor:
    """Estimated mass of each free block, by the gate if there is one; no gradient flows through a choice."""
    with torch.no_grad():
        if gate is not None:
            return gate(q, k, chosen)
        return block_mass(pooled(q, pool), pooled(k, pool), chosen.free, chosen.tables.block_size, pool, scale)


@lru_cache(maxsize=8)
def selector(workload: Workload, device: torch.device, sparsity: float, block_size: int, learned: bool) -> Select:
    """Calibrated (and trained) on draws of the workload's inputs; made once for the several calls of a cell."""
    w, scale = workload, workload.softmax_scale
    chosen = choice(w.visible_mask, w.mask_shape, block_size, device)
    gate = None
    if learned:
        gate = BlockGate(w.heads, w.head_dim, scale=scale).to(device)
        with torch.enable_grad():
            train_gate(gate, list(_examples(w, TRAINING, device)), w.visible_mask, block_size, steps=STEPS)
    typical = [estimate(q, k, chosen, scale, gate=gate) for q, k in _examples(w, CALIBRATION, device)]
    threshold = calibrated(torch.cat(typical), chosen, sparsity)

    def select(q: torch.Tensor, k: torch.Tensor) -> tuple[BlockTables, float]:
        tables = chosen.keeping(by_threshold(estimate(q, k, chosen, scale, gate=gate), threshold))
        return tables, chosen.sparsity(tables.kept)

    return select


def _examples(
    workload: Workload, seeds: Iterable[int], device: torch.device
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    for seed in seeds:
        q, k, *_ = draw(workload, seed)
        yield tuple(torch.from_numpy(x).to(device).transpose(1, 2).contiguous() for x in (q, k))  # pyright: ignore
