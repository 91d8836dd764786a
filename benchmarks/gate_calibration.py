"""How far can a verdict be believed: `python benchmarks/gate_calibration.py --minutes 30 [-o FILE]`.

Compares torch.sdpa with itself (A/A) and with itself on 2.5, 5 and 10 % more sequences, with and without two
memory-streaming processes that come and go. Each comparison is a line in FILE; runs add to it, and the counts over all
lines are printed with Clopper-Pearson bounds. Beside our verdict stand those of the usual rules on the same samples,
taken one arm after the other as those rules do: blocks of a from the first half of the launches, of b from the second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from calibrating import beside, decided, keep, read
from scipy import stats

from attnbench.comparing.compare import sides
from attnbench.comparing.experiment import Experiment, Terms
from attnbench.comparing.sides import code_of
from attnbench.comparison import Launch
from attnbench.spec import Workload

BATCHES = {
    "cpu": {"A/A": 40, "+2.5 %": 41, "+5 %": 42, "+10 %": 44},
    "cuda": {"A/A": 50, "+2 %": 51},
}
TARGETS = {
    "A/A": ("false alarms", 0.01),
    "+2 %": ("found", 0.95),
    "+2.5 %": ("found", 0.5),
    "+5 %": ("found", 0.95),
    "+10 %": ("found", 0.99),
}
STREAMS, STREAM_BYTES = 2, 1 << 26
BURST_S, PAUSE_S = 1.0, 2.0


def workloads(device: str) -> dict[str, tuple[Workload, Workload | None]]:
    """Effect -> the workload of a, and b's where it has more sequences, each as much work as any other."""
    shape: dict[str, Any] = {"q_len": 256, "heads": 1, "head_dim": 64}
    if device != "cpu":
        shape = {"q_len": 1024, "heads": 16, "head_dim": 128, "dtype": "bfloat16"}
    made = {effect: Workload(batch=batch, **shape) for effect, batch in BATCHES[device].items()}
    return {effect: (made["A/A"], None if effect == "A/A" else more) for effect, more in made.items()}


def stream(seed: int) -> None:
    """Sweep through memory in bursts, for ever."""
    rng, block = random.Random(seed), np.zeros(STREAM_BYTES, np.uint8)
    while True:
        end = time.monotonic() + rng.expovariate(1 / BURST_S)
        while time.monotonic() < end:
            block += 1
        time.sleep(rng.expovariate(1 / PAUSE_S))


def usual_rules(launches: Sequence[Launch], metric: str) -> dict[str, bool]:
    """Whether each rule calls b slower; a's blocks come from the first half of the launches, b's from the second."""
    half = len(launches) // 2
    a = np.array([block.ns[metric] for launch in launches[:half] for block in launch.a])
    b = np.array([block.ns[metric] for launch in launches[half:] for block in launch.b])
    if len(a) < 2 or len(b) < 2:
        return {}
    return {
        "mean > 20 %": bool(b.mean() > 1.2 * a.mean()),
        "Welch p < .05": bool(stats.ttest_ind(b, a, equal_var=False, alternative="greater").pvalue < 0.05),
        "Mann-Whitney p < .05": bool(stats.mannwhitneyu(b, a, alternative="greater").pvalue < 0.05),
        "asv: p < .002 and 1.1x": bool(
            stats.mannwhitneyu(b, a, alternative="two-sided").pvalue < 0.002 and np.median(b) > 1.1 * np.median(a)
        ),
    }


def measure(minutes: float, out: Path, options: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * minutes
    effects = workloads(options.device)
    plan = list(itertools.product(options.condition, effects))
    random.shuffle(plan)
    arm = code_of("torch.sdpa", "torch")
    with sides([arm, arm], options.device, options.threads) as (first, second):
        for condition, effect in itertools.cycle(plan):
            if time.monotonic() > end:
                return
            work, more = effects[effect]
            terms = Terms(workload=work, other=more, budget_s=options.budget)
            with beside(stream, [(n,) for n in range(STREAMS)] if condition == "burst" else []):
                found = Experiment(first, second, terms, lambda launches, decision: None).run()
            rules = usual_rules(found.launches, "device" if "device" in found.estimates else "wall")
            keep(out, condition, effect, found, timing_s=round(found.timing_s, 2), rules=rules)


def bounds(hits: int, total: int) -> str:
    """Share with its 95 % Clopper-Pearson interval."""
    low = stats.beta.ppf(0.025, hits, total - hits + 1) if hits else 0.0
    high = stats.beta.ppf(0.975, hits + 1, total - hits) if hits < total else 1.0
    return f"{hits}/{total} ({low:.1%}-{high:.1%})"


def summary(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row(condition, effect, mine) for (condition, effect), mine in decided(lines).items()]


def row(condition: str, effect: str, mine: list[dict[str, Any]]) -> dict[str, Any]:
    what, target = TARGETS[effect]
    wrong = {"slower", "faster"} if effect == "A/A" else {"slower"}
    hits = sum(line["verdict"] in wrong for line in mine)
    elapsed = [line["elapsed_s"] for line in mine]
    timing = [line["timing_s"] for line in mine if "timing_s" in line]
    main = "device" if "device" in mine[0]["ratios"] else "wall"
    rules = {rule: f"{sum(line['rules'].get(rule, False) for line in mine)}/{len(mine)}" for rule in mine[0]["rules"]}
    return {
        "condition": condition,
        "effect": effect,
        what: bounds(hits, len(mine)),
        "target": f"{'<=' if effect == 'A/A' else '>='} {target:.0%}",
        "inconclusive": f"{sum(line['verdict'] == 'inconclusive' for line in mine)}/{len(mine)}",
        "median ratio": round(median(line["ratios"][main][0] for line in mine), 4),
        "seconds": f"{median(elapsed):.1f}, 95th percentile {np.percentile(elapsed, 95):.1f}",
        "seconds of timing": f"{median(timing):.1f}" if timing else "not recorded",
        "called slower by": rules,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, help="0: only sum up what is there")
    parser.add_argument("--condition", nargs="+", default=["idle", "burst"], choices=["idle", "burst"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("-o", "--out", type=Path, default=Path("results/cpu/gate_calibration.jsonl"))
    options = parser.parse_args()
    if options.minutes:
        measure(options.minutes, options.out, options)
    table = summary(read(options.out))
    options.out.with_suffix(".summary.json").write_text(json.dumps(table, indent=1) + "\n")
    for one in table:
        print(", ".join(f"{name} {value}" for name, value in one.items()))


if __name__ == "__main__":
    main()
