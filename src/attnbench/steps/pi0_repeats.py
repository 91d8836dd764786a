"""What is drawn of pi0's weights, and how the rest is made of it: billions of independent numbers would take minutes.

Two layers are drawn, which take turns over the depth, and a 41st of pi0-FAST's embedding table. A small model has no
more than that: where results are checked, nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnbench.spec import Workload
from attnbench.steps.gemma_weights import EXPERTS, NORMS, WEIGHTS
from attnbench.workloads.pi0_sizes import SMALL_DEPTH, WHOLE_VOCABULARY, depth, experts, vocabulary

DRAWN_LAYERS = SMALL_DEPTH
LAYERED = (*(f"{name}{end}" for end in EXPERTS for name in (*WEIGHTS, *NORMS)), "keys", "values")
TABLE = "input_embedding"
TABLE_REPEATS = {WHOLE_VOCABULARY: 41}


def drawn_rows(w: Workload) -> tuple[int, int]:
    """Of the embedding table, and their width."""
    return vocabulary(w) // TABLE_REPEATS.get(vocabulary(w), 1), experts(w)[0].width


def repeats(name: str, w: Workload) -> int:
    """How often a drawn array stands behind itself in the model."""
    if name in LAYERED:
        return depth(w) // DRAWN_LAYERS
    return TABLE_REPEATS.get(vocabulary(w), 1) if name == TABLE else 1


def whole(arrays: Mapping[str, Any], w: Workload, tile: Callable[..., Any]) -> dict[str, Any]:
    """All layers and the whole table, by NumPy's or JAX's `tile`."""
    times = {name: repeats(name, w) for name in arrays}
    return {n: one if times[n] == 1 else tile(one, (times[n],) + (1,) * (one.ndim - 1)) for n, one in arrays.items()}
