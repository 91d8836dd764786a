"""Forward and backward passes apart in JAX: plain ones, cuDNN's, and two made into one differentiable call.

cuDNN's are not public: `jax.nn.dot_product_attention` rounds the LSE to the inputs' dtype and keeps the backward
pass to itself, so both come from the module behind it, and from no version whose backward rule looks different.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from attnbench.errors import Unsupported
from attnbench.frameworks.jax.plain import grouped_heads, in_usual_promotion, visible
from attnbench.impls.jax._masks import mask_arguments
from attnbench.impls.partial import jax_blocks
from attnbench.spec import Array, Call, Partial, Workload

CUDNN_RULE = (
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length", "is_training",
    "return_residual", "res", "grad_output",
)  # fmt: skip
FLOAT16_SAFE = 32768.0
"""As in torch_autograd."""
UNUSED_INPUTS = 4
"""Offsets and page tables; they are empty here, and so are bias and lengths where there are none."""


def plain_passes(workload: Workload) -> Partial | None:
    """Operator by operator, with the scores stored; None for masks that carry weights."""
    if workload.visible_mask.weighted:
        return None
    rule = jax_blocks.Rule(workload.softmax_scale, workload.softcap)

    def seen() -> Any:
        mask = workload.visible_mask
        return None if mask.kinds == ("full",) else grouped_heads(visible(mask, workload.mask_shape), workload)

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse = jax_blocks.forward(q, k, v, seen(), rule)
        return out.astype(q.dtype), lse

    def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        grads = jax_blocks.backward(q, k, v, (out, lse, dout), seen(), rule)
        dq, dk, dv = (grad.astype(x.dtype) for grad, x in zip(grads, (q, k, v)))
        return dq, dk, dv

    return forward, backward


def cudnn_passes(workload: Workload) -> Partial | None:
    """cuDNN's kernels for full and top-left causal masks; None for other masks, or where JAX has changed."""
    arguments = mask_arguments(workload)
    if arguments.needs_array or arguments.window is not None or arguments.kv_lengths is not None:
        return None
    return _cudnn_kernels(workload.softmax_scale, "CAUSAL" if arguments.is_causal else "NO_MASK")


def cudnn_late_passes(scale: float, padded: bool) -> Partial | None:
    """The same without a mask; `padded`: but for key lengths int32 [b], which are then the last argument of both."""
    return _cudnn_kernels(scale, "PADDING" if padded else "NO_MASK")


def _cudnn_kernels(scale: float, mask: str) -> Partial | None:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    rule: Any = getattr(fused, "_dot_product_attention_bwd_rule", None)
    if rule is None or tuple(inspect.signature(rule).parameters) != CUDNN_RULE:
        return None
    mask_type, layout = fused.MaskType[mask], fused.AttentionLayout.BTNH.value

    def forward(q: Array, k: Array, v: Array, *lengths: Array) -> tuple[Array, Array]:
        words = dict(zip(("q_seqlen", "kv_seqlen"), _both_lengths(q, *lengths))) if lengths else {}
        found: Any = fused.dot_product_attention(
            q, k, v, scale=scale, mask_type=mask_type, return_residual=True, **words
        )
        return found

    def backward(
        q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, *lengths: Array
    ) -> tuple[Array, Array, Array]:
        import jax.numpy as jnp

        none = jnp.zeros(0, q.dtype)
        sizes = _both_lengths(q, *lengths) if lengths else (none, none)
        kept = (q, k, v, none, *sizes, *[none] * UNUSED_INPUTS, lse, out)
        dq, dk, dv, *_ = rule(scale, 42, 0.0, (False, False), mask_type, layout, None, True, False, kept, dout)
        return dq, dk, dv

    return forward, backward


def _both_lengths(q: Array, of_keys: Array) -> tuple[Array, Array]:
    """Of queries, all of them, and of keys."""
    import jax.numpy as jnp

    return jnp.full(q.shape[:1], q.shape[1], jnp.int32), of_keys.astype(jnp.int32)


def differentiable(pair: Partial, with_lse: bool) -> Call:
    """`(q, k, v) -> out`, or (out, lse), whose gradient is the pair's backward; the LSE's costs a second one.

    Differentiable once: a library's forward pass may keep its LSE from gradients, and second ones would be wrong.
    """
    import jax

    forward, backward = pair[0], once_differentiable(pair[1])

    def both(q: Array, k: Array, v: Array) -> Any:
        out, lse = forward(q, k, v)
        return (out, lse) if with_lse else out

    def kept(q: Array, k: Array, v: Array) -> Any:
        out, lse = forward(q, k, v)
        return ((out, lse) if with_lse else out), (q, k, v, out, lse)

    def gradients(saved: tuple[Array, ...], grad: Any) -> tuple[Array, Array, Array]:
        if not with_lse:
            return backward(*saved, grad)
        dq, dk, dv = backward(*saved, grad[0])
        q, k, v, out, lse = saved
        more_dq, more_dk = _through_lse(backward, q, k, v, out, lse, grad[1])
        return dq + more_dq, dk + more_dk, dv

    call = jax.custom_vjp(both)
    call.defvjp(kept, in_usual_promotion(gradients))
    return call


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which has no derivative."""
    import jax

    @jax.custom_jvp
    def run(*arrays: Array) -> Any:
        return backward(*arrays)

    @run.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        raise Unsupported(
            "a backward pass that is called alone has no second derivative: take jax.einsum or jax.xla for those."
        )

    return run


def _through_lse(
    backward: Any, q: Array, k: Array, v: Array, out: Array, lse: Array, dlse: Array
) -> tuple[Array, Array]:
    """As torch_autograd does it: values of 0, and an `out` whose product with `dout` is -dlse, in two columns."""
    import jax.numpy as jnp

    half = out.dtype == jnp.float16
    excess = _beyond_float16(dlse) if half else None
    rows = (dlse / excess if half else dlse).transpose(0, 2, 1)
    lead = rows.astype(out.dtype)
    rest = (rows - lead.astype(rows.dtype)).astype(out.dtype)
    carrier = jnp.zeros_like(out).at[..., 0].set(-lead)
    ones = jnp.zeros_like(out).at[..., :2].set(1)
    if out.shape[-1] > 1:
        carrier = carrier.at[..., 1].set(-rest)
    dq, dk, _ = backward(q, k, jnp.zeros_like(v), carrier, lse, ones)
    if half:
        dq, dk = ((x.astype(jnp.float32) * excess).astype(x.dtype) for x in (dq, dk))
    return dq, dk


def _beyond_float16(dlse: Array) -> Array:
    """How many times too large the largest is; one where none is."""
    import jax.numpy as jnp

    return jnp.maximum(jnp.max(jnp.where(jnp.isfinite(dlse), jnp.abs(dlse), 0.0)) / FLOAT16_SAFE, 1.0)
