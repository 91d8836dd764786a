"""Gemma's layers in float64 for the references of steps, written out apart from the models; torch differentiates them.

`store` stands wherever an implementation writes to memory: see `storing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attnbench.spec import Workload
from attnbench.steps.base import Rounded

BASE = 10_000.0
Weights = Mapping[str, Any]
Store = Callable[[Any], Any]
Cache = tuple[Any, Any]


def storing(rounded: Rounded) -> Store:
    """What is rounded on the way is rounded on the way back too."""
    import torch

    class Stored(torch.autograd.Function):
        """What an implementation writes to memory and reads again."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return torch.tensor(rounded(x.numpy()))

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return torch.tensor(rounded(gradients[0].numpy()))

    return Stored.apply


def in_float32(rounded: Rounded) -> Rounded:
    """For what is held in float32 whatever the workload's precision; exact where `rounded` is."""
    third = np.full(1, 1 / 3)
    if np.array_equal(rounded(third), third):
        return rounded
    return lambda array: array.astype(np.float32).astype(np.float64)


def tensors(values: Mapping[str, np.ndarray], leaves: Sequence[str] = ()) -> dict[str, Any]:
    """float64, the leaves to be differentiated by; whole numbers stay whole."""
    import torch

    whole = {name: torch.tensor(one.astype(np.int64)) for name, one in values.items() if one.dtype.kind in "iu"}
    rest = {name: torch.tensor(np.asarray(one, np.float64)) for name, one in values.items() if name not in whole}
    for name in leaves:
        rest[name].requires_grad_()
    return whole | rest


def visible(w: Workload) -> Any:
    """[1, 1, q, kv] booleans of a mask that is the same for every row and head."""
    import torch

    places = [np.arange(size).reshape(shape) for size, shape in ((w.q_len, (1, 1, -1, 1)), (w.kv_len, (1, 1, 1, -1)))]
    first = np.zeros((1, 1, 1, 1), np.int64)
    return torch.tensor(np.asarray(w.visible_mask.predicate(w.mask_shape, np)(first, first, *places)))


def normed(x: Any, scale: Any) -> Any:
    """By the root of the mean square."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + scale)


def turned(x: Any, first: int) -> Any:
    """Half-split rotation by position, the first token standing at `first`; [b, t, n, h]."""
    import torch

    half = x.shape[-1] // 2
    angles = (first + np.arange(x.shape[1]))[:, None] / BASE ** (np.arange(half) / half)
    cos, sin = (torch.tensor(f(angles))[None, :, None] for f in (np.cos, np.sin))
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def attended(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Scaled queries [b, t, n, h] over k and v [b, s, k, h]."""
    import torch

    k, v = (one.repeat_interleave(q.shape[2] // one.shape[2], 2) for one in (k, v))
    logits = torch.einsum("btnh,bsnh->bnts", q, k).masked_fill(~seen, -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", logits.softmax(-1), v)


def joint_attention(
    xs: Sequence[Any],
    experts: Sequence[Weights],
    seen: Any,
    store: Store,
    *,
    first: int = 0,
    cache: Cache | None = None,
) -> tuple[list[Any], Cache]:
    """Tokens of each expert with its own projections, one attention over all and the cache before them."""
    import torch

    q = torch.cat([store(torch.einsum("btd,ndh->btnh", x, one["q_einsum"])) for x, one in zip(xs, experts)], 1)
    pairs = [store(torch.einsum("bsd,ckdh->cbskh", x, one["kv_einsum"])) for x, one in zip(xs, experts)]
    k, v = torch.cat(pairs, 2)
    q, k = store(turned(q, first) * q.shape[-1] ** -0.5), store(turned(k, first))
    if cache is not None:
        k, v = (torch.cat([old, new], 1) for old, new in zip(cache, (k, v)))
    parts = store(attended(q, k, v, seen)).split([x.shape[1] for x in xs], 1)
    outs = [store(torch.einsum("btnh,nhd->btd", part, one["attn_vec_einsum"])) for part, one in zip(parts, experts)]
    return outs, (k, v)


def fed(x: Any, weights: Weights, store: Store) -> Any:
    """The gated feed-forward layer."""
    import torch

    gate, value = (store(x @ one) for one in weights["gating_einsum"])
    return store(store(torch.nn.functional.gelu(gate, approximate="tanh") * value) @ weights["linear"])


def joint_block(
    xs: Sequence[Any],
    experts: Sequence[Weights],
    seen: Any,
    store: Store,
    *,
    first: int = 0,
    cache: Cache | None = None,
) -> tuple[list[Any], Cache]:
    """Attention and feed-forward with their norms and residuals."""
    normal = [store(normed(x, one["pre_attention_norm"])) for x, one in zip(xs, experts)]
    added, cache = joint_attention(normal, experts, seen, store, first=first, cache=cache)
    xs = [store(x + more) for x, more in zip(xs, added)]
    normal = [store(normed(x, one["pre_ffw_norm"])) for x, one in zip(xs, experts)]
    return [store(x + fed(n, one, store)) for x, n, one in zip(xs, normal, experts)], cache
