"""The flash path: a mask cut into calls that attnbench's implementations can do without a T x S array.

| mask | what a call gets |
| --- | --- |
| TokenMask with runs, all keys valid | one call per run, no mask at all: a run is full attention over the first keys |
| TokenMask with runs and padding | one call per run with key lengths; holes are closed by gathering the keys first |
| runs, few queries after the first | cuDNN: one call of all queries over the first run's keys (`common_keys`) |
| TokenMask of a known mask, all keys valid | that mask, in the implementation's own words (`is_causal`, a window) |
| TokenMask with ids, or an array | one call with a boolean array (kvax: the ids themselves, no array) |

Keys may be reordered freely: their positions are already in them. With "auto" consecutive runs of fewer than 128
queries (a denoise or a decode step) are one call to jax.xla with a small array: on an H200 that took 15 to 21 us where
the fused kernels took 47 to 117 us (results/h200/gemma.jsonl).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.errors import JaxRuntimeError

from attnbench import masks
from attnbench.dispatch.attention import attention
from attnbench.dispatch.demand import Words, pass_of
from attnbench.dispatch.explain import explain, explained
from attnbench.dispatch.plan import by_pass
from attnbench.errors import Unsupported
from attnbench.impls.jax import _masks_in_jit, kvax
from attnbench.impls.jax._masks_in_jit import Form
from attnbench.impls.partial.jax_passes import cudnn_late_passes
from attnbench.masks import AnyMask
from attnbench.models.common_keys import attend as attend_common
from attnbench.models.common_keys import has_common_keys
from attnbench.models.gemma_config import FLASH_CHOICES
from attnbench.models.masks import TokenMask
from attnbench.spec import Partial

SHORT = 128
SCALE = 1.0
"""Queries come scaled."""


class Piece(NamedTuple):
    """One call: queries start:stop over the first `keys` keys."""

    start: int
    stop: int
    keys: int
    form: Form
    choice: str


def flash_attention(q: Array, k: Array, v: Array, mask: Array | TokenMask, choice: str) -> Array:
    """[B, T, N, H] with anything in rows that see no key; Unsupported with the reasons when no implementation can."""
    if isinstance(mask, TokenMask) and mask.known is not None and mask.valid is None:
        return _call(q, k, v, "none", choice, known=mask.known.mask)
    if choice == "kvax":
        return _kvax(q, k, v, mask)
    if isinstance(mask, TokenMask) and mask.runs is not None:
        return _by_runs(q, k, v, mask, choice)
    array = mask.array() if isinstance(mask, TokenMask) else mask
    return _call(q, k, v, "array", choice, mask=array)


def pieces(mask: TokenMask, choice: str) -> list[Piece]:
    """The calls that a mask of runs becomes."""
    assert mask.runs is not None
    found: list[Piece] = []
    start = 0
    for queries, reached in mask.runs:
        stop, keys = start + queries, max(reached, 1)  # rows without keys get another result afterwards
        alone: Form = "none" if mask.valid is None else "lengths"
        if choice != "auto" or queries >= SHORT:
            found.append(Piece(start, stop, keys, alone, choice))
        elif found and found[-1].choice == "jax":
            last = found.pop()
            found.append(Piece(last.start, stop, max(last.keys, keys), "array", "jax"))
        else:
            found.append(Piece(start, stop, keys, "none" if alone == "none" else "array", "jax"))
        start = stop
    return found


def _by_runs(q: Array, k: Array, v: Array, mask: TokenMask, choice: str) -> Array:
    calls = pieces(mask, choice)
    if has_common_keys(mask) and (kernel := _common_kernel(q, k, v, calls[0])) is not None:
        with _refusals_told(choice, "jax.cudnn"):
            return attend_common(q, k, v, mask, SCALE, kernel)
    in_front = (k, v)
    unpacked = [piece.keys for piece in calls if piece.form == "lengths" and piece.keys > mask.packed]
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


def _common_kernel(q: Array, k: Array, v: Array, first: Piece) -> Partial | None:
    """cuDNN's passes, where both of the first run's would be cuDNN's anyway."""
    if first.choice not in ("auto", "cudnn"):
        return None
    rows, front, values = q[:, first.start : first.stop], k[:, : first.keys], v[:, : first.keys]
    try:
        names = {pick(rows, front, values, first.form, first.choice, train) for train in (False, True)}
    except Unsupported:  # of one pass alone, perhaps: the call itself says so where it matters
        return None
    return cudnn_late_passes(SCALE, first.form == "lengths") if names == {"jax.cudnn"} else None


@contextmanager
def _refusals_told(choice: str, name: str) -> Iterator[None]:
    """What a library raises where it cannot run a call, as Unsupported; a call that broke while it ran stays so."""
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
    traced = pass_of("jax", q, k, v, *(one for one in (mask, kv_lengths) if one is not None)) == "train"
    names = [pick(q, k, v, form, choice, train, known) for train in ((False, True) if traced else (False,))]
    with _refusals_told(choice, " or ".join(dict.fromkeys(names))):
        if form == "none":
            return attention(q, k, v, mask=known, scale=SCALE, impl="auto" if choice == "auto" else names[-1])
        if mask is not None:
            mask = mask | ~mask.any(-1, keepdims=True)  # fused kernels give NaN gradients to rows without keys
        run = by_pass(lambda train: partial(_late, names[train])) if traced else partial(_late, names[0])
        return run(q, k, v, kv_lengths, mask)


def _late(name: str, q: Array, k: Array, v: Array, kv_lengths: Array | None, mask: Array | None) -> Array:
    return _masks_in_jit.attend(name, q, k, v, scale=SCALE, kv_lengths=kv_lengths, mask=mask)


def pick(
    q: Array, k: Array, v: Array, form: Form, choice: str, train: bool = False, known: AnyMask | None = None
) -> str:
    """The implementation of one call: `explain`'s pick, or the next that takes such a mask; or Unsupported."""
    mask = known or _masks_in_jit.stand_in(form, q.shape[0], q.shape[1], k.shape[1])
    reasons = []
    for name in FLASH_CHOICES[choice]:
        told = explained(q, k, v, Words(mask, SCALE, None, name, "bshd", None, False), train)
        able = told.able
        for name in able:
            late = None if form == "none" else _masks_in_jit.takes(name)
            if late is None:
                return name
            reasons.append(f"{name}: {late}")
        reasons += [f"{one.name}: {one.reason}" for one in told.candidates if one.name not in able]
    raise _refusal(choice, reasons)


def _refusal(choice: str, reasons: list[str]) -> Unsupported:
    return Unsupported(f'flash_attention_impl="{choice}" cannot run this: {"; ".join(reasons)}.')


def _kvax(q: Array, k: Array, v: Array, mask: Array | TokenMask) -> Array:
    """Causal by position, positions being the mask's ids; a hidden key has a segment of its own (-1: padding)."""
    if not isinstance(mask, TokenMask):
        raise _refusal("kvax", ["jax.kvax: takes no boolean array, only a TokenMask"])
    if mask.known is not None:
        raise _refusal("kvax", ["jax.kvax: takes no padding known only inside jit with a mask of attnbench.masks"])
    told = explain(q, k, v, mask=masks.causal(), scale=SCALE, impl="jax.kvax")
    if told.pick is None:
        raise _refusal("kvax", [f"{one.name}: {one.reason}" for one in told.candidates])
    queries, keys = mask.positions_of_kvax()
    valid = jnp.ones((1, k.shape[1]), bool) if mask.valid is None else mask.valid
    if (order := mask.with_order().order) is not None:  # kvax reads whatever lies between two blocks that are seen
        k, v = (jnp.take_along_axis(x, order[:, :, None, None], axis=1) for x in (k, v))
        keys, valid = (jnp.take_along_axis(jnp.broadcast_to(x, order.shape), order, axis=1) for x in (keys, valid))
    sizes = [(q.shape[0], q.shape[1])] * 2 + [(q.shape[0], k.shape[1])] * 2
    tokens = (queries, jnp.zeros((1, 1), jnp.int32), keys, jnp.where(valid, 0, -1))
    q_positions, q_segments, kv_positions, kv_segments = (jnp.broadcast_to(x, s) for x, s in zip(tokens, sizes))
    config = kvax.KVAX.configs(told.workload)[0]
    return kvax.attend(
        q, k, v, (q_positions, q_segments, kv_positions, kv_segments), scale=SCALE, config=config, gradients=True
    )
