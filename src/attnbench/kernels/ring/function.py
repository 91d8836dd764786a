"""`ring_attention`: attention over a sequence that is sharded over a process group, torchrun's or any other.

Every rank passes its own tokens, laid out as `schedule.positions` says, and gets its own rows of the result. Both
passes of a rank are one differentiable torch operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.frameworks.torch.internals import under_autocast, without_autocast
from attnbench.impls._arguments import check_tensors, fitting
from attnbench.kernels.ring.agreement import RefusedByAll, agreement, global_lengths, rank_and_world
from attnbench.kernels.ring.dilated_work import DilatedWork, Pattern, work_of
from attnbench.kernels.ring.engine import Engine, transport_of
from attnbench.kernels.ring.schedule import Problem, check_layout
from attnbench.kernels.ring.work import DenseWork, Kernels, LimitedWork, rows_of_one_length
from attnbench.masks import Blocks, Dilated, MaskShape
from attnbench.spec import Workload

if TYPE_CHECKING:
    import torch


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "zigzag",
    inner: str = "auto",
    process_group: Any = None,
    lengths: tuple[int, int] | None = None,
    dilated: Dilated | None = None,
    detached: bool = False,
    blocks: Blocks | None = None,
    kv_lengths: Sequence[int] | torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Return this rank's rows [b, tokens, heads, dim] of attention over all ranks' keys; differentiable.

    With `return_lse`, also return the LSE [b, heads, tokens]; a gradient through the LSE costs all ranks a second
    backward pass. A row that sees no key gives 0 and LSE -inf. Without an initialised process group there is one
    rank. Under torch's autocast the arrays are cast to its dtype, as in `ab.attention`.

    causal: for unequal lengths the mask is aligned bottom-right.
    inner: name of the kernel that computes the tiles, or "auto".
    lengths: global numbers of queries and keys. If given, ranks do not communicate before the call, so they do not
        notice if they disagree or if one of them refuses.
    dilated: LongNet's pattern over the global positions; with `detached`, its mixing weights count as constants in
        the backward pass.
    blocks: drops the pairs whose block, by global position, is not kept by the block mask.
    kv_lengths: keys from global position kv_lengths[b] on are padding; the same on every rank. Lengths on a GPU
        cost a synchronisation.
    """
    rank, world = rank_and_world(process_group)
    with RefusedByAll(process_group, q, k, v) if lengths is None else nullcontext():
        if detached and dilated is None:
            raise UsageError(
                "detached is about mixing the branches of a dilated pattern: give dilated=, or leave it out."
            )
        check_tensors("ring_attention", q, k, v)
        q, k, v = under_autocast(q, k, v)
        shape = shape_of(q, k, v, scale, softcap)
        limits = key_lengths(kv_lengths)
        check_layout(layout)
        check_kernel(q, k, shape, inner, causal)
    if lengths is None:
        ids = tuple(None if mask is None else mask.id for mask in (dilated, blocks))
        said = {"softcap": softcap, "pattern": (*ids, detached), "kv_lengths": limits, "layout": layout}
        said |= {"inner": inner, "return_lse": return_lse}
        lengths = global_lengths(q, k, process_group, agreement(q, k, v, causal=causal, scale=scale, **said))
    q_len, kv_len = lengths
    problem = Problem(q_len, kv_len, world, layout, causal, kv_len - q_len)
    check_shard((q.shape[1], k.shape[1]), problem, rank)
    if limits is not None:
        masks.lengths(limits).check(MaskShape(shape.batch, shape.heads, q_len, kv_len))
    pattern = _checked_pattern(q, k, (q_len, kv_len), dilated, detached, blocks)
    engine = engine_of(problem, rank, shape, inner, q.device, pattern, limits)
    with without_autocast(q.device.type):
        out, lse = _autograd_function().apply(q, k, v, engine, process_group, return_lse)
    return (out, lse.float()) if return_lse else out


def _checked_pattern(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: tuple[int, int],
    dilated: Dilated | None,
    detached: bool,
    blocks: Blocks | None,
) -> Pattern | None:
    """Return the pattern, checked against the whole sequence; a block mask alone is one segment of all tokens."""
    if dilated is None and blocks is None:
        return None
    shape = MaskShape(q.shape[0], q.shape[2], *lengths)
    mask = dilated or Dilated((max(lengths),), (1,))
    for one in filter(None, (mask, blocks)):
        one.check(shape)
    if blocks is not None and blocks.per_batch:
        raise UsageError("a ring takes one block mask for all batch rows (it may differ by head).")

    return Pattern(mask, q.shape[2], k.shape[2], detached, blocks)


@lru_cache(maxsize=256)
def engine_of(
    problem: Problem,
    rank: int,
    shape: Workload,
    inner: str,
    device: torch.device,
    pattern: Pattern | None = None,
    limits: tuple[int, ...] | None = None,
) -> Engine:
    """Make the plan and the kernels of one rank, once for each problem."""
    if limits is None or min(limits) == problem.kv_len:
        return Engine(problem, rank, _work(problem, rank, shape, inner, device, pattern, None))
    parts = []
    for rows, limit in rows_of_one_length(limits):
        part = msgspec.structs.replace(shape, batch=rows.stop - rows.start)
        parts.append((rows, _work(problem, rank, part, inner, device, pattern, limit)))
    return Engine(problem, rank, LimitedWork(parts))


@lru_cache(maxsize=256)
def _work(
    problem: Problem,
    rank: int,
    shape: Workload,
    inner: str,
    device: torch.device,
    pattern: Pattern | None,
    limit: int | None,
) -> DenseWork | DilatedWork:
    """Return the prepared work of some batch rows, cached: key lengths may differ from call to call."""
    work = work_of(problem, rank, Kernels(shape, inner, device), pattern, limit)
    work.prepare(device)
    return work


def key_lengths(kv_lengths: Sequence[int] | torch.Tensor | None) -> tuple[int, ...] | None:
    """Return key lengths as whole numbers, checked as by the mask `lengths`; None if there are none."""
    if kv_lengths is None:
        return None
    return tuple(masks.lengths(kv_lengths).kv_lengths.array.tolist())


def check_kernel(q: torch.Tensor, k: torch.Tensor, shape: Workload, inner: str, causal: bool) -> None:
    """Raise Unsupported if no kernel takes this rank's own queries and keys, before any message is sent."""
    if q.shape[1] and k.shape[1]:
        square = min(q.shape[1], k.shape[1])
        for q_len, kv_len, masked in ((q.shape[1], k.shape[1], False), *([(square, square, True)] if causal else [])):
            Kernels(shape, inner, q.device).of((shape.batch, q_len, kv_len, shape.heads, shape.kv_heads), masked)


def check_shard(local: tuple[int, int], problem: Problem, rank: int) -> None:
    """Raise UsageError if the numbers of queries and keys are not those that the layout gives this rank."""
    problem.check()
    wanted = problem.q_sizes()[rank], problem.kv_sizes()[rank]
    if local != wanted:
        raise UsageError(
            f"rank {rank} of {problem.world} holds {local[0]} queries and {local[1]} keys; of {problem.q_len} and "
            f"{problem.kv_len} laid out {problem.layout} it should hold {wanted[0]} and {wanted[1]}."
        )


def shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, softcap: float | None) -> Workload:
    """Return what a kernel must know besides lengths and mask; raise UsageError if the arrays do not fit together."""
    of_q, of_k, of_v, dtype = fitting(q, k, v)
    return Workload(
        batch=of_q.batch,
        q_len=1,
        heads=of_q.heads,
        kv_heads=of_k.heads,
        head_dim=of_q.dim,
        v_head_dim=of_v.dim,
        dtype=dtype,
        pass_="train" if any(x.requires_grad for x in (q, k, v)) else "forward",
        scale=scale,
        softcap=softcap,
    )


@lru_cache(maxsize=1)
def _autograd_function() -> Any:
    """Return the operation `(q, k, v, engine, group, with_lse) -> (out, lse)`; with_lse gives the LSE a gradient."""
    import torch

    from attnbench.impls.partial.torch_autograd import once

    class Ring(torch.autograd.Function):
        """Attention over a ring: forward sends K and V round, backward sends them with the sums of their gradients."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, engine: Engine, group: Any, with_lse: bool) -> Any:
            transport = transport_of(engine.problem, group)
            out, lse, *own = engine.forward(q, k, v, transport)
            ctx.save_for_backward(q, k, v, out, lse, *own)
            ctx.engine, ctx.group, ctx.with_lse = engine, group, with_lse
            ctx.set_materialize_grads(False)
            if not with_lse:
                ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            computed = partial(_gradients, ctx.engine, ctx.group, ctx.with_lse)
            return *once(computed, dout, dlse, *ctx.saved_tensors), None, None, None

    return Ring


def _gradients(
    engine: Engine,
    group: Any,
    with_lse: bool,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *own: torch.Tensor,
) -> tuple[Any, Any, Any]:
    import torch

    from attnbench.impls.partial.torch_autograd import of_both, through_lse

    transport = transport_of(engine.problem, group)
    of_out, of_lse = _asked(dout, dlse, engine, group, q.device) if with_lse else (True, False)
    if of_out and dout is None:
        dout = torch.zeros_like(out)
    if of_lse and dlse is None:
        dlse = torch.zeros_like(lse)
    return of_both(
        lambda dout: engine.backward((q, k, v), (out, lse, *own), dout, transport),
        lambda dlse: through_lse(
            engine.under_whole(transport), "bshd", q, k, v, out, lse, dlse, _common_excess(dlse, out, engine, group)
        ),
        dout,
        dlse if of_lse else None,
    )


def _asked(dout: Any, dlse: Any, engine: Engine, group: Any, device: torch.device) -> tuple[bool, bool]:
    """Return whether any rank wants the gradient of the output, and of the LSE: all ranks must then compute it."""
    import torch
    import torch.distributed as dist

    wanted = [dout is not None, dlse is not None]
    if engine.problem.world > 1:
        flags = torch.tensor(wanted, dtype=torch.int32, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        wanted = [bool(flag) for flag in flags.tolist()]
    return wanted[0], wanted[1]


def _common_excess(dlse: torch.Tensor, out: torch.Tensor, engine: Engine, group: Any) -> torch.Tensor | None:
    """Return the largest float16 excess of all ranks, since dK is summed over them; None if no rank needs another's."""
    import torch
    import torch.distributed as dist

    from attnbench.impls.partial.torch_autograd import beyond_float16

    if out.dtype != torch.float16 or engine.problem.world == 1:
        return None
    excess = beyond_float16(dlse)
    dist.all_reduce(excess, dist.ReduceOp.MAX, group=group)
    return excess
