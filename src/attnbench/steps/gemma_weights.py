"""Weights of Gemma's blocks by openpi's names: drawn, and as arrays of one layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attnbench.spec import Workload

PROJECTIONS = ("q_einsum", "kv_einsum", "attn_vec_einsum")
FEED_FORWARD = ("gating_einsum", "linear")
WEIGHTS = (*PROJECTIONS, *FEED_FORWARD)
NORMS = ("pre_attention_norm", "pre_ffw_norm")
EXPERTS = ("", "_1")
"""The suffixes of pi0's two experts."""
Normal = Callable[..., np.ndarray]


def normals(seed: int) -> Normal:
    """Numbers of variance 1 / fan_in for a shape."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(fan_in**-0.5)

    return normal


def drawn(
    normal: Normal,
    w: Workload,
    width: int,
    wide: int,
    lead: tuple[int, ...],
    suffix: str = "",
    names: Sequence[str] = (*WEIGHTS, *NORMS),
) -> dict[str, np.ndarray]:
    """Of one expert, `lead` being the axis of layers or none: variance 1 / fan-in, norms near 1."""
    inside = w.heads * w.head_dim
    shapes = {
        "q_einsum": ((w.heads, width, w.head_dim), width),
        "kv_einsum": ((2, w.kv_heads, width, w.head_dim), width),
        "attn_vec_einsum": ((w.heads, w.head_dim, width), inside),
        "gating_einsum": ((2, width, wide), width),
        "linear": ((wide, width), wide),
        "pre_attention_norm": ((width,), 100),
        "pre_ffw_norm": ((width,), 100),
    }
    return {name + suffix: normal(*lead, *shapes[name][0], fan_in=shapes[name][1]) for name in names}


def of_layer(arrays: Mapping[str, Any], layer: int | None = None, suffix: str = "") -> dict[str, Any]:
    """Name -> weight of one layer, without the expert's suffix; `layer` is None where there is no axis of layers."""
    named = {name: arrays[name + suffix] for name in (*WEIGHTS, *NORMS) if name + suffix in arrays}
    return named if layer is None else {name: array[layer] for name, array in named.items()}
