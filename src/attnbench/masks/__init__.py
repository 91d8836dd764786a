"""Masks as data: `attnbench.masks`. Each function returns a frozen mask; masks combine with `&`.

Lists and NumPy arrays become constants of the mask. Tensors on an accelerator, and arrays that torch.compile or JAX
traces, are not read: `lengths`, `valid`, `documents` and `block_causal` return a `DeviceMask` for them, the others
refuse what has no numbers yet. With `constant=True` values are read now, with `constant=False` tensors and JAX arrays
of a CPU are not read either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np

from attnbench.errors import InvalidWorkload
from attnbench.masks.arrays import BlockCausal, Blocks, Dense, Documents, Lengths, Valid
from attnbench.masks.base import (
    LARGEST_SIZE,
    Align,
    Mask,
    MaskShape,
    Namespace,
    Predicate,
    check_constant,
    freeze,
    integers,
    to_numpy,
    whole_number,
)
from attnbench.masks.combine import Both, Part
from attnbench.masks.device import DeviceMask, ids_on_device, lengths_on_device, stays_on_device, valid_on_device
from attnbench.masks.positional import Alibi, Causal, Dilated, Full, Prefix, Window, alibi_slopes
from attnbench.tracing import constant_when_traced

AnyMask = Part | Both

__all__ = [
    "AnyMask", "Align", "LARGEST_SIZE", "Mask", "MaskShape", "Namespace", "Predicate",
    "Full", "Causal", "Window", "Prefix", "BlockCausal", "Documents", "Lengths", "Valid", "Dilated", "Blocks", "Dense",
    "Alibi", "Both", "DeviceMask",
    "full", "causal", "window", "prefix", "block_causal", "documents", "lengths", "valid", "dilated", "blocks", "dense",
    "alibi",
]  # fmt: skip


@constant_when_traced
def full() -> Full:
    """Return the mask under which every query sees every key."""
    return Full()


@constant_when_traced
def causal(align: Align = "bottom-right") -> Causal:
    """Return the mask under which query i sees the keys up to i.

    If q_len and kv_len differ, the last query sees all keys; with align="top-left" the first query sees the first key
    only.
    """
    return Causal(align)


@constant_when_traced
def window(left: int | None, right: int | None = 0, align: Align = "bottom-right") -> Window:
    """Return the mask under which query i sees keys i - left ... i + right; None means no bound on that side."""
    return Window(left, right, align)


@constant_when_traced
def prefix(n: int, align: Align = "bottom-right") -> Prefix:
    """Return the mask under which all queries see the first n keys, and the other keys causally."""
    return Prefix(n, align)


HostData = Sequence[Any] | np.ndarray
"""Data of which the values are known."""


@overload
def block_causal(ids: HostData, q_ids: HostData | None = None, *, constant: None = None) -> BlockCausal: ...
@overload
def block_causal(ids: Any, q_ids: Any = None, *, constant: bool | None = None) -> BlockCausal | DeviceMask: ...
def block_causal(ids: Any, q_ids: Any = None, *, constant: bool | None = None) -> BlockCausal | DeviceMask:
    """Return the mask ids[j] <= q_ids[i]; ids is the running sum of openpi's mask_ar, [kv_len] or [batch, kv_len]."""
    if stays_on_device(ids, constant):
        return ids_on_device("block_causal", ids, q_ids)
    return _block_causal(ids, q_ids)


@overload
def documents(ids: HostData, q_ids: HostData | None = None, *, constant: None = None) -> Documents: ...
@overload
def documents(ids: Any, q_ids: Any = None, *, constant: bool | None = None) -> Documents | DeviceMask: ...
def documents(ids: Any, q_ids: Any = None, *, constant: bool | None = None) -> Documents | DeviceMask:
    """Return the mask under which tokens see only their own document; ids is [kv_len] or [batch, kv_len]."""
    if stays_on_device(ids, constant):
        return ids_on_device("documents", ids, q_ids)
    return _documents(ids, q_ids)


@overload
def lengths(kv_lengths: HostData, *, constant: None = None) -> Lengths: ...
@overload
def lengths(kv_lengths: Any, *, constant: bool | None = None) -> Lengths | DeviceMask: ...
def lengths(kv_lengths: Any, *, constant: bool | None = None) -> Lengths | DeviceMask:
    """Return the mask of right padding: batch row b has kv_lengths[b] valid keys."""
    return lengths_on_device(kv_lengths) if stays_on_device(kv_lengths, constant) else _lengths(kv_lengths)


@overload
def valid(mask_bj: HostData, *, constant: None = None) -> Valid: ...
@overload
def valid(mask_bj: Any, *, constant: bool | None = None) -> Valid | DeviceMask: ...
def valid(mask_bj: Any, *, constant: bool | None = None) -> Valid | DeviceMask:
    """Return the mask of the valid keys, given as booleans [kv_len] or [batch, kv_len] with holes anywhere."""
    return valid_on_device(mask_bj) if stays_on_device(mask_bj, constant) else _valid(mask_bj)


@constant_when_traced
def _block_causal(ids: Any, q_ids: Any) -> BlockCausal:
    return BlockCausal(*_token_ids(ids, q_ids, "block_causal"))


@constant_when_traced
def _documents(ids: Any, q_ids: Any) -> Documents:
    return Documents(*_token_ids(ids, q_ids, "documents"))


@constant_when_traced
def _lengths(kv_lengths: Any) -> Lengths:
    if to_numpy(kv_lengths, "kv_lengths").dtype == bool:
        raise InvalidWorkload("kv_lengths must be numbers of keys, not booleans: use masks.valid for booleans.")
    frozen = integers(kv_lengths, "kv_lengths", (1,))
    if frozen.array.min() < 0:
        raise InvalidWorkload(f"key lengths cannot be negative: {frozen.array.min()}.")
    return Lengths(frozen)


@constant_when_traced
def _valid(mask_bj: Any) -> Valid:
    keys = to_numpy(mask_bj, "valid")
    if keys.dtype != bool or keys.ndim not in (1, 2):
        raise InvalidWorkload(
            f"valid takes booleans [kv_len] or [batch, kv_len], not {keys.dtype} with {keys.ndim} axes."
        )
    return Valid(freeze(np.atleast_2d(keys)))


@constant_when_traced
def dilated(
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], offset: Literal["mod", "group"] = "mod"
) -> Dilated:
    """Return LongNet's pattern; a pair that meets in several branches counts once for each of them."""
    lists = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    for name, values in lists.items():
        if isinstance(values, str) or not hasattr(values, "__iter__"):
            raise InvalidWorkload(f"{name} must be a list of whole numbers, not {values!r}.")
    widths, rates = (tuple(whole_number(n, f"each of {name}") for n in values) for name, values in lists.items())
    return Dilated(widths, rates, offset)


@constant_when_traced
def blocks(block_mask: Any, block_size: int) -> Blocks:
    """Keep whole blocks: block_mask is boolean [q blocks, kv blocks], optionally with head and batch axes before."""
    kept = to_numpy(block_mask, "block_mask")
    if kept.dtype != bool or not 2 <= kept.ndim <= 4:
        raise InvalidWorkload(f"block_mask must be booleans with 2 to 4 axes, not {kept.dtype} with {kept.ndim}.")
    return Blocks(freeze(kept), whole_number(block_size, "block_size"))


@constant_when_traced
def dense(array: Any) -> Dense:
    """Return the mask of a constant array, boolean or added, that broadcasts to [batch, heads, q_len, kv_len]."""
    check_constant(array, "a mask", "; ab.attention takes one that is learned as bias=")
    values = to_numpy(array, "dense")
    if values.ndim > 4 or values.size == 0:
        raise InvalidWorkload(f"a dense mask has at most 4 axes and is not empty, not {values.shape}.")
    if values.dtype.kind in "iu":
        raise InvalidWorkload("an integer mask is ambiguous: pass booleans (visible) or floats (added to the logits).")
    if values.dtype.kind not in "bf":
        raise InvalidWorkload(f"a dense mask is boolean or floating, not {values.dtype}.")
    if values.dtype.kind == "f" and (np.isnan(values).any() or (values == np.inf).any()):
        raise InvalidWorkload("an additive mask may hold finite numbers and -inf, not NaN or +inf.")
    return Dense(freeze(values if values.dtype == bool or values.dtype == np.float64 else values.astype(np.float32)))


@constant_when_traced
def alibi(slopes: Any, align: Align = "bottom-right") -> Alibi:
    """Return the mask under which every query sees every key, with -slopes[h] * |i - j| added to the logits of head h.

    `slopes` is an array [heads], kept in float32, or the number of heads for the slopes of the paper. If q_len and
    kv_len differ, the last query is at the last key; with align="top-left" the first query is at the first key.
    """
    check_constant(slopes, "alibi's slopes")
    array = to_numpy(slopes, "slopes")
    if array.ndim == 0:
        return Alibi(freeze(alibi_slopes(whole_number(slopes, "the number of heads", least=1))), align)
    if array.dtype.kind not in "fiu" or array.ndim != 1 or array.size == 0:
        raise InvalidWorkload(f"slopes are numbers [heads], not {array.dtype} with {array.ndim} axes.")
    if not (np.isfinite(array) & (array >= 0)).all():
        raise InvalidWorkload("slopes must be finite and 0 or more; any other bias is a masks.dense.")
    return Alibi(freeze(array.astype(np.float32)), align)


def _token_ids(ids: Any, q_ids: Any, name: str) -> tuple[Any, Any]:
    keys = integers(np.atleast_2d(to_numpy(ids, f"{name} ids")), f"{name} ids", (2,))
    if q_ids is None:
        return keys, None
    return keys, integers(np.atleast_2d(to_numpy(q_ids, f"{name} q_ids")), f"{name} q_ids", (2,))
