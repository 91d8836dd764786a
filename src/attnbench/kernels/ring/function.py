"""`ring_attention`: attention over a sequence that is sharded over a process group, torchrun's or any other.

Every rank passes its own tokens, laid out as `schedule.positions` says, and gets its own rows of the result. Both
passes of a rank are one differentiable torch operation. A rank that raised by itself would leave the others waiting for
its keys: so before each call the ranks exchange their arguments, a rank that refuses says so in the same exchange, and
every rank raises. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any
from zlib import crc32

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from attnbench import masks, registry
from attnbench.errors import UsageError
from attnbench.frameworks.torch.internals import under_autocast, without_autocast
from attnbench.impls._arguments import check_tensors, fitting
from attnbench.impls.partial.torch_autograd import beyond_float16, of_both, once, through_lse
from attnbench.kernels.ring.engine import RingEngine, transport_of
from attnbench.kernels.ring.schedule import RingProblem, check_layout, sizes
from attnbench.kernels.ring.work import DenseWork, DilatedWork, LimitedWork, Pattern, TileKernels, work_of
from attnbench.masks import Blocks, Dilated, MaskShape
from attnbench.spec import Workload

ALIKE = (
    "kv_lengths", "layout", "dtype", "batch", "heads", "head_dim", "causal", "scale", "requires_grad", "softcap",
    "pattern", "inner", "return_lse",
)  # fmt: skip
"""Arguments that must be the same on every rank, in the order in which their digests are sent."""
ACCEPTS, REFUSES = 1, 0


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
    kept = "" if blocks is None or lengths is not None else blocks.id
    return attend_over_ranks(
        q, k, v, who="ring_attention", causal=causal, scale=scale, softcap=softcap, layout=layout, inner=inner,
        process_group=process_group, lengths=lengths, dilated=dilated, detached=detached, blocks=lambda *_: blocks,
        kept=kept, kv_lengths=kv_lengths, return_lse=return_lse,
    )  # fmt: skip


def attend_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, *, who: str, causal: bool, scale: float | None, softcap: float | None, layout: str,
    inner: str, process_group: Any, lengths: tuple[int, int] | None, dilated: Dilated | None, detached: bool,
    blocks: Callable[[int, int], Blocks | None], kept: str, kv_lengths: Sequence[int] | Tensor | None, return_lse: bool,
) -> Any:  # fmt: skip
    """Return what `ring_attention` returns, for a function or module named `who`.

    `blocks` returns the block mask for global numbers of queries and heads; the text `kept` describes it.
    """
    rank, world = rank_and_world(process_group)
    with refused_by_all(process_group, q, k, v) if lengths is None else nullcontext():
        if detached and dilated is None:
            raise UsageError(
                "detached= applies to the mixing of a dilated pattern's branches: give dilated= too, or leave it out."
            )
        check_tensors(who, q, k, v)
        q, k, v = under_autocast(q, k, v)
        shape = _shape_of(q, k, v, scale, softcap)
        known: Any = None if kv_lengths is None else masks.lengths(kv_lengths, constant=True)
        limits = None if known is None else tuple(known.kv_lengths.array.tolist())
        check_layout(layout)
        _check_kernel(q, k, shape, inner, causal)
    if lengths is None:
        # A rank that records no gradients would leave the others waiting in their backward pass.
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        pattern_text = (None if dilated is None else dilated.id, kept, detached)
        lengths = _global_lengths(q, k, process_group, {
            "kv_lengths": limits, "layout": layout, "dtype": q.dtype, "batch": q.shape[0],
            "heads": (q.shape[2], k.shape[2]), "head_dim": (q.shape[3], v.shape[3]), "causal": causal,
            "scale": float(shape.softmax_scale), "requires_grad": recorded, "softcap": softcap,
            "pattern": pattern_text, "inner": inner, "return_lse": return_lse,
        })  # fmt: skip
    q_len, kv_len = lengths
    problem = RingProblem(q_len, kv_len, world, layout, causal, kv_len - q_len)
    _check_shard((q.shape[1], k.shape[1]), problem, rank)
    if limits is not None:
        masks.lengths(limits).check(MaskShape(shape.batch, shape.heads, q_len, kv_len))
    pattern = _checked_pattern(q, k, lengths, dilated, detached, blocks(q_len, q.shape[2]))
    engine = _engine_of(problem, rank, shape, inner, q.device, pattern, limits)
    with without_autocast(q.device.type):
        out, lse = RingFunction.apply(q, k, v, engine, process_group, return_lse)
    return (out, lse.float()) if return_lse else out


def _checked_pattern(
    q: Tensor, k: Tensor, lengths: tuple[int, int], dilated: Dilated | None, detached: bool, blocks: Blocks | None
) -> Pattern | None:
    """Return the pattern, checked against the whole sequence; a block mask alone is one segment of all tokens."""
    if dilated is None and blocks is None:
        return None
    shape = MaskShape(q.shape[0], q.shape[2], *lengths)
    mask = dilated or Dilated((max(lengths),), (1,))
    for part in filter(None, (mask, blocks)):
        part.check(shape)
    if blocks is not None and blocks.per_batch:
        raise UsageError("blocks= must be the same for all batch rows in a ring; it may differ by head.")
    return Pattern(mask, q.shape[2], k.shape[2], detached, blocks)


@registry.cached(256)
def _engine_of(
    problem: RingProblem, rank: int, shape: Workload, inner: str, device: torch.device, pattern: Pattern | None = None,
    limits: tuple[int, ...] | None = None,
) -> RingEngine:  # fmt: skip
    """Make the plan and the kernels of one rank, once for each problem."""
    if limits is None or min(limits) == problem.kv_len:
        return RingEngine(problem, rank, _work(problem, rank, shape, inner, device, pattern, None))
    parts, first = [], 0
    for limit, rows in groupby(limits):
        count = len(list(rows))
        part = msgspec.structs.replace(shape, batch=count)
        parts.append((slice(first, first + count), _work(problem, rank, part, inner, device, pattern, limit)))
        first += count
    return RingEngine(problem, rank, LimitedWork(parts))


@registry.cached(256)
def _work(
    problem: RingProblem, rank: int, shape: Workload, inner: str, device: torch.device, pattern: Pattern | None,
    limit: int | None,
) -> DenseWork | DilatedWork:  # fmt: skip
    """Return the prepared work of some batch rows, cached: key lengths may differ from call to call."""
    work = work_of(problem, rank, TileKernels(shape, inner, device), pattern, limit)
    work.prepare()
    return work


def _check_kernel(q: Tensor, k: Tensor, shape: Workload, inner: str, causal: bool) -> None:
    """Raise Unsupported if no kernel takes this rank's own queries and keys, before any message is sent."""
    if q.shape[1] and k.shape[1]:
        square = min(q.shape[1], k.shape[1])
        for q_len, kv_len, masked in ((q.shape[1], k.shape[1], False), *([(square, square, True)] if causal else [])):
            TileKernels(shape, inner, q.device).of((shape.batch, q_len, kv_len, shape.heads, shape.kv_heads), masked)


def _check_shard(local: tuple[int, int], problem: RingProblem, rank: int) -> None:
    """Raise UsageError if the numbers of queries and keys are not those that the layout gives this rank."""
    problem.check()
    wanted = problem.q_sizes()[rank], problem.kv_sizes()[rank]
    if local != wanted:
        raise UsageError(
            f"rank {rank} of {problem.world} holds {local[0]} queries and {local[1]} keys, but layout "
            f'"{problem.layout}" gives it {wanted[0]} of {problem.q_len} and {wanted[1]} of {problem.kv_len}.'
        )


def _shape_of(q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None) -> Workload:
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


class RingFunction(torch.autograd.Function):
    """Attention over a ring: forward sends K and V round, backward sends them with the sums of their gradients.

    The inputs are (q, k, v, engine, group, with_lse); the outputs (out, lse). with_lse gives the LSE a gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, engine: RingEngine, group: Any, with_lse: bool) -> Any:
        out, lse, *own = engine.forward(q, k, v, transport_of(engine.problem, group))
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


def _gradients(
    engine: RingEngine, group: Any, with_lse: bool, dout: Tensor | None, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *own: Tensor,
) -> tuple[Any, Any, Any]:  # fmt: skip
    transport, several = transport_of(engine.problem, group), engine.problem.world > 1
    of_out, of_lse = dout is not None or not with_lse, dlse is not None and with_lse
    if with_lse and several:  # what any rank wants the gradient of, all ranks must compute
        flags = torch.tensor([of_out, of_lse], dtype=torch.int32, device=q.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        of_out, of_lse = (bool(flag) for flag in flags.tolist())
    if of_out and dout is None:
        dout = torch.zeros_like(out)
    if of_lse and dlse is None:
        dlse = torch.zeros_like(lse)

    def by_lse(dlse: Tensor) -> tuple[Any, Any, Any]:
        excess = None
        if out.dtype == torch.float16 and several:  # the largest of all ranks, since dK is summed over them
            excess = beyond_float16(dlse)
            dist.all_reduce(excess, dist.ReduceOp.MAX, group=group)
        return through_lse(engine.under_whole(transport), "bshd", q, k, v, out, lse, dlse, excess)

    return of_both(
        lambda dout: engine.backward((q, k, v), (out, lse, *own), dout, transport),
        by_lse,
        dout,
        dlse if of_lse else None,
    )


def rank_and_world(group: Any) -> tuple[int, int]:
    """Return the rank and the number of ranks; (0, 1) if no process group was initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise UsageError(
                "process_group= was given, but torch.distributed is not initialised: call init_process_group first."
            )
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


@contextmanager
def refused_by_all(group: Any, *arrays: Any) -> Iterator[None]:
    """Pass errors on to every rank: if one rank raises inside, the others raise in `_global_lengths`."""
    try:
        yield
    except Exception:
        if rank_and_world(group)[1] > 1:
            _exchanged([REFUSES, 0, 0, *[0] * len(ALIKE)], group, arrays)
        raise


def _global_lengths(q: Tensor, k: Tensor, group: Any, given: Mapping[str, object]) -> tuple[int, int]:
    """Return the global numbers of queries and keys: the sums over all ranks.

    Every rank raises UsageError if the ranks' sizes do not fit the layout, if values of `given` (those of ALIKE) are
    not the same on every rank, or if one rank refuses.
    """
    local, (rank, world) = (q.shape[1], k.shape[1]), rank_and_world(group)
    if world == 1:
        return local
    digests = [crc32(repr(given[name]).encode()) for name in ALIKE]
    accepts, q_counts, kv_counts, *by_name = _exchanged([ACCEPTS, *local, *digests], group, (q, k))
    if REFUSES in accepts:
        refusing = [str(other) for other, accepted in enumerate(accepts) if accepted == REFUSES]
        raise UsageError(
            f"rank {' and '.join(refusing)} of {world} refused this call, so rank {rank} stops too instead of waiting "
            "for its keys; the error of the refusing rank says why."
        )
    unlike = [name for name, digests in zip(ALIKE, by_name) if len(set(digests)) > 1]
    if unlike == ["kv_lengths"]:
        raise UsageError("kv_lengths differ between ranks: every rank must give the lengths of the whole sequence.")
    if unlike:
        raise UsageError(f"ranks disagree on {', '.join(unlike)}: every rank must give the same value.")
    for what, counts in (("queries", q_counts), ("keys", kv_counts)):
        wanted = sizes(str(given["layout"]), sum(counts), world)
        if tuple(counts) != wanted:
            raise UsageError(
                f'ranks hold {", ".join(map(str, counts))} {what}, but layout "{given["layout"]}" divides '
                f"{sum(counts)} {what} into {', '.join(map(str, wanted))}."
            )
    return sum(q_counts), sum(kv_counts)


def _exchanged(numbers: list[int], group: Any, arrays: tuple[Any, ...]) -> list[list[int]]:
    """Gather one list of numbers from every rank; return, for each number, the values in the order of the ranks."""
    device = next((x.device for x in arrays if isinstance(x, Tensor) and not x.is_meta), torch.device("cpu"))
    if device.type == "cpu" and dist.get_backend(group) == "nccl":  # NCCL moves no arrays of the host
        device = torch.device("cuda", torch.cuda.current_device())
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(by_rank, own, group=group)
    return torch.stack(by_rank, 1).tolist()
