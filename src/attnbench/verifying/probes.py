"""Inputs made to show a wrong kernel: small mistakes change their outputs far more than rounding does.

`counted`: all keys of a row weigh the same up to a known ratio and their values cancel, whatever run of keys a row
sees. What is left of a row is the size of one key, so that one key more or less changes it by as much, at any length
and in any precision; the logits are large (near the soft cap if there is one) and exact in 16 bits.

`counted_pairs`: the same for gradients. Queries and keys lie in different channels, so all logits are 0 and every
visible key of a row weighs the same; each pair of a query and a key adds about one unit to one element of every
gradient.

`shifted`: `counted` with a constant taken from all logits of a row, which changes no weight: in some heads half of the
keys are zeros and their logits exactly 0, in the others all logits lie near -20.

`steep`: logits far below 0 that fall from key to key, in every second head from the last key to the first. A running
maximum that starts at 0, a mask value that is finite, or one that is added, leaves hidden keys or nothing in the row.

`pointed`: each query points at two keys, one of them at an edge of what it sees, just inside or just outside, so that a
single pair carries the row and its gradients.

`zeros`: normal inputs in which whole tokens are zeros, in all heads: queries, keys, values, and keys with their values,
the last tokens among them. A kernel that takes a token of zeros for padding leaves it out.

`sinks`: as in language models, one key in many has nearly all the weight of a row and a value of zeros, so that the
output is made of the light keys alone. A kernel that leaves out keys of little weight leaves out the row.
"""

from __future__ import annotations

from functools import partial
from math import ceil, floor, inf, lcm, log, log2, tanh
from typing import Any

import array_api_compat
import numpy as np

from attnbench.frameworks import Framework, Inputs
from attnbench.masks import Dilated, Mask, MaskShape
from attnbench.spec import DTYPE_BYTES, Workload

LARGE_LOGIT = 20.0
NEAR_CAP = 0.9
"""Share of the soft cap that logits of `counted` reach."""
RUNS = (1, 2, 3, 5)
"""Keys of one sign in a row, by channel: a block of keys that is left out does not cancel in every channel."""
BEGUN = 4
"""Keys at the beginning whose values are drawn at random."""
STEPS = {16: (4, 5, 6, 7), 64: (4, 8), 128: (4, 8)}
"""Ratio of the two kinds of keys -> sizes of queries, in quarters: together few bits, so that 16 bits hold every logit
exactly."""
WIDEST_GAP = 2.0
"""Largest gap between the logits of the two kinds of keys, if a finer ratio can make it smaller."""
LONGEST_RUN = 64
MOST_TERMS = {"float16": 1 << 15, "bfloat16": 1 << 9}
"""Pairs that add to one element of a gradient of `counted_pairs`, at most: among more, rounding hides a single one."""
LARGEST_DOUT = 256.0
POINTED = 12.0
"""Least logit of the keys that `pointed` queries point at, beyond any clamp that would pass unseen."""
SHARP_ENOUGH = 24.0
MOST_CAPS = 4
"""Logit of keys that `pointed` queries point at, in soft caps, if the cap is below 1: beyond, its slope is nothing."""
LARGEST_ROUNDED = 90.0
"""Logit of 16-bit inputs that point at keys, at most: a plain implementation rounds it to a quarter. A soft cap that
needs larger ones is left to the other checks."""
RUNGS = 128
"""Different logits of `steep`, all of them exact in 16 bits: -RUNGS to 1 - 2 * RUNGS steps."""
STEEPEST, WEIGHTED_STEEPEST = 256.0, 16.0
"""Step between logits of `steep`, at most; smaller if a mask adds log-weights, which large logits would round away."""
LARGEST = {"float16": 65504.0, "bfloat16": 2.0**60, "float32": 2.0**60, "float64": 2.0**500}
"""Largest elements of inputs: of float16 what it holds, else what can be squared and summed in float32 or float64."""
SATURATED = 12.0
"""Times the soft cap that all logits of `steep` are beyond, so that its tangent hyperbolic is -1 for all."""
FINITE_SHARE = 0.25
"""Share of the largest number of float16 that the product of a typical query and key may reach; some are larger."""
LARGEST_NORMAL = 8.0
"""Bound of the sum of two normal numbers."""
TAIL = 8
"""One token in so many is at the end of the keys that `zeros` pads with zeros."""
SINKS, LIGHT = 1 / 64, 0.008
"""Share of heavy keys of `sinks`, and what all light keys of a row together weigh."""
LARGEST_SINK = {"float16": 9.0}
"""Logit of heavy keys, where light ones have 0, at most: weights of light keys are still normal numbers."""
LOOKED_UP_PAIRS = 1 << 26
"""Pairs of a mask without a formula for its edges that are looked at to find them."""


def counted(
    framework: Framework, device: str, workload: Workload, like: Inputs, seed: int, shifted: bool = False
) -> Inputs:
    """Draw the input set, bshd; dO is that of `like`. `shifted`: the same with lower logits, of the same weights if
    there is no soft cap."""
    w, rng = workload, np.random.default_rng([seed, 11])

    def put(values: np.ndarray) -> Any:
        return framework.array(values.astype(np.float32), w.dtype, device)

    signs = partial(_signs, rng)
    order = _key_order(w.visible_mask, w.mask_shape)
    kind = order // 2 % 2
    rank = 2 * (order // 4) + order % 2
    width = np.array([RUNS[n % len(RUNS)] for n in range(w.value_dim)])
    code = 1 - 2 * ((rank[..., None] + rng.integers(2 * width, size=(2, w.value_dim))[kind]) // width % 2)
    # If all rows see all keys, both kinds might cancel: then a ratio between them would not show.
    begun = order < BEGUN
    code[begun] = signs(BEGUN, w.value_dim)[order[begun]]
    ratio, power = _sizes(w)
    up, down = 2.0 ** ceil(power / 2), 2.0 ** floor(power / 2)
    axis = signs(w.batch, w.kv_heads, w.head_dim)
    axis[..., rng.permutation(w.head_dim)[_channels(w) :]] = 0
    steps = np.array(STEPS[ratio], np.float32)
    q = put(steps[rng.integers(len(steps), size=(w.q_len, w.heads), dtype=np.int8)] / 4)[None, :, :, None] * put(
        up * np.repeat(axis, w.group, axis=1)
    )[:, None]  # fmt: skip
    size = put((ratio - kind) / ratio)[:, :, None, None]
    if shifted:
        size = size - put(1 + np.add.outer(np.arange(w.batch), np.arange(w.kv_heads)) % 2)[:, None, :, None]
    k = size * put(down * axis)[:, None]
    v = put(code)[:, :, None] * put(signs(w.batch, w.kv_heads, w.value_dim))[:, None]
    return Inputs(q, k, v, like.dout)


def _signs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.choice(np.array([-1, 1], np.float32), shape)


def _sizes(w: Workload) -> tuple[int, int]:
    """Return (ratio, power): the kinds of keys are as ratio to ratio - 1, and q times k is multiplied by 2 ** power."""
    target = min(LARGE_LOGIT if w.softcap is None else NEAR_CAP * w.softcap, _largest_logit(w))
    slope = 1.0 if w.softcap is None else 1 - tanh(NEAR_CAP) ** 2
    ratio = next((n for n in STEPS if target * slope / n <= WIDEST_GAP), max(STEPS))
    unit = abs(w.softmax_scale) * _channels(w) * sum(STEPS[ratio]) / len(STEPS[ratio]) / 4
    return ratio, round(log2(target / unit)) if unit else 0


def _channels(w: Workload) -> int:
    """Return the number of channels in use: a power of two, so that sums over them stay exact."""
    return 1 << (w.head_dim.bit_length() - 1)


def can_be_steep(w: Workload) -> bool:
    """Return whether `steep` shows anything: without a soft cap, or with one that makes all its logits equal."""
    least = RUNGS * abs(w.softmax_scale) * _channels(w) * 2.0 ** _steep_power(w)
    return w.softcap is None or least >= SATURATED * w.softcap


def steep(framework: Framework, device: str, workload: Workload, seed: int) -> Inputs:
    """Draw the input set, bshd. All key/value heads of one parity have the same numbers, in all batch rows."""
    w, rng = workload, np.random.default_rng([seed, 16])
    power = _steep_power(w)

    def put(values: np.ndarray, *shape: int) -> Any:
        narrow = framework.array(values.astype(np.float32), w.dtype, device)
        return framework.snapshot((array_api_compat.array_namespace(narrow).broadcast_to(narrow, shape),))[0]

    signs = partial(_signs, rng)
    axis = signs(w.head_dim)
    axis[rng.permutation(w.head_dim)[_channels(w) :]] = 0
    rung = np.arange(w.kv_len) * RUNGS // w.kv_len
    ladder = np.stack([rung, rung[::-1]], axis=1)[:, np.arange(w.kv_heads) % 2]
    up, down = 2.0 ** ceil(power / 2), 2.0 ** floor(power / 2)
    sign = -1.0 if w.softmax_scale < 0 else 1.0
    return Inputs(
        put(sign * up * axis, w.batch, w.q_len, w.heads, w.head_dim),
        put(-down * (RUNGS + ladder)[..., None] * axis, w.batch, w.kv_len, w.kv_heads, w.head_dim),
        put(signs(w.kv_len, 1, w.value_dim), w.batch, w.kv_len, w.kv_heads, w.value_dim),
        put(signs(w.q_len, 1, w.value_dim), w.batch, w.q_len, w.heads, w.value_dim),
    )


def _steep_power(w: Workload) -> int:
    """Return the power of two by which q times k is multiplied: as far as its sum is finite in float16."""
    weighted = w.visible_mask.log_weight(w.mask_shape, np) is not None
    most = (WEIGHTED_STEEPEST if weighted else STEEPEST) / (abs(w.softmax_scale) or 1.0)
    if w.dtype == "float16":
        most = min(most, LARGEST["float16"] / (2 * RUNGS - 1))
    return floor(log2(most / _channels(w)))


def counted_pairs(framework: Framework, device: str, workload: Workload, reach: np.ndarray, seed: int) -> Inputs:
    """Draw the input set, bshd, for a head_dim of at least 2. `reach` [q_len] bounds how many keys each row sees."""
    w, rng = workload, np.random.default_rng([seed, 14])

    def put(values: np.ndarray) -> Any:
        return framework.array(values.astype(np.float32), w.dtype, device)

    def one_hot(tokens: int, heads: int, channels: np.ndarray, width: int, size: np.ndarray, keep: float) -> Any:
        """Make [batch, tokens, heads, width]: +-size in one of the channels of every token that is kept, else 0."""
        shape = (w.batch, tokens, heads)
        values = put(size * _signs(rng, *shape) * (rng.random(shape) < keep))
        chosen = channels[rng.integers(len(channels), size=shape)]
        lanes = framework.array(np.arange(width), "int32", device)
        here = framework.array(chosen, "int32", device)[..., None] == lanes
        return framework.cast(here, w.dtype) * values[..., None]

    channels = rng.permutation(w.head_dim)
    of_q, of_k = np.split(channels, [w.head_dim // 2])
    of_v = np.arange(w.value_dim)
    most = MOST_TERMS.get(w.dtype, float("inf"))
    rows = most * min(len(of_q), len(of_v)) / (w.q_len * w.group)
    length = np.array(2.0 ** round(-log2(abs(w.softmax_scale)))) if w.softmax_scale else np.array(1.0)
    length = np.minimum(length, 2.0 ** floor(log2(LARGEST[w.dtype])))
    per_key, per_head = put(_signs(rng, w.kv_len, w.value_dim)), put(_signs(rng, w.batch, w.kv_heads, w.value_dim))
    v = per_key[None, :, None] * per_head[:, None]
    return Inputs(
        one_hot(w.q_len, w.heads, of_q, w.head_dim, length, 1.0),
        one_hot(w.kv_len, w.kv_heads, of_k, w.head_dim, length, most * len(of_k) / w.kv_len),
        v,
        one_hot(w.q_len, w.heads, of_v, w.value_dim, pair_weight(reach) * reach[:, None], rows),
    )


def pair_weight(reach: np.ndarray) -> float:
    """Return the least that a visible pair of `counted_pairs` adds to an element of dV: a power of two."""
    most = max(1, int(reach.max()))
    return 2.0 ** floor(log2(min(1.0, LARGEST_DOUT / most)))


def _key_order(mask: Mask, shape: MaskShape) -> np.ndarray:
    """Return ranks of the keys, [batch or 1, kv_len], so that a row sees a run of ranks as far as possible.

    Keys that a mask names one by one are ranked apart from the hidden ones, strides in steps of their common multiple.
    """
    stride = 1
    filters = []
    for part in mask.split():
        if isinstance(part, Dilated):
            stride = min(LONGEST_RUN, lcm(stride, *part.dilation_rates))
        elif (keys := part.key_filter(shape)) is not None:
            filters.append(keys)
    if not filters:
        return np.arange(shape.kv_len)[None] // stride
    kept = np.logical_and.reduce(np.broadcast_arrays(*filters))
    return np.where(kept, np.cumsum(kept, axis=1), np.cumsum(~kept, axis=1)) // stride


def pointed(framework: Framework, device: str, workload: Workload, normal: Inputs, seed: int) -> Inputs:
    """Make the input set, bshd, of a normal one: V and dO are its own, and K is, times a power of two if the queries
    were too large."""
    w = workload
    first, second = (_places(w, keys) for keys in targets(w, seed))
    xp = array_api_compat.array_namespace(normal.k)
    flat = xp.reshape(normal.k, (-1, w.head_dim))
    length = pointed_logit(w) / (abs(w.softmax_scale) * w.head_dim or 1.0)
    sign = -1.0 if w.softmax_scale < 0 else 1.0
    power = ceil(log2(max(1.0, LARGEST_NORMAL * length / LARGEST[w.dtype])))
    picked = [flat[framework.namespace(device).asarray(keys)] for keys in (first, second)]
    q = framework.cast(framework.multiply(picked[0] + picked[1], np.array(sign * length / 2.0**power)), w.dtype)
    return normal._replace(q=q, k=framework.multiply(normal.k, np.array(2.0**power)) if power else normal.k)


def zeros(framework: Framework, workload: Workload, normal: Inputs, seed: int) -> Inputs:
    """Make the input set, bshd, of a normal one."""
    w, rng = workload, np.random.default_rng([seed, 17])
    kind = rng.integers(8, size=(w.batch, w.kv_len))
    kind[:, w.kv_len - w.kv_len // TAIL :] = 2
    of_q = np.add.outer(np.arange(w.batch), np.arange(w.q_len)) % 3 == 0
    empty = {"q": of_q, "k": (kind == 0) | (kind == 2), "v": (kind == 1) | (kind == 2)}
    kept = {name: (~tokens).astype(np.float32)[:, :, None, None] for name, tokens in empty.items()}
    return normal._replace(**{name: framework.multiply(getattr(normal, name), kept[name]) for name in kept})


def sinks(framework: Framework, device: str, workload: Workload, normal: Inputs, seed: int) -> Inputs:
    """Make the input set, bshd, of a normal one, whose V and dO are its own but for the zeros of heavy keys.

    Queries are one vector for each key/value head, times -1 if the scale is negative; a heavy key is that vector, and
    the others are nothing. Each value is shifted by 1, so that light keys do not cancel.
    """
    w, rng = workload, np.random.default_rng([seed, 18])
    heavy = rng.random(w.kv_len) < SINKS
    heavy[0] = True
    logit = sink_logit(w)
    channels = _channels(w)
    size = (logit / (channels * abs(w.softmax_scale))) ** 0.5 if w.softmax_scale else 1.0
    axis = np.zeros((w.kv_heads, w.head_dim), np.float32)
    axis[:, :channels] = size * rng.choice(np.array([-1, 1], np.float32), (w.kv_heads, channels))
    sign = -1.0 if w.softmax_scale < 0 else 1.0
    xp = array_api_compat.array_namespace(normal.v)

    def put(values: np.ndarray, *shape: int) -> Any:
        narrow = framework.array(values.astype(np.float32), w.dtype, device)
        return framework.snapshot((xp.broadcast_to(narrow, shape),))[0]

    q = put(np.repeat(sign * axis, w.group, axis=0), w.batch, w.q_len, w.heads, w.head_dim)
    k = put(heavy[:, None, None] * axis, w.batch, w.kv_len, w.kv_heads, w.head_dim)
    light = put((~heavy).astype(np.float32)[:, None, None], w.batch, w.kv_len, w.kv_heads, w.value_dim)
    return Inputs(q, k, (normal.v + light) * light, normal.dout)


def sink_logit(w: Workload) -> float:
    """Return the logit of heavy keys of `sinks`: the more light keys there are, the larger it is."""
    capped = inf if w.softcap is None else NEAR_CAP * w.softcap
    return min(log(w.kv_len / LIGHT), LARGEST_SINK.get(w.dtype, inf), capped, _largest_logit(w))


def pointed_logit(w: Workload) -> float:
    """Return the logit of keys that a query points at: all others together weigh less, as far as head_dim allows."""
    need, room = log(w.kv_len) + 3, w.head_dim / 2
    inside = 1 - 2 * need / room
    least = SHARP_ENOUGH if inside <= 0 else min(SHARP_ENOUGH, room * (1 - inside**0.5))
    near = 0.0 if w.softcap is None else NEAR_CAP * w.softcap
    if w.softcap is not None and w.softcap < 1:
        return min(MOST_CAPS * w.softcap, _largest_logit(w))
    large = max(POINTED, least, near if DTYPE_BYTES[w.dtype] > 2 or near <= LARGEST_ROUNDED else 0.0)
    return min(large, _largest_logit(w))


def _largest_logit(w: Workload) -> float:
    """Return the logit up to which q times k is finite in float16, before it is scaled; of other dtypes infinity."""
    return FINITE_SHARE * LARGEST["float16"] * abs(w.softmax_scale) if w.dtype == "float16" else inf


def _places(w: Workload, keys: np.ndarray) -> np.ndarray:
    """Return row numbers [batch, q, heads] among all keys of all key/value heads."""
    batch = np.arange(w.batch)[:, None, None]
    return (batch * w.kv_len + keys) * w.kv_heads + np.arange(w.heads) // w.group


def targets(w: Workload, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for every query the key at an edge and another visible one, [batch or 1, q, heads] each."""
    rng = np.random.default_rng([seed, 12])
    mask, shape = w.visible_mask, w.mask_shape
    if (runs := mask.runs(shape)) is not None:
        low, high = (edge[..., None] for edge in runs)
        return _of_intervals(low, high, w, rng)
    batch = w.batch if mask.per_batch else 1
    first, second = (rng.integers(w.kv_len, size=(batch, w.q_len, w.heads)) for _ in range(2))
    heads = w.heads if mask.per_head else 1
    per_row = batch * heads * w.kv_len
    rows = rng.permutation(w.q_len)[: max(1, LOOKED_UP_PAIRS // per_row)]
    step = max(1, (1 << 22) // per_row)
    for some in (np.sort(rows[n : n + step]) for n in range(0, len(rows), step)):
        seen = mask.array(shape, some)
        first[:, some], second[:, some] = (
            np.broadcast_to(x.transpose(0, 2, 1), (batch, len(some), w.heads)) for x in _of_array(seen, rng)
        )
    return first, second


def _of_intervals(
    low: np.ndarray, high: np.ndarray, w: Workload, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    sizes = (len(low), w.q_len, w.heads)
    choice = rng.integers(4, size=sizes, dtype=np.int8)
    edges = np.choose(choice, np.broadcast_arrays(low, high - 1, low - 1, high))
    edges = np.where((edges >= 0) & (edges < w.kv_len), edges, np.where(choice % 2, high - 1, low))
    inside = low + (rng.random(sizes) * (high - low)).astype(np.int64)
    return np.clip(edges, 0, w.kv_len - 1), np.clip(inside, 0, w.kv_len - 1)


def _of_array(seen: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return for visibility [b, h, rows, keys] a key beside a change of visibility, and a visible one, [b, h, rows]
    each.

    If nothing changes within a row, the first one is any visible key.
    """
    first, second = (np.argmax((rng.random(seen.shape, np.float32) + 0.5) * seen, axis=-1) for _ in range(2))
    change = seen[..., 1:] != seen[..., :-1]
    if change.any():
        noise = rng.random(change.shape, np.float32) + 0.5
        beside = np.argmax(noise * change, axis=-1) + rng.integers(2, size=first.shape)
        first = np.where(change.any(axis=-1), beside, first)
    return first, second
