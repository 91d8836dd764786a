"""Attention of the Gemma models in JAX: a standard path (einsum) and a flash path with the same result.

A query that sees no key gives the mean of V, as in openpi (`fully_masked="uniform"`), or 0 (`"zero"`), on either path.
The flash path cuts a mask into calls that attnbench's implementations compute without an array of q_len x kv_len:

| mask | call |
| --- | --- |
| TokenMask with runs, all keys valid | one call per run without a mask: a run is full attention over the first keys |
| TokenMask with runs and padding | one call per run with key lengths; valid keys are gathered to the front first |
| runs, few queries after the first | cuDNN: one call of all queries over the keys of the first run |
| TokenMask of a known mask, all keys valid | that mask, in the implementation's own arguments (`is_causal`, a window) |
| TokenMask with ids, or an array | one call with a boolean array (kvax: the ids themselves, no array) |

Keys may be reordered freely, since positions are already encoded in them. With "auto", consecutive runs of fewer than
128 queries (a denoise or a decode step) are one call to jax.xla with a small array: on an H200 that took 15 to 21 us,
the fused kernels 47 to 117 us (results/h200/gemma.jsonl).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.errors import JaxRuntimeError

from attnbench import masks, registry
from attnbench.dispatch.attention import attention, explain, explained
from attnbench.dispatch.demand import Words, pass_of
from attnbench.dispatch.plan import by_pass
from attnbench.errors import Unsupported, UsageError
from attnbench.impls.jax import kvax
from attnbench.impls.jax._libraries import import_beside_torch
from attnbench.impls.jax.nn import JaxNn
from attnbench.impls.jax.tokamax import Tokamax
from attnbench.impls.partial.jax_passes import (
    MOST_PAIRS,
    Corner,
    Rule,
    backward_joined,
    cudnn_late_passes,
    forward_joined,
)
from attnbench.masks import AnyMask
from attnbench.models.gemma_config import FLASH_CHOICES, check_flash_choice
from attnbench.models.masks import TokenMask, fitted
from attnbench.spec import Partial

FlashChoice = Literal["auto", "cudnn", "tokamax", "kvax", "pallas", "jax"]
FullyMasked = Literal["uniform", "zero"]
Form = Literal["none", "lengths", "array"]
"""Form of a call's mask: none (or a known one), or key lengths or a boolean array, which may exist only inside jit."""
HIDDEN = -2.3819763e38
"""Logit of a hidden pair in openpi: finite, so that a row without keys becomes uniform."""
_warned: set[str] = set()


@dataclass(frozen=True)
class Path:
    """Computation path of an attention module; the fields of `gemma.Attention` and `gemma_fast.Attention`."""

    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"

    def __post_init__(self) -> None:
        check_flash_choice(self.flash_attention_impl)
        for name in ("use_flash_attention", "fallback"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if self.fully_masked not in ("uniform", "zero"):
            raise UsageError(f'fully_masked must be "uniform" or "zero", not "{self.fully_masked}".')


FLASH_FIELDS = tuple(field.name for field in fields(Path))


def flash_fields(module: Any) -> dict[str, Any]:
    """Return the path's fields of a module, for its `Path` and for the modules inside it."""
    return {name: getattr(module, name) for name in FLASH_FIELDS}


def attend(q: Array, k: Array, v: Array, attn_mask: Array | TokenMask, path: Path, dtype: Any) -> Array:
    """Return attention by the chosen path, [B, T, N, H].

    q [B, T, N, H] is scaled already; k and v are [B, S, K, H]; the mask is [B, 1, T, S] or a TokenMask; `dtype` is that
    of the probabilities.
    """
    attn_mask = fitted(attn_mask, q.shape[0], q.shape[1], k.shape[1])
    if path.use_flash_attention:
        try:
            out = flash_attention(q.astype(k.dtype), k, v, attn_mask, path.flash_attention_impl)
        except Unsupported as refusal:
            if not path.fallback:
                raise Unsupported(f"{refusal} fallback=True uses the standard attention instead.") from refusal
            if str(refusal) not in _warned:
                _warned.add(str(refusal))
                warnings.warn(f"the standard attention is used: {refusal}", stacklevel=2)
        else:
            out = out.astype(jnp.result_type(dtype, v.dtype))
            return _fill(out, v, _rows_that_see(attn_mask), path.fully_masked, dtype)
    array = attn_mask.array() if isinstance(attn_mask, TokenMask) else attn_mask
    out = standard_attention(q, k, v, array, dtype)
    if path.fully_masked == "uniform":
        return out
    return _fill(out, v, _rows_that_see(attn_mask), "zero", dtype)


def standard_attention(q: Array, k: Array, v: Array, mask: Array, dtype: Any) -> Array:
    """Compute logits and softmax in float32 and probabilities in `dtype`; stores T x S values."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(jnp.where(mask[:, :, None], logits, HIDDEN), axis=-1).astype(dtype)
    return jnp.einsum("bkgts,bskh->btkgh", probabilities, v).reshape(*q.shape[:3], v.shape[-1])


def _rows_that_see(attn_mask: Array | TokenMask) -> Array | None:
    return attn_mask.rows_that_see() if isinstance(attn_mask, TokenMask) else attn_mask.any(-1)[:, 0]


def _fill(out: Array, v: Array, rows: Array | None, how: FullyMasked, dtype: Any) -> Array:
    """Return the output with rows without keys set to 0, or to the result of equal probabilities of `dtype`."""
    if rows is None:
        return out
    other = jnp.zeros((), out.dtype)
    if how == "uniform":
        mean = jnp.einsum("s,bskh->bkh", jnp.full(v.shape[1], 1 / v.shape[1], dtype), v)
        other = jnp.repeat(mean, out.shape[2] // v.shape[2], axis=1)[:, None].astype(out.dtype)
    return jnp.where(rows[..., None, None], out, other)


SHORT = 128
SCALE = 1.0
"""Scale of the calls: queries are scaled already."""


class AttentionCall(NamedTuple):
    """A call on queries start:stop over the first `keys` keys."""

    start: int
    stop: int
    keys: int
    form: Form
    choice: str


def flash_attention(q: Array, k: Array, v: Array, mask: Array | TokenMask, choice: str) -> Array:
    """Return attention [B, T, N, H]; rows that see no key have any value.

    Raise Unsupported with the reasons if no implementation can compute the mask.
    """
    if isinstance(mask, TokenMask) and mask.known is not None and mask.valid is None:
        return _call(q, k, v, "none", choice, known=mask.known.mask)
    if choice == "kvax":
        return _kvax(q, k, v, mask)
    if isinstance(mask, TokenMask) and mask.runs is not None:
        return _by_runs(q, k, v, mask, choice)
    array = mask.array() if isinstance(mask, TokenMask) else mask
    return _call(q, k, v, "array", choice, mask=array)


def calls_of_runs(mask: TokenMask, choice: str) -> list[AttentionCall]:
    """Return the calls into which a mask of runs is cut."""
    assert mask.runs is not None
    calls: list[AttentionCall] = []
    start = 0
    for queries, reached in mask.runs:
        stop, keys = start + queries, max(reached, 1)  # rows without keys get another result afterwards
        alone: Form = "none" if mask.valid is None else "lengths"
        if choice != "auto" or queries >= SHORT:
            calls.append(AttentionCall(start, stop, keys, alone, choice))
        elif calls and calls[-1].choice == "jax":
            last = calls.pop()
            calls.append(AttentionCall(last.start, stop, max(last.keys, keys), "array", "jax"))
        else:
            calls.append(AttentionCall(start, stop, keys, "none" if alone == "none" else "array", "jax"))
        start = stop
    return calls


def _by_runs(q: Array, k: Array, v: Array, mask: TokenMask, choice: str) -> Array:
    calls = calls_of_runs(mask, choice)
    if has_common_keys(mask) and (kernel := _common_kernel(q, k, v, calls[0])) is not None:
        with _errors_as_refusals(choice, "jax.cudnn"):
            return attend_common(q, k, v, mask, SCALE, kernel)
    in_front = (k, v)
    unpacked = [call.keys for call in calls if call.form == "lengths" and call.keys > mask.packed]
    if unpacked:
        order = mask.with_order().order
        assert order is not None
        order = order[:, : max(unpacked)]
        in_front = tuple(jnp.take_along_axis(x, order[:, :, None, None], axis=1) for x in (k, v))
    outs = []
    for start, stop, keys, form, how in calls:
        source = in_front if form == "lengths" and keys > mask.packed else (k, v)
        rows, front, values = q[:, start:stop], source[0][:, :keys], source[1][:, :keys]
        if form == "lengths":
            outs.append(_call(rows, front, values, form, how, kv_lengths=jnp.maximum(mask.valid_keys(keys), 1)))
        else:
            hidden = mask.rows(start, stop, keys) if form == "array" else None
            outs.append(_call(rows, front, values, form, how, mask=hidden))
    return jnp.concatenate(outs, axis=1) if len(outs) > 1 else outs[0]


def _common_kernel(q: Array, k: Array, v: Array, first: AttentionCall) -> Partial | None:
    """Return cuDNN's passes if both passes of the first run would be cuDNN's anyway; else None."""
    if first.choice not in ("auto", "cudnn"):
        return None
    arrays = q[:, first.start : first.stop], k[:, : first.keys], v[:, : first.keys]
    try:
        names = {pick(*arrays, first.form, first.choice, train) for train in (False, True)}
    except Unsupported:  # perhaps of one pass only: the call itself raises if it needs that pass
        return None
    return cudnn_late_passes(SCALE, first.form == "lengths") if names == {"jax.cudnn"} else None


@contextmanager
def _errors_as_refusals(choice: str, name: str) -> Iterator[None]:
    """Raise Unsupported for an error of a library that cannot run a call; errors while a call runs stay as they are."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ImportError) as error:
        if isinstance(error, (Unsupported, JaxRuntimeError, RecursionError)):
            raise
        raise _refusal(choice, [f"{name}: {error}"]) from error


def _call(
    q: Array,
    k: Array,
    v: Array,
    form: Form,
    choice: str,
    *,
    mask: Array | None = None,
    kv_lengths: Array | None = None,
    known: AnyMask | None = None,
) -> Array:
    traced = pass_of("jax", q, k, v, *(x for x in (mask, kv_lengths) if x is not None)) == "train"
    names = [pick(q, k, v, form, choice, train, known) for train in ((False, True) if traced else (False,))]
    with _errors_as_refusals(choice, " or ".join(dict.fromkeys(names))):
        if form == "none":
            return attention(q, k, v, mask=known, scale=SCALE, impl="auto" if choice == "auto" else names[-1])
        if mask is not None:
            mask = mask | ~mask.any(-1, keepdims=True)  # fused kernels give NaN gradients to rows without keys
        if not traced:
            return attend_in_jit(names[0], q, k, v, kv_lengths, mask)
        return by_pass(lambda train: partial(attend_in_jit, names[train]))(q, k, v, kv_lengths, mask)


def attend_in_jit(name: str, q: Array, k: Array, v: Array, kv_lengths: Array | None, mask: Array | None) -> Array:
    """Return attention in layout bshd with a mask that may be traced, by a library whose own interface takes such.

    `kv_lengths` is int32 [b], each at least 1, or `mask` booleans [b or 1, 1, q, kv]. A row that sees no key has the
    library's result: the caller replaces it.
    """
    implementation = registry.get(name)
    words: dict[str, Any] = {"scale": SCALE}
    if kv_lengths is not None:
        words["key_value_seq_lengths"] = kv_lengths.astype(jnp.int32)
    if isinstance(implementation, JaxNn):
        if mask is not None and implementation.full_pairs:
            mask = jnp.broadcast_to(mask, (q.shape[0], q.shape[2], *mask.shape[2:]))
        words |= {"implementation": implementation.backend, "mask": mask}
        return jax.nn.dot_product_attention(q, k, v, **words)
    assert isinstance(implementation, Tokamax)
    tokamax: Any = import_beside_torch("tokamax")
    return tokamax.dot_product_attention(q, k, v, mask=mask, implementation=implementation.backend, **words)


def _stand_in(form: Form, batch: int, q_len: int, kv_len: int) -> AnyMask:
    """Return a concrete mask of the same form, by which an implementation can judge support; it hides no pair and
    stores no array."""
    if form == "lengths":
        return masks.lengths(np.full(batch, kv_len, np.int32))
    if form == "array":
        return masks.block_causal(np.zeros((1, kv_len), np.int32), np.zeros((1, q_len), np.int32))
    return masks.full()


def pick(
    q: Array, k: Array, v: Array, form: Form, choice: str, train: bool = False, known: AnyMask | None = None
) -> str:
    """Return the implementation for a call: `explain`'s pick, or the next one that takes such a mask; raise Unsupported
    if none does."""
    mask = known or _stand_in(form, q.shape[0], q.shape[1], k.shape[1])
    reasons = []
    for asked in FLASH_CHOICES[choice]:
        explanation = explained(q, k, v, Words(mask, SCALE, None, asked, "bshd", None, False), train)
        able = explanation.able
        for name in able:
            if form == "none" or isinstance(registry.get(name), JaxNn | Tokamax):
                return name
            reasons.append(f"{name}: takes no mask that exists only inside jit")
        reasons += [f"{other.name}: {other.reason}" for other in explanation.candidates if other.name not in able]
    raise _refusal(choice, reasons)


def _refusal(choice: str, reasons: list[str]) -> Unsupported:
    return Unsupported(f'flash_attention_impl="{choice}" cannot run this call: {"; ".join(reasons)}.')


def _kvax(q: Array, k: Array, v: Array, mask: Array | TokenMask) -> Array:
    """Compute attention by kvax: causal by position, the mask's ids being positions; hidden keys have segment -1
    (padding)."""
    if not isinstance(mask, TokenMask):
        raise _refusal("kvax", ["jax.kvax: takes no boolean array, only a TokenMask"])
    if mask.known is not None:
        raise _refusal(
            "kvax", ["jax.kvax: cannot combine padding that exists only inside jit with a mask of attnbench.masks"]
        )
    explanation = explain(q, k, v, mask=masks.causal(), scale=SCALE, impl="jax.kvax")
    if explanation.pick is None:
        raise _refusal("kvax", [f"{candidate.name}: {candidate.reason}" for candidate in explanation.candidates])
    queries, keys = mask.positions_of_kvax()
    valid = jnp.ones((1, k.shape[1]), bool) if mask.valid is None else mask.valid
    if (order := mask.with_order().order) is not None:  # kvax reads whatever lies between two blocks that are seen
        k, v = (jnp.take_along_axis(x, order[:, :, None, None], axis=1) for x in (k, v))
        keys, valid = (jnp.take_along_axis(jnp.broadcast_to(x, order.shape), order, axis=1) for x in (keys, valid))
    q_positions, q_segments = (jnp.broadcast_to(x, q.shape[:2]) for x in (queries, jnp.zeros((1, 1), jnp.int32)))
    kv_positions, kv_segments = (jnp.broadcast_to(x, k.shape[:2]) for x in (keys, jnp.where(valid, 0, -1)))
    config = kvax.KVAX.configs(explanation.workload)[0]
    return kvax.attend(
        q, k, v, (q_positions, q_segments, kv_positions, kv_segments), scale=SCALE, config=config, gradients=True
    )


def has_common_keys(mask: TokenMask) -> bool:
    """Return whether the queries after the first run are few and see the first run's keys, which stand in front."""
    if mask.runs is None or len(mask.runs) < 2:
        return False
    (queries, keys), *others = mask.runs
    few = (mask.q_len - queries) * (mask.kv_len - keys) <= MOST_PAIRS
    in_front = mask.valid is None or mask.packed >= keys
    return keys > 0 and few and in_front and all(more >= keys for _, more in others)


def attend_common(q: Array, k: Array, v: Array, mask: TokenMask, scale: float, kernel: Partial) -> Array:
    """Return attention [B, T, N, H] of a mask for which `has_common_keys` holds.

    `kernel` is (forward, backward), called on all queries and the keys that every query sees; if keys may be invalid,
    its last argument is key lengths [B], each at least 1. The suffix's own pairs are computed beside the kernel. A
    batch row without a valid key among the common ones has no part in that call; its other queries may still see keys
    of the suffix.
    """
    assert mask.runs is not None
    first, keys = mask.runs[0]
    rule = Rule(scale, None)
    lengths = () if mask.valid is None else (mask.valid_keys(keys),)
    seen = mask.rows(first, mask.q_len, mask.kv_len)[:, :, None, :, keys:]

    @jax.custom_vjp
    def run(q: Array, k: Array, v: Array, seen: Array, *lengths: Array) -> Array:
        return forward(q, k, v, seen, *lengths)[0]

    def forward(q: Array, k: Array, v: Array, seen: Array, *lengths: Array) -> tuple[Array, Any]:
        def common(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = kernel[0](q, k, v, *(jnp.maximum(length, 1) for length in lengths))
            return out, _where_empty(lengths, -jnp.inf, lse)

        out, lse = forward_joined(common, Corner(first, keys, seen), rule, q, k, v)
        return out, (q, k, v, seen, lengths, out, lse)

    def backward(kept: Any, dout: Array) -> tuple[Any, ...]:
        q, k, v, seen, lengths, out, lse = kept

        def common(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
            at_least_one = (jnp.maximum(length, 1) for length in lengths)
            return kernel[1](q, k, v, out, _where_empty(lengths, jnp.inf, lse), dout, *at_least_one)

        gradients = backward_joined(common, Corner(first, keys, seen), rule, q, k, v, out, lse, dout)
        return *gradients, None, *(None for _ in lengths)

    run.defvjp(forward, backward)
    return run(q, k, v, seen, *lengths)


def _where_empty(lengths: tuple[Array, ...], value: float, lse: Array) -> Array:
    """Return the LSE with another value in batch rows that have none of the common keys."""
    for length in lengths:
        lse = jnp.where(length[:, None, None] == 0, value, lse)
    return lse
