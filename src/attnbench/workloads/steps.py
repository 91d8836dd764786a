"""Steps: computations that attention is a part of, and what they cost around it. A workload names one in `step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from attnbench.spec import Workload


class Surroundings(Struct, frozen=True):
    """What is around the attention."""

    description: str
    width: Callable[[Workload], int]
    """Of a token's vector, in and out."""
    weights: Callable[[Workload], int]
    """Numbers that every token is multiplied with, once each."""
    layers: int = 1
    """How often the attention is computed."""


def _multihead_width(w: Workload) -> int:
    return w.heads * w.head_dim


def _multihead_weights(w: Workload) -> int:
    return _multihead_width(w) * (2 * _multihead_width(w) + 2 * w.kv_heads * w.head_dim)


GEMMA_DEPTH = 4
"""Blocks of the step `gemma-stack`: enough for what is between them, few enough for one device."""


def gemma_width(w: Workload) -> int:
    """Of a token in the step `gemma-stack`: 2048 of Gemma-2B's 8 heads of 256."""
    return w.heads * w.head_dim


def _gemma_weights(w: Workload) -> int:
    """Of all blocks: projections, and a gated feed-forward that is 8 times as wide."""
    width = gemma_width(w)
    return GEMMA_DEPTH * (2 * width * width + 2 * width * w.kv_heads * w.head_dim + 3 * width * 8 * width)


STEPS: Mapping[str, Surroundings] = {
    "multihead": Surroundings(
        "x in, x out: projections to Q, K and V, attention, projection back", _multihead_width, _multihead_weights
    ),
    "gemma-stack": Surroundings(
        "four Gemma blocks and a final norm, recomputed in the backward pass",
        gemma_width,
        _gemma_weights,
        layers=GEMMA_DEPTH,
    ),
}
