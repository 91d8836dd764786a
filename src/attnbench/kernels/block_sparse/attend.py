"""Attention over tables of blocks made at run time, on whichever device the arrays lie."""

from __future__ import annotations

import torch

from attnbench.errors import Unsupported
from attnbench.impls.partial.torch_autograd import differentiable
from attnbench.kernels.block_sparse import cpu
from attnbench.kernels.block_sparse.tables import BlockTables
from attnbench.kernels.block_sparse.tiles import beyond_the_kernels, read_config
from attnbench.spec import Partial, Workload


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, h, t, d], k and v [b, g, s, d] -> out, and lse [b, h, t] in float32; differentiable in q, k and v."""
    kind = q.device.type
    if kind not in ("cpu", "cuda"):
        raise Unsupported(f"block-sparse attention runs on cpu and cuda, not on {kind}.")
    pair = _cpu_pair(q, k, tables, scale) if kind == "cpu" else _triton_pair(q, k, v, tables, scale)
    out, lse = differentiable(pair, "bhsd")(q, k, v)
    return out, lse.float()


def _cpu_pair(q: torch.Tensor, k: torch.Tensor, tables: BlockTables, scale: float) -> Partial:
    plan = cpu.plan(tables, k.shape[1], q.shape[3])
    return (
        lambda q, k, v: cpu.forward(q, k, v, plan, scale),
        lambda q, k, v, out, lse, dout: cpu.backward(q, k, v, out, lse, dout, plan, scale),
    )


def _triton_pair(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float) -> Partial:
    from attnbench.kernels.block_sparse import triton_call

    workload = Workload(
        batch=q.shape[0], q_len=q.shape[2], kv_len=k.shape[2], heads=q.shape[1], kv_heads=k.shape[1],
        head_dim=q.shape[3], v_head_dim=v.shape[3], dtype=str(q.dtype).rpartition(".")[2], scale=scale,
    )  # fmt: skip
    reason = beyond_the_kernels(workload, tables.block_size)
    if reason is not None:
        raise Unsupported(f"block-sparse attention on cuda {reason}.")
    tiles, atomic = read_config(workload, {})
    plan = triton_call.plan(tables, q.shape[1] // k.shape[1])
    return triton_call.pair(lambda _: plan, scale, tiles, atomic)
