"""How fast the dilated family is: `python benchmarks/dilated.py [-o FILE]` on a CUDA GPU, bfloat16, about 3 minutes.

Every result is checked before it is timed. Rates count the pairs that are computed (one in two branches twice), a
training step as 3.5 x forward. Claims, with the paper's five branches on 12 heads of 64, against the rate of cuDNN's
dense causal attention on 16k tokens: forward >= 65 % at 128k and 75 % at 1M tokens, training 60 % and 65 %; improved at
least 3 x as fast as standard at 128k. `--smoke` runs all of it on tiny shapes on a CPU, where nothing is claimed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
from publishing import publish
from torch.nn.functional import scaled_dot_product_attention

from attnbench.frameworks.torch import FRAMEWORK
from attnbench.impls.dilated.pieces import Problem, computed_pairs
from attnbench.nn import ImprovedDilatedAttention, create_dilated_attention, create_multihead_dilated_attention
from attnbench.reference import attention as reference_attention
from attnbench.spec import Workload
from attnbench.workloads import masks

HEADS, TRAIN_FACTOR, ALLOWED_ERROR = 12, 3.5, 2e-2
CLAIMS = {("forward", "short"): 0.65, ("forward", "long"): 0.75, ("train", "short"): 0.60, ("train", "long"): 0.65}
SPEEDUP_CLAIM = 3.0


class Scale(NamedTuple):
    """The sizes of a run; `shrunk` divides the paper's segments."""

    device: str
    dtype: torch.dtype
    shrunk: int
    dense: int
    short: int
    long: int
    dims: tuple[int, ...]
    seconds: float


GPU = Scale("cuda", torch.bfloat16, 1, 16 << 10, 128 << 10, 1 << 20, (64, 128), 1.5)
SMOKE = Scale("cpu", torch.float32, 256, 64, 256, 512, (16,), 0.01)


def pattern(scale: Scale) -> masks.Dilated:
    return masks.dilated([w // scale.shrunk for w in (2048, 4096, 8192, 16384, 32768)], [1, 2, 4, 6, 12])


def module(kind: str, scale: Scale) -> torch.nn.Module:
    one = pattern(scale)
    return create_dilated_attention(kind, one.segment_lengths, one.dilation_rates, causal=True)


def draw(scale: Scale, tokens: int, dim: int) -> list[torch.Tensor]:
    """q, k, v that want gradients, and dout."""
    arrays = [torch.randn(1, tokens, HEADS, dim, device=scale.device, dtype=scale.dtype) for _ in range(4)]
    return [x.requires_grad_() for x in arrays[:3]] + arrays[3:]


def step(call: Callable[..., torch.Tensor], arrays: list[torch.Tensor], train: bool) -> Callable[[], Any]:
    *leaves, dout = arrays

    def forward() -> Any:
        with torch.no_grad():
            return call(*leaves)

    return (lambda: torch.autograd.grad(call(*leaves), leaves, dout)) if train else forward


def sample(run: Callable[[], Any], scale: Scale) -> dict[str, Any]:
    """Median milliseconds of single calls, after two untimed ones, and the peak of extra memory (null on a CPU)."""
    run(), run()
    synchronise(scale)
    base = torch.cuda.memory_allocated() if scale.device == "cuda" else 0
    if scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < scale.seconds and len(times) < 50):
        with timed(scale) as elapsed:
            run()
        times.append(elapsed[0])
    peak = round((torch.cuda.max_memory_allocated() - base) / 2**30, 3) if scale.device == "cuda" else None
    return {"ms": round(median(times), 4), "samples": len(times), "peak_gib": peak}


def synchronise(scale: Scale) -> None:
    if scale.device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def timed(scale: Scale) -> Iterator[list[float]]:
    """Milliseconds between two events on the stream, or of the wall on a CPU."""
    elapsed: list[float] = []
    if scale.device != "cuda":
        begin = time.perf_counter()
        yield elapsed
        elapsed.append((time.perf_counter() - begin) * 1e3)
        return
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    yield elapsed
    last.record()
    last.synchronize()
    elapsed.append(first.elapsed_time(last))


def check(scale: Scale, kind: str, dim: int) -> float:
    """Relative error against float64 on one head of a few hundred tokens, with branches small enough to mix there."""
    small = masks.dilated([64, 128, 256, 512, 512], [1, 2, 4, 6, 12])
    q, k, v, _ = (x.detach() for x in draw(scale, 512, dim))
    out = create_dilated_attention(kind, small.segment_lengths, small.dilation_rates, causal=True)(q, k, v)
    w = Workload(batch=1, q_len=512, heads=HEADS, head_dim=dim, mask=small & masks.causal())
    exact, _ = reference_attention(w, *(x.double().cpu().numpy() for x in (q, k, v)))
    want = torch.from_numpy(exact)
    error = float((out.double().cpu() - want).norm() / want.norm())
    if not error < ALLOWED_ERROR:
        raise SystemExit(f"{kind} is wrong at head_dim {dim}: relative error {error:.2g}, so nothing is timed.")
    return error


def rate(flops: float, ms: float) -> float:
    return float(f"{flops / ms / 1e9:.4g}")


def dense_rates(scale: Scale, dim: int) -> dict[str, Any]:
    """Dense causal attention, heads first; on a GPU by cuDNN and nothing else."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    arrays = [x.detach().transpose(1, 2).contiguous() for x in draw(scale, scale.dense, dim)]
    arrays = [x.requires_grad_() for x in arrays[:3]] + arrays[3:]
    flops = 4 * dim * HEADS * scale.dense * (scale.dense + 1) // 2
    found: dict[str, Any] = {"tokens": scale.dense}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if scale.device == "cuda" else SDPBackend.FLASH_ATTENTION):
        for name, factor in (("forward", 1.0), ("train", TRAIN_FACTOR)):
            run = step(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), arrays, name == "train")
            taken = sample(run, scale)
            found[name] = taken | {"tflops": rate(flops * factor, taken["ms"])}
    return found


def dilated_rates(scale: Scale, kind: str, tokens: int, dim: int) -> dict[str, Any]:
    problem = Problem(pattern(scale), 1, tokens, HEADS, HEADS, True)
    flops, arrays, call = 4 * dim * computed_pairs(problem), draw(scale, tokens, dim), module(kind, scale)
    found: dict[str, Any] = {"tokens": tokens, "forward_tflop": flops / 1e12}
    for name, factor in (("forward", 1.0), ("train", TRAIN_FACTOR)):
        taken = sample(step(call, arrays, name == "train"), scale)
        found[name] = taken | {"tflops": rate(flops * factor, taken["ms"])}
    return found


def multihead_times(scale: Scale, kind: str, tokens: int, dim: int) -> dict[str, Any]:
    """A training step of the module with its projections, x in and x out."""
    one = pattern(scale)
    width = HEADS * dim
    made = create_multihead_dilated_attention(
        kind, width, HEADS, one.segment_lengths, one.dilation_rates, causal=True, device=scale.device, dtype=scale.dtype
    )
    x, dout = (torch.randn(1, tokens, width, device=scale.device, dtype=scale.dtype) for _ in range(2))
    leaves = [x.requires_grad_(), *made.parameters()]
    return sample(lambda: torch.autograd.grad(made(x), leaves, dout), scale)


def kernels(scale: Scale, tokens: int, dim: int) -> dict[str, float]:
    """Microseconds of each kernel of one training step of the improved module, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    run = step(module("improved", scale), draw(scale, tokens, dim), train=True)
    run()
    activity = ProfilerActivity.CUDA if scale.device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        run()
        synchronise(scale)
    attribute = "self_device_time_total" if scale.device == "cuda" else "self_cpu_time_total"
    spent = {event.key[:120]: round(getattr(event, attribute), 1) for event in profiler.key_averages()}
    return dict(sorted(spent.items(), key=lambda item: -item[1])[:12])


def measure(scale: Scale) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": str(scale.dtype), "heads": HEADS, "pattern": pattern(scale).id, "dims": {}}
    for dim in scale.dims:
        errors = {kind: check(scale, kind, dim) for kind in ("standard", "improved")}
        one: dict[str, Any] = {"errors": errors, "dense": dense_rates(scale, dim)}
        for length in ("short", "long"):
            one[length] = {"improved": dilated_rates(scale, "improved", getattr(scale, length), dim)}
        one["short"]["standard"] = dilated_rates(scale, "standard", scale.short, dim)
        one["multihead_train"] = {
            kind: multihead_times(scale, kind, scale.short, dim) for kind in ("standard", "improved")
        }
        found["dims"][str(dim)] = one | {"ratios": ratios(one)}
        if scale.device == "cuda":
            torch.cuda.empty_cache()
    found["kernels_of_a_training_step_us"] = kernels(scale, scale.short, scale.dims[0])
    return found


def ratios(one: dict[str, Any]) -> dict[str, float]:
    """Rates against the dense one, and improved against standard by time."""
    against = {
        f"{name}_{length}_of_dense": one[length]["improved"][name]["tflops"] / one["dense"][name]["tflops"]
        for name, length in CLAIMS
    }
    both = one["short"]["standard"], one["short"]["improved"]
    faster = {
        f"improved_over_standard_{name}": both[0][name]["ms"] / both[1][name]["ms"] for name in ("forward", "train")
    }
    heads = one["multihead_train"]
    faster["improved_over_standard_multihead"] = heads["standard"]["ms"] / heads["improved"]["ms"]
    return {name: round(value, 3) for name, value in (against | faster).items()}


def claims(found: dict[str, Any]) -> dict[str, bool]:
    """Which claims hold, at the paper's head_dim."""
    seen = found["dims"]["64"]["ratios"]
    held = {
        f"{name}_{length} >= {least:.0%}": seen[f"{name}_{length}_of_dense"] >= least
        for (name, length), least in CLAIMS.items()
    }
    return held | {f"improved >= {SPEEDUP_CLAIM:g} x standard": seen["improved_over_standard_forward"] >= SPEEDUP_CLAIM}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument(
        "--kernel", help="implementation that computes the pieces, such as torch.sdpa-flash or torch.fa4"
    )
    parser.add_argument("--merge", choices=["triton", "eager"], help="how the improved variant merges")
    parser.add_argument("--no-diagonal", action="store_true", help="one call an offset in the improved variant")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        print("benchmarks/dilated.py needs a CUDA GPU: run it on one, or with --smoke on this CPU.", file=sys.stderr)
        raise SystemExit(2)
    how = {"kernel": options.kernel, "merge": options.merge, "diagonal": False if options.no_diagonal else None}
    ImprovedDilatedAttention.how = {name: value for name, value in how.items() if value is not None}
    torch.manual_seed(0)
    scale = SMOKE if options.smoke else GPU
    found = {"how": dict(ImprovedDilatedAttention.how)} | measure(scale)
    found |= {"smoke": options.smoke, "environment": msgspec.to_builtins(FRAMEWORK.environment(scale.device))}
    if not options.smoke:
        found["cudnn"] = torch.backends.cudnn.version()
        found["claims"] = claims(found)
    publish(found, options.out)


if __name__ == "__main__":
    main()
