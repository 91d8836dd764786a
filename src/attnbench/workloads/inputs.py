"""Inputs of a workload, drawn from a seed: normals, ramps, or the patterns of attention in trained models.

Structured inputs have sinks (first tokens that all queries see), verticals (other such tokens), slashes (keys at a
fixed distance, near and far) and needles (single keys that few queries ask for).
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnbench.errors import InvalidWorkload
from attnbench.spec import Workload

if TYPE_CHECKING:
    from jaxtyping import Float

CHUNK = 1 << 22
"""Elements drawn from one stream. Streams are independent, so that large arrays fill on all cores and never repeat."""
RAMP = 0.01
AMPLITUDE = 0.1
LARGEST_FLOAT16_VALUE = 1000.0
"""Largest tangent near its poles in float16, which ends at 65504."""


class Drawn(NamedTuple):
    """Arrays in layout bshd, float64 if the workload is, else float32; the framework rounds to 16 bits."""

    q: Float[np.ndarray, "b q h d"]
    k: Float[np.ndarray, "b kv g d"]
    v: Float[np.ndarray, "b kv g dv"]
    dout: Float[np.ndarray, "b q h dv"]


def draw(workload: Workload, seed: int, scale: float = 1.0) -> Drawn:
    """Return the inputs of a call. `scale` multiplies Q, K and V (stability checks), never dO.

    `sincostan` is q = 0.1 sin(0.01 i), k = 0.1 cos(0.01 i), v = 0.1 tan(0.01 i), i being the flat index in bshd. Seed 0
    starts at i = 0; any other seed starts elsewhere on the ramp, so that no two seeds share a result. Near the
    tangent's poles V reaches hundreds (in float16 up to 1000). dO is normal. `structured` draws Q and K with sinks,
    verticals, slashes and needles, and V normal.
    """
    w = workload
    dtype = np.dtype(np.float64 if w.dtype == "float64" else np.float32)
    q_shape, out_shape = ((w.batch, w.q_len, w.heads, dim) for dim in (w.head_dim, w.value_dim))
    k_shape, v_shape = ((w.batch, w.kv_len, w.kv_heads, dim) for dim in (w.head_dim, w.value_dim))
    dout = _normal(out_shape, dtype, seed, stream=3)
    if w.inputs == "sincostan":
        start = 0 if seed == 0 else int(np.random.default_rng(seed).integers(1, 1 << 20))
        q, k, v = (
            (AMPLITUDE * wave(RAMP * np.arange(start, start + math.prod(shape), dtype=np.float64)))
            .astype(dtype)
            .reshape(shape)
            for shape, wave in ((q_shape, np.sin), (k_shape, np.cos), (v_shape, np.tan))
        )
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


SMALLEST_DIM = 16
SINKS = 4
TOKENS_PER_VERTICAL, TOKENS_PER_NEEDLE = 1024, 512
ASKING = 64
"""Number of consecutive queries that look for a needle."""
SLASH_WIDTH = 32
"""Number of tokens that have most of a slash's weight; also the slash's shortest wavelength."""
WEIGHTS = {"sink": 4.0, "vertical": 4.0, "near": 24.0, "far": 12.0, "needle": 8.0}
"""Weight of a feature's keys in units of the whole background; for a slash, as if all its width had its peak weight."""
SPREAD = 0.15
"""Largest relative difference between heads in the strength of a feature: factors of the logit in 1 +- SPREAD."""
DIRECTIONS = 20_000
"""Seed of the properties that are fixed for a head."""


class Frame(NamedTuple):
    """Orthonormal basis of one key/value head, whose columns belong to the features in turn."""

    basis: Float[np.ndarray, "d d"]
    waves: int
    """Number of wavelengths of each of the two slashes; each takes a cosine and a sine column."""
    codes: int
    """Number of columns for the codes of needles."""

    @property
    def background(self) -> int:
        """Number of columns left for noise."""
        return len(self.basis) - 4 * self.waves - self.codes - 2


def structured(workload: Workload, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return q [b, t, h, d] and k [b, s, g, d] in layout bshd, float64."""
    w = workload
    if w.head_dim < SMALLEST_DIM or w.softmax_scale <= 0:
        raise InvalidWorkload(f"structured inputs need head_dim {SMALLEST_DIM} or more and a positive scale.")
    q = np.empty((w.batch, w.q_len, w.heads, w.head_dim))
    k = np.empty((w.batch, w.kv_len, w.kv_heads, w.head_dim))
    for group in range(w.kv_heads):
        fixed = np.random.default_rng([DIRECTIONS, group, w.head_dim])
        basis, _ = np.linalg.qr(fixed.standard_normal((w.head_dim, w.head_dim)))
        frame = Frame(basis, w.head_dim // 8, w.head_dim // 8)
        for batch in range(w.batch):
            rng = np.random.default_rng([seed, batch, group])
            keys, codes, places = _keys(w, frame, rng)
            k[batch, :, group] = keys @ frame.basis.T
            for head in range(group * w.group, (group + 1) * w.group):
                q[batch, :, head] = _queries(w, frame, head, codes, places, rng) @ frame.basis.T
    return q, k


def _amplitude(w: Workload, feature: str, keys: int) -> float:
    """Return the amplitude of the feature in a query and in each of its keys."""
    logit = math.log(w.kv_len) + 0.5 + math.log(WEIGHTS[feature] / keys)
    return math.sqrt(max(logit, 1.0) / w.softmax_scale)


def _noise(w: Workload, frame: Frame, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Return noise columns whose products have a logit of variance 1."""
    return rng.standard_normal((tokens, frame.background)) / math.sqrt(w.softmax_scale * math.sqrt(frame.background))


def _positions(w: Workload, frame: Frame, tokens: np.ndarray) -> np.ndarray:
    """Return [tokens, 2 * waves]: cosines and sines whose product decreases with distance on all scales."""
    longest = max(w.kv_len, 2 * SLASH_WIDTH)
    lengths = np.geomspace(SLASH_WIDTH, longest, frame.waves)
    phase = 2 * np.pi * tokens[:, None] / lengths
    return np.concatenate([np.cos(phase), np.sin(phase)], axis=1) / math.sqrt(frame.waves)


def _keys(w: Workload, frame: Frame, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the features of all keys, and the codes and places of the needles."""
    places = np.arange(w.kv_len)
    slashes = _positions(w, frame, places)
    near, far = (_amplitude(w, name, SLASH_WIDTH) * slashes for name in ("near", "far"))
    sinks = np.where(places < SINKS, _amplitude(w, "sink", SINKS), 0.0)
    count = max(1, w.kv_len // TOKENS_PER_VERTICAL)
    verticals = np.zeros(w.kv_len)
    verticals[rng.choice(w.kv_len, size=count, replace=False)] = _amplitude(w, "vertical", count)
    hidden = rng.choice(w.kv_len, size=max(1, w.kv_len // TOKENS_PER_NEEDLE), replace=False)
    codes = rng.choice([-1.0, 1.0], (len(hidden), frame.codes)) / math.sqrt(frame.codes)
    needles = np.zeros((w.kv_len, frame.codes))
    needles[hidden] = _amplitude(w, "needle", 1) * codes
    columns = [near, far, sinks[:, None], verticals[:, None], needles, _noise(w, frame, w.kv_len, rng)]
    return np.concatenate(columns, axis=1), codes, hidden


def _queries(
    w: Workload, frame: Frame, head: int, codes: np.ndarray, hidden: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return the features of all queries of a head.

    Positions count as under a bottom-right mask; a needle is asked for after its place.
    """
    fixed = np.random.default_rng([DIRECTIONS, head, 1])
    strength = 1 + fixed.uniform(-SPREAD, SPREAD, 5)
    distance = int(fixed.uniform(0.1, 0.4) * w.kv_len)
    places = np.arange(w.q_len) + w.kv_len - w.q_len
    near, far = (
        strength[n] * _amplitude(w, name, SLASH_WIDTH) * _positions(w, frame, places - back)
        for n, (name, back) in enumerate((("near", 0), ("far", distance)))
    )
    count = max(1, w.kv_len // TOKENS_PER_VERTICAL)
    always = [_amplitude(w, "sink", SINKS) * strength[2], _amplitude(w, "vertical", count) * strength[3]]
    asked = np.zeros((w.q_len, frame.codes))
    for code, place in zip(codes, hidden):
        first = rng.integers(max(place + w.q_len - w.kv_len, 0), w.q_len) if place + w.q_len >= w.kv_len else 0
        asked[first : first + ASKING] = strength[4] * _amplitude(w, "needle", 1) * code
    columns = [near, far, np.tile(always, (w.q_len, 1)), asked, _noise(w, frame, w.q_len, rng)]
    return np.concatenate(columns, axis=1)
