"""Q, K, V and dO of a workload as NumPy arrays: fresh for every seed, the same for the same seed on any machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from attnbench.spec import Workload
from attnbench.workloads.structured import structured

CHUNK = 1 << 22
"""Elements drawn from one stream. Streams are independent, so that big arrays fill on all cores and never repeat."""
RAMP = 0.01
AMPLITUDE = 0.1
LARGEST_FLOAT16_VALUE = 1000.0
"""Of a tangent near its poles: float16 ends at 65504."""


class Drawn(NamedTuple):
    """Layout bshd; float32, or float64 when the workload is. Rounding to 16 bits is the framework's part."""

    q: Float[np.ndarray, "b q h d"]
    k: Float[np.ndarray, "b kv g d"]
    v: Float[np.ndarray, "b kv g dv"]
    dout: Float[np.ndarray, "b q h dv"]


def draw(workload: Workload, seed: int, scale: float = 1.0) -> Drawn:
    """Inputs of one call. `scale` multiplies Q, K and V (stability checks), never dO.

    `sincostan` is the third founding document's q = 0.1 sin(0.01 i), k = 0.1 cos(0.01 i), v = 0.1 tan(0.01 i), i being
    the flat index in bshd. Seed 0 starts at i = 0 as there; any other seed starts elsewhere on the ramp, so that no two
    seeds share a result. The tangent is kept as it was, poles and all (in float16 up to 1000): near them V
    reaches hundreds. dO is normal.
    `structured` draws Q and K with sinks, verticals, slashes and needles (see workloads/structured.py), V normal.
    """
    w = workload
    dtype = np.dtype(np.float64 if w.dtype == "float64" else np.float32)
    q_shape, out_shape = ((w.batch, w.q_len, w.heads, dim) for dim in (w.head_dim, w.value_dim))
    k_shape, v_shape = ((w.batch, w.kv_len, w.kv_heads, dim) for dim in (w.head_dim, w.value_dim))
    dout = _normal(out_shape, dtype, seed, stream=3)
    if w.inputs == "sincostan":
        start = 0 if seed == 0 else int(np.random.default_rng(seed).integers(1, 1 << 20))
        waves = zip((q_shape, k_shape, v_shape), (np.sin, np.cos, np.tan))
        q, k, v = (_ramp(shape, dtype, wave, start) for shape, wave in waves)
        if w.dtype == "float16":
            v = np.clip(v, -LARGEST_FLOAT16_VALUE, LARGEST_FLOAT16_VALUE)
    elif w.inputs == "structured":
        q, k = (array.astype(dtype) for array in structured(w, seed))
        v = _normal(v_shape, dtype, seed, stream=2)
    else:
        q, k, v = (_normal(shape, dtype, seed, stream) for stream, shape in enumerate((q_shape, k_shape, v_shape)))
    if scale != 1.0:
        q, k, v = (array * dtype.type(scale) for array in (q, k, v))
    return Drawn(q, k, v, dout)


def _normal(shape: tuple[int, ...], dtype: np.dtype, seed: int, stream: int) -> np.ndarray:
    flat = np.empty(int(np.prod(shape)), dtype)

    def fill(chunk: int) -> None:
        bits = np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(stream, chunk)))
        part = flat[chunk * CHUNK : (chunk + 1) * CHUNK]
        np.random.Generator(bits).standard_normal(out=part, dtype=dtype.type)

    chunks = range(-(-flat.size // CHUNK))
    if len(chunks) == 1:
        fill(0)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(fill, chunks))
    return flat.reshape(shape)


def _ramp(shape: tuple[int, ...], dtype: np.dtype, wave: Callable[[np.ndarray], np.ndarray], start: int) -> np.ndarray:
    position = np.arange(start, start + int(np.prod(shape)), dtype=np.float64)
    return (AMPLITUDE * wave(RAMP * position)).astype(dtype).reshape(shape)
