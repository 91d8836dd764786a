"""The step `gemma-stack`: its weights, a float64 reference independent of the models, and PyTorch's blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import msgspec
import numpy as np

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.spec import Array, Config, Environment, Workload
from attnbench.steps import Outputs, Rounded, StepImplementation, StepKind, Values
from attnbench.workloads.steps import GEMMA_DEPTH, STEPS, gemma_width

BASE = 10_000.0
Weights = Mapping[str, Any]
Store = Callable[[Any], Any]
Cache = tuple[Any, Any]


def storing(rounded: Rounded) -> Store:
    """Return a function that rounds a tensor on the way forward and its gradient on the way back."""
    import torch

    class Stored(torch.autograd.Function):
        """Rounding of a value that an implementation writes to memory and reads again, and of its gradient."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return torch.tensor(rounded(x.numpy()))

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return torch.tensor(rounded(gradients[0].numpy()))

    return Stored.apply


def in_float32(rounded: Rounded) -> Rounded:
    """Return a rounding for values that are float32 whatever the workload's precision; exact if `rounded` is."""
    third = np.full(1, 1 / 3)
    if np.array_equal(rounded(third), third):
        return rounded
    return lambda array: array.astype(np.float32).astype(np.float64)


def tensors(values: Mapping[str, np.ndarray], leaves: Sequence[str] = ()) -> dict[str, Any]:
    """Return float64 tensors, those of `leaves` with requires_grad; whole numbers stay whole."""
    import torch

    integer = {name: torch.tensor(x.astype(np.int64)) for name, x in values.items() if x.dtype.kind in "iu"}
    floating = {name: torch.tensor(np.asarray(x, np.float64)) for name, x in values.items() if name not in integer}
    for name in leaves:
        floating[name].requires_grad_()
    return integer | floating


def visible(w: Workload) -> Any:
    """Return booleans [1, 1, q, kv] of a mask that is equal for all rows and heads."""
    import torch

    places = [np.arange(size).reshape(shape) for size, shape in ((w.q_len, (1, 1, -1, 1)), (w.kv_len, (1, 1, 1, -1)))]
    first = np.zeros((1, 1, 1, 1), np.int64)
    return torch.tensor(np.asarray(w.visible_mask.predicate(w.mask_shape, np)(first, first, *places)))


def rms_norm(x: Any, scale: Any) -> Any:
    """Return x divided by the root of its mean square and scaled."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + scale)


def rotated(x: Any, first: int) -> Any:
    """Return [b, t, n, h] with halves rotated by position; the first token is at position `first`."""
    import torch

    half = x.shape[-1] // 2
    angles = (first + np.arange(x.shape[1]))[:, None] / BASE ** (np.arange(half) / half)
    cos, sin = (torch.tensor(f(angles))[None, :, None] for f in (np.cos, np.sin))
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def attend(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Return attention of scaled queries [b, t, n, h] over k and v [b, s, k, h]."""
    import torch

    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
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
    """Return each expert's tokens after its own projections and one attention over all tokens and the cache."""
    import torch

    q = torch.cat([store(torch.einsum("btd,ndh->btnh", x, expert["q_einsum"])) for x, expert in zip(xs, experts)], 1)
    pairs = [store(torch.einsum("bsd,ckdh->cbskh", x, expert["kv_einsum"])) for x, expert in zip(xs, experts)]
    k, v = torch.cat(pairs, 2)
    q, k = store(rotated(q, first) * q.shape[-1] ** -0.5), store(rotated(k, first))
    if cache is not None:
        k, v = (torch.cat([old, new], 1) for old, new in zip(cache, (k, v)))
    parts = store(attend(q, k, v, seen)).split([x.shape[1] for x in xs], 1)
    outs = [
        store(torch.einsum("btnh,nhd->btd", part, expert["attn_vec_einsum"])) for part, expert in zip(parts, experts)
    ]
    return outs, (k, v)


def feed_forward(x: Any, weights: Weights, store: Store) -> Any:
    """Return the gated feed-forward layer."""
    import torch

    gate, value = (store(x @ weight) for weight in weights["gating_einsum"])
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
    """Return each expert's tokens after attention and feed-forward with their norms and residuals."""
    normed = [store(rms_norm(x, expert["pre_attention_norm"])) for x, expert in zip(xs, experts)]
    attended, cache = joint_attention(normed, experts, seen, store, first=first, cache=cache)
    xs = [store(x + more) for x, more in zip(xs, attended)]
    normed = [store(rms_norm(x, expert["pre_ffw_norm"])) for x, expert in zip(xs, experts)]
    return [store(x + feed_forward(n, expert, store)) for x, n, expert in zip(xs, normed, experts)], cache


def with_gradients(
    kind: StepKind, w: Workload, outs: Sequence[Any], of: Any, leaves: Sequence[Any], rounded: Rounded,
    cotangents: Any = None,
) -> Outputs:  # fmt: skip
    """Return the outputs by name: those of the forward pass, and rounded gradients of `of` if they are asked for."""
    import torch

    outputs = {name: out.detach().numpy() for name, out in zip(kind.forward_outputs, outs)}
    if w.needs_gradients:
        gradients = torch.autograd.grad(of, leaves, cotangents)
        outputs |= {name: rounded(gradient.numpy()) for name, gradient in zip(kind.gradient_outputs, gradients)}
    return {name: outputs[name] for name in kind.outputs(w)}


PROJECTIONS = ("q_einsum", "kv_einsum", "attn_vec_einsum")
FEED_FORWARD = ("gating_einsum", "linear")
WEIGHTS = (*PROJECTIONS, *FEED_FORWARD)
NORMS = ("pre_attention_norm", "pre_ffw_norm")
EXPERTS = ("", "_1")
"""Suffixes of the names of pi0's two experts."""
Normal = Callable[..., np.ndarray]


def normals(seed: int) -> Normal:
    """Return a function that draws numbers of variance 1 / fan_in in a shape."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(fan_in**-0.5)

    return normal


def draw_expert(
    normal: Normal,
    w: Workload,
    width: int,
    wide: int,
    lead: tuple[int, ...],
    suffix: str = "",
    names: Sequence[str] = (*WEIGHTS, *NORMS),
) -> dict[str, np.ndarray]:
    """Return the weights of an expert: variance 1 / fan-in, norms near 1; `lead` is the axis of layers, or empty."""
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
    """Return the weights of a layer by name without the expert's suffix; `layer` is None if there is no axis of
    layers."""
    named = {name: arrays[name + suffix] for name in (*WEIGHTS, *NORMS) if name + suffix in arrays}
    return named if layer is None else {name: array[layer] for name, array in named.items()}


CHECKED_TOKENS, CHECKED_GROUP = 64, 2


class GemmaStack(StepKind):
    """Gemma blocks with openpi's weights by name and shape, stacked over the layers."""

    name = "gemma-stack"
    gradient_outputs = ("dx", *(f"d_{name}" for name in WEIGHTS))
    gradients_alone = True

    def small(self, workload: Workload) -> Workload:
        """Return the workload with fewer heads and tokens and the same head_dim, which decides between kernels."""
        kv_heads = 1 if workload.group > 1 else min(workload.kv_heads, CHECKED_GROUP)
        heads = kv_heads * min(workload.group, CHECKED_GROUP)
        tokens = min(workload.q_len, CHECKED_TOKENS)
        sizes = {"batch": min(workload.batch, 2), "q_len": tokens, "kv_len": tokens}
        return msgspec.structs.replace(workload, **sizes, heads=heads, kv_heads=kv_heads)

    def draw(self, workload: Workload, seed: int) -> Values:
        w, normal, width = workload, normals(seed), gemma_width(workload)
        return {
            "x": normal(w.batch, w.q_len, width),
            **draw_expert(normal, w, width, 8 * width, (GEMMA_DEPTH,)),
            "final_norm": normal(width, fan_in=100),
            "dout": normal(w.batch, w.q_len, width),
        }

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        leaves = ("x", *WEIGHTS) if workload.needs_gradients else ()
        arrays = tensors(values, leaves)
        store, seen, xs = storing(rounded), visible(workload), [arrays["x"]]
        for layer in range(GEMMA_DEPTH):
            xs, _ = joint_block(xs, [of_layer(arrays, layer)], seen, store)
        out = store(rms_norm(xs[0], arrays["final_norm"]))
        return with_gradients(self, workload, [out], out, [arrays[name] for name in leaves], rounded, arrays["dout"])


GEMMA_STACK = GemmaStack()


def why_no_stack(workload: Workload) -> str | None:
    """Return why a stack cannot be made of a workload, or None."""
    if workload.q_len != workload.kv_len or workload.value_dim != workload.head_dim:
        return "takes self-attention with values as wide as keys"
    if workload.visible_mask.kinds not in (("causal",), ("full",)) or workload.softcap or workload.scale is not None:
        return "takes a causal or full mask, the usual scale and no softcap"
    return None if workload.kv_heads < workload.heads else "takes grouped heads, as Gemma has them"


class TorchGemmaStack(StepImplementation):
    """Gemma blocks with the weights of the JAX models, each recomputed in the backward pass."""

    framework = "torch"
    step = "gemma-stack"
    untested = ("cuda",)

    def __init__(self, name: str, impl: str) -> None:
        self.name, self._impl, self.materialises_scores = name, impl, impl == "standard"
        way = {"standard": "plain operators", "sdpa": "torch.sdpa", "auto": "what attnbench picks"}[impl]
        self.description = f"Step gemma-stack in PyTorch: {STEPS['gemma-stack'].description}; attention by {way}."
        self.tunables = {"impl": impl} if impl == "auto" else {}

    def configured(self, config: Config) -> Self:
        impl = str(config.get("impl", self._impl))
        if impl not in ("standard", "sdpa", "auto"):
            chosen = registry.get(impl)
            if chosen.framework != "torch" or chosen.step:
                raise UsageError(f"{self.name} takes an attention implementation of torch, not {impl}.")
        return self

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return why_no_stack(workload)

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return (the stack with these weights, x, the positions, the cotangent)."""
        import torch
        from torch import nn

        from attnbench.models.gemma_config import Config as Sizes
        from attnbench.models.gemma_torch import Stack

        width = gemma_width(workload)
        sizes = Sizes(width, GEMMA_DEPTH, 8 * width, workload.heads, workload.kv_heads, workload.head_dim)
        causal = "causal" in workload.visible_mask.kinds
        with torch.device("meta"):
            stack = Stack(sizes, causal=causal, impl=str(config.get("impl", self._impl)), device="meta")
        for number, layer in enumerate(stack.layers):
            for name in (*WEIGHTS, *NORMS):
                setattr(layer, name, nn.Parameter(arrays[name][number]))
        stack.final_norm = nn.Parameter(arrays["final_norm"])
        positions = torch.arange(workload.q_len, device=arrays["x"].device).expand(workload.batch, -1)
        return stack, arrays["x"], positions, arrays["dout"]

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        import torch

        def run(state: Any) -> tuple[Array, ...]:
            stack, x, positions, dout = state
            if not workload.needs_gradients:
                with torch.no_grad():
                    return (stack(x, positions),)
            x = x.detach().requires_grad_()
            out = stack(x, positions)
            weights = [getattr(layer, name) for name in WEIGHTS for layer in stack.layers]
            dx, *of_layers = torch.autograd.grad(out, (x, *weights), dout)
            depth = len(stack.layers)
            stacked = [torch.stack(of_layers[n * depth : (n + 1) * depth]) for n in range(len(WEIGHTS))]
            return (dx, *stacked) if workload.pass_ == "backward" else (out.detach(), dx, *stacked)

        return run


TORCH = TorchGemmaStack("torch.gemma-stack", "standard")
TORCH_SDPA = TorchGemmaStack("torch.gemma-stack-sdpa", "sdpa")
TORCH_AUTO = TorchGemmaStack("torch.gemma-stack-auto", "auto")
