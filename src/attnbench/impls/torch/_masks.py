"""Masks as torch libraries take them: SDPA's arguments, FlexAttention's block table, and two bounds per query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from attnbench.frameworks.torch.plain import TorchNamespace, mask_tensors
from attnbench.impls.conditions import first_reason, needs_mask
from attnbench.masks import Blocks, Causal, Dense, Full, Window, dense
from attnbench.masks.cuts import block_layout
from attnbench.masks.device import MaskForm
from attnbench.masks.large_bias import shifted
from attnbench.spec import Array, Workload

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask


Route = Literal["none", "causal", "lower-right", "array", "bias"]
CHUNK_PAIRS = 1 << 26
"""Number of pairs that are examined at a time."""
EXAMINED_PAIRS = 1 << 28
"""Largest number of pairs of a mask that is searched for rows that see no key."""


def route(workload: Workload) -> Route:
    """Return the cheapest form of the mask: nothing, torch's `is_causal` (aligned top-left), lower-right, an array."""
    mask, shape = workload.visible_mask, workload.mask_shape
    if mask.weighted:
        return "bias"
    interval = mask.interval(shape)
    if interval is None:
        return "array"
    low, high = (np.clip(edge, 0, shape.kv_len) for edge in interval)
    if low.any():
        return "array"
    rows = np.arange(1, shape.q_len + 1)
    if (high == shape.kv_len).all():
        return "none"
    if (high == np.minimum(rows, shape.kv_len)).all():
        return "causal"
    if (high == np.maximum(rows + shape.kv_len - shape.q_len, 0)).all():
        return "lower-right"
    return "array"


def may_have_dead_rows(workload: Workload) -> bool:
    """Return whether a row may see no key; True also if the mask is too large to search."""
    mask, shape = workload.visible_mask, workload.mask_shape
    interval = mask.interval(shape)
    if interval is not None:
        low, high = (np.clip(edge, 0, shape.kv_len) for edge in interval)
        return bool((high <= low).any())
    keys = mask.key_filter(shape)
    if keys is not None:
        return not keys.any(axis=1).all()
    if isinstance(mask, Blocks):
        return not mask.block_mask.array.any(axis=-1).all()
    if isinstance(mask, Dense):
        values = mask.values.array
        return not (values if values.dtype == bool else values != -np.inf).any(axis=-1).all()
    heads, batch = shape.heads if mask.per_head else 1, shape.batch if mask.per_batch else 1
    if batch * heads * shape.q_len * shape.kv_len > EXAMINED_PAIRS:
        return True
    step = max(1, CHUNK_PAIRS // (batch * heads * shape.kv_len))
    chunks = (np.arange(start, min(start + step, shape.q_len)) for start in range(0, shape.q_len, step))
    return not all(mask.array(shape, rows).any(axis=-1).all() for rows in chunks)


class SdpaMask(NamedTuple):
    """Mask arguments of scaled_dot_product_attention, and the rows to set to 0 afterwards."""

    attn_mask: torch.Tensor | None
    is_causal: bool
    dead: torch.Tensor | None = None


def sdpa_mask(workload: Workload, device: torch.device, zeroes_dead_rows: bool) -> SdpaMask:
    """Return mask arguments for a device; a large bias lacks the part that is added to whole rows (`MaskTensors.top`).

    A kernel that is not known to give 0 for rows without keys is shown all keys there, and its rows are cleared:
    neither output nor gradients can then be NaN.
    """
    way = route(workload)
    if way in ("none", "causal"):
        return SdpaMask(None, way == "causal")
    tensors = mask_tensors(workload, device)
    assert tensors.visible is not None
    visible, dead = tensors.visible, None if zeroes_dead_rows else tensors.dead
    if dead is not None:
        visible = visible | dead
    if tensors.weight is None:
        return SdpaMask(visible, False, dead)
    return SdpaMask(tensors.weight.masked_fill(~visible, float("-inf")), False, dead)


def additive(attn_mask: torch.Tensor | None, dtype: torch.dtype, hidden: float = float("-inf")) -> torch.Tensor | None:
    """Return a boolean mask as a bias (0 if visible); a bias is returned unchanged."""
    import torch

    if attn_mask is None or attn_mask.dtype != torch.bool:
        return attn_mask
    return torch.zeros(attn_mask.shape, dtype=dtype, device=attn_mask.device).masked_fill(~attn_mask, hidden)


def block_mask(workload: Workload, device: torch.device, block_size: int) -> BlockMask | None:
    """Return FlexAttention's table of blocks and its mask_mod; None if everything is visible.

    The table is made from the blocks of the mask if it has some, else from the predicate in chunks of rows: memory
    stays bounded, nothing is compiled, and partial and full blocks never share a tensor (FlexAttention does not compile
    if they do).
    """
    from torch.nn.attention.flex_attention import BlockMask

    mask, shape = workload.visible_mask, workload.mask_shape
    if isinstance(mask, Full):
        return None
    some, every = _seen_blocks(workload, device, block_size)
    return BlockMask.from_kv_blocks(
        *_table(some & ~every),
        *_table(every),
        BLOCK_SIZE=block_size,
        mask_mod=mask.predicate(shape, TorchNamespace(device)),
        seq_lengths=(shape.q_len, shape.kv_len),
    )


def _seen_blocks(workload: Workload, device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [b or 1, h or 1, q blocks, kv blocks] whether some pair is visible, and whether all are (never for a
    ragged last block)."""
    import torch

    mask, shape = workload.visible_mask, workload.mask_shape
    layout = block_layout(mask, shape, size)
    if layout is not None:
        whole_rows = np.arange(1, layout.kept.shape[2] + 1)[:, None] * size <= shape.q_len
        every = layout.whole & whole_rows
        return torch.from_numpy(layout.kept).to(device), torch.from_numpy(every).to(device)
    batch, heads = shape.batch if mask.per_batch else 1, shape.heads if mask.per_head else 1
    visible = mask.predicate(shape, TorchNamespace(device))
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    kv = torch.arange(shape.kv_len, device=device)
    step = max(1, CHUNK_PAIRS // (batch * heads * shape.kv_len * size)) * size
    some, every = [], []
    for start in range(0, shape.q_len, step):
        q = torch.arange(start, min(start + step, shape.q_len), device=device).view(-1, 1)
        seen = visible(b, h, q, kv).expand(batch, heads, q.numel(), shape.kv_len)
        seen = torch.nn.functional.pad(seen, (0, -shape.kv_len % size, 0, -q.numel() % size))
        seen = seen.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        some.append(seen.any(-1).any(3))
        every.append(seen.all(-1).all(3))
    return torch.cat(some, 2), torch.cat(every, 2)


def _table(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of kept blocks per row, and the block indices, kept ones first."""
    import torch

    order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
    return kept.sum(-1).to(torch.int32), order.to(torch.int32)


def score_mod(workload: Workload, device: torch.device) -> Any:
    """Return soft cap, then log-weights, as FlexAttention's score_mod; None if there is neither."""
    cap = workload.softcap
    namespace, shift = TorchNamespace(device), shifted(workload.visible_mask, workload.mask_shape, np.float32)
    mask = workload.visible_mask if shift is None else dense(shift.weight)
    weight = mask.log_weight(workload.mask_shape, namespace)
    if cap is None and weight is None:
        return None

    def modify(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        import torch

        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if weight is None else score + weight(b, h, q, kv).to(score.dtype)

    return modify


def bounds(workload: Workload) -> tuple[int | None, int | None]:
    """Return the keys seen to the left and right of a query after alignment; None if there is no bound."""
    mask = workload.visible_mask
    if isinstance(mask, Causal):
        return None, 0
    return (mask.left, mask.right) if isinstance(mask, Window) else (None, None)


def is_causal(workload: Workload) -> bool:
    """Return whether the mask is causal, as Causal or as Window."""
    return bounds(workload) == (None, 0)


def is_windowed(workload: Workload) -> bool:
    """Return whether the mask is neither full nor causal."""
    return bounds(workload) not in ((None, None), (None, 0))


def is_top_left(workload: Workload) -> bool:
    """Return whether the alignment is top-left and differs from bottom-right."""
    align = getattr(workload.visible_mask, "align", "bottom-right")
    return align == "top-left" and workload.q_len != workload.kv_len


def needs_bounds(workload: Workload) -> str | None:
    """Refuse anything but a single full, causal or window mask."""
    single = None if len(workload.visible_mask.kinds) == 1 else "takes one mask at a time"
    return first_reason(needs_mask(workload, "full", "causal", "window"), single)


def needs_bottom_right(workload: Workload) -> str | None:
    """Refuse a top-left alignment, which flash-attention and similar libraries do not have."""
    if is_top_left(workload):
        return f"aligns masks bottom-right; top-left needs q_len = kv_len, not {workload.q_len} and {workload.kv_len}"
    return None


def needs_packed_bounds(workload: Workload, form: MaskForm) -> str | None:
    """Refuse what flash-attention's varlen functions do not take: other masks inside of sequences, top-left ones."""
    aligned = any(getattr(part, "align", "bottom-right") == "top-left" for part in form.fixed.split())
    top_left = "aligns masks bottom-right in each sequence; top-left needs keys with the offsets of the queries"
    return first_reason(needs_bounds(workload), top_left if aligned and not form.same_offsets else None)


def needs_visible_rows(workload: Workload) -> str | None:
    """Refuse rows that see no key; masks that are not one interval per row are left to `needs_bounds`."""
    single_interval = workload.visible_mask.interval(workload.mask_shape) is not None
    reason = "does not define rows that see no key, and this mask has such rows"
    return reason if single_interval and may_have_dead_rows(workload) else None


def natural_lse(lse: Array) -> Array:
    """Return the LSE with -inf instead of +inf for rows that see no key."""
    return lse.masked_fill(lse == float("inf"), float("-inf"))
