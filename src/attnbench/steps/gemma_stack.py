"""The step `gemma-stack`: four Gemma blocks and a final norm, x [b, s, e] in and out; gradients of x and all products.

Sizes follow the workload: e = heads * head_dim (2048 of Gemma-2B's 8 x 256), the feed-forward is 8 e wide, as there.
The reference is float64 by torch's autograd, written out here apart from the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from attnbench.spec import Workload
from attnbench.steps.base import Outputs, Rounded, StepKind, Values
from attnbench.workloads.steps import GEMMA_DEPTH, gemma_width

WEIGHTS = ("q_einsum", "kv_einsum", "attn_vec_einsum", "gating_einsum", "linear")
NORMS = ("pre_attention_norm", "pre_ffw_norm")
FORWARD, GRADIENTS = ("out",), ("dx", *(f"d_{name}" for name in WEIGHTS))
CHECKED_TOKENS, CHECKED_GROUP = 64, 2
BASE = 10_000.0


class GemmaStack(StepKind):
    """Weights are openpi's by name and shape, stacked over the layers."""

    name = "gemma-stack"

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """The output; gradients of x and of the five products of the layers."""
        return {"forward": FORWARD, "backward": GRADIENTS, "train": FORWARD + GRADIENTS}[workload.pass_]

    def small(self, workload: Workload) -> Workload:
        """Fewer heads and tokens, the same head_dim: that is what kernels differ by."""
        kv_heads = 1 if workload.group > 1 else min(workload.kv_heads, CHECKED_GROUP)
        heads = kv_heads * min(workload.group, CHECKED_GROUP)
        tokens = min(workload.q_len, CHECKED_TOKENS)
        sizes = {"batch": min(workload.batch, 2), "q_len": tokens, "kv_len": tokens}
        return msgspec.structs.replace(workload, **sizes, heads=heads, kv_heads=kv_heads)

    def draw(self, workload: Workload, seed: int) -> Values:
        """Weights of variance 1 / fan-in, norms near 1."""
        w, rng = workload, np.random.default_rng(seed)
        width, wide = gemma_width(w), 8 * gemma_width(w)

        def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(fan_in**-0.5)

        depth = GEMMA_DEPTH
        return {
            "x": normal(w.batch, w.q_len, width),
            "q_einsum": normal(depth, w.heads, width, w.head_dim, fan_in=width),
            "kv_einsum": normal(depth, 2, w.kv_heads, width, w.head_dim, fan_in=width),
            "attn_vec_einsum": normal(depth, w.heads, w.head_dim, width, fan_in=width),
            "gating_einsum": normal(depth, 2, width, wide, fan_in=width),
            "linear": normal(depth, wide, width, fan_in=wide),
            "pre_attention_norm": normal(depth, width, fan_in=100),
            "pre_ffw_norm": normal(depth, width, fan_in=100),
            "final_norm": normal(width, fan_in=100),
            "dout": normal(w.batch, w.q_len, width),
        }

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Layer by layer in float64; what is rounded on the way is rounded on the way back too."""
        import torch

        arrays = {name: torch.tensor(np.asarray(one, np.float64)) for name, one in values.items()}
        leaves = [arrays[name].requires_grad_(workload.needs_gradients) for name in ("x", *WEIGHTS)]
        out = _stack(workload, arrays, _rounding(rounded))
        found = {"out": out.detach().numpy()}
        if not workload.needs_gradients:
            return found
        gradients = torch.autograd.grad(out, leaves, arrays["dout"])
        found |= {name: rounded(one.numpy()) for name, one in zip(GRADIENTS, gradients)}
        return found if workload.pass_ == "train" else {name: found[name] for name in GRADIENTS}


def _rounding(rounded: Rounded) -> Any:
    import torch

    class Store(torch.autograd.Function):
        """What an implementation writes to memory and reads again."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return torch.tensor(rounded(x.numpy()))

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return torch.tensor(rounded(gradients[0].numpy()))

    return Store.apply


def _stack(w: Workload, arrays: Mapping[str, Any], store: Any) -> Any:
    x = arrays["x"]
    for layer in range(GEMMA_DEPTH):
        weights = {name: arrays[name][layer] for name in (*WEIGHTS, *NORMS)}
        x = _block(w, x, weights, store)
    return store(_normed(x, arrays["final_norm"]))


def _block(w: Workload, x: Any, weights: Mapping[str, Any], store: Any) -> Any:
    import torch

    normed = store(_normed(x, weights["pre_attention_norm"]))
    q = store(torch.einsum("btd,ndh->btnh", normed, weights["q_einsum"]))
    k, v = store(torch.einsum("bsd,ckdh->cbskh", normed, weights["kv_einsum"]))
    q, k = store(_turned(q) * w.softmax_scale), store(_turned(k))
    x = store(x + store(torch.einsum("btnh,nhd->btd", store(_attended(w, q, k, v)), weights["attn_vec_einsum"])))
    normed = store(_normed(x, weights["pre_ffw_norm"]))
    gate, value = (store(normed @ one) for one in weights["gating_einsum"])
    fed = store(torch.nn.functional.gelu(gate, approximate="tanh") * value) @ weights["linear"]
    return store(x + store(fed))


def _normed(x: Any, scale: Any) -> Any:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + scale)


def _turned(x: Any) -> Any:
    """Half-split rotation by position; [b, t, n, h]."""
    import torch

    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] / BASE ** (np.arange(half) / half)
    cos, sin = (torch.tensor(f(angles))[None, :, None] for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attended(w: Workload, q: Any, k: Any, v: Any) -> Any:
    import torch

    places = [np.arange(size).reshape(shape) for size, shape in ((w.q_len, (1, 1, -1, 1)), (w.kv_len, (1, 1, 1, -1)))]
    first = np.zeros((1, 1, 1, 1), np.int64)
    visible = torch.tensor(np.asarray(w.visible_mask.predicate(w.mask_shape, np)(first, first, *places)))
    k, v = (one.repeat_interleave(w.group, 2) for one in (k, v))
    logits = torch.einsum("btnh,bsnh->bnts", q, k).masked_fill(~visible, -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", logits.softmax(-1), v)


GEMMA_STACK = GemmaStack()
