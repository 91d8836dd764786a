"""Calls whose mask has values on the device, and `ab.attention_varlen`: packed sequences.

The values are never read: they are arguments of what a plan, a graph or a traced program runs. The choice sees the
mask's form (attnbench.masks.device.MaskForm) and a stand-in of the same kinds. Plans of packed sequences are kept for
each doubling of their sizes, since every batch has other ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnbench import policy, registry
from attnbench.dispatch.demand import Words, demand_of, framework_of, pass_of
from attnbench.dispatch.plan import Plans, built, by_pass, bytes_kept, jax_choices, running
from attnbench.errors import InvalidWorkload
from attnbench.frameworks.torch.internals import is_autocast, under_autocast, without_autocast
from attnbench.impls.partial.torch_choice import current
from attnbench.masks import AnyMask, DeviceMask, Full
from attnbench.masks.base import Mask
from attnbench.masks.device import PACKED, POSITIONAL, DevicePart, MaskForm, check_values, mask_or_form
from attnbench.spec import Array, Call
from attnbench.tracing import constant_when_traced, is_fake

PLANS = Plans()
WITHIN = "a mask inside of packed sequences is full, causal, window or prefix, or some of these joined by `&`"


def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, *, mask: AnyMask | None = None,
    scale: float | None = None, softcap: float | None = None, impl: str = "auto", return_lse: bool = False,
) -> Any:  # fmt: skip
    """Return attention inside of each packed sequence, [tokens, heads, dim] like q; differentiable.

    Sequence n has the queries `cu_seqlens_q[n] : cu_seqlens_q[n + 1]`, and its keys and values lie by `cu_seqlens_k`
    (None: as the queries). Offsets are int32 arrays [sequences + 1] on the device of q that begin with 0, never fall
    and end with the number of tokens; they are not read, so this is not checked. `max_seqlen_q` and `max_seqlen_k` are
    whole numbers that no sequence exceeds (None: the number of tokens). `mask` (full, causal, window, prefix) holds
    inside of each sequence, aligned to its own last query and key. With `return_lse` also the LSE [heads, tokens].
    `impl` is as in `attention`. Works inside torch.compile and jax.jit: one graph serves all offsets.
    """
    offsets = [_checked_offsets(cu_seqlens_q, "cu_seqlens_q")]
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
        offsets.append(_checked_offsets(cu_seqlens_k, "cu_seqlens_k"))
        if offsets[0].shape[0] != offsets[1].shape[0]:
            lengths = f"{offsets[0].shape[0]} and {offsets[1].shape[0]}"
            raise InvalidWorkload(f"cu_seqlens_q and cu_seqlens_k must have one length, not {lengths}.")
    elif q.shape[0] != k.shape[0]:
        raise InvalidWorkload(f"{q.shape[0]} queries and {k.shape[0]} keys have different offsets: pass cu_seqlens_k.")
    longest = (_longest(max_seqlen_q, q, "max_seqlen_q"), _longest(max_seqlen_k, k, "max_seqlen_k"))
    if k.shape[0] != v.shape[0]:
        raise InvalidWorkload(f"there are {k.shape[0]} keys and {v.shape[0]} values: each key needs one value.")
    arrays = (offsets[0], None if len(offsets) == 1 else offsets[1])
    packed = DeviceMask(_within(mask), (DevicePart(PACKED, arrays, longest),))
    return attention(q, k, v, packed, scale, softcap, impl, "bshd", None, return_lse)


def _checked_offsets(offsets: Array, name: str) -> Array:
    """Return offsets as 32-bit numbers; raise if they are no array of whole numbers with one axis."""
    if not hasattr(offsets, "dtype") or not hasattr(offsets, "ndim"):
        raise InvalidWorkload(f"{name} must be a 32-bit array of the inputs' framework, not {type(offsets).__name__}.")
    dtype = str(offsets.dtype).rpartition(".")[2]
    if offsets.ndim != 1 or dtype != "int32" or offsets.shape[0] < 2:
        shape = tuple(offsets.shape)
        raise InvalidWorkload(f"{name} must be an int32 array [sequences + 1], not {dtype} of shape {shape}.")
    return offsets


def _longest(given: int | None, x: Array, name: str) -> int:
    if len(x.shape) != 3:
        raise InvalidWorkload(f"packed arrays are [tokens, heads, dim], not of shape {tuple(x.shape)}.")
    if given is None:
        return x.shape[0]
    if isinstance(given, np.integer):
        given = int(given)
    if isinstance(given, bool) or hasattr(given, "dtype") or given < 0:
        raise InvalidWorkload(f"{name} must be a whole number of at least 0, not {given!r}.")
    return max(1, given)


def _within(mask: Any) -> Any:
    """Return the mask inside of sequences; raise if it is not one of positions."""
    if mask is None:
        return _full()
    if not isinstance(mask, Mask) or not all(isinstance(part, POSITIONAL) for part in mask.split()):
        raise InvalidWorkload(f"{WITHIN}.")
    return mask


@constant_when_traced
def _full() -> Full:
    return Full()


def attention(
    q: Array, k: Array, v: Array, mask: DeviceMask, scale: float | None, softcap: float | None, impl: str, layout: str,
    heads: int | tuple[int, int] | None, return_lse: bool,
) -> Any:  # fmt: skip
    """Compute `attnbench.attention` under a mask with values on the device."""
    if not hasattr(q, "requires_grad"):
        _check(q, k, v, mask, layout)
        return _jax(q, k, v, mask, Words(_form(mask), scale, softcap, impl, layout, heads, return_lse))
    import torch

    if is_autocast(q.device.type):
        q, k, v = under_autocast(q, k, v)
        with without_autocast(q.device.type):
            return attention(q, k, v, mask, scale, softcap, impl, layout, heads, return_lse)
    if torch.compiler.is_dynamo_compiling():
        from attnbench.dispatch import torch_compile

        _check(q, k, v, mask, layout)
        return torch_compile.attention(q, k, v, mask, scale, softcap, impl, layout, heads, return_lse, False)
    train = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    words = (scale, softcap, impl, layout, heads, return_lse)
    key = (
        *_sizes_of_plan(q, k, v, mask), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, train, mask.outline,
        words, type(q), current(), registry.generation(), policy.generation(),
    )  # fmt: skip
    run = PLANS.get(key)
    if run is None:
        _check(q, k, v, mask, layout)
        run, size = _planned(q, k, v, Words(_form(mask), *words), train)
        if not is_fake(q):
            PLANS.put(key, run, size)
    return run(q, k, v, *mask.values)


def _sizes_of_plan(q: Array, k: Array, v: Array, mask: DeviceMask) -> tuple[Any, ...]:
    """Return the sizes that a plan is kept for: the shapes, or of packed sequences their doublings."""
    devices = tuple([(array.shape[1:], array.device) for array in mask.arrays])
    if mask.parts[0].kind != PACKED:
        return q.shape, k.shape, v.shape, tuple([array.shape[0] for array in mask.arrays]), devices
    counts = (q.shape[0], k.shape[0], mask.arrays[0].shape[0])
    return tuple([count.bit_length() for count in counts]), q.shape[1:], k.shape[1:], v.shape[1:], devices


def _form(mask: DeviceMask) -> MaskForm:
    form = mask_or_form(mask.outline)
    return form._replace(sequences=mask.arrays[0].shape[0] - 1) if form.packed else form


def _check(q: Array, k: Array, v: Array, mask: DeviceMask, layout: str) -> None:
    """Refuse arrays of another framework or device, and sizes that do not go together."""
    of_torch = hasattr(q, "requires_grad")
    for array in mask.arrays:
        if hasattr(array, "requires_grad") != of_torch or (not of_torch and framework_of(q) != "jax"):
            raise InvalidWorkload(
                f"the mask has values on the device, of type {type(array).__name__}, and the inputs are of type "
                f"{type(q).__name__}: both must be torch tensors or JAX arrays."
            )
        if of_torch and array.device != q.device:
            raise InvalidWorkload(f"the mask is on {array.device}, but the inputs are on {q.device}: move the mask.")
    if mask.parts[0].kind == PACKED:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if len(x.shape) != 3:
                raise InvalidWorkload(f"packed arrays are [tokens, heads, dim]; {name} has shape {tuple(x.shape)}.")
        return
    tokens = 2 if layout == "bhsd" else 1
    axes = 3 if layout == "packed" else 4
    if len(q.shape) == axes and len(k.shape) == axes:  # else the choice says what is wrong
        check_values(mask, q.shape[0], q.shape[tokens], k.shape[tokens])


def _planned(q: Array, k: Array, v: Array, words: Words, train: bool) -> tuple[Call, int]:
    if is_fake(q) or q.is_meta:
        from attnbench.dispatch import torch_compile

        return torch_compile.without_numbers(q, k, v, words, train), 0
    demand = demand_of(q, k, v, words, train)
    if demand.values is not None and demand.values.packed:
        demand = demand._replace(any_kv_len=True)
    return running(words.impl, demand, words.layout), bytes_kept(demand)


def _jax(q: Array, k: Array, v: Array, mask: DeviceMask, words: Words) -> Any:
    import jax.numpy as jnp

    demands = [demand_of(q, k, v, words, train, framework="jax") for train in (False, True)]
    choice, limits = jax_choices(words.impl, *demands), mask.values[len(mask.arrays) :]

    def call(train: bool) -> Callable[..., Any]:
        decision, demand = choice(train)
        run = built(decision.taken(words.impl, demand), decision.config, demand, words.layout)
        return lambda *arrays: run(*arrays, *limits)

    arrays = (q, k, v, *map(jnp.asarray, mask.arrays))  # offsets may be NumPy's
    run = call(False) if pass_of("jax", *arrays) == "forward" else by_pass(call)
    return run(*arrays)
