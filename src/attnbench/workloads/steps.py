"""Steps: computations that attention is a part of, and what they cost around it. A workload names one in `step`."""

from __future__ import annotations

from collections.abc import Mapping

from attnbench.spec import Workload
from attnbench.workloads.pi0_surroundings import PI0_STEPS
from attnbench.workloads.surroundings import Around, Surroundings, same_tokens

GEMMA_DEPTH = 4
"""Blocks of the step `gemma-stack`: enough for what is between them, few enough for one device."""


def gemma_width(w: Workload) -> int:
    """Of a token in the step `gemma-stack`: 2048 of Gemma-2B's 8 heads of 256."""
    return w.heads * w.head_dim


def _multihead(w: Workload) -> Around:
    width = w.heads * w.head_dim
    return same_tokens(w, width, width * (2 * width + 2 * w.kv_heads * w.head_dim))


def _gemma_stack(w: Workload) -> Around:
    """Projections of all blocks, and a gated feed-forward that is 8 times as wide."""
    width = gemma_width(w)
    weights = GEMMA_DEPTH * (2 * width * width + 2 * width * w.kv_heads * w.head_dim + 3 * width * 8 * width)
    return same_tokens(w, width, weights, layers=GEMMA_DEPTH)


STEPS: Mapping[str, Surroundings] = {
    "multihead": Surroundings("x in, x out: projections to Q, K and V, attention, projection back", _multihead),
    "gemma-stack": Surroundings("four Gemma blocks and a final norm, recomputed in the backward pass", _gemma_stack),
    **PI0_STEPS,
}
