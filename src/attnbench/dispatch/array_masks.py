"""Attention whose mask is an array that is known only when the call runs: inside jit, or made by a model at each step.

`ab.attention` takes masks as data that the choice depends on; copying a T x S array to the host at every step only to
hash it would cost more than the attention. Here arrays stay on their device, and only implementations that take them as
arguments are asked (`choice.TAKE_ARRAYS`), the policies' entries for `dense` masks first: torch.sdpa (torch's own pick)
and torch.eager, jax.cudnn, jax.xla and jax.einsum.

Any other implementation that is asked for by name gets the array as `masks.dense`, which reads its values and so cannot
be traced. A row that sees no key gives 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from attnbench import frameworks, masks, policy, registry
from attnbench.dispatch import attention as dispatch
from attnbench.dispatch.choice import TAKE_ARRAYS, chosen
from attnbench.dispatch.demand import Demand, Outline, Words, demand_of, framework_of, pass_of, to_layout
from attnbench.dispatch.plan import Plans, by_pass, bytes_kept, jax_choices
from attnbench.dispatch.sinks import with_sinks
from attnbench.errors import InvalidWorkload, Unsupported
from attnbench.frameworks.jax.plain import in_usual_promotion, log_weight
from attnbench.frameworks.jax.plain import visible as visible_pairs
from attnbench.frameworks.torch import plain
from attnbench.frameworks.torch.internals import under_autocast, without_autocast
from attnbench.impls._arguments import both_heads, workload_of
from attnbench.impls.partial.torch_choice import current
from attnbench.impls.torch.sdpa import sdpa_with_tensors
from attnbench.masks import AnyMask
from attnbench.masks.combine import literal, mask_of
from attnbench.masks.large_bias import LARGE, has_large_bias
from attnbench.spec import Array, Workload
from attnbench.tracing import constant_when_traced

FLOATS = ("float16", "bfloat16", "float32", "float64")
_NAMES = Plans()
"""Names of the implementations of torch calls, by everything that the choice depends on."""
_ARRAYS = Plans()
"""Masks of torch calls as arrays on a device, for calls that add a bias of their own."""


def attention_with_array(
    q: Array, k: Array, v: Array, *, visible: Array | None = None, bias: Array | None = None,
    scale: float | None = None, softcap: float | None = None, impl: str = "auto", layout: str = "bshd",
    sinks: Array | None = None,
) -> Array:  # fmt: skip
    """Return attention of the pairs in `visible`, with `bias` added to the logits; both broadcast to [b, h, q, kv].

    `sinks` [heads] join the rows as in `ab.attention`.
    """
    given = [array for array in (visible, bias) if array is not None]
    framework = "torch" if all(hasattr(x, "requires_grad") for x in (q, k, v)) else framework_of(q, k, v)
    if framework != "numpy":  # masks of NumPy calls are read as data, whatever their kind
        _check_kinds(given, framework, q)
    # Integers are ambiguous: 0 and 1 may mark visible pairs, or be added to the logits.
    if visible is not None and not str(visible.dtype).endswith("bool"):
        raise InvalidWorkload(
            f"a mask of visible pairs must be boolean, not {visible.dtype}: convert it, as in mask != 0."
        )
    if bias is not None and str(bias.dtype).rpartition(".")[2] not in FLOATS:
        raise InvalidWorkload(
            f"a bias must be floating-point, not {bias.dtype}: other numbers are ambiguous, as they could be added to "
            "the logits or mark visible pairs. Pass booleans (True is visible), as in mask != 0, or floats."
        )
    takers = TAKE_ARRAYS.get(framework, ())
    if not given or not takers or impl not in ("auto", *takers):
        mask: Any = reduce(and_, [masks.dense(array) for array in given]) if given else None
        options: Any = {"scale": scale, "softcap": softcap, "impl": impl, "layout": layout, "sinks": sinks}
        return dispatch.attention(q, k, v, mask=mask, **options)
    words = Words(None, scale, softcap, impl, layout, None, sinks is not None, sinks is not None)
    if framework == "jax":
        if sinks is not None:
            raise Unsupported("attention sinks together with a mask that is a JAX array are not supported.")
        return _jax(q, k, v, visible, bias, words)
    q, k, v = under_autocast(q, k, v)
    with without_autocast(q.device.type):
        return _torch(q, k, v, visible, bias, words, sinks)


def attention_with_bias(q: Array, k: Array, v: Array, bias: Array, words: Words, sinks: Array | None) -> Array:
    """Return attention of the pairs that a mask shows, with `bias` added to their logits, which gets its gradient."""
    mask: Any = words.mask
    layout = words.layout
    if words.return_lse:
        raise Unsupported("return_lse together with bias= is not supported: a constant bias may be a masks.dense.")
    options: Any = {"scale": words.scale, "softcap": words.softcap, "impl": words.impl, "sinks": sinks}
    is_torch = hasattr(q, "requires_grad")
    framework = "torch" if is_torch else framework_of(q, k, v)
    if framework == "numpy":  # which has no gradients
        both: Any = masks.dense(bias) if mask is None else mask & masks.dense(bias)
        return dispatch.attention(q, k, v, mask=both, layout=layout, heads=words.heads, **options)
    _check_kinds([bias], framework, q)
    inner, (q_heads, kv_heads) = layout, both_heads(words.heads)
    if layout == "packed":
        inner = "bshd"
        q = to_layout(q, layout, inner, q_heads)
        k, v = to_layout(k, layout, inner, kv_heads), to_layout(v, layout, inner, kv_heads)
    if is_torch:
        q, k, v = under_autocast(q, k, v)
    seen = weight = None
    if mask is not None and is_torch:
        seen, weight = _torch_mask(literal(mask), _sizes(q, k, inner), q.dtype, q.device)
    elif mask is not None:
        _check_small(mask)
        work = workload_of(q, k, v, mask=mask, layout=inner)
        seen, weight = visible_pairs(mask, work.mask_shape), log_weight(mask, work.mask_shape, bias.dtype)
    bias = bias if weight is None else bias + weight
    return to_layout(attention_with_array(q, k, v, visible=seen, bias=bias, layout=inner, **options), inner, layout)


def _check_small(mask: AnyMask) -> None:
    """Refuse a mask with a large bias, whose arrays lack what is added to whole rows."""
    if has_large_bias(mask):
        raise Unsupported(
            f"a mask with values beyond {LARGE:g} together with bias= is not supported: add it to the bias."
        )


def _sizes(q: Array, k: Array, layout: str) -> tuple[int, ...]:
    """Return batch, heads, q_len and kv_len as plain numbers."""
    from attnbench.dispatch.torch_compile import specialised

    tokens, heads = (2, 1) if layout == "bhsd" else (1, 2)
    return specialised((q.shape[0], q.shape[heads], q.shape[tokens], k.shape[tokens]))


@constant_when_traced
def _torch_mask(mask: Any, sizes: tuple[int, ...], dtype: Any, device: Any) -> tuple[Any, Any]:
    """Return which pairs a mask shows, and what it adds to their logits or None, as tensors that are kept."""
    key = (mask, sizes, dtype, device)
    found: Any = _ARRAYS.get(key)
    if found is None:
        (batch, heads, q_len, kv_len), name = sizes, str(dtype).removeprefix("torch.")
        work = Workload(
            batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, head_dim=1, dtype=name, mask=mask_of(mask)
        )
        _check_small(work.visible_mask)
        made = plain.mask_tensors(work, device)
        found = made.visible, made.weight
        _ARRAYS.put(key, found, bytes_kept(Demand(work, "torch", device.type)))
    return found


def _check_kinds(given: list[Array], framework: str, q: Array) -> None:
    """Raise unless masks are arrays of the inputs' framework and device; JAX also takes NumPy's."""
    for array in given:
        is_tensor = hasattr(array, "requires_grad")
        in_jax = framework == "jax" and hasattr(array, "dtype") and frameworks.of(array) in ("jax", "numpy")
        if not (is_tensor if framework == "torch" else in_jax):
            raise InvalidWorkload(
                f"the inputs are {framework} arrays, but the mask is of type {type(array).__name__}: convert the mask."
            )
        if framework == "torch" and array.device != q.device:
            raise InvalidWorkload(f"the mask is on {array.device}, but the inputs are on {q.device}: move the mask.")


def _demand(q: Any, k: Any, v: Any, words: Words, train: bool, framework: str, weighted: bool = False) -> Demand:
    """Return the demand of a call, with a mask of the kind `dense` in place of an array that may not be read."""
    kv_len = k.shape[2 if words.layout == "bhsd" else 1]
    hidden = np.arange(kv_len) < max(kv_len - 1, 1)
    stand_in: AnyMask = masks.dense(np.where(hidden, 0, -np.inf).astype(np.float32) if weighted else hidden)
    return demand_of(q, k, v, words._replace(mask=stand_in), train, "array", framework)


def mask_of_keys(visible: np.ndarray, batch: int) -> AnyMask:
    """Return the mask of visible keys [b or 1, kv]: full; lengths if they come first in each row; else valid."""
    if visible.all():
        return masks.full()
    lengths: np.ndarray = visible.sum(axis=1)
    if len(visible) == batch and (visible == (np.arange(visible.shape[1]) < lengths[:, None])).all():
        return masks.lengths(lengths)
    return masks.valid(visible)


def _four_axes(array: Array, wanted: tuple[int, ...]) -> Array:
    shape = tuple(array.shape)
    padded = (1,) * (4 - len(shape)) + shape
    if len(shape) > 4 or any(have not in (1, want) for have, want in zip(padded, wanted)):
        raise InvalidWorkload(f"the mask of shape {shape} does not broadcast to [b, h, q, kv] = {list(wanted)}.")
    return array.reshape(padded)


def _torch(
    q: Array, k: Array, v: Array, visible: Array | None, bias: Array | None, words: Words, sinks: Array | None
) -> Array:
    """Compute attention without reading values, so that torch.compile can trace it."""
    import torch

    impl, layout, softcap = words.impl, words.layout, words.softcap
    if impl == "torch.sdpa" and softcap is not None:
        raise Unsupported("torch.sdpa does not support softcap: ask for torch.eager.")
    if impl == "torch.sdpa" and sinks is not None:
        raise Unsupported("torch.sdpa returns no LSE, which attention sinks need: ask for torch.eager.")
    if bias is not None and q.dtype == torch.float64:  # beside which SDPA reads a bias of another dtype wrongly
        bias = bias.to(q.dtype)
    # Fused kernels of a GPU round a bias; those of a CPU take float32 too.
    exact = bias is None or bias.dtype == q.dtype or (q.device.type == "cpu" and str(bias.dtype) == "torch.float32")
    if impl == "torch.sdpa" and not exact:
        assert bias is not None
        raise Unsupported(
            f"torch.sdpa takes a bias in the dtype of its inputs (on a CPU also in float32), and {q.dtype} would round "
            f"this bias of {bias.dtype}: cast the bias if that is intended, or ask for torch.eager."
        )
    # Which of SDPA's kernels runs on a GPU is torch's choice, and not all of them have a gradient of the bias.
    learns = bias is not None and bias.requires_grad and torch.is_grad_enabled() and q.device.type != "cpu"
    if impl == "torch.sdpa" and learns:
        raise Unsupported(
            "torch picks SDPA's kernel on a GPU, and not every kernel has the gradient of a bias: detach a bias that "
            "is constant, or ask for torch.eager."
        )
    impl = "torch.eager" if impl == "auto" and (learns or not exact) else impl  # the only one that takes such a bias
    impl = _torch_choice(q, k, v, words._replace(impl=impl))
    tokens, heads = (2, 1) if layout == "bhsd" else (1, 2)
    wanted = (q.shape[0], q.shape[heads], q.shape[tokens], k.shape[tokens])
    visible, bias = (None if array is None else _four_axes(array, wanted) for array in (visible, bias))
    if bias is None:
        seen: Any = visible
    else:  # pairs with -inf are hidden, and the bias is made finite
        finite = bias != float("-inf")
        seen, bias = finite if visible is None else visible & finite, bias.masked_fill(~finite, 0.0)
    dead = ~seen.any(-1, keepdim=True)
    eager = impl == "torch.eager" or softcap is not None or sinks is not None
    return with_torch_array(q, k, v, plain.MaskTensors(seen, bias, dead), eager, words, sinks)


def with_torch_array(
    q: Array, k: Array, v: Array, mask: plain.MaskTensors, eager: bool, words: Words, sinks: Array | None = None
) -> Array:
    """Compute attention by torch.eager or torch.sdpa; the mask must say which rows see no key."""
    layout, factor = words.layout, q.shape[-1] ** -0.5 if words.scale is None else words.scale
    if mask.weight is not None:
        top = _large_tops(mask.weight, mask.visible)
        mask = mask._replace(weight=mask.weight - top, top=top.squeeze(-1))
    if eager:
        q, k, v = (to_layout(x, layout, "bshd") for x in (q, k, v))
        out, logits = plain.attend(q, k, v, mask, factor, words.softcap)
        if sinks is not None:
            out = with_sinks((out, plain.log_sum_exp(logits, mask)), sinks, "bshd", False)
        return to_layout(out, "bshd", layout)
    q, k, v = (to_layout(x, layout, "bhsd") for x in (q, k, v))
    return to_layout(sdpa_with_tensors(q, k, v, mask, factor), "bhsd", layout)


def _large_tops(bias: Array, seen: Any) -> Array:
    """Return the largest visible bias of each row if it is large, to be subtracted: see attnbench.masks.large_bias."""
    top = bias.detach().where(seen, float("-inf")).amax(-1, keepdim=True)
    return top.where(top.isfinite() & (top.abs() > LARGE), 0.0)


def _torch_choice(q: Array, k: Array, v: Array, words: Words) -> str:
    """Return the name that runs: the one asked for, else the choice, after a report if no policy covers the call.

    With dynamic sizes there is no choice, and the name is not checked.
    """
    import torch
    from torch.fx.experimental.symbolic_shapes import has_static_value

    train = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if torch.compiler.is_dynamo_compiling():
        from attnbench.dispatch.torch_compile import specialised

        if not all(has_static_value(size) for x in (q, k, v) for size in x.shape):
            return words.impl
        outlines = tuple([(specialised(tuple(x.shape)), x.dtype, x.device) for x in (q, k, v)])
        return _chosen_name_now(outlines, words.impl, train, words.softcap is not None, words.layout, words.sinks)
    key = (
        words.impl, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, train,
        words.softcap is None, words.layout, words.sinks, current(), registry.generation(), policy.generation(),
    )  # fmt: skip
    name = _NAMES.get(key)
    if name is None:
        name = _chosen_name(q, k, v, words.impl, train, words.softcap is not None, words.layout, words.sinks)
        _NAMES.put(key, name)
    return name


@constant_when_traced
def _chosen_name_now(outlines: tuple[Any, ...], *rest: Any) -> str:
    return _chosen_name(*[*(Outline(*one) for one in outlines), *rest])


def _chosen_name(q: Any, k: Any, v: Any, impl: str, train: bool, capped: bool, layout: str, sinks: bool) -> str:
    words = Words(None, None, 1.0 if capped else None, impl, layout, None, sinks, sinks)
    return chosen(impl, _demand(q, k, v, words, train, "torch"))[0].name


def _jax(q: Array, k: Array, v: Array, visible: Array | None, bias: Array | None, words: Words) -> Array:
    demands = [_demand(q, k, v, words, train, "jax", bias is not None) for train in (False, True)]
    wanted, layout = tuple(demands[0].workload.mask_shape), words.layout
    visible, bias = (None if array is None else _four_axes(array, wanted) for array in (visible, bias))
    q, k, v = (to_layout(x, layout, "bshd") for x in (q, k, v))
    choice = jax_choices(words.impl, *demands)

    def call(train: bool) -> Callable[..., Array]:
        decision, demand = choice(train)
        backend = decision.taken(words.impl, demand).name.removeprefix("jax.")
        return in_usual_promotion(lambda *arrays: _with_backend(backend, demand.workload, *arrays))

    given = [array for array in (q, k, v, visible, bias) if array is not None]
    run = call(False) if pass_of("jax", *given) == "forward" else by_pass(call)
    return to_layout(run(q, k, v, visible, bias), "bshd", layout)


def _with_backend(
    backend: str, workload: Workload, q: Array, k: Array, v: Array, visible: Array | None, bias: Array | None
) -> Array:
    import jax
    import jax.numpy as jnp

    from attnbench.frameworks.jax.plain import attend_with_arrays
    from attnbench.impls.jax.nn import nn_with_arrays

    seen = jnp.ones((1, 1, 1, 1), bool) if visible is None else visible.astype(bool)
    if bias is not None:
        seen, bias = seen & (bias != -jnp.inf), jnp.where(bias == -jnp.inf, 0, bias)
        top = jnp.max(jax.lax.stop_gradient(jnp.where(seen, bias, -jnp.inf)), axis=-1, keepdims=True)
        bias = bias - jnp.where(jnp.isfinite(top) & (jnp.abs(top) > LARGE), top, 0)  # as _large_tops
    sees = jnp.any(jnp.broadcast_to(seen, (*seen.shape[:3], workload.kv_len)), axis=-1, keepdims=True)
    seen = seen | ~sees
    if backend == "einsum":
        out = attend_with_arrays(workload, q, k, v, seen, bias)[0]
    else:
        out = nn_with_arrays(backend, workload.softmax_scale, q, k, v, seen, bias)
    return jnp.where(sees.transpose(0, 2, 1, 3), out, jnp.zeros((), out.dtype))
