"""The partial form of a dense kernel for pieces of given sizes, made once for each."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from attnbench import masks
from attnbench.impls.partial.torch_choice import Rules, choose, current
from attnbench.spec import Partial, Workload

if TYPE_CHECKING:
    import torch


class Sizes(NamedTuple):
    """Of one dense call."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


def partial_of(
    kernel: str, dtype: torch.dtype, device: torch.device, sizes: Sizes, causal: bool, scale: float
) -> Partial:
    """(forward, backward), bshd, for pieces of these sizes; `kernel` is an implementation's name or "auto"."""
    return _partial(kernel, _device(device), str(dtype).removeprefix("torch."), sizes, causal, scale, current())


def _device(device: torch.device) -> str:
    import torch

    return "rocm" if device.type == "cuda" and torch.version.hip else device.type


@lru_cache(maxsize=4096)
def _partial(kernel: str, device: str, dtype: str, sizes: Sizes, causal: bool, scale: float, rules: Rules) -> Partial:
    mask = masks.causal() if causal else masks.full()
    workload = Workload(**sizes._asdict(), dtype=dtype, mask=mask, scale=scale, pass_="train")
    return choose(kernel, workload, device, rules)[1]
