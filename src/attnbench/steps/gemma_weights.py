"""Weights of Gemma's blocks by openpi's names: drawn, and as arrays of one layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnbench.spec import Workload

PROJECTIONS = ("q_einsum", "kv_einsum", "attn_vec_einsum")
FEED_FORWARD = ("gating_einsum", "linear")
WEIGHTS = (*PROJECTIONS, *FEED_FORWARD)
NORMS = ("pre_attention_norm", "pre_ffw_norm")
Normal = Callable[..., np.ndarray]


def normals(seed: int) -> Normal:
    """Numbers of variance 1 / fan_in for a shape."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(fan_in**-0.5)

    return normal


def drawn(
    normal: Normal, w: Workload, width: int, wide: int, lead: tuple[int, ...], suffix: str = ""
) -> dict[str, np.ndarray]:
    """Of one expert, `lead` being the axis of layers or none: variance 1 / fan-in, norms near 1."""
    inside = w.heads * w.head_dim
    found = {
        "q_einsum": normal(*lead, w.heads, width, w.head_dim, fan_in=width),
        "kv_einsum": normal(*lead, 2, w.kv_heads, width, w.head_dim, fan_in=width),
        "attn_vec_einsum": normal(*lead, w.heads, w.head_dim, width, fan_in=inside),
        "gating_einsum": normal(*lead, 2, width, wide, fan_in=width),
        "linear": normal(*lead, wide, width, fan_in=wide),
        "pre_attention_norm": normal(*lead, width, fan_in=100),
        "pre_ffw_norm": normal(*lead, width, fan_in=100),
    }
    return {name + suffix: array for name, array in found.items()}


def of_layer(arrays: Mapping[str, Any], layer: int | None = None, suffix: str = "") -> dict[str, Any]:
    """Name -> weight of one layer, without the expert's suffix; `layer` is None where there is no axis of layers."""
    named = {name: arrays[name + suffix] for name in (*WEIGHTS, *NORMS) if name + suffix in arrays}
    return named if layer is None else {name: array[layer] for name, array in named.items()}
