"""The partial form of a dense kernel for pieces shaped like given arrays, made once for each shape."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from attnbench.impls.parts.torch_choice import choose
from attnbench.spec import Partial, Workload
from attnbench.workloads import masks

if TYPE_CHECKING:
    import torch


def partial_of(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Partial:
    """(forward, backward) for pieces shaped like these; `kernel` is an implementation's name or "auto"."""
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    return _partial(kernel, _device(q), str(q.dtype).removeprefix("torch."), sizes, causal, scale)


def _device(x: torch.Tensor) -> str:
    import torch

    return "rocm" if x.device.type == "cuda" and torch.version.hip else x.device.type


@lru_cache(maxsize=4096)
def _partial(kernel: str, device: str, dtype: str, sizes: tuple[int, ...], causal: bool, scale: float) -> Partial:
    batch, q_len, kv_len, heads, kv_heads, head_dim, v_head_dim = sizes
    workload = Workload(
        batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        v_head_dim=v_head_dim, dtype=dtype, mask=masks.causal() if causal else masks.full(), scale=scale, pass_="train",
    )  # fmt: skip
    return choose(kernel, workload, device)[1]
