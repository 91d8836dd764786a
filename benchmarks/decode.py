"""Decoding from KV caches: `python benchmarks/decode.py [--quick] [--budget SECONDS] [-o FILE]`.

For each batch and number of keys, the implementations of `ab.decode` over one piece and over shuffled pages, and
torch's SDPA over whole arrays, take turns in an order drawn anew each round. On a GPU a sample is a replay of a CUDA
graph over so many caches that none is still in the L2 cache when its turn comes again (`us`), and the same calls
outside of a graph, which the host may hold up (`us_called`); what no graph can hold has the latter alone. Every way is
checked against float32 first. The claim is that the fastest reader of pages takes at most 1.05 times what the fastest
reader of one piece takes. The file is written after each case, so a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from dispatch_overhead import interval

import attnbench as ab
from attnbench import frameworks

CLAIM = 1.05
L2_BYTES = 256 << 20
"""Several times the L2 cache of a large GPU."""
GPU_READERS = ("torch.triton-decode", "torch.flash-attn", "torch.fa3", "torch.fa4", "torch.flashinfer", "torch.eager")
CPU_READERS = ("torch.sdpa-flash", "torch.eager")
WHOLE = "torch.sdpa, whole arrays"
CALLS = 10
ALLOWED = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4}
Run = Callable[[], Any]


class Way(NamedTuple):
    """A way to compute a case: one function for each copy of the cache, and its graph if it could be captured."""

    runs: list[Run]
    replay: Run | None
    note: str = ""


def caches(case: dict[str, Any], page_size: int | None, device: str, seed: int) -> tuple[Any, Any]:
    """A query for each sequence and a cache that is full, or of lengths from an eighth of it on; pages are shuffled."""
    batch, keys, kind = case["batch"], case["keys"], getattr(torch, case["dtype"])
    torch.manual_seed(seed)
    shape = (batch, keys, case["kv_heads"], case["head_dim"])
    q = torch.randn(batch, case["queries"], case["heads"], case["head_dim"], device=device, dtype=kind)
    k, v = (torch.randn(shape, device=device, dtype=kind) for _ in range(2))
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    if case["unequal"]:
        lengths = torch.randint(keys // 8, keys + 1, (batch,), dtype=torch.int32)
    lengths = lengths.to(device)
    if page_size is None:
        return q, ab.ContiguousCache(k, v, lengths)
    columns = keys // page_size
    order = torch.randperm(batch * columns, device=device)
    # Where page n of the sequences goes: the keys themselves are those of the contiguous cache.
    k, v = (torch.empty_like(x).view(-1, page_size, *shape[2:]).index_copy_(0, order, x.view(-1, page_size, *shape[2:]))
            for x in (k, v))  # fmt: skip
    return q, ab.PagedCache(k, v, order.view(batch, columns).int(), lengths)


def whole_run(q: Any, cache: Any) -> Run:
    """Torch's own attention of all keys, as if all sequences had them, grouped heads by its own flag."""
    q, k, v = (x.transpose(1, 2) for x in (q, cache.k, cache.v))
    mask = None
    if q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def error_of(found: Any, q: Any, cache: Any) -> float:
    """Relative Frobenius distance from plain operators in float32, of the first sequence."""
    k, v, lengths, table = cache.arrays
    length = int(lengths[0])
    k, v = (x[0] if table is None else x[table[0].long()].flatten(0, 1) for x in (k, v))
    whole = ab.attention(
        q[:1].float(), k[None, :length].float(), v[None, :length].float(), mask=ab.masks.causal(), impl="torch.eager"
    )
    return float((found[:1].float() - whole).norm() / whole.norm())


def way_of(name: str, page_size: int | None, case: dict[str, Any], device: str, copies: int) -> Way:
    """Build and check a way; raise what keeps it from running."""
    runs: list[Run] = []
    for copy in range(copies):
        q, cache = caches(case, page_size, device, copy)
        if name == WHOLE:
            runs.append(whole_run(q, cache))
        else:
            runs.append(lambda q=q, cache=cache: ab.decode(q, cache, impl=name))
        if copy == 0:
            found = runs[0]()
            error = error_of(found.transpose(1, 2) if name == WHOLE else found, q, cache)
            if not error <= ALLOWED[case["dtype"]]:
                raise RuntimeError(f"is wrong: relative error {error:.2g}")
    if device == "cpu":
        return Way(runs, None)
    for run in runs:
        run()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [run() for run in runs]
    except Exception as error:
        torch.cuda.synchronize()
        return Way(runs, None, f"no graph: {type(error).__name__}: {str(error)[:200]}")
    return Way(runs, lambda: (graph.replay(), kept)[0])


def timed(run: Run, calls: int, device: str) -> float:
    """Microseconds of one of the calls that a run makes."""
    if device == "cpu":
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / calls / 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls * 1e3


def sampled(ways: dict[str, Way], rounds: int, until: float, device: str) -> dict[str, dict[str, list[float]]]:
    """Microseconds a call, round by round, until the rounds or the time are used up; three rounds at least."""
    times: dict[str, dict[str, list[float]]] = {name: {"us": [], "us_called": []} for name in ways}

    def called(way: Way) -> None:
        for n in range(CALLS):
            way.runs[n % len(way.runs)]()

    for number in range(rounds):
        if number >= 3 and time.monotonic() > until:
            break
        for name in random.sample(list(ways), len(ways)):
            way = ways[name]
            called_us = timed(lambda way=way: called(way), CALLS, device)
            times[name]["us_called"].append(called_us)
            replay = way.replay
            times[name]["us"].append(called_us if replay is None else timed(replay, len(way.runs), device))
    return times


def measure(case: dict[str, Any], options: argparse.Namespace, until: float) -> dict[str, Any]:
    """What a case took, by way; what could not run, and why."""
    device = options.device
    a_cache = 2 * case["batch"] * case["keys"] * case["kv_heads"] * case["head_dim"] * DTYPE_BYTES[case["dtype"]]
    copies = 1 if device == "cpu" else max(1, min(32, L2_BYTES // a_cache + 1))
    ways: dict[str, Way] = {}
    not_run: dict[str, str] = {}
    wanted: list[tuple[str, int | None]] = [] if case["unequal"] else [(WHOLE, None)]
    wanted += [(name, size) for name in options.impl for size in (None, *options.pages)]
    for name, size in wanted:
        title = name if size is None else f"{name}, pages of {size}"
        if size is not None and case["keys"] % size:
            not_run[title] = "pages do not divide the keys"
            continue
        try:
            ways[title] = way_of(name, size, case, device, copies)
        except Exception as error:
            not_run[title] = f"{type(error).__name__}: {str(error)[:300]}"
    times = sampled(ways, options.rounds, until, device)
    found: dict[str, Any] = {}
    for name, sample in times.items():
        us = float(np.median(sample["us"]))
        found[name] = {
            "us": round(us, 3), "ci95": interval(np.array(sample["us"])),
            "us_called": round(float(np.median(sample["us_called"])), 3),
            "tokens_per_s": round(case["batch"] * case["queries"] / us * 1e6, 1),
            "gb_per_s": None if case["unequal"] else round(a_cache / us / 1e3, 2),
            "graph": ways[name].replay is not None, "note": ways[name].note, "rounds": len(sample["us"]),
        }  # fmt: skip
    ratios = {}
    for size in options.pages:
        pages = {name: float(np.median(t["us"])) for name, t in times.items() if name.endswith(f", pages of {size}")}
        pieces = {name: float(np.median(times[name]["us"])) for name in times if name in options.impl}
        if pages and pieces:
            best, piece = min(pages, key=pages.__getitem__), min(pieces, key=pieces.__getitem__)
            ratios[f"{best} / {piece}"] = ratio(times[best]["us"], times[piece]["us"])
        for name in pages:
            alone = name.partition(", ")[0]
            if alone in pieces:
                ratios[f"{name} / {alone}"] = ratio(times[name]["us"], times[alone]["us"])
    return {**case, "copies": copies, "cache_bytes": a_cache, "ways": found, "not_run": not_run, "ratios": ratios}


def ratio(a: list[float], b: list[float]) -> dict[str, Any]:
    """The median of the ratios of rounds, with its interval."""
    each = np.array(a) / np.array(b)
    return {"ratio": round(float(np.median(each)), 4), "ci95": interval(each)}


DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny cases, few rounds; runs anywhere")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 4096, 16384, 65536, 131072])
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--heads", default="32:8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=list(DTYPE_BYTES), default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--impl", nargs="+")
    parser.add_argument("--unequal", action="store_true", help="lengths from an eighth of the keys on")
    options = parser.parse_args()
    options.impl = options.impl or list(CPU_READERS if options.device == "cpu" else GPU_READERS)
    if options.quick:
        options.batch, options.keys, options.pages = [1, 3], [256, 1024], [16, 64]
        options.rounds, options.budget = min(options.rounds, 5), min(options.budget, 60.0)
    heads, _, kv_heads = options.heads.partition(":")
    cases = [
        {
            "batch": batch, "keys": keys, "queries": options.queries, "heads": int(heads),
            "kv_heads": int(kv_heads or heads), "head_dim": options.head_dim, "dtype": options.dtype,
            "unequal": options.unequal,
        }
        for keys in options.keys for batch in options.batch
    ]  # fmt: skip
    environment = msgspec.to_builtins(frameworks.get("torch").environment(options.device))
    found: dict[str, Any] = {
        "claim": CLAIM,
        "quick": options.quick,
        "environment": environment,
        "cases": [],
        "not_reached": [],
    }
    end = time.monotonic() + options.budget
    for number, case in enumerate(cases):
        left = end - time.monotonic()
        if left <= 0:
            found["not_reached"] = cases[number:]
            break
        with torch.no_grad():
            result = measure(case, options, time.monotonic() + left / (len(cases) - number))
        found["cases"].append(result)
        show(result)
        if options.out is not None:
            options.out.write_text(json.dumps(found | {"not_reached": cases[number + 1 :]}, indent=1) + "\n")
        if options.device != "cpu":
            torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def show(result: dict[str, Any]) -> None:
    """Print a case, fastest way first."""
    print(f"batch {result['batch']}, {result['keys']} keys, {result['queries']} queries", flush=True)
    for name, way in sorted(result["ways"].items(), key=lambda item: item[1]["us"]):
        speed = "" if way["gb_per_s"] is None else f"{way['gb_per_s']:8.1f} GB/s "
        print(f"  {way['us']:10.1f} us {way['us_called']:10.1f} us called {speed} {name} {way['note']}", flush=True)
    for name, one in result["ratios"].items():
        print(f"  {one['ratio']:6.3f} {one['ci95']}  {name}", flush=True)
    for name, reason in result["not_run"].items():
        print(f"  not run: {name}: {reason}", flush=True)


if __name__ == "__main__":
    main()
