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


def _multihead_width(w: Workload) -> int:
    return w.heads * w.head_dim


def _multihead_weights(w: Workload) -> int:
    return _multihead_width(w) * (2 * _multihead_width(w) + 2 * w.kv_heads * w.head_dim)


STEPS: Mapping[str, Surroundings] = {
    "multihead": Surroundings(
        "x in, x out: projections to Q, K and V, attention, projection back", _multihead_width, _multihead_weights
    ),
}
