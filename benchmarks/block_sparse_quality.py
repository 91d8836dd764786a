"""What block patterns lose: `python benchmarks/block_sparse_quality.py [-o FILE]`, on a CPU, in a few minutes.

For each pattern at 50, 75, 90 and 95 % sparsity, on structured Q and K (sinks, verticals, slashes, needles): the
achieved sparsity, the recall of attention mass (the mean share of a row's dense attention that lies in kept blocks) and
the relative error of the output against dense attention. `oracle` chooses by true attention, which costs all of QK^T:
the most that any choice by blocks can reach. Thresholds are calibrated, and the gate trained, on other draws than the
ones measured. No times: nothing here says what is fast.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from publishing import publish

from attnbench.frameworks.numpy import versions
from attnbench.masks import causal, full
from attnbench.masks.block_patterns import PATTERNS, SPARSITIES, block_pattern
from attnbench.run.machine import isa_cap
from attnbench.spec import Workload
from attnbench.workloads.inputs import draw

os.environ.update(isa_cap())  # before torch is imported

import torch

from attnbench.kernels.block_sparse.selection import (
    POOL,
    BlockChoice,
    BlockGate,
    block_mass,
    by_threshold,
    calibrated,
    choice,
    pooled,
    train_gate,
    true_mass,
)
from attnbench.kernels.block_sparse.torch_impls import attend

MEASURED, CALIBRATION, TRAINING = range(3), range(10, 12), range(100, 116)
"""Seeds of the draws."""
Mass = Callable[[torch.Tensor, torch.Tensor, BlockChoice], torch.Tensor]


class Case(NamedTuple):
    """A shape; `normal` inputs are measured beside structured ones to show that they have no sparsity to find."""

    tokens: int = 4096
    heads: int = 4
    head_dim: int = 64
    block_size: int = 64
    causal: bool = False
    inputs: str = "structured"
    steps: int = 300

    @property
    def workload(self) -> Workload:
        """The dense problem."""
        mask = causal() if self.causal else full()
        return Workload(
            batch=1, q_len=self.tokens, heads=self.heads, head_dim=self.head_dim, mask=mask, inputs=self.inputs
        )

    def arrays(self, seed: int) -> list[torch.Tensor]:
        """q, k and v in layout bhsd."""
        return [torch.from_numpy(x).transpose(1, 2).contiguous() for x in draw(self.workload, seed)[:3]]


class Dense(NamedTuple):
    """A measured draw and what dense attention makes of it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, for a test of the script")
    options = parser.parse_args()
    cases = [Case(), Case(causal=True), Case(inputs="normal")]
    if options.smoke:
        cases = [Case(tokens=384, heads=1, head_dim=32, block_size=8, causal=True, steps=20)]
    found = {
        "cases": [measure(case) for case in cases],
        "pool": POOL,
        "packages": versions("torch", "numpy"),
    }
    publish(found, options.out)


def measure(case: Case) -> dict[str, Any]:
    w = case.workload
    chosen = choice(w.visible_mask, w.mask_shape, case.block_size, torch.device("cpu"))
    gate = BlockGate(case.heads, case.head_dim)
    examples = [(q, k) for q, k, _ in (case.arrays(seed) for seed in TRAINING)]
    losses = train_gate(gate, examples, w.visible_mask, case.block_size, steps=case.steps)
    masses: dict[str, Mass] = {
        "dynamic_threshold": lambda q, k, c: block_mass(
            pooled(q, POOL), pooled(k, POOL), c.free, case.block_size, POOL, w.softmax_scale
        ),
        "learned": gate,
        "oracle": lambda q, k, c: _over_free(true_mass(q, k, c, w.softmax_scale), c),
    }
    calibration = [case.arrays(seed)[:2] for seed in CALIBRATION]
    measured = [_dense(case, chosen, seed) for seed in MEASURED]
    rows = []
    with torch.no_grad():
        for sparsity in SPARSITIES:
            for pattern in PATTERNS:
                kept = block_pattern(
                    pattern, sparsity, w.mask_shape, block_size=case.block_size, causal=case.causal, seed=1
                )
                fixed = torch.from_numpy(kept)[None]
                rows.append(_row(case, chosen, measured, pattern, sparsity, lambda q, k, fixed=fixed: fixed, None))
            for name, mass in masses.items():
                typical = torch.cat([mass(q, k, chosen) for q, k in calibration])
                threshold = calibrated(typical, chosen, sparsity)
                choose = lambda q, k, m=mass, t=threshold: by_threshold(m(q, k, chosen), t)  # noqa: E731
                rows.append(_row(case, chosen, measured, name, sparsity, choose, threshold))
    training = {"steps": case.steps, "first_loss": losses[0], "last_loss": losses[-1], "examples": len(examples)}
    return {"case": case._asdict(), "gate_training": training, "rows": rows}


def _over_free(mass: torch.Tensor, chosen: BlockChoice) -> torch.Tensor:
    mass = mass * chosen.free
    return mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)


def _dense(case: Case, chosen: BlockChoice, seed: int) -> Dense:
    q, k, v = case.arrays(seed)
    return Dense(q, k, v, *attend(q, k, v, chosen.tables, case.workload.softmax_scale))


def _row(
    case: Case, chosen: BlockChoice, measured: list[Dense], name: str, sparsity: float, choose: Any,
    threshold: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Means over the measured draws."""
    figures = []
    for dense in measured:
        selected = choose(dense.q, dense.k)
        tables = chosen.keeping(selected)
        if threshold is None:  # a fixed pattern keeps exactly its own blocks
            tables = chosen.tables._replace(kept=selected, whole=selected & chosen.free)
        out, lse = attend(dense.q, dense.k, dense.v, tables, case.workload.softmax_scale)
        recall = float((lse - dense.lse).exp().mean())
        error = float((out - dense.out).norm() / dense.out.norm())
        kept = tables.kept.expand(1, case.heads, *tables.kept.shape[2:])
        figures.append((chosen.sparsity(kept), recall, error))
    achieved, recall, error = (float(np.mean(column)) for column in zip(*figures))
    row = {"pattern": name, "sparsity": sparsity, "achieved": achieved, "recall": recall, "output_error": error}
    return row if threshold is None else row | {"threshold": threshold}


if __name__ == "__main__":
    main()
