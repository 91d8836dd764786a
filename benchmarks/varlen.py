"""Packed sequences against padding: `python benchmarks/varlen.py [--device cuda] [-o FILE]`.

The lengths of a batch are drawn so that the share of padding in the padded batch is as asked, half by default.
Compared are attention of the packed tokens (`ab.attention_varlen`), of the padded batch under its lengths, and of the
padded batch under the causal mask alone, which right padding allows; by default with the implementation that attnbench
picks for each, or with those named. Lengths and offsets are tensors on the device that nobody reads. Every round takes
all ways in turn, in an order drawn anew; the ratio is the median over rounds of paired times, with its interval. Before
timing, the outputs are compared with each other at the real tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import attnbench as ab
from attnbench import frameworks
from attnbench.errors import PolicyWarning, Unsupported

CLAIM = 1.7
"""Least factor by which packed sequences are to be faster at half padding."""
QUICK = ((4, 64, 2, 16),)
SHAPES = ((16, 2048, 16, 128), (32, 1024, 16, 64), (8, 4096, 16, 128))
"""Sequences, longest, heads, head_dim."""
Run = Callable[[], Any]


def drawn_lengths(sequences: int, longest: int, padding: float, seed: int = 0) -> np.ndarray:
    """Lengths up to `longest`, one of them that long, whose mean leaves the share of padding."""
    generator = np.random.default_rng(seed)
    spread = min(1 - padding, padding)
    lengths = (generator.uniform(1 - padding - spread, 1 - padding + spread, sequences) * longest).round().astype(int)
    lengths = np.clip(lengths, 1, longest)
    lengths[0] = longest
    wanted, rest = round((1 - padding) * longest * sequences), lengths[1:]
    while missing := wanted - lengths.sum():  # spread what is missing over those with room
        room = np.flatnonzero(rest < longest if missing > 0 else rest > 1)
        if not len(room):
            break
        rest[generator.choice(room, min(len(room), abs(missing)), replace=False)] += np.sign(missing)
    return lengths


class Problem:
    """A padded batch, the same tokens packed, and the mask of each as tensors on the device."""

    def __init__(
        self, shape: tuple[int, int, int, int], padding: float, device: str, dtype: torch.dtype, train: bool
    ) -> None:
        sequences, self.longest, heads, dim = shape
        self.lengths = drawn_lengths(sequences, self.longest, padding)
        self.real = torch.arange(self.longest)[None] < torch.tensor(self.lengths)[:, None]
        sizes = (sequences, self.longest, heads, dim)
        self.padded = [torch.randn(sizes, device=device, dtype=dtype) for _ in range(4)]
        self.packed = [x[self.real.to(device)].contiguous() for x in self.padded]
        self.train = train
        for arrays in (self.padded, self.packed):
            for x in arrays[:3]:
                x.requires_grad_(train)
        self.n = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self.offsets = torch.tensor(np.cumsum([0, *self.lengths]), dtype=torch.int32, device=device)

    def run(self, call: Callable[..., torch.Tensor], arrays: list[torch.Tensor]) -> torch.Tensor:
        """The output; in training after its backward pass."""
        *inputs, dout = arrays
        out = call(*inputs)
        if self.train:
            torch.autograd.grad(out, inputs, dout)
        return out

    def with_padding(self, impl: str) -> Run:
        mask: Any = ab.masks.causal() & ab.masks.lengths(self.n, constant=False)
        return lambda: self.run(lambda q, k, v: ab.attention(q, k, v, mask=mask, impl=impl), self.padded)

    def without_lengths(self, impl: str) -> Run:
        """Causal attention needs no lengths for right padding: later keys are hidden, padded rows are not used."""
        return lambda: self.run(lambda q, k, v: ab.attention(q, k, v, mask=ab.masks.causal(), impl=impl), self.padded)

    def without_padding(self, impl: str) -> Run:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            longest = (self.longest, self.longest)
            return ab.attention_varlen(q, k, v, self.offsets, None, *longest, mask=ab.masks.causal(), impl=impl)

        return lambda: self.run(call, self.packed)

    def check(self, ways: dict[str, Run]) -> float:
        """Largest difference of any way to the first one at the real tokens, relative to the largest output."""
        real = self.real.to(self.n.device)
        outs = [out if out.dim() == 3 else out[real] for out in (run().detach().float() for run in ways.values())]
        return max(float((out - outs[0]).abs().max() / outs[0].abs().max()) for out in outs)


def sample(ways: dict[str, Run], until: float, least: int, wait: Run) -> dict[str, np.ndarray]:
    """Milliseconds a call, round by round, until the time is over and there are enough rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        for _ in range(3):
            run()
    rounds = 0
    while rounds < least or time.monotonic() < until:
        for name in random.sample(list(ways), len(ways)):
            wait()
            start = time.perf_counter_ns()
            ways[name]()
            wait()
            times[name].append((time.perf_counter_ns() - start) / 1e6)
        rounds += 1
    return {name: np.array(values) for name, values in times.items()}


def ratio(slow: np.ndarray, fast: np.ndarray) -> dict[str, Any]:
    """Median of paired ratios and 95 % of it, by resampling rounds."""
    paired = slow / fast
    drawn = np.random.default_rng(0).choice(paired, (2000, len(paired)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return {"ratio": round(float(np.median(paired)), 3), "ci95": (round(float(low), 3), round(float(high), 3))}


def measured(
    shape: tuple[int, int, int, int], train: bool, given: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    problem = Problem(shape, given.padding, given.device, dtype, train)
    ways = {
        "packed": problem.without_padding(given.packed), "padded, lengths": problem.with_padding(given.padded),
        "padded, causal alone": problem.without_lengths(given.causal),
    }  # fmt: skip
    wait: Run = (lambda: None) if given.device == "cpu" else torch.accelerator.synchronize
    difference = problem.check(ways)
    if difference > (1e-4 if dtype == torch.float32 else 0.05):
        raise SystemExit(f"outputs differ by {difference:.2g} of the largest: nothing is timed.")
    times = sample(ways, time.monotonic() + seconds, 5 if given.quick else 20, wait)
    return {
        "shape": dict(zip(("sequences", "longest", "heads", "head_dim"), shape)),
        "pass": "train" if train else "forward",
        "padding": round(1 - float(problem.lengths.mean()) / problem.longest, 3), "difference": difference,
        "rounds": len(times["packed"]), "ms": {name: round(float(np.median(x)), 4) for name, x in times.items()},
        "padded / packed": {name: ratio(times[name], times["packed"]) for name in list(ways)[1:]},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="one small shape, few rounds: to see that it runs")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for all timing")
    parser.add_argument("--padding", type=float, default=0.5, help="share of padding in the padded batch")
    for way in ("packed", "padded", "causal"):
        parser.add_argument(f"--{way}", default="auto", metavar="IMPL", help=f"implementation of the {way} way")
    given = parser.parse_args()
    warnings.simplefilter("ignore", PolicyWarning)
    torch.manual_seed(0)
    cases = [(shape, train) for shape in (QUICK if given.quick else SHAPES) for train in (False, True)]
    found: list[dict[str, Any]] = []
    for shape, train in cases:
        try:
            found.append(measured(shape, train, given, 0.0 if given.quick else given.budget / len(cases)))
        except Unsupported as error:
            found.append({"shape": shape, "pass": "train" if train else "forward", "unsupported": str(error)})
        print(json.dumps(found[-1]))
    record = {
        "claim": CLAIM, "impl": {way: getattr(given, way) for way in ("packed", "padded", "causal")}, "cases": found,
        "environment": msgspec.to_builtins(frameworks.get("torch").environment(given.device)),
    }  # fmt: skip
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
