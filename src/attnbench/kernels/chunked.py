"""torch.chunked: exact attention over very long sequences on one device, chunk by chunk of queries and of keys.

Besides inputs and outputs it needs the accumulators of one chunk and the temporaries of one tile, whatever the length:
results are merged in float32 by their LSE, dK and dV summed in float32. Any kernel with a partial form computes tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Self

from attnbench.impls import AlwaysLse
from attnbench.impls._arguments import check_whole
from attnbench.impls.conditions import first_reason, needs_device
from attnbench.impls.partial.torch_passes import nothing_yet
from attnbench.kernels.ring.schedule import Tile, TokenRun, block_tiles, check_inner, needs_dense_mask, problem_of
from attnbench.spec import Array, Call, Config, Environment, Workload

if TYPE_CHECKING:
    import torch

    from attnbench.kernels.ring.work import TileKernels

LEAST_CHUNKS = 4
"""Fewest chunks of a sequence: short sequences are cut too, so that what is verified small is what runs large."""


class Chunked(AlwaysLse):
    """Long sequences in tiles of another kernel: `torch.chunked[chunk=32768,inner=torch.sdpa-flash]`."""

    name = "torch.chunked"
    framework = "torch"
    tunables = {"chunk": 65536, "inner": "auto"}

    def configured(self, config: Config) -> Self:
        given = {**self.tunables, **config}
        check_whole("chunk", given["chunk"], 1)
        check_inner(given["inner"])
        return self

    def available(self, environment: Environment) -> str | None:
        return needs_device(environment, "cpu", "cuda")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(self.available(environment), needs_dense_mask(workload))

    def both(self, workload: Workload, config: Config) -> Call:
        from attnbench.impls.partial.torch_autograd import differentiable

        plan = TilePlan(workload, {**self.tunables, **config})
        return differentiable((partial(_forward, plan), partial(_backward, plan)))


class TilePlan:
    """The tiles of a problem, query chunk by query chunk, and their kernels."""

    def __init__(self, workload: Workload, config: Config) -> None:
        check_whole("chunk", config["chunk"], 1)

        def kernels(device: torch.device) -> TileKernels:
            from attnbench.kernels.ring.work import TileKernels

            return TileKernels(workload, str(config["inner"]), device)

        self.kernels = lru_cache(kernels)
        self._problem = problem_of(workload, 1, "contiguous")
        self._chunk = min(int(config["chunk"]), -(-max(workload.q_len, workload.kv_len) // LEAST_CHUNKS))

    def chunks(self) -> Iterator[tuple[slice, list[Tile]]]:
        """Yield the rows of each query chunk, and its tiles with rows counted from the chunk's first row."""
        problem = self._problem
        for row in range(0, problem.q_len, self._chunk):
            queries, tiles = TokenRun(row, min(self._chunk, problem.q_len - row)), []
            for key in range(0, problem.kv_len, self._chunk):
                keys = TokenRun(key, min(self._chunk, problem.kv_len - key))
                of_chunk = block_tiles([queries], [keys], problem.causal, problem.shift)
                tiles += [tile._replace(key=tile.key + key, key_end=tile.key_end + key) for tile in of_chunk]
            yield slice(row, row + queries.size), tiles


def _forward(plan: TilePlan, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    import torch

    from attnbench.kernels.ring.work import attend_tiles

    out = q.new_empty(*q.shape[:3], v.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide, device=q.device)
    for rows, tiles in plan.chunks():
        part = q[:, rows]
        total, total_lse = nothing_yet((*part.shape[:3], v.shape[-1]), q.dtype, q.device)
        attend_tiles(plan.kernels(q.device), tiles, part, (k, v), total, total_lse)
        out[:, rows], lse[:, :, rows] = total, total_lse
    return out, lse


def _backward(
    plan: TilePlan, q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array
) -> tuple[Array, Array, Array]:
    import torch

    from attnbench.kernels.ring.work import differentiate_tiles

    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    for rows, tiles in plan.chunks():
        total = torch.zeros_like(q[:, rows], dtype=lse.dtype)
        whole = out[:, rows], lse[:, :, rows], dout[:, rows]
        differentiate_tiles(plan.kernels(q.device), tiles, q[:, rows], (k, v), whole, (total, dk, dv))
        dq[:, rows] = total
    return dq, dk.to(k.dtype), dv.to(v.dtype)


CHUNKED = Chunked()
