"""How often `attnbench compare` errs on a user's functions: `python benchmarks/compare_calibration.py --minutes 60`.

Compares a function with a copy of it in another file (nothing is different), and with one that does 5 % more real work,
on an idle machine and beside one busy process. Each comparison is a line in FILE as soon as it is over; stop it at any
time, the next call goes on with what was measured least, until there are COUNT of each. Then, or when its time is up,
the counts over all lines go to FILE's .summary.json and into the package, whose fine print cites them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scipy import stats

from attnbench.comparing import compare
from attnbench.comparison import Comparison
from attnbench.report.calibration import PACKAGED
from attnbench.spec import Ok, Workload

CONDITIONS, EFFECTS = ("idle", "busy"), ("same", "+5 %")
WORKLOAD = Workload(batch=20, q_len=128, heads=4, head_dim=64)
FUNCTION = """
import torch

def attend(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
    return (weights @ v).transpose(1, 2)
"""
MORE = (
    FUNCTION.replace("def attend", "def once")
    + "\ndef attend(q, k, v):\n    once(q[:1], k[:1], v[:1])\n    return once(q, k, v)\n"
)
"""One sequence of twenty is computed twice."""


def spin() -> None:
    """Keep a core busy for ever."""
    while True:
        sum(range(1000))


@contextmanager
def neighbour(condition: str) -> Iterator[None]:
    if condition == "idle":
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def line_of(condition: str, effect: str, threads: int | None, found: Comparison) -> dict[str, Any]:
    environment = found.record_a.environment if isinstance(found.record_a, Ok) else None
    return {
        "condition": condition,
        "effect": effect,
        "verdict": found.verdict,
        "reason": found.reason,
        "notes": list(found.notes),
        "ratios": {name: [one.ratio, *one.interval] for name, one in found.estimates.items()},
        "launches": len(found.launches),
        "elapsed_s": round(found.elapsed_s, 2),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "device": environment and environment.device_name,
        "cores": environment and environment.cores,
        "fingerprint": environment and environment.fingerprint,
        "packages": environment and {k: v for k, v in environment.packages.items() if k in ("torch", "numpy")},
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []


def measure(options: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * options.minutes
    counts = Counter((line["condition"], line["effect"]) for line in read(options.out) if line["verdict"] is not None)
    plan = [(condition, effect) for effect in options.effect for condition in options.condition]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        for name, text in (("one", FUNCTION), ("same", FUNCTION), ("+5 %", MORE)):
            Path(folder, f"{name}.py").write_text(text)
        while time.monotonic() < end:
            condition, effect = min(plan, key=lambda case: counts[case])
            if counts[condition, effect] >= options.count:
                return
            a, b = (f"{folder}/{name}.py:attend" for name in ("one", effect))
            with neighbour(condition):
                found = compare(a, b, WORKLOAD, device="cpu", threads=options.threads, budget_s=options.budget)
            counts[condition, effect] += 1
            with options.out.open("a") as file:
                file.write(json.dumps(line_of(condition, effect, options.threads, found)) + "\n")
            told = f"{found.verdict or found.reason} {found.ratio or 0:.3f}, {len(found.launches)} launches"
            print(f"{condition} {effect}: {told}, {found.elapsed_s:.0f} s", flush=True)


def summary(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each condition and effect: how many were called what, and the one-sided 95 % bound of the wrong ones."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        if line["verdict"] is not None:
            groups.setdefault((line["condition"], line["effect"]), []).append(line)
    rows = []
    for (condition, effect), mine in sorted(groups.items()):
        seen = Counter(line["verdict"] for line in mine)
        wrong = seen["slower"] + seen["faster"] if effect == "same" else seen["faster"] + seen["same"]
        bound = float(stats.beta.ppf(0.95, wrong + 1, len(mine) - wrong)) if wrong < len(mine) else 1.0
        rows.append(
            {
                "condition": condition,
                "effect": effect,
                "comparisons": len(mine),
                "wrong": wrong,
                "at_most": round(bound, 4),
                "verdicts": dict(sorted(seen.items())),
                "machines": sorted({f"{line['device']}, {line['cores']} cores" for line in mine}),
                "threads": sorted({str(line["threads"] or "all") for line in mine}),
                "packages": mine[-1]["packages"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, help="0: only sum up what is there")
    parser.add_argument("--count", type=int, default=300, help="comparisons of each kind")
    parser.add_argument("--condition", nargs="+", default=list(CONDITIONS), choices=CONDITIONS)
    parser.add_argument("--effect", nargs="+", default=list(EFFECTS), choices=EFFECTS)
    parser.add_argument("--threads", type=int, help="as a user's compare has it: all cores")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("-o", "--out", type=Path, default=Path("results/cpu/compare_calibration.jsonl"))
    options = parser.parse_args()
    try:
        measure(options)
    except KeyboardInterrupt:
        print("stopped; the next call goes on", flush=True)
    text = json.dumps(summary(read(options.out)), indent=1) + "\n"
    for path in (options.out.with_suffix(".summary.json"), PACKAGED):
        path.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
