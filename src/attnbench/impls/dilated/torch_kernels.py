"""Which dense kernel computes a piece: the one named, or the first of the order that takes it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from attnbench import frameworks, registry
from attnbench.errors import Unsupported
from attnbench.spec import Environment, Partial, Workload
from attnbench.workloads import masks

if TYPE_CHECKING:
    import torch

ORDER = ("torch.sdpa-cudnn", "torch.sdpa-flash", "torch.sdpa-efficient", "torch.eager")
"""The fastest first where it was measured (an H200); eager takes everything and stores the scores."""


def partial_of(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Partial:
    """(forward, backward) for pieces shaped like these; `kernel` is an implementation's name or "auto"."""
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    return _partial(kernel, _device(q), str(q.dtype).removeprefix("torch."), sizes, causal, scale)


def _device(x: torch.Tensor) -> str:
    import torch

    return "rocm" if x.device.type == "cuda" and torch.version.hip else x.device.type


@lru_cache(maxsize=8)
def _environment(device: str) -> Environment:
    return frameworks.get("torch").environment(device)


@lru_cache(maxsize=4096)
def _partial(kernel: str, device: str, dtype: str, sizes: tuple[int, ...], causal: bool, scale: float) -> Partial:
    batch, q_len, kv_len, heads, kv_heads, head_dim, v_head_dim = sizes
    workload = Workload(
        batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        v_head_dim=v_head_dim, dtype=dtype, mask=masks.causal() if causal else masks.full(), scale=scale, pass_="train",
    )  # fmt: skip
    reasons = []
    for name in ORDER if kernel == "auto" else (kernel,):
        implementation, where = registry.get(name), _environment(device)
        reason = implementation.available(where) or implementation.supports(workload, where)
        pair = None if reason else implementation.partial(workload, {})
        if pair is not None:
            return pair
        reasons.append(f"{name} {reason or 'has no partial form here'}")
    raise Unsupported(f"no kernel computes {workload.title} on {device}: {'; '.join(reasons)}.")
