"""The PyTorch side of gemma_models.py: the same Gemma stack and training step."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from attnbench.models.gemma_config import Config
from attnbench.models.gemma_torch import Stack


def torch_stack(config: Config, lengths: tuple[int, ...], dtype: str, rounds: int) -> dict[str, Any]:
    """A training step at each length, as many rows as make the longest; standard attention and SDPA."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for tokens in lengths:
        batch = max(lengths) // tokens
        x = torch.randn(batch, tokens, config.width, device=device, dtype=getattr(torch, dtype))
        at = torch.arange(tokens, device=device).expand(batch, tokens)
        one: dict[str, Any] = {}
        for name, impl in (("off", "standard"), ("on", "sdpa")):
            stack = Stack(config, causal=True, impl=impl, device=device)
            optimizer = torch.optim.SGD(stack.parameters(), lr=1e-3)

            def step(stack: Any = stack, optimizer: Any = optimizer, x: Any = x, at: Any = at) -> None:
                optimizer.zero_grad(set_to_none=True)
                stack(x, at).float().square().sum().backward()
                optimizer.step()

            one[name] = torch_times(step, device, rounds)
        found[f"stack train {tokens}"] = one | {"speedup": round(one["off"]["ms"] / one["on"]["ms"], 3)}
    return found


def torch_times(step: Callable[[], None], device: str, rounds: int) -> dict[str, Any]:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    step(), step(), wait()
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        step(), wait()
        times.append((time.perf_counter() - begin) * 1e3)
    peak = torch.cuda.max_memory_allocated() - held if device == "cuda" else None
    return {"ms": round(median(times), 4), "samples_ms": [round(value, 4) for value in times], "peak_bytes": peak}
