"""`ring_attention`: attention over a sequence that is sharded over a process group, torchrun's or any other.

Every rank passes its own tokens, laid out as `layouts.positions` says, and gets its own rows of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.frameworks.torch.internals import under_autocast, without_autocast
from attnbench.impls._arguments import check_tensors, fitting
from attnbench.kernels.ring.agreement import RefusedByAll, agreement, global_lengths, rank_and_world
from attnbench.kernels.ring.dilated_work import DilatedWork, Pattern
from attnbench.kernels.ring.engine import Engine
from attnbench.kernels.ring.kernels import Kernels
from attnbench.kernels.ring.layouts import check_layout
from attnbench.kernels.ring.limited_work import LimitedWork, alike
from attnbench.kernels.ring.schedule import Problem
from attnbench.kernels.ring.torch_passes import autograd_function
from attnbench.kernels.ring.work import DenseWork, Work
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
    """The rank's rows [b, tokens, heads, dim] of attention over all ranks' keys; differentiable.

    A causal mask of unequal lengths is aligned bottom-right. `lengths` are the global numbers of queries and keys:
    given, ranks neither ask each other at every call nor notice that they disagree, or that one of them refuses.
    `inner` names the kernel, or "auto". Without an initialised process group there is one rank. `dilated` is
    LongNet's pattern over the global positions; `detached` takes its mixing weights for constants in the backward
    pass. `blocks` drops the pairs whose block, by global position, its block mask does not keep. Keys from global
    position kv_lengths[b] on are padding, the same on every rank (lengths on a GPU are waited for); a row that sees
    no key gives 0 and LSE -inf. A gradient through the LSE [b, heads, tokens] costs all ranks a second backward
    pass. Under torch's autocast the arrays are taken in its dtype, as `ab.attention` takes them.
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
    pattern = _pattern(q, k, (q_len, kv_len), dilated, detached, blocks)
    engine = engine_of(problem, rank, shape, inner, q.device, pattern, limits)
    with without_autocast(q.device.type):
        out, lse = autograd_function().apply(q, k, v, engine, process_group, return_lse)
    return (out, lse.float()) if return_lse else out


def _pattern(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: tuple[int, int],
    dilated: Dilated | None,
    detached: bool,
    blocks: Blocks | None,
) -> Pattern | None:
    """Checked against the whole sequence; a block mask alone is one segment that holds everything."""
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
    """Plan and kernels, made once."""
    if limits is None or min(limits) == problem.kv_len:
        return Engine(problem, rank, _work(problem, rank, shape, inner, device, pattern, None))
    parts = [
        (rows, _work(problem, rank, _rows_of(shape, rows), inner, device, pattern, limit))
        for rows, limit in alike(limits)
    ]
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
) -> Work:
    """For some batch rows; key lengths that differ from call to call find those of earlier ones here."""
    kernels = Kernels(shape, inner, device)
    if pattern is None:
        work: Work = DenseWork(problem, rank, kernels, limit)
    else:
        work = DilatedWork(problem, rank, kernels, pattern, limit)
    work.prepare(device)
    return work


def _rows_of(shape: Workload, rows: slice) -> Workload:
    return msgspec.structs.replace(shape, batch=rows.stop - rows.start)


def key_lengths(kv_lengths: Sequence[int] | torch.Tensor | None) -> tuple[int, ...] | None:
    """Whole numbers of this process, checked as the mask `lengths` checks them."""
    if kv_lengths is None:
        return None
    return tuple(masks.lengths(kv_lengths).kv_lengths.array.tolist())


def check_kernel(q: torch.Tensor, k: torch.Tensor, shape: Workload, inner: str, causal: bool) -> None:
    """Raise Unsupported if no kernel takes this rank's own queries and keys: while the others can still be told."""
    if q.shape[1] and k.shape[1]:
        square = min(q.shape[1], k.shape[1])
        for q_len, kv_len, masked in ((q.shape[1], k.shape[1], False), *([(square, square, True)] if causal else [])):
            Kernels(shape, inner, q.device).of((shape.batch, q_len, kv_len, shape.heads, shape.kv_heads), masked)


def check_shard(local: tuple[int, int], problem: Problem, rank: int) -> None:
    """Raises where the shard is not what the layout gives this rank."""
    problem.check()
    wanted = problem.q_sizes()[rank], problem.kv_sizes()[rank]
    if local != wanted:
        raise UsageError(
            f"rank {rank} of {problem.world} holds {local[0]} queries and {local[1]} keys; of {problem.q_len} and "
            f"{problem.kv_len} laid out {problem.layout} it should hold {wanted[0]} and {wanted[1]}."
        )


def shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, softcap: float | None) -> Workload:
    """What a kernel must know besides lengths and mask; raises where the arrays do not go together."""
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
