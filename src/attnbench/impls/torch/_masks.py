"""Masks in the forms torch's kernels take: a flag, an array for SDPA, a block mask and score_mod for FlexAttention.

`route` and `may_have_dead_rows` are asked by `supports` and use NumPy alone; the rest is made at the first call on a
device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from attnbench.frameworks.torch.plain import TorchNamespace, mask_tensors
from attnbench.masks import Blocks, Dense, Full, dense
from attnbench.masks.block_layout import block_layout
from attnbench.masks.large_bias import shifted
from attnbench.spec import Workload

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

Route = Literal["none", "causal", "lower-right", "array", "bias"]
CHUNK_PAIRS = 1 << 26
"""Pairs looked at in one go when rows or blocks are examined."""
EXAMINED_PAIRS = 1 << 28
"""Above this many pairs a mask is not searched for rows that see no key."""


def route(workload: Workload) -> Route:
    """The cheapest form that says the same: nothing, torch's `is_causal` (aligned top-left), lower-right, an array."""
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
    """Whether a row may see no key; True also where the mask is too large to look."""
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
    """What scaled_dot_product_attention is handed, and the rows to set to 0 afterwards."""

    attn_mask: torch.Tensor | None
    is_causal: bool
    dead: torch.Tensor | None = None


def sdpa_mask(workload: Workload, device: torch.device, zeroes_dead_rows: bool) -> SdpaMask:
    """Mask arguments for a device; of a large bias without what is added to whole rows (`MaskTensors.top`).

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
    """A boolean mask as a bias (0 where visible); a bias as it is."""
    import torch

    if attn_mask is None or attn_mask.dtype != torch.bool:
        return attn_mask
    return torch.zeros(attn_mask.shape, dtype=dtype, device=attn_mask.device).masked_fill(~attn_mask, hidden)


def block_mask(workload: Workload, device: torch.device, block_size: int) -> BlockMask | None:
    """FlexAttention's table of blocks and its mask_mod; None when everything is visible.

    The table is made from the blocks of the mask where it has them, else from the predicate in chunks of rows: memory
    stays bounded, nothing is compiled, and partial and full blocks never share a tensor (FlexAttention does not compile
    when they do).
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
    """[b or 1, h or 1, q blocks, kv blocks]: some pair is visible, every pair is (never so for a ragged last block)."""
    import torch

    mask, shape = workload.visible_mask, workload.mask_shape
    layout = block_layout(mask, shape, size)
    if layout is not None:
        whole_rows = np.arange(1, layout.kept.shape[2] + 1)[:, None] * size <= shape.q_len
        found = (layout.kept, layout.whole & whole_rows)
        return tuple(torch.from_numpy(blocks).to(device) for blocks in found)  # pyright: ignore[reportReturnType]
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
    """Number of kept blocks per row, and their indices first."""
    import torch

    order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
    return kept.sum(-1).to(torch.int32), order.to(torch.int32)


def score_mod(workload: Workload, device: torch.device) -> Any:
    """Soft cap, then log-weights, as FlexAttention's score_mod; None when there is neither."""
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
