"""Plain attention in torch under a mask whose values are arguments of the call: nothing here reads a value.

A call is `(q, k, v, *values)`; arrays are bshd, or [tokens, heads, dim] if sequences are packed. Rows that see no key
give 0, an LSE of -inf and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from attnbench.frameworks.torch.plain import (
    MaskTensors,
    TorchNamespace,
    attend,
    log_sum_exp,
    mask_tensors,
    once_per_device,
)
from attnbench.masks.device import MaskForm
from attnbench.masks.packed import (
    inside_of,
    padding_is_cheaper,
    places,
    rows_of,
    visible_in_batch,
    visible_in_rows,
)
from attnbench.spec import Layout, ValuesCall, Workload

if TYPE_CHECKING:
    import torch

Attend = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", MaskTensors], Any]
"""Function (q, k, v, mask) of bshd arrays -> (out, LSE or None)."""


def plain_values_call(workload: Workload, form: MaskForm, with_lse: bool) -> ValuesCall:
    """Return plain attention, operator by operator."""
    scale, softcap = workload.softmax_scale, workload.softcap

    def attend_plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskTensors) -> Any:
        out, logits = attend(q, k, v, mask, scale, softcap)
        return out, log_sum_exp(logits, mask) if with_lse else None

    return values_call(workload, form, with_lse, attend_plainly)


def values_call(
    workload: Workload, form: MaskForm, with_lse: bool, attend: Attend, layout: Layout = "bshd"
) -> ValuesCall:
    """Return a call (q, k, v, *values) from a function of arrays with their mask as tensors.

    Sequences that are packed become arrays in bshd, others come in `layout`.
    """
    run = _packed(form, attend) if form.packed else _batched(workload, form, attend, layout)
    return run if with_lse else lambda *arrays: run(*arrays)[0]


def _batched(workload: Workload, form: MaskForm, attend: Attend, layout: Layout) -> ValuesCall:
    fixed = replace(workload, mask=form.fixed)
    known = once_per_device(lambda device: mask_tensors(fixed, device))
    inside, tokens = inside_of(form.fixed) if form.any_size else None, 1 if layout == "bshd" else 2
    predicates = form.predicates

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: torch.Tensor) -> Any:
        import torch

        sizes = (q.shape[0], 1, q.shape[tokens], k.shape[tokens])
        b, h, q_at, k_at = (
            torch.arange(size, device=q.device).view([-1 if n == axis else 1 for n in range(4)])
            for axis, size in enumerate(sizes)
        )
        if inside is not None:  # made anew, so that nothing of q_len x kv_len is kept
            mask, seen = MaskTensors(None, None, None), inside(q_at, sizes[3] - sizes[2], k_at)
        else:
            mask = known(q.device)
            seen = mask.visible
        for predicate in predicates(values, *sizes[2:]):
            seen = seen & predicate(b, h, q_at, k_at)
        assert seen is not None
        return attend(q, k, v, MaskTensors(seen, mask.weight, ~seen.any(-1, keepdim=True), mask.top))

    return run


def _packed(form: MaskForm, attend: Attend) -> ValuesCall:
    inside, same = inside_of(form.fixed), form.same_offsets

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: Any) -> Any:
        *offsets, q_longest, k_longest = values
        q_offsets, k_offsets = offsets[0], offsets[0 if same else 1]
        namespace, tokens = TorchNamespace(q.device), (q.shape[0], k.shape[0])
        q_places = places(q_offsets, tokens[0], namespace)
        longest = (q_longest, k_longest)
        if _is_padded(q_offsets.shape[0] - 1, longest, tokens):
            seen = visible_in_batch(inside, q_offsets, k_offsets, longest, namespace)
            q_rows = rows_of(q_offsets, q_longest, tokens[0], namespace)
            k_rows = rows_of(k_offsets, k_longest, tokens[1], namespace)
            out, lse = attend(q[q_rows], k[k_rows], v[k_rows], _tensors(seen))
            at = q_places.sequence, namespace.clip(q_places.position, 0, q_longest - 1)
            out, lse = out[at], None if lse is None else lse.transpose(1, 2)[at].transpose(0, 1)
        else:
            k_places = q_places if same else places(k_offsets, tokens[1], namespace)
            seen = visible_in_rows(inside, q_offsets, k_offsets, q_places, k_places)
            out, lse = attend(q[None], k[None], v[None], _tensors(seen))
            out, lse = out[0], None if lse is None else lse[0]
        outside = ~q_places.inside
        lse = None if lse is None else lse.masked_fill(outside, float("-inf"))
        return out.masked_fill(outside[:, None, None], 0.0), lse

    return run


def _is_padded(sequences: int, longest: tuple[int, int], tokens: tuple[int, int]) -> bool:
    """Return whether packed sequences are padded, in a graph of dynamic sizes by what is known of all of them."""
    import torch
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if torch.compiler.is_dynamo_compiling() and not (has_static_value(tokens[0]) and has_static_value(tokens[1])):
        return has_static_value(longest[0]) and has_static_value(longest[1])
    return padding_is_cheaper(sequences, longest, tokens)


def _tensors(seen: torch.Tensor) -> MaskTensors:
    return MaskTensors(seen, None, ~seen.any(-1, keepdim=True))
