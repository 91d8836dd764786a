"""Decoding from KV caches in torch: by chunks of keys with plain operators, and by slices of known length on a CPU.

The chunked form reads nothing on the host: its operators depend on shapes alone, so a CUDA graph can hold them. It
looks at the whole capacity (on a CPU only up to the longest sequence). What lies behind the end of a sequence is
replaced before a product with V, as 0 times NaN is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnbench.frameworks.torch.plain import MaskTensors, attend, log_sum_exp
from attnbench.impls.partial.torch_passes import NEGATIVE_INFINITY, merge_, nothing_yet, positive_scale
from attnbench.impls.torch._masks import additive, bounds
from attnbench.spec import CacheCall, Workload

if TYPE_CHECKING:
    import torch

CHUNK_BYTES, CPU_CHUNK_BYTES = 64 << 20, 2 << 20
"""Most bytes of the keys that are looked at, or gathered from pages, at a time; on a CPU what stays in its cache, else
gathering takes several times as long as attending."""


def window_of(workload: Workload) -> int | None:
    """Return how many keys before itself a query sees at most; None if all."""
    return bounds(workload)[0]


def keys_at_a_time(k: torch.Tensor, sequences: int, page_size: int | None) -> int:
    """Return the length of a chunk of keys: whole pages, whatever the lengths."""
    a_key = sequences * k.shape[2] * k.shape[3] * k.element_size()
    step, most = page_size or 1, CPU_CHUNK_BYTES if k.device.type == "cpu" else CHUNK_BYTES
    return max(1, most // a_key // step) * step


def plain_decode(workload: Workload) -> CacheCall:
    """Return a CacheCall of plain operators: every dtype, soft cap, window, page size and device."""
    scale, softcap, left = workload.softmax_scale, workload.softcap, window_of(workload)

    def call(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> tuple[Any, Any]:
        import torch

        page_size = None if table is None else k.shape[1]
        capacity = k.shape[1] if table is None else table.shape[1] * k.shape[1]
        if q.device.type == "cpu":
            capacity = min(capacity, int(lengths.max()))
        rows = lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        out, lse = nothing_yet((*q.shape[:3], v.shape[3]), q.dtype, q.device)
        step = keys_at_a_time(k, len(q), page_size)
        for start in range(0, capacity, step):
            stop = min(start + step, capacity)
            keys = torch.arange(start, stop, dtype=torch.int32, device=q.device)
            live = keys < lengths[:, None]
            seen = live[:, None, :] & (keys <= rows[..., None])
            if left is not None:
                seen = seen & (keys >= rows[..., None] - left)
            part_k, part_v = (x[:, start:stop] if table is None else gathered(x, table, live, start) for x in (k, v))
            part_v = part_v.masked_fill(~live[..., None, None], 0.0)
            mask = MaskTensors(seen[:, None], None, ~seen.any(-1)[:, None, :, None])
            part, logits = attend(q, part_k, part_v, mask, scale, softcap)
            merge_(out, lse, part, log_sum_exp(logits, mask).to(lse.dtype))
        return out.to(q.dtype), lse.float()

    return call


def gathered(pages: torch.Tensor, table: torch.Tensor, live: torch.Tensor, start: int) -> torch.Tensor:
    """Return keys or values `start` to `start + live.shape[1]` of every sequence from whole pages, [b, keys, h, d].

    Entries of the table whose page has no live token are not looked at.
    """
    size, tokens = pages.shape[1], live.shape[1]
    count = -(-tokens // size)
    first = start // size
    wanted = table[:, first : first + count].masked_fill(~live[:, ::size], 0)
    return pages[wanted].flatten(1, 2)[:, :tokens]


def sliced_decode(workload: Workload) -> CacheCall:
    """Return a CacheCall for CPUs by torch's flash kernel, which reads exactly the keys that a sequence has.

    Query heads that share keys are rows of one problem, so that keys are read once. Sequences of equal length are one
    call; pages are gathered in chunks, whose results are merged by their LSE.
    """
    scale, factor = positive_scale(workload.softmax_scale)
    left = window_of(workload)

    def call(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> tuple[Any, Any]:
        out, lse = nothing_yet((*q.shape[:3], v.shape[3]), q.dtype, q.device)
        q = q if factor == 1.0 else q * factor
        known = lengths.tolist()
        equal = min(known) == max(known)
        for b in (slice(None),) if equal else [slice(b, b + 1) for b in range(len(known))]:
            keys = (k[b], v[b], None) if table is None else (k, v, table[b])
            _attend_to_slices(q[b], *keys, known[b.start or 0], left, scale, out[b], lse[b])
        return out.to(q.dtype), lse.float()

    return call


def _attend_to_slices(
    q: Any, k: Any, v: Any, table: Any, length: int, left: int | None, scale: float, out: Any, lse: Any
) -> None:
    """Compute the queries of sequences of one length into `out` and `lse`, which say "nothing seen" before."""
    import torch

    count, heads, groups = q.shape[1], q.shape[2], k.shape[2]
    size = 1 if table is None else k.shape[1]
    length = min(length, k.shape[1] if table is None else table.shape[1] * size)
    unseeing = max(count - length, 0)
    q, out, lse = q[:, unseeing:], out[:, unseeing:], lse[..., unseeing:]
    count -= unseeing
    low = 0 if left is None else max(length - count - left, 0)
    stacked = q.transpose(1, 2).reshape(len(q), groups, heads // groups * count, q.shape[3])
    step = (length - low if table is None else keys_at_a_time(k, len(q), size)) or 1
    for start in range(low if table is None else low // size * size, length, step):
        stop, begin = min(start + step, length), max(start, low)
        if table is None:
            part_k, part_v = (x[:, begin:stop] for x in (k, v))
        else:
            pages = table[:, start // size : -(-stop // size)]
            part_k, part_v = (x[pages].flatten(1, 2)[:, begin - start : stop - start] for x in (k, v))
        seen = None
        if count > 1:
            at = torch.arange(begin, stop)
            rows = torch.arange(length - count, length)[:, None]
            seen = (at <= rows) if left is None else (at <= rows) & (at >= rows - left)
            seen = seen.repeat(heads // groups, 1)
        # The public function has no LSE.
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            stacked, part_k.transpose(1, 2), part_v.transpose(1, 2), 0.0, False,
            attn_mask=additive(seen, q.dtype), scale=scale,
        )  # fmt: skip
        part = part.reshape(len(q), heads, count, -1).transpose(1, 2)
        part_lse = part_lse.reshape(len(q), heads, count)
        if seen is not None:  # a row may see none of this chunk, for which the kernel's LSE is not defined
            part_lse = part_lse.masked_fill(~seen[:count].any(-1), NEGATIVE_INFINITY)
        merge_(out, lse, part, part_lse)
