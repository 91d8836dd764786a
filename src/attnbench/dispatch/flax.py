"""`attention_fn` for `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`.

    nnx.MultiHeadAttention(..., attention_fn=attention_fn)
    nnx.MultiHeadAttention(..., attention_fn=partial(attention_fn, impl="jax.cudnn"))

Arrays are [batch..., tokens, heads, dim], key/value heads may be fewer. Masks and biases have no values
under jit, so they are passed as arrays (`attnbench.dispatch.array_masks`); nnx's `is_causal` without a mask needs none.
The softmax is float32 or better whatever `force_fp32_for_softmax` says, and a row that sees no key gives 0, not the
mean of V as in Flax. Dropout, sown weights and custom einsums are refused.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from typing import Any

from attnbench import masks
from attnbench.dispatch import array_masks
from attnbench.dispatch import attention as dispatch
from attnbench.errors import Unsupported, UsageError
from attnbench.spec import Array


def attention_fn(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None,
    broadcast_dropout: bool = True, dropout_rng: Any = None, dropout_rate: float = 0.0, deterministic: bool = False,
    dtype: Any = None, precision: Any = None, module: Any = None, force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None, qk_attn_weights_einsum: Any = None, attn_weights_value_einsum: Any = None,
    promote_dtype: Any = None, is_causal: bool = False, *, impl: str = "auto",
) -> Array:  # fmt: skip
    """Compute attention as Flax calls it. All arguments are named here, because linen passes only those that are."""
    import jax.numpy as jnp

    if dropout_rate > 0 and not deterministic:
        raise Unsupported(
            f"attnbench's attention does not support dropout, but this layer asks for {dropout_rate:g}: "
            "set dropout_rate=0, or call the layer with deterministic=True."
        )
    asked = {
        "sow_weights": module,
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, given in asked.items():
        if given is not None:
            raise Unsupported(f"attnbench's attention does not support {name}: use Flax's attention_fn for this layer.")
    if promote_dtype is not None:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    else:
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    shape, lead = (*query.shape[:-1], value.shape[-1]), query.shape[:-3]
    with _precision(precision):
        q, k, v = (x.reshape(prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
        out = _attend(q, k, v, lead, bias, mask, is_causal, impl)
    return out.reshape(shape)


def _attend(
    q: Array, k: Array, v: Array, lead: tuple[int, ...], bias: Any, mask: Any, is_causal: bool, impl: str
) -> Array:
    import jax.numpy as jnp

    square = q.shape[1] == k.shape[1]
    if bias is None and mask is None:
        causal = masks.causal("bottom-right" if square else "top-left") if is_causal else None
        return dispatch.attention(q, k, v, mask=causal, impl=impl)
    visible = None if mask is None else _pairs(mask, lead).astype(bool)
    if is_causal:
        tril = jnp.tri(q.shape[1], k.shape[1], dtype=bool)[None, None]
        visible = tril if visible is None else visible & tril
    if bias is not None:  # Flax adds it to the logits whatever its type
        bias = _pairs(bias, lead)
        bias = bias if jnp.issubdtype(bias.dtype, jnp.floating) else bias.astype(jnp.float32)
    return array_masks.attention_with_array(q, k, v, visible=visible, bias=bias, impl=impl)


def _precision(precision: Any) -> Any:
    import jax

    if precision is None:
        return nullcontext()
    if isinstance(precision, jax.lax.DotAlgorithm):
        raise Unsupported("attnbench's attention takes a DotAlgorithmPreset, not a DotAlgorithm: pass a preset.")
    if isinstance(precision, tuple | list):
        names = {_precision_name(one) for one in precision}
        if len(names) > 1:
            raise Unsupported("attnbench's attention takes one precision for all operands: pass a single one.")
        return jax.default_matmul_precision(names.pop())
    return jax.default_matmul_precision(_precision_name(precision))


def _precision_name(precision: Any) -> str:
    """Return the name of a precision in JAX's setting, which does not know every spelling that a product takes."""
    from jax.lax import DotAlgorithmPreset, Precision

    if isinstance(precision, str) and precision in DotAlgorithmPreset.__members__:
        precision = DotAlgorithmPreset[precision]
    if isinstance(precision, DotAlgorithmPreset) and precision is not DotAlgorithmPreset.DEFAULT:
        return precision.name
    try:
        return "default" if precision is DotAlgorithmPreset.DEFAULT else Precision(precision).name.lower()
    except (ValueError, KeyError):
        raise UsageError(f"{precision!r} is not a precision that JAX knows.") from None


def _pairs(array: Array, lead: tuple[int, ...]) -> Array:
    """Return an array that broadcasts to [batch..., heads, q, kv] with one batch axis."""
    import jax.numpy as jnp

    array = array.reshape((1,) * (len(lead) + 3 - array.ndim) + array.shape)
    if prod(array.shape[:-3]) > 1:
        array = jnp.broadcast_to(array, (*lead, *array.shape[-3:]))
    return array.reshape(prod(array.shape[:-3]), *array.shape[-3:])
