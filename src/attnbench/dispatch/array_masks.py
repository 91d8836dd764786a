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
from attnbench.dispatch.demand import Demand, device_of, framework_of, pass_of, to_layout
from attnbench.dispatch.plan import Plans, by_pass, jax_choices
from attnbench.dispatch.torch_sdpa import native_sdpa
from attnbench.errors import InvalidWorkload, Unsupported
from attnbench.frameworks.jax.plain import in_usual_promotion
from attnbench.frameworks.torch.internals import under_autocast, without_autocast
from attnbench.frameworks.torch.plain import MaskTensors
from attnbench.impls._arguments import workload_of
from attnbench.impls.partial.torch_choice import NO_RULES, current
from attnbench.impls.partial.torch_passes import positive_scale
from attnbench.masks import AnyMask
from attnbench.masks.large_bias import LARGE
from attnbench.spec import Array, Pass, Workload
from attnbench.tracing import constant_when_traced

FLOATS = ("float16", "bfloat16", "float32", "float64")
_NAMES = Plans()
"""Names of the implementations of torch calls, by everything that the choice depends on."""


def attention_with_array(
    q: Array,
    k: Array,
    v: Array,
    *,
    visible: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str = "auto",
    layout: str = "bshd",
) -> Array:
    """Return attention of the pairs in `visible`, with `bias` added to the logits; both broadcast to [b, h, q, kv]."""
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
        return dispatch.attention(q, k, v, mask=mask, scale=scale, softcap=softcap, impl=impl, layout=layout)
    if framework == "torch":
        q, k, v = under_autocast(q, k, v)
        with without_autocast(q.device.type):
            return _torch(q, k, v, visible, bias, scale, softcap, impl, layout)
    return _jax(q, k, v, visible, bias, scale, softcap, impl, layout)


def _check_kinds(given: list[Array], framework: str, q: Array) -> None:
    """Raise unless masks are arrays of the inputs' framework and device; JAX also takes NumPy's."""
    for array in given:
        if framework == "torch":
            fits = hasattr(array, "requires_grad")
        else:
            fits = hasattr(array, "dtype") and frameworks.of(array) in ("jax", "numpy")
        if not fits:
            raise InvalidWorkload(
                f"the inputs are {framework} arrays, but the mask is of type {type(array).__name__}: convert the mask."
            )
        if framework == "torch" and array.device != q.device:
            raise InvalidWorkload(f"the mask is on {array.device}, but the inputs are on {q.device}: move the mask.")


def _demand(
    q: Any, k: Any, v: Any, weighted: bool, pass_: Pass, softcap: float | None, layout: str, framework: str,
    scale: float | None = None,
) -> Demand:  # fmt: skip
    """Return the demand of a call, with a mask of the kind `dense` in place of an array that may not be read."""
    kv_len = k.shape[2 if layout == "bhsd" else 1]
    hidden = np.arange(kv_len) < max(kv_len - 1, 1)
    stand_in: AnyMask = masks.dense(np.where(hidden, 0, -np.inf).astype(np.float32) if weighted else hidden)
    workload = workload_of(q, k, v, mask=stand_in, scale=scale, softcap=softcap, layout=layout, pass_=pass_)
    rules = current() if framework == "torch" else NO_RULES
    return Demand(workload, framework, device_of(q, framework), False, "array", rules)


def mask_of_keys(visible: np.ndarray, batch: int) -> AnyMask:
    """Return the mask of visible keys [b or 1, kv]: full; lengths if the visible keys of each row come first; else
    valid."""
    if visible.all():
        return masks.full()
    lengths = visible.sum(axis=1)
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
    q: Array, k: Array, v: Array, visible: Array | None, bias: Array | None, scale: float | None,
    softcap: float | None, impl: str, layout: str,
) -> Array:  # fmt: skip
    """Compute attention without reading values, so that torch.compile can trace it.

    Rows that see no key are computed with all keys and then set to 0: a fused kernel may give NaN there.
    """
    if impl == "torch.sdpa" and softcap is not None:
        raise Unsupported("torch.sdpa does not support softcap: ask for torch.eager.")
    # Fused kernels of a GPU round a bias; those of a CPU take float32 too.
    exact = bias is None or bias.dtype == q.dtype or (q.device.type == "cpu" and str(bias.dtype) == "torch.float32")
    if impl == "torch.sdpa" and not exact:
        assert bias is not None
        raise Unsupported(
            f"torch.sdpa takes a bias in the dtype of its inputs (on a CPU also in float32), and {q.dtype} would round "
            f"this bias of {bias.dtype}: cast the bias if that is intended, or ask for torch.eager."
        )
    impl = "torch.eager" if impl == "auto" and not exact else impl  # the only one that takes such a bias
    impl = _torch_choice(impl, q, k, v, softcap, layout)
    tokens, heads = (2, 1) if layout == "bhsd" else (1, 2)
    wanted = (q.shape[0], q.shape[heads], q.shape[tokens], k.shape[tokens])
    visible, bias = (None if array is None else _four_axes(array, wanted) for array in (visible, bias))
    if bias is None:
        seen: Any = visible
    else:  # pairs with -inf are hidden, and the bias is made finite
        finite = bias != float("-inf")
        seen, bias = finite if visible is None else visible & finite, bias.masked_fill(~finite, 0.0)
    dead = ~seen.any(-1, keepdim=True)
    plain = impl == "torch.eager" or softcap is not None
    return with_torch_array(q, k, v, MaskTensors(seen, bias, dead), plain, scale, softcap, layout)


def with_torch_array(
    q: Array, k: Array, v: Array, mask: MaskTensors, plain: bool, scale: float | None, softcap: float | None,
    layout: str,
) -> Array:  # fmt: skip
    """Compute attention by torch.eager (`plain`) or torch.sdpa; the mask must say which rows see no key."""
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    if mask.weight is not None:
        mask = mask._replace(weight=_without_large_rows(mask.weight, mask.visible))
    if plain:
        from attnbench.frameworks.torch.plain import attend

        q, k, v = (to_layout(x, layout, "bshd") for x in (q, k, v))
        return to_layout(attend(q, k, v, mask, factor, softcap)[0], "bshd", layout)
    factor, sign = positive_scale(factor)
    q = q if sign == 1.0 else q * sign
    q, k, v = (to_layout(x, layout, "bhsd") for x in (q, k, v))
    seen: Any = mask.visible
    seen = seen if mask.dead is None else seen | mask.dead
    weights = seen if mask.weight is None else mask.weight.where(seen, float("-inf"))
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.device.type != "cpu":  # no fused kernel of a GPU takes a mask together with grouped heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        group = 1
    out = native_sdpa(q, k, v, attn_mask=weights, scale=factor, enable_gqa=group > 1)
    return to_layout(out if mask.dead is None else out.masked_fill(mask.dead, 0.0), "bhsd", layout)


def _without_large_rows(bias: Array, seen: Any) -> Array:
    """Return a bias minus the largest visible value of each row, if that is large: see attnbench.masks.large_bias."""
    top = bias.detach().where(seen, float("-inf")).amax(-1, keepdim=True)
    return bias - top.where(top.isfinite() & (top.abs() > LARGE), 0.0)


def _torch_choice(impl: str, q: Array, k: Array, v: Array, softcap: float | None, layout: str) -> str:
    """Return the name that runs: `impl`, or the policies' choice, or that of the fixed order after reporting the miss.

    With dynamic sizes there is no choice, and `impl` is not checked.
    """
    import torch
    from torch.fx.experimental.symbolic_shapes import has_static_value

    train = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if torch.compiler.is_dynamo_compiling():
        from attnbench.dispatch.torch_compile import specialised

        if not all(has_static_value(size) for x in (q, k, v) for size in x.shape):
            return impl
        outlines = tuple([(specialised(tuple(x.shape)), x.dtype, x.device) for x in (q, k, v)])
        return _chosen_name_now(outlines, impl, train, softcap is not None, layout)
    key = (
        impl, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, train,
        softcap is None, layout, current(), registry.generation(), policy.generation(),
    )  # fmt: skip
    name = _NAMES.get(key)
    if name is None:
        name = _chosen_name(q, k, v, impl, train, softcap is not None, layout)
        _NAMES.put(key, name)
    return name


@constant_when_traced
def _chosen_name_now(outlines: tuple[Any, ...], *rest: Any) -> str:
    from attnbench.dispatch.torch_compile import Outline

    q, k, v = (Outline(*one) for one in outlines)
    return _chosen_name(q, k, v, *rest)


def _chosen_name(q: Any, k: Any, v: Any, impl: str, train: bool, capped: bool, layout: str) -> str:
    demand = _demand(q, k, v, False, "train" if train else "forward", 1.0 if capped else None, layout, "torch")
    return chosen(impl, demand)[0].name


def _jax(
    q: Array, k: Array, v: Array, visible: Array | None, bias: Array | None, scale: float | None,
    softcap: float | None, impl: str, layout: str,
) -> Array:  # fmt: skip
    demands = [
        _demand(q, k, v, bias is not None, pass_, softcap, layout, "jax", scale) for pass_ in ("forward", "train")
    ]
    workload = demands[0].workload
    visible, bias = (
        None if array is None else _four_axes(array, tuple(workload.mask_shape)) for array in (visible, bias)
    )
    q, k, v = (to_layout(x, layout, "bshd") for x in (q, k, v))
    choice = jax_choices(impl, *demands)

    def call(train: bool) -> Callable[..., Array]:
        decision, demand = choice(train)
        backend = decision.taken(impl, demand).name.removeprefix("jax.")
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

    seen = jnp.ones((1, 1, 1, 1), bool) if visible is None else visible.astype(bool)
    if bias is not None:
        seen, bias = seen & (bias != -jnp.inf), jnp.where(bias == -jnp.inf, 0, bias)
        top = jnp.max(jax.lax.stop_gradient(jnp.where(seen, bias, -jnp.inf)), axis=-1, keepdims=True)
        bias = bias - jnp.where(jnp.isfinite(top) & (jnp.abs(top) > LARGE), top, 0)  # as _without_large_rows
    sees = jnp.any(jnp.broadcast_to(seen, (*seen.shape[:3], workload.kv_len)), axis=-1, keepdims=True)
    seen = seen | ~sees
    if backend == "einsum":
        out = attend_with_arrays(workload, q, k, v, seen, bias)
    else:
        pairs = (workload.q_len, workload.kv_len)
        wide = tuple(workload.mask_shape) if backend == "cudnn" else (*seen.shape[:2], *pairs)
        words: Any = {"mask": jnp.broadcast_to(seen, wide), "implementation": backend}
        if bias is not None:
            words["bias"] = jnp.broadcast_to(bias, (*bias.shape[:2], *pairs))
        out = jax.nn.dot_product_attention(q, k, v, scale=workload.softmax_scale, **words)
    return jnp.where(sees.transpose(0, 2, 1, 3), out, jnp.zeros((), out.dtype))
