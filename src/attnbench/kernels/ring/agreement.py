"""One exchange between the ranks of a ring before each call: the arguments of each rank, or that it refuses.

A rank that raised by itself would leave the others waiting for its keys. So a rank that refuses says so in the same
exchange, and every rank raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from zlib import crc32

from attnbench.errors import UsageError
from attnbench.kernels.ring.schedule import sizes

if TYPE_CHECKING:
    import torch

ALIKE = (
    "kv_lengths", "layout", "dtype", "batch", "heads", "head_dim", "causal", "scale", "requires_grad", "softcap",
    "pattern", "inner", "return_lse",
)  # fmt: skip
"""Arguments that must be the same on every rank, in the order in which their digests are sent."""
ACCEPTS, REFUSES = 1, 0


def rank_and_world(group: Any) -> tuple[int, int]:
    """Return the rank and the number of ranks; (0, 1) if no process group was initialised."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise UsageError("a process_group was given, but torch.distributed is not initialised.")
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


class RefusedByAll(AbstractContextManager[None]):
    """A context whose errors reach every rank: if one rank raises inside, the others raise in `global_lengths`."""

    def __init__(self, group: Any, *arrays: Any) -> None:
        self._group, self._arrays = group, arrays

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and rank_and_world(self._group)[1] > 1:
            _exchanged([REFUSES, 0, 0, *[0] * len(ALIKE)], self._group, self._arrays)


def agreement(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None, **more: object
) -> dict[str, object]:
    """Return the values of ALIKE: from the arrays, and from `more`; missing values count as None.

    Whether gradients are recorded is one of them: a rank that records none would leave the others waiting in their
    backward pass.
    """
    import torch

    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    factor = float(q.shape[3] ** -0.5 if scale is None else scale)
    heads, dims = (q.shape[2], k.shape[2]), (q.shape[3], v.shape[3])
    arrays = {"dtype": q.dtype, "batch": q.shape[0], "heads": heads, "head_dim": dims}
    return {**arrays, "causal": causal, "scale": factor, "requires_grad": recorded, **more}


def global_lengths(q: torch.Tensor, k: torch.Tensor, group: Any, given: Mapping[str, object]) -> tuple[int, int]:
    """Return the global numbers of queries and keys: the sums over all ranks.

    Every rank raises UsageError if the ranks' sizes do not fit the layout, if values of `given` (those of ALIKE) are
    not the same on every rank, or if one rank refuses.
    """
    local, (rank, world) = (q.shape[1], k.shape[1]), rank_and_world(group)
    if world == 1:
        return local
    digests = [crc32(repr(given.get(name)).encode()) for name in ALIKE]
    accepts, q_counts, kv_counts, *by_name = _exchanged([ACCEPTS, *local, *digests], group, (q, k))
    if REFUSES in accepts:
        refusing = [str(other) for other, accepted in enumerate(accepts) if accepted == REFUSES]
        raise UsageError(
            f"rank {' and '.join(refusing)} of {world} refused this call, and so does rank {rank}, which would wait "
            "for it: the error there says why."
        )
    unlike = [name for name, found in zip(ALIKE, by_name) if len(set(found)) > 1]
    if unlike == ["kv_lengths"]:
        raise UsageError("kv_lengths differ from rank to rank: every rank gives those of the whole sequence.")
    if unlike:
        raise UsageError(f"ranks disagree on {', '.join(unlike)}: every rank gives the same.")
    for what, counts in (("queries", q_counts), ("keys", kv_counts)):
        wanted = sizes(str(given["layout"]), sum(counts), world)
        if tuple(counts) != wanted:
            raise UsageError(
                f"ranks hold {', '.join(map(str, counts))} {what}; laid out {given['layout']}, "
                f"{sum(counts)} make {', '.join(map(str, wanted))}."
            )
    return sum(q_counts), sum(kv_counts)


def _exchanged(mine: list[int], group: Any, arrays: tuple[Any, ...]) -> list[list[int]]:
    """Gather one list of numbers from every rank; return, for each number, the values in the order of the ranks."""
    import torch
    import torch.distributed as dist

    device = next((x.device for x in arrays if isinstance(x, torch.Tensor) and not x.is_meta), torch.device("cpu"))
    if device.type == "cpu" and dist.get_backend(group) == "nccl":  # NCCL moves no arrays of the host
        device = torch.device("cuda", torch.cuda.current_device())
    told = torch.tensor(mine, dtype=torch.int64, device=device)
    by_rank = [torch.empty_like(told) for _ in range(dist.get_world_size(group))]
    dist.all_gather(by_rank, told, group=group)
    return torch.stack(by_rank, 1).tolist()
