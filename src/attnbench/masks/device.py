"""Masks whose values stay on the device: lengths, valid keys, documents and blocks given as torch or JAX arrays.

Masks of host data are constants: a choice, a plan and a graph depend on their values. A `DeviceMask` carries arrays
that nobody reads: they are arguments of the call, so that one plan, one graph of torch.compile and one trace of JAX
serve all their values, and no host waits for a device. What is known of it, its `MaskForm`, is hashable and holds no
array.

Code that torch.compile traces makes and combines these masks, so they are plain objects with plain values inside.
"""

from __future__ import annotations

import sys
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnbench.errors import InvalidWorkload
from attnbench.masks.arrays import SEES_ID, BlockCausal, Documents, Lengths, Valid, by_ids, by_keys, by_lengths
from attnbench.masks.base import Mask, MaskShape, Predicate, freeze
from attnbench.masks.combine import literal, mask_of
from attnbench.masks.positional import Causal, Full, Prefix, Window
from attnbench.tracing import being_traced, constant_when_traced, is_fake

if TYPE_CHECKING:
    from attnbench.masks import AnyMask

PACKED = "packed"
"""Kind of the part that says which tokens of packed arrays form a sequence; `ab.attention_varlen` makes it."""
FORM = "MaskForm"
"""Name at the beginning of an outline."""
POSITIONAL = (Full, Causal, Window, Prefix)
WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def stays_on_device(values: Any, constant: bool | None) -> bool:
    """Return whether the values of a mask are left where they are, as arguments of each call.

    That holds for arrays on an accelerator and for whatever has no numbers yet; `constant` overrides it.
    """
    if constant:
        return False
    if hasattr(values, "detach"):
        import torch

        if constant is False or torch.compiler.is_dynamo_compiling():
            return True
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(values)  # pyright: ignore[reportAttributeAccessIssue]
        return wrapped or values.device.type != "cpu" or is_fake(values) or being_traced()
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(values, jax.Array):
        if constant is False or isinstance(values, jax.core.Tracer):
            return True
        return any(device.platform != "cpu" for device in values.devices())
    if constant is False:
        raise InvalidWorkload(
            "constant=False is for torch tensors and JAX arrays: lists and NumPy arrays are constants of a call."
        )
    return False


class DevicePart(NamedTuple):
    """A part of a mask with its arrays: rows first, None for what was not given."""

    kind: str
    arrays: tuple[Any, ...]
    limits: tuple[int, ...] = ()
    """Whole numbers that go with each call: of packed arrays the largest numbers of queries and keys of a sequence."""


class DeviceMask:
    """A mask of which some parts have their values in arrays on the device; `&` combines it with any other mask."""

    def __init__(self, fixed: Any, parts: tuple[DevicePart, ...]) -> None:
        self.fixed = fixed
        """Combination of the parts whose values are known."""
        self.parts = parts

    def __and__(self, other: Any) -> DeviceMask:
        if isinstance(other, DeviceMask):
            return DeviceMask(self.fixed & other.fixed, self.parts + other.parts)
        return DeviceMask(self.fixed & other, self.parts) if isinstance(other, Mask) else NotImplemented

    def __rand__(self, other: Any) -> DeviceMask:
        return DeviceMask(other & self.fixed, self.parts) if isinstance(other, Mask) else NotImplemented

    def __repr__(self) -> str:
        return f"<mask {self.id}>"

    @property
    def id(self) -> str:
        """Kinds of the parts: the values have no name."""
        return "&".join([*(() if isinstance(self.fixed, Full) else (self.fixed.id,)), *self.kinds])

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the parts on the device."""
        return tuple([part.kind for part in self.parts])

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays in order."""
        return tuple([array for part in self.parts for array in part.arrays if array is not None])

    @property
    def values(self) -> tuple[Any, ...]:
        """Arrays and limits, as they are passed to a call after q, k and v."""
        return self.arrays + tuple([limit for part in self.parts for limit in part.limits])

    @property
    def outline(self) -> tuple[Any, ...]:
        """The mask's form as plain values that torch.compile can guard on."""
        parts = [(part.kind, tuple([array is not None for array in part.arrays])) for part in self.parts]
        return (FORM, literal(self.fixed), tuple(parts))


class PartForm(NamedTuple):
    """A part of a mask without its arrays."""

    kind: str
    given: tuple[bool, ...]
    """Which of its arrays are given."""


class MaskForm(NamedTuple):
    """A DeviceMask without its arrays: what is known before the call."""

    fixed: AnyMask
    parts: tuple[PartForm, ...]
    sequences: int = 8
    """Number of packed sequences, by which policies judge a call."""

    @property
    def outline(self) -> tuple[Any, ...]:
        """The form as plain values, equal to the outline of its masks."""
        return (FORM, literal(self.fixed), tuple((part.kind, part.given) for part in self.parts))

    @property
    def any_size(self) -> bool:
        """Whether its arrays can be made for any number of tokens: its fixed parts depend on positions alone."""
        return all(isinstance(part, POSITIONAL) for part in self.fixed.split())

    @property
    def packed(self) -> bool:
        """Whether tokens of several sequences follow each other, and `fixed` holds inside of each."""
        return self.parts[0].kind == PACKED

    @property
    def same_offsets(self) -> bool:
        """Whether packed keys have the offsets of the queries."""
        return self.packed and not self.parts[0].given[1]

    def predicates(self, values: tuple[Any, ...], q_len: Any, kv_len: Any) -> list[Predicate]:
        """Return a predicate for each part on the device, for arrays of any framework."""
        rest, found = list(values), []
        for part in self.parts:
            arrays: list[Any] = [rest.pop(0) if given else None for given in part.given]
            if part.kind == "lengths":
                found.append(by_lengths(arrays[0]))
            elif part.kind == "valid":
                found.append(by_keys(arrays[0]))
            else:
                ids, q_ids = arrays
                q_ids = ids[:, kv_len - q_len :] if q_ids is None else q_ids
                found.append(by_ids(SEES_ID[part.kind], ids, q_ids))
        return found

    def stand_in(self, shape: MaskShape) -> AnyMask:
        """Return a mask of the same kinds that shows half of the keys, by which policies and `supports` judge."""
        parts = [_stand_in(part, shape) for part in self.parts if part.kind != PACKED]
        return reduce(and_, parts, self.fixed)  # pyright: ignore[reportReturnType]


def outline_of(mask: Any) -> Any:
    """Return plain values for a mask, a form or None."""
    return mask.outline if isinstance(mask, DeviceMask | MaskForm) else literal(mask)


def mask_or_form(outline: Any) -> Any:
    """Return the mask, the form or None that `outline_of` turned into plain values."""
    if isinstance(outline, tuple) and outline[0] == FORM:
        return MaskForm(mask_of(outline[1]), tuple(PartForm(*part) for part in outline[2]))
    return mask_of(outline)


def _stand_in(part: PartForm, shape: MaskShape) -> Mask:
    halves = (np.arange(shape.kv_len) * 2 // shape.kv_len).astype(np.int32)[None]
    if part.kind == "lengths":
        return Lengths(freeze(np.full(shape.batch, max(1, shape.kv_len // 2), np.int32)))
    if part.kind == "valid":
        return Valid(freeze((np.arange(shape.kv_len) % 2 == 0)[None]))
    q_ids = (np.arange(shape.q_len) * 2 // shape.q_len).astype(np.int32)[None] if part.given[1] else None
    make = {"documents": Documents, "block_causal": BlockCausal}[part.kind]
    return make(freeze(halves), None if q_ids is None else freeze(q_ids))


@constant_when_traced
def _full() -> Full:
    return Full()


def lengths_on_device(kv_lengths: Any) -> DeviceMask:
    """Return the mask of `lengths` for an array [b] that is not read."""
    _check(kv_lengths, "kv_lengths", (1,), WHOLE)
    return DeviceMask(_full(), (DevicePart("lengths", (kv_lengths,)),))


def valid_on_device(keys: Any) -> DeviceMask:
    """Return the mask of `valid` for booleans [kv] or [b, kv] that are not read."""
    _check(keys, "valid", (1, 2), ("bool",))
    return DeviceMask(_full(), (DevicePart("valid", (_rows(keys),)),))


def ids_on_device(kind: str, ids: Any, q_ids: Any) -> DeviceMask:
    """Return the mask of `documents` or `block_causal` for ids [tokens] or [b, tokens] that are not read."""
    for name, array in (("ids", ids), ("q_ids", q_ids)):
        if array is not None:
            _check(array, f"{kind} {name}", (1, 2), WHOLE)
    return DeviceMask(_full(), (DevicePart(kind, (_rows(ids), None if q_ids is None else _rows(q_ids))),))


def _rows(array: Any) -> Any:
    return array[None] if array.ndim == 1 else array


def _check(array: Any, what: str, axes: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if not hasattr(array, "dtype") or not hasattr(array, "ndim"):
        raise InvalidWorkload(f"{what} must be an array of the inputs' framework, like the other arrays of the mask.")
    dtype = str(array.dtype).rpartition(".")[2]
    if array.ndim not in axes or dtype not in dtypes:
        wanted = "booleans" if dtypes == ("bool",) else "whole numbers"
        count = " or ".join([str(n) for n in axes])
        raise InvalidWorkload(f"{what} must be {wanted} with {count} axes, not {dtype} with {array.ndim}.")


def check_values(mask: DeviceMask, batch: Any, q_len: Any, kv_len: Any) -> None:
    """Refuse arrays whose sizes do not fit the call; their values are not looked at."""
    for kind, arrays, _ in mask.parts:
        if kind == "lengths":
            if arrays[0].shape[0] != batch:
                raise InvalidWorkload(f"lengths has {arrays[0].shape[0]} batch rows, the call has {batch}.")
            continue
        wanted = (("" if kind == "valid" else " ids", kv_len, "kv_len"), (" q_ids", q_len, "q_len"))
        for array, (name, tokens, axis) in zip(arrays, wanted):
            if array is None:
                if q_len > kv_len:
                    raise InvalidWorkload(f"{kind} needs q_ids: q_len {q_len} is more than kv_len {kv_len}.")
                continue
            if array.shape[0] != 1 and array.shape[0] != batch:
                raise InvalidWorkload(f"{kind}{name} has {array.shape[0]} batch rows, the call has {batch}.")
            if array.shape[1] != tokens:
                raise InvalidWorkload(f"{kind}{name} covers {array.shape[1]} tokens, {axis} is {tokens}.")
