"""Operators behind SDPA's backends, called directly: they return the LSE and have their own backward operators.

Only these operators accept `out` and `lse` of a larger whole in the backward pass. Head dims must already suit the
kernel (SDPA itself pads); the CPU operator needs its mask as floats. Rows without keys: the CPU writes LSE 0, so it is
overwritten. Strided views: the efficient backward reads `out` as if it were dense, and cuDNN's finds its compiled graph
by the strides of q, k and v alone (torch 2.11), so `out` and `dout` of other strides than at first would be read
wrongly, by torch's own autograd too. The pairs below are bhsd as the operators are; `partial` returns them as bshd.
Forward operators are called through torch's own binding, which costs the host less than `torch.ops`; backward operators
have none.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from attnbench.frameworks.torch.plain import mask_tensors, once_per_device
from attnbench.impls.partial.torch_passes import (
    NEGATIVE_INFINITY,
    for_backward,
    pair_at_positive_scale,
    with_dense_rows,
)
from attnbench.impls.torch._masks import SdpaMask, additive, may_have_dead_rows, route, sdpa_mask
from attnbench.masks.large_bias import has_large_bias
from attnbench.spec import Array, Call, Partial, Workload


def with_lse(backend: str, workload: Workload) -> Call | None:
    """Return a call in bhsd that returns (out, lse), or None; in training a gradient flows through both."""
    pair = _pair(backend, workload)
    if pair is None:
        return None
    import torch

    from attnbench.impls.partial.torch_autograd import differentiable

    safe = _guarded(pair) if may_have_dead_rows(workload) else pair
    forward = differentiable(safe, "bhsd") if workload.needs_gradients else pair[0]
    large = has_large_bias(workload.visible_mask)
    tops = once_per_device(lambda device: mask_tensors(workload, device).top)

    def call(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse = forward(q, k, v)
        lse = lse + tops(q.device) if large else lse
        return out, lse.to(torch.promote_types(q.dtype, torch.float32))

    return call


def operator(backend: str, workload: Workload) -> Call | None:
    """Return a call in bhsd that torch itself differentiates, through the output alone; None without an operator."""
    pair = _pair(backend, workload)
    return None if pair is None else pair[0]


def partial(backend: str, workload: Workload) -> Partial | None:
    """Return (forward, backward) in bshd; None if the operators cannot compute the workload.

    The LSE of the whole is -inf only in rows without keys: if the workload has none, nothing is guarded. A large bias
    has no partial form, because it leaves no precision in the LSE.
    """
    pair = None if has_large_bias(workload.visible_mask) else _pair(backend, workload)
    if pair is None:
        return None
    from attnbench.impls.partial.torch_autograd import turned

    return turned(_guarded(pair) if may_have_dead_rows(workload) else pair)


def _guarded(pair: Partial) -> Partial:
    """Return the pair with a backward pass that accepts the LSE of -inf of rows that see no key."""
    forward, backward = pair

    def guarded(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        return backward(q, k, v, out, for_backward(lse), dout)

    return forward, guarded


def _pair(backend: str, workload: Workload) -> Partial | None:
    """Return the kernels' two passes; their LSE lacks the part that a large bias adds to whole rows."""
    makers = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}
    if backend not in makers:
        return None

    def make(positive: Workload) -> Partial | None:
        pair = makers[backend](positive)
        return None if pair is None else with_dense_rows(pair)  # last: negated queries may have other strides

    return pair_at_positive_scale(make, workload)


def _flash(workload: Workload) -> Partial:
    cpu, gpu = _cpu_flash(workload), _gpu_flash(workload)

    def pick(index: int) -> Callable[..., Any]:
        def run(q: Array, *rest: Array) -> Any:
            pair = cpu if q.device.type in ("cpu", "meta") else gpu
            if pair is None:
                raise NotImplementedError(
                    "the flash operator on a GPU takes only a causal mask or none, and head_dim in steps of 8"
                )
            return pair[index](q, *rest)

        return run

    return pick(0), pick(1)


def _cpu_flash(workload: Workload) -> Partial:
    import torch

    forward_op = torch._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateImportUsage]
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    scale = workload.softmax_scale

    def make(device: Any) -> tuple[Any, bool, Any]:
        mask = sdpa_mask(workload, device, zeroes_dead_rows=True)
        dead = None if mask.attn_mask is None else mask_tensors(workload, device).dead
        wide = torch.float64 if workload.dtype == "float64" else torch.float32
        return additive(mask.attn_mask, wide), mask.is_causal, None if dead is None else dead.squeeze(-1)

    masks = once_per_device(make)

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        bias, causal, dead = masks(q.device)
        out, lse = forward_op(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse if dead is None else lse.masked_fill(dead, NEGATIVE_INFINITY)

    def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        bias, causal, _ = masks(q.device)
        lse = lse.to(torch.promote_types(q.dtype, torch.float32))
        return backward_op(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)

    return forward, backward


def _forward_op(name: str) -> Callable[..., Any]:
    """Return torch's quick binding; while Dynamo traces, the operator: the binding refuses dynamic sizes."""
    import torch
    from torch.compiler import is_dynamo_compiling

    quick, traced = getattr(torch, name), getattr(torch.ops.aten, name)
    return lambda *given, **named: (traced if is_dynamo_compiling() else quick)(*given, **named)


def _gpu_flash(workload: Workload) -> Partial | None:
    """Return the GPU's flash operators, which align causal masks bottom-right; None for other masks and sizes."""
    import torch

    way, square = route(workload), workload.q_len == workload.kv_len
    fits = way in ("none", "lower-right") or (way == "causal" and square)
    if not fits or workload.head_dim % 8 or workload.value_dim != workload.head_dim or may_have_dead_rows(workload):
        return None
    scale, causal = workload.softmax_scale, way != "none"
    forward_op = _forward_op("_scaled_dot_product_flash_attention")
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    random = once_per_device(lambda device: _no_dropout(device, torch.uint64, 2))

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return forward_op(q, k, v, 0.0, causal, False, scale=scale)[:2]

    def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        sizes = (None, None, q.shape[2], k.shape[2])
        return backward_op(dout, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, *random(q.device), scale=scale)

    return forward, backward


def _cudnn(workload: Workload) -> Partial | None:
    import torch

    way = route(workload)
    if way not in ("none", "causal") or workload.head_dim % 8 or workload.value_dim % 8:
        return None
    scale, causal = workload.softmax_scale, way == "causal"
    forward_op = _forward_op("_scaled_dot_product_cudnn_attention")
    backward_op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    random = once_per_device(lambda device: _no_dropout(device, torch.int64))

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse = forward_op(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        return out, lse.view(lse.shape[:3])

    def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        sizes, rows = (None, None, q.shape[2], k.shape[2]), lse.contiguous().unsqueeze(-1)
        out, dout = ordered_as(q, out), strided_as_at_first(graph_key(q, k, v), dout)
        return backward_op(dout, q, k, v, out, rows, *random(q.device), None, *sizes, 0.0, causal, scale=scale)

    return forward, backward


def _no_dropout(device: Any, dtype: Any, *seeds: int) -> tuple[Array, Array]:
    """Return seed and offset of a random generator that nothing draws from."""
    import torch

    return torch.zeros(seeds, dtype=dtype, device=device), torch.zeros((), dtype=dtype, device=device)


_dout_strides: dict[tuple[Any, ...], tuple[int, ...]] = {}
"""Strides of dO in the first calls. Never emptied: torch keeps its graphs as long, and would read wrong strides without
the entry."""


def graph_key(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
    """Return what torch 2.11 finds cuDNN's graphs by: its tensors but `out` and `dout`."""
    return (q.device, q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())


def strided_as_at_first(key: tuple[Any, ...], dout: Array) -> Array:
    """Return dO, copied if its strides differ from those of the first call with this key in this thread: cuDNN's graphs
    are kept per thread, and would read it with the strides that they were built for.

    Broadcast numbers and a strided last axis are made dense first, as torch does for the latter itself.
    """
    import torch

    overlaps = any(stride == 0 and size > 1 for size, stride in zip(dout.shape, dout.stride()))
    if overlaps or dout.stride(-1) != 1:
        dout = dout.contiguous()
    wanted = _dout_strides.setdefault((get_ident(), *key), dout.stride())
    if wanted == dout.stride():
        return dout
    return torch.empty_strided(dout.shape, wanted, dtype=dout.dtype, device=dout.device).copy_(dout)


def ordered_as(q: Array, out: Array) -> Array:
    """Return `out` as torch's cuDNN forward operator lays it out: dense, its axes in the order of those of q."""
    import torch

    order = sorted(range(4), key=lambda axis: q.stride(axis))
    strides, size = [0] * 4, 1
    for axis in order:
        strides[axis], size = size, size * out.shape[axis]
    if list(out.stride()) == strides:
        return out
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)


def _efficient(workload: Workload) -> Partial:
    """Return the memory-efficient operators, which pad the LSE's rows to a multiple of 32; the backward reads that
    padding as +inf."""
    import torch

    def make(device: Any) -> SdpaMask:
        mask = sdpa_mask(workload, device, zeroes_dead_rows=False)
        bias = additive(mask.attn_mask, getattr(torch, workload.dtype))
        full = (workload.batch, workload.heads, workload.q_len, workload.kv_len)
        return mask._replace(attn_mask=None if bias is None else bias.expand(full))

    masks, scale, ops = once_per_device(make), workload.softmax_scale, torch.ops.aten
    random = once_per_device(lambda device: _no_dropout(device, torch.int64))

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        mask = masks(q.device)
        out, lse, *_ = ops._scaled_dot_product_efficient_attention(
            q, k, v, mask.attn_mask, True, 0.0, mask.is_causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]
        if mask.dead is None:
            return out, lse
        return out.masked_fill(mask.dead, 0.0), lse.masked_fill(mask.dead.squeeze(-1), NEGATIVE_INFINITY)

    def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        mask = masks(q.device)
        if mask.dead is not None:  # the kernel is shown all keys there
            lse = lse.masked_fill(mask.dead.squeeze(-1), float("inf"))
        odd = -lse.shape[-1] % 32
        padded = torch.nn.functional.pad(lse, (0, odd), value=float("inf")) if odd else lse.contiguous()
        wanted, out = [True, True, True, False], out.transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk, dv, _ = ops._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, mask.attn_mask, out, padded, *random(q.device), 0.0, wanted, mask.is_causal, scale=scale
        )
        return dq, dk, dv

    return forward, backward
