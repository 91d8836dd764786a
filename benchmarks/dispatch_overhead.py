"""What `ab.attention` adds to a call in eager torch: `python benchmarks/dispatch_overhead.py [-o FILE]`.

A problem so small that the host is what takes the time, on one thread, by the clock of that thread: what others do on
the machine does not count. Every round times all ways of calling it in turn, in an order drawn anew; what one adds to
another is the median over rounds of their difference, with its interval. The claim is under 5 us over the call that
the implementation built, and over the same call with the layout turned by hand.
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
from torch.nn.functional import scaled_dot_product_attention

import attnbench as ab
from attnbench import frameworks, registry
from attnbench.dispatch.choice import order_on
from attnbench.errors import PolicyWarning

CLAIM_US = 5.0
SHAPE = {"batch": 1, "q_len": 16, "heads": 2, "head_dim": 16}
CALLS = 50
ROUNDS = 400
Run = Callable[[], Any]


def ways(device: str, train: bool, mask: Any) -> tuple[dict[str, Run], list[tuple[str, str]]]:
    """Ways of calling by name, and which is compared with which."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sizes = (SHAPE["batch"], SHAPE["heads"], SHAPE["q_len"], SHAPE["head_dim"])
    q, k, v = (torch.randn(sizes, device=device, dtype=dtype).requires_grad_(train) for _ in range(3))
    turned = [x.detach().transpose(1, 2).contiguous().requires_grad_(train) for x in (q, k, v)]
    kind = str(dtype).rpartition(".")[2]
    work = ab.Workload(**SHAPE, dtype=kind, mask=mask, pass_="train" if train else "forward")
    name = "torch.sdpa-flash"
    direct = registry.get(name).build(work, {})
    pick = ab.explain(q, k, v, mask=mask, layout="bhsd").pick
    assert pick is not None
    direct_pick = registry.get(pick).build(work, {})
    assert registry.get(pick).layout == "bhsd"
    causal = mask is not None

    def by_hand() -> Any:
        return direct(*(x.transpose(1, 2) for x in turned)).transpose(1, 2)

    found: dict[str, Run] = {
        "F.scaled_dot_product_attention": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
        f"built {name}": lambda: direct(q, k, v),
        f"built {name}, layout by hand": by_hand,
        f"attention {name}": lambda: ab.attention(q, k, v, mask=mask, impl=name, layout="bhsd"),
        f"attention {name}, bshd": lambda: ab.attention(*turned, mask=mask, impl=name),
        f"built {pick} (auto)": lambda: direct_pick(q, k, v),
        "attention auto": lambda: ab.attention(q, k, v, mask=mask, layout="bhsd"),
        "attention torch.sdpa": lambda: ab.attention(q, k, v, mask=mask, impl="torch.sdpa", layout="bhsd"),
    }
    pairs = [
        (f"attention {name}", f"built {name}"),
        (f"attention {name}, bshd", f"built {name}, layout by hand"),
        ("attention auto", f"built {pick} (auto)"),
        ("attention torch.sdpa", "F.scaled_dot_product_attention"),
        ("attention auto", "F.scaled_dot_product_attention"),
    ]
    return found, pairs


def sample(found: dict[str, Run], rounds: int, calls: int, wait: Run) -> dict[str, np.ndarray]:
    """Microseconds a call, round by round."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for run in found.values():
        for _ in range(calls):
            run()
    for _ in range(rounds):
        for name in random.sample(list(found), len(found)):
            run = found[name]
            wait()
            start = time.thread_time_ns()
            for _ in range(calls):
                run()
            times[name].append((time.thread_time_ns() - start) / calls / 1e3)
    return {name: np.array(values) for name, values in times.items()}


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % of the median, by resampling rounds."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return round(float(low), 3), round(float(high), 3)


def measure(device: str, rounds: int, calls: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    wait: Run = (lambda: None) if device == "cpu" else torch.accelerator.synchronize
    cases = {}
    masks = {"full": None, "causal": ab.masks.causal()}
    for title, mask, train in (("full", "full", False), ("causal", "causal", False), ("causal train", "causal", True)):
        found, pairs = ways(device, train, masks[mask])
        times = sample(found, rounds, calls, wait)
        added = {
            f"{a} - {b}": {"us": round(float(np.median(times[a] - times[b])), 3), "ci95": interval(times[a] - times[b])}
            for a, b in pairs
        }
        medians = {name: round(float(np.median(values)), 3) for name, values in times.items()}
        cases[title] = {"us_per_call": medians, "added": added}
    return {
        "claim_us": CLAIM_US, "shape": SHAPE, "calls": calls, "rounds": rounds, "order": order_on("torch", device),
        "cases": cases, "environment": msgspec.to_builtins(frameworks.get("torch").environment(device)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS)
    given = parser.parse_args()
    warnings.simplefilter("ignore", PolicyWarning)
    found = measure(given.device, given.rounds, given.calls)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    for title, case in found["cases"].items():
        print(title)
        for name, added in case["added"].items():
            print(f"  {added['us']:7.2f} us  {added['ci95']}  {name}")


if __name__ == "__main__":
    main()
