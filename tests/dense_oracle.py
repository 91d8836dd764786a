"""Attention pair by pair in plain Python, from the page's definitions alone: shares no line with the package.

Every case is a mask of the package beside the same rule written out as `log_weight(place) -> float` (-inf: not seen).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from attnbench import masks
from attnbench.spec import Workload

HIDDEN = -math.inf


class Place(NamedTuple):
    """One (query, key) pair of one head, and the sizes around it."""

    b: int
    h: int
    i: int
    j: int
    heads: int
    q_len: int
    kv_len: int

    @property
    def row(self) -> int:
        """The query's position among the keys, last query at the last key."""
        return self.i + self.kv_len - self.q_len


Rule = Callable[[Place], float]


class Case(NamedTuple):
    name: str
    mask: masks.AnyMask
    rule: Rule
    square: bool = True
    """Whether the rule needs q_len == kv_len."""


def seen(condition: bool) -> float:
    return 0.0 if condition else HIDDEN


def dilated_rule(segments: list[int], rates: list[int], group_offsets: bool) -> Rule:
    def rule(p: Place) -> float:
        count = 0
        for w, r in zip(segments, rates):
            offset = p.h // math.ceil(p.heads / r) if group_offsets else p.h % r
            kept = range(p.i // w * w + offset, p.i // w * w + w, r)
            count += p.i in kept and p.j in kept
        return math.log(count) if count else HIDDEN

    return rule


def _data(tokens: int = 14) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    bias = rng.standard_normal((2, 4, tokens, tokens)).astype(np.float32)
    return {
        "ids": np.cumsum(rng.random((2, tokens)) < 0.3, axis=1),
        "documents": rng.integers(0, 3, (2, tokens)),
        "keys": rng.random((2, tokens)) < 0.7,
        "kept": rng.random((2, 4, 3, 3)) < 0.6,
        "bias": np.where(rng.random(bias.shape) < 0.2, -np.inf, bias).astype(np.float32),
    }


def square_cases(tokens: int = 14) -> list[Case]:
    """Batch 2, 4 heads, that many tokens on both sides."""
    d = _data(tokens)
    both = dilated_rule([4, 14], [1, 3], False)
    return [
        Case("full", masks.full(), lambda p: 0.0),
        Case("block_causal", masks.block_causal(d["ids"]), lambda p: seen(d["ids"][p.b, p.j] <= d["ids"][p.b, p.i])),
        Case(
            "documents",
            masks.documents(d["documents"]),
            lambda p: seen(d["documents"][p.b, p.i] == d["documents"][p.b, p.j]),
        ),
        Case("lengths, an empty row", masks.lengths([5, 0]), lambda p: seen(p.j < (5, 0)[p.b])),
        Case("holes", masks.valid(d["keys"]), lambda p: seen(bool(d["keys"][p.b, p.j]))),
        Case("blocks", masks.blocks(d["kept"], 5), lambda p: seen(bool(d["kept"][p.b, p.h, p.i // 5, p.j // 5]))),
        Case("bias", masks.dense(d["bias"]), lambda p: float(d["bias"][p.b, p.h, p.i, p.j])),
        Case("dilated, mod", masks.dilated([4, 14], [1, 3]), both),
        Case("dilated, group", masks.dilated([4, 14], [1, 3], "group"), dilated_rule([4, 14], [1, 3], True)),
        Case("dilated, skipped rows", masks.dilated([6], [2]), dilated_rule([6], [2], False)),
        Case("dilated twice", masks.dilated([7, 7], [2, 2]), dilated_rule([7, 7], [2, 2], False)),
        Case(
            "causal and dilated",
            masks.causal() & masks.dilated([4, 14], [1, 3]),
            lambda p: both(p) if p.j <= p.i else HIDDEN,
        ),
        Case(
            "causal and bias", masks.causal() & masks.dense(d["bias"]),
            lambda p: float(d["bias"][p.b, p.h, p.i, p.j]) if p.j <= p.i else HIDDEN,
        ),
    ]  # fmt: skip


def aligned_cases() -> list[Case]:
    """Rules that know two alignments; for any q_len and kv_len."""
    return [
        Case("causal", masks.causal(), lambda p: seen(p.j <= p.row), False),
        Case("causal, top-left", masks.causal("top-left"), lambda p: seen(p.j <= p.i), False),
        Case("window", masks.window(3, 1), lambda p: seen(p.row - 3 <= p.j <= p.row + 1), False),
        Case("window, top-left", masks.window(3, 1, "top-left"), lambda p: seen(p.i - 3 <= p.j <= p.i + 1), False),
        Case("window, open", masks.window(None, 2), lambda p: seen(p.j <= p.row + 2), False),
        Case("prefix", masks.prefix(4), lambda p: seen(p.j < 4 or p.j <= p.row), False),
        Case("prefix, top-left", masks.prefix(4, "top-left"), lambda p: seen(p.j < 4 or p.j <= p.i), False),
    ]


def log_weights(workload: Workload, rule: Rule) -> np.ndarray:
    """[b, h, i, j]"""
    w = workload
    sizes = (w.batch, w.heads, w.q_len, w.kv_len)
    flat = [rule(Place(*index, w.heads, w.q_len, w.kv_len)) for index in np.ndindex(*sizes)]
    return np.array(flat).reshape(sizes)


def attention(workload: Workload, rule: Rule, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """(out [b, i, h, e], lse [b, h, i]): one row at a time, over the keys that it sees and no others."""
    w, bias = workload, log_weights(workload, rule)
    scale = w.head_dim**-0.5 if w.scale is None else w.scale
    out = np.zeros((w.batch, w.q_len, w.heads, w.value_dim))
    lse = np.full((w.batch, w.heads, w.q_len), -np.inf)
    for b, h, i in np.ndindex(w.batch, w.heads, w.q_len):
        g = h // (w.heads // w.kv_heads)
        keys = [j for j in range(w.kv_len) if bias[b, h, i, j] > HIDDEN]
        logits = [scale * float(np.dot(q[b, i, h], k[b, j, g])) for j in keys]
        if w.softcap is not None:
            logits = [w.softcap * math.tanh(x / w.softcap) for x in logits]
        logits = [x + bias[b, h, i, j] for x, j in zip(logits, keys)]
        if not keys:
            continue
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        out[b, i, h] = sum(p * v[b, j, g] for p, j in zip(weights, keys)) / sum(weights)
        lse[b, h, i] = top + math.log(sum(weights))
    return out, lse
