"""One torch call on a CPU or a CUDA GPU: how long it took, and how much memory it needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], Any], device: str) -> float:
    """Between two events on the stream, or of the wall on a CPU."""
    if device != "cuda":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def extra_gib(run: Callable[[], Any], device: str) -> float | None:
    """At the peak of a second call, beyond what lay there before it; null on a CPU, where nothing counts."""
    run()
    synchronise(device)
    if device != "cuda":
        return None
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronise(device)
    return round((torch.cuda.max_memory_allocated() - base) / 2**30, 3)
