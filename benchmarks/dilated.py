"""How fast the dilated family is: `python benchmarks/dilated.py [-o FILE]` on a CUDA GPU, bfloat16.

Every result is checked before it is timed. All calls of a head_dim and pass take turns, in rounds of an order drawn
anew; ratios are medians over rounds, with 95 % intervals. Rates count the pairs that are computed (one in two branches
twice), a training step as 3.5 x forward. Claims, with the paper's five branches on 12 heads of 64, against the rate of
cuDNN's dense causal attention on 16k tokens: forward >= 65 % at 128k and 75 % at 1M tokens, training 60 % and 65 %;
improved at least 3 x as fast as gathered copies and eager math at 128k; a training step at 1M at most 1.1 x of linear
growth from 128k. `standard` hands its copies to the same fused kernels, and the claim is judged against it too; `eager`
computes on them operator by operator: products in bfloat16, everything on the scores in float32, forward only.
`--smoke` runs all of it on tiny shapes on a CPU, where nothing is claimed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
from device_calls import extra_gib, milliseconds, synchronise
from interleaving import in_turn, ratio
from publishing import publish
from torch.nn.functional import scaled_dot_product_attention

from attnbench import masks, registry
from attnbench.frameworks.torch.framework import FRAMEWORK
from attnbench.frameworks.torch.plain import attend, log_sum_exp, mask_tensors, once_per_device
from attnbench.kernels.dilated.pieces import DilatedProblem, computed_pairs
from attnbench.nn import (
    DilatedAttention,
    ImprovedDilatedAttention,
    create_dilated_attention,
    create_multihead_dilated_attention,
)
from attnbench.reference import attention as reference_attention
from attnbench.spec import Array, Call, Config, Environment, Implementation, Partial, Workload

HEADS, TRAIN_FACTOR, ALLOWED_ERROR = 12, 3.5, 2e-2
CLAIMS = {("forward", "short"): 0.65, ("forward", "long"): 0.75, ("train", "short"): 0.60, ("train", "long"): 0.65}
SPEEDUP_CLAIM, GROWTH_CLAIM = 3.0, 1.1
PASSES = {"forward": 1.0, "train": TRAIN_FACTOR}


class Scale(NamedTuple):
    """The sizes of a run; `shrunk` divides the paper's segments."""

    device: str
    dtype: torch.dtype
    shrunk: int
    dense: int
    short: int
    long: int
    dims: tuple[int, ...]
    rounds: int


GPU = Scale("cuda", torch.bfloat16, 1, 16 << 10, 128 << 10, 1 << 20, (64, 128), 25)
SMOKE = Scale("cpu", torch.float32, 256, 64, 256, 512, (16,), 5)


class EagerPieces(Implementation):
    """Pieces operator by operator, forward: products in the inputs' dtype, scores in float32. torch.eager's own pieces,
    made to be exact, are float32 throughout."""

    name = "benchmark.eager-pieces"
    framework = "torch"

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return None

    def build(self, workload: Workload, config: Config) -> Call:
        forward, _ = self.partial(workload, config)
        return lambda q, k, v: forward(q, k, v)[0]

    def partial(self, workload: Workload, config: Config) -> Partial:
        tensors = once_per_device(lambda device: mask_tensors(workload, device))

        def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, logits = attend(q, k, v, tensors(q.device), workload.softmax_scale, None)
            return out, log_sum_exp(logits, tensors(q.device))

        def backward(*arrays: Array) -> tuple[Array, Array, Array]:
            raise NotImplementedError("benchmark.eager-pieces is timed forward only")

        return forward, backward


class EagerStandard(DilatedAttention):
    """Gathered copies and eager math: what is written by hand without a fused kernel."""

    how = {"kernel": EagerPieces.name}


def pattern(scale: Scale) -> masks.Dilated:
    return masks.dilated([w // scale.shrunk for w in (2048, 4096, 8192, 16384, 32768)], [1, 2, 4, 6, 12])


def module(kind: str, scale: Scale) -> torch.nn.Module:
    return made_of(kind, pattern(scale))


def made_of(kind: str, one: masks.Dilated) -> torch.nn.Module:
    if kind == "eager":
        return EagerStandard(one.segment_lengths, one.dilation_rates, causal=True)
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


class Taken(NamedTuple):
    """A call's milliseconds, one a round, and its peak of extra memory (null on a CPU)."""

    ms: list[float]
    peak_gib: float | None

    def figures(self, flops: float | None = None) -> dict[str, Any]:
        """As they are published, with the rate where the work is known."""
        found = {"ms": round(median(self.ms), 4), "samples": len(self.ms), "peak_gib": self.peak_gib}
        return found if flops is None else found | {"tflops": four_digits(flops / found["ms"] / 1e9)}


def compared(runs: Mapping[str, Callable[[], Any]], scale: Scale) -> dict[str, Taken]:
    """All in turn, round by round, after untimed calls that are weighed."""
    peaks = {name: extra_gib(run, scale.device) for name, run in runs.items()}
    times = in_turn({name: partial(milliseconds, run, scale.device) for name, run in runs.items()}, scale.rounds)
    return {name: Taken(times[name], peaks[name]) for name in runs}


def four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def check(scale: Scale, kind: str, dim: int) -> float:
    """Relative error against float64 on one head of a few hundred tokens, with branches small enough to mix there."""
    small = masks.dilated([64, 128, 256, 512, 512], [1, 2, 4, 6, 12])
    q, k, v, _ = (x.detach() for x in draw(scale, 512, dim))
    with torch.no_grad():
        out = made_of(kind, small)(q, k, v)
    w = Workload(batch=1, q_len=512, heads=HEADS, head_dim=dim, mask=small & masks.causal())
    exact, _ = reference_attention(w, *(x.double().cpu().numpy() for x in (q, k, v)))
    want = torch.from_numpy(exact)
    error = float((out.double().cpu() - want).norm() / want.norm())
    if not error < ALLOWED_ERROR:
        raise SystemExit(f"{kind} is wrong at head_dim {dim}: relative error {error:.2g}, so nothing is timed.")
    return error


def dense_calls(scale: Scale, dim: int) -> tuple[float, dict[str, Callable[[], Any]]]:
    """Dense causal attention, heads first, by the backend that `pinned` says."""
    arrays = [x.detach().transpose(1, 2).contiguous() for x in draw(scale, scale.dense, dim)]
    arrays = [x.requires_grad_() for x in arrays[:3]] + arrays[3:]
    call = partial(scaled_dot_product_attention, is_causal=True)
    flops = 4 * dim * HEADS * scale.dense * (scale.dense + 1) // 2
    return flops, {name: step(call, arrays, name == "train") for name in PASSES}


def pinned(scale: Scale) -> Any:
    """On a GPU dense attention is cuDNN's alone. Entered outside what is timed; the modules do not see it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION if scale.device == "cuda" else SDPBackend.FLASH_ATTENTION)


def dilated_calls(scale: Scale, kind: str, tokens: int, dim: int) -> tuple[float, dict[str, Callable[[], Any]]]:
    problem = DilatedProblem(pattern(scale), 1, tokens, HEADS, HEADS, True)
    arrays, call = draw(scale, tokens, dim), module(kind, scale)
    passes = ["forward"] if kind == "eager" else list(PASSES)
    return 4 * dim * computed_pairs(problem), {name: step(call, arrays, name == "train") for name in passes}


def multihead_step(scale: Scale, kind: str, tokens: int, dim: int) -> Callable[[], Any]:
    """A training step of the module with its projections, x in and x out."""
    one = pattern(scale)
    width = HEADS * dim
    made = create_multihead_dilated_attention(
        kind, width, HEADS, one.segment_lengths, one.dilation_rates, causal=True, device=scale.device, dtype=scale.dtype
    )
    x, dout = (torch.randn(1, tokens, width, device=scale.device, dtype=scale.dtype) for _ in range(2))
    leaves = [x.requires_grad_(), *made.parameters()]
    return lambda: torch.autograd.grad(made(x), leaves, dout)


def kernels(scale: Scale, tokens: int, dim: int) -> dict[str, float]:
    """Microseconds of each kernel of one training step of the improved module, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    run = step(module("improved", scale), draw(scale, tokens, dim), train=True)
    run()
    activity = ProfilerActivity.CUDA if scale.device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        run()
        synchronise(scale.device)
    attribute = "self_device_time_total" if scale.device == "cuda" else "self_cpu_time_total"
    spent = {event.key[:120]: round(getattr(event, attribute), 1) for event in profiler.key_averages()}
    return dict(sorted(spent.items(), key=lambda item: -item[1])[:12])


def measure(scale: Scale) -> dict[str, Any]:
    begin = time.perf_counter()
    found: dict[str, Any] = {"dtype": str(scale.dtype), "heads": HEADS, "pattern": pattern(scale).id, "dims": {}}
    for dim in scale.dims:
        errors = {kind: check(scale, kind, dim) for kind in ("eager", "standard", "improved")}
        found["dims"][str(dim)] = {"errors": errors} | at_width(scale, dim)
        if scale.device == "cuda":
            torch.cuda.empty_cache()
    found["kernels_of_a_training_step_us"] = kernels(scale, scale.short, scale.dims[0])
    return found | {"seconds": round(time.perf_counter() - begin, 1)}


def at_width(scale: Scale, dim: int) -> dict[str, Any]:
    """Figures and ratios at one head_dim."""
    cases = [("short", "improved"), ("short", "standard"), ("short", "eager"), ("long", "improved")]
    made = {"dense": dense_calls(scale, dim)} | {
        f"{length} {kind}": dilated_calls(scale, kind, getattr(scale, length), dim) for length, kind in cases
    }
    with pinned(scale):
        runs = {name: {what: calls[name] for what, (_, calls) in made.items() if name in calls} for name in PASSES}
        taken = {name: compared(mine, scale) for name, mine in runs.items()}
    taken["multihead"] = compared(
        {kind: multihead_step(scale, kind, scale.short, dim) for kind in ("standard", "improved")}, scale
    )
    one: dict[str, Any] = {"dense": {"tokens": scale.dense}, "short": {}, "long": {}}
    for what, (flops, _) in made.items():
        length, _, kind = what.partition(" ")
        place = one[length]
        if kind:
            place = one[length][kind] = {"tokens": getattr(scale, length), "forward_tflop": flops / 1e12}
        place |= {
            name: taken[name][what].figures(flops * factor) for name, factor in PASSES.items() if what in taken[name]
        }
    one["multihead_train"] = {kind: each.figures() for kind, each in taken["multihead"].items()}
    found = ratios(taken, {what: flops for what, (flops, _) in made.items()}, scale.long / scale.short)
    return one | {
        "ratios": {name: four_digits(value) for name, (value, _) in found.items()},
        "ratios_ci95": {name: [four_digits(end) for end in ends] for name, (_, ends) in found.items()},
    }


def ratios(
    taken: Mapping[str, Mapping[str, Taken]], flops: Mapping[str, float], longer: float
) -> dict[str, tuple[float, list[float]]]:
    """Rates against the dense one, improved against standard by time, and growth against linear; each with its ends."""

    def of(pass_: str, above: str, below: str, times: float = 1.0) -> tuple[float, list[float]]:
        value, ends = ratio(taken[pass_][above].ms, taken[pass_][below].ms)
        return value * times, [end * times for end in ends]

    found = {}
    for name, length in CLAIMS:
        what = f"{length} improved"
        found[f"{name}_{length}_of_dense"] = of(name, "dense", what, flops[what] / flops["dense"])
    for name in PASSES:
        found[f"improved_over_standard_{name}"] = of(name, "short standard", "short improved")
        found[f"{name}_growth_over_linear"] = of(name, "long improved", "short improved", 1 / longer)
    found["improved_over_eager_forward"] = of("forward", "short eager", "short improved")
    found["improved_over_standard_multihead"] = of("multihead", "standard", "improved")
    return found


def claims(found: dict[str, Any]) -> dict[str, bool]:
    """Which claims hold, at the paper's head_dim."""
    seen = found["dims"]["64"]["ratios"]
    held = {
        f"{name}_{length} >= {least:.0%}": seen[f"{name}_{length}_of_dense"] >= least
        for (name, length), least in CLAIMS.items()
    }
    return held | {
        f"improved >= {SPEEDUP_CLAIM:g} x standard": seen["improved_over_standard_forward"] >= SPEEDUP_CLAIM,
        f"improved >= {SPEEDUP_CLAIM:g} x copies and eager math": seen["improved_over_eager_forward"] >= SPEEDUP_CLAIM,
        f"train_long <= {GROWTH_CLAIM:g} x linear": seen["train_growth_over_linear"] <= GROWTH_CLAIM,
    }


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
    registry.register(EagerPieces())
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
