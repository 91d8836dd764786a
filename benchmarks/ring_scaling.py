"""How a ring scales: `python benchmarks/ring_scaling.py [--smoke] [-o FILE]`.

Measured: torch.ring over 1, 2 and 4 ranks, verified and timed as any cell (processes over gloo on a CPU; on one GPU the
ranks are virtual, and the records say so). Modelled: more ranks, from kernel times measured here and a link that is
stated on the command line; every such entry carries "modelled": true. The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from ring_model import Link, model

from attnbench import frameworks
from attnbench.kernels.ring.schedule import Tile, problem_of
from attnbench.run.launch import Listener, Request, launch
from attnbench.run.machine import isa_cap
from attnbench.spec import Ok, Record, Workload
from attnbench.workloads.suite_file import grid

MEASURED, MODELLED = (1, 2, 4), (8, 16, 32, 64)
LEAST_S, MOST_CALLS = 0.2, 50
NOTE = (
    "Entries with modelled = true were not measured: they put kernel times measured on this machine and the stated "
    "link together, for ranks that have a device each."
)


def measured(workload: Workload, worlds: tuple[int, ...], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry for each number of ranks; what is not ok is told with its reason."""
    records: list[Record] = []
    names = tuple(f"torch.ring[world={world},layout={options.layout}]" for world in worlds)
    request = Request(
        workloads=(workload,), implementations=names, device=options.device, budget_s=options.budget, seed=1
    )
    launch(request, records.extend, Listener())
    rings = [record for record in records if record.implementation == "torch.ring"]
    return [_entry(record) for record in rings]


def _entry(record: Record) -> dict[str, Any]:
    if not isinstance(record, Ok) or record.time is None or record.ranks is None:
        return {"world": record.config["world"], "status": record.status, "reason": record.reason}
    ranks = record.ranks
    return {
        "world": ranks.world,
        "status": "ok",
        "seconds": record.time.median_ns * 1e-9,
        "ci95_s": None if record.time.ci95_ns is None else [edge * 1e-9 for edge in record.time.ci95_ns],
        "clock": record.time.clock,
        "ranks_share_cores": ranks.how != "virtual" and ranks.world > (os.cpu_count() or 1),
        "errors": msgspec.to_builtins(record.errors),
        "ranks": msgspec.to_builtins(ranks),
    }


def tile_clock(workload: Workload, device: str) -> Callable[[Tile], tuple[float, float]]:
    """Seconds of a tile's forward pass with its merge, and of its backward pass with its sums, on one device."""
    import torch

    from attnbench.frameworks.torch.programs import synchronize
    from attnbench.impls.partial.torch_passes import merge_, nothing_yet
    from attnbench.kernels.ring.work import TileKernels

    torch.set_num_threads(1)  # as a rank has when there are as many as cores
    kernels = TileKernels(workload, "auto", torch.device(device))

    def seconds(call: Callable[[], object]) -> float:
        call()
        times: list[float] = []
        while len(times) < 3 or (sum(times) < LEAST_S and len(times) < MOST_CALLS):
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    @cache
    def of_shape(rows: int, keys: int, causal: bool) -> tuple[float, float]:
        w, dtype = workload, getattr(torch, workload.dtype)
        make = {"dtype": dtype, "device": device}
        q = torch.randn(w.batch, rows, w.heads, w.head_dim, **make)
        k = torch.randn(w.batch, keys, w.kv_heads, w.head_dim, **make)
        v, dout = (torch.randn(w.batch, n, h, w.value_dim, **make) for n, h in ((keys, w.kv_heads), (rows, w.heads)))
        forward, backward = kernels.at(Tile(0, rows, 0, keys, causal))
        out, lse = nothing_yet((*q.shape[:3], w.value_dim), dtype, q.device)
        ahead = seconds(lambda: merge_(out, lse, *forward(q, k, v)))
        if not w.needs_gradients:
            return ahead, 0.0
        sums = [torch.zeros(x.shape, device=device) for x in (q, k, v)]
        whole = forward(q, k, v)
        back = seconds(lambda: [a.add_(b) for a, b in zip(sums, backward(q, k, v, *whole, dout))])
        return ahead, back

    return lambda tile: of_shape(*tile.shape, tile.causal)


def report(options: argparse.Namespace) -> dict[str, Any]:
    (workload,) = grid(
        batch=1, q_len=options.tokens, heads=options.heads, head_dim=options.head_dim, dtype=options.dtype,
        mask="causal", pass_=options.pass_,
    )  # fmt: skip
    link = Link(options.gb_per_s * 1e9, options.latency_us * 1e-6)
    worlds, more = ((1, 2), (4,)) if options.smoke else (MEASURED, MODELLED)
    found = measured(workload, worlds, options)
    clock = tile_clock(workload, options.device)
    problems = [problem_of(workload, world, options.layout) for world in (*worlds, *more)]
    return {
        "workload": workload.id,
        "note": NOTE,
        "stated_link": {"gb_per_s": options.gb_per_s, "latency_us": options.latency_us},
        "cores": os.cpu_count(),
        "environment": msgspec.to_builtins(frameworks.get("torch").environment(options.device or "cpu")),
        "measured": found,
        "modelled": [msgspec.to_builtins(model(workload, problem, clock, link)) for problem in problems],
    }


def print_table(found: dict[str, Any]) -> None:
    """For people, on stderr."""
    say = lambda text: print(text, file=sys.stderr)  # noqa: E731
    say(f"{found['workload']}")
    for one in found["measured"]:
        if one["status"] != "ok":
            say(f"  {one['world']:>3} ranks  {one['status']}: {one['reason']}")
            continue
        ranks = one["ranks"]
        shared = "  (ranks share cores)" if one["ranks_share_cores"] else ""
        peak = f"{max(ranks['peak_bytes']) / 1e6:.2f} MB" if ranks.get("peak_bytes") else "-"
        say(
            f"  {one['world']:>3} ranks  measured {one['seconds'] * 1e3:9.2f} ms  peak a rank {peak}  "
            f"balance {ranks['balance']:.0%}{shared}"
        )
    for one in found["modelled"]:
        say(
            f"  {one['world']:>3} ranks  MODELLED {one['seconds'] * 1e3:9.2f} ms  speed-up {one['speedup']:.2f}  "
            f"exposed communication {one['exposed_s'] * 1e3:.2f} ms"
        )
    say(found["note"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it works")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--heads", default="8:2")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pass", dest="pass_", default="train")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=2.0)
    parser.add_argument("--gb-per-s", type=float, default=50.0, help="stated bandwidth of a link, each way")
    parser.add_argument("--latency-us", type=float, default=10.0, help="stated latency of a message")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    options.tokens = options.tokens or (256 if options.smoke else 8192)
    options.budget = 0.1 if options.smoke else options.budget
    os.environ.update(isa_cap())
    found = report(options)
    print_table(found)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    if any(one["status"] != "ok" for one in found["measured"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
