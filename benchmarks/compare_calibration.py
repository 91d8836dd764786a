"""How often `attnbench compare` errs on a user's functions: `python benchmarks/compare_calibration.py --minutes 60`.

Compares a function with a copy of it in another file (nothing is different), and with one that does 5 % more real work,
on an idle machine and beside one busy process. Each comparison is a line in FILE as soon as it is over; stop it at any
time, the next call goes on with what was measured least, until there are COUNT of each. Then, or when its time is up,
the counts over all lines go to FILE's .summary.json and, of the published file, into the package, whose fine print
cites them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from calibrating import beside, decided, keep, read
from scipy import stats

from attnbench.comparing.compare import compare
from attnbench.comparing.text import CALIBRATION
from attnbench.spec import Ok, Workload

CONDITIONS, EFFECTS = ("idle", "busy"), ("same", "+5 %")
PUBLISHED = Path("results/cpu/compare_calibration.jsonl")
WORKLOAD = Workload(batch=20, q_len=128, heads=4, head_dim=64)
FUNCTIONS = {
    "torch": """
import torch

def attend(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
    return (weights @ v).transpose(1, 2)
""",
    "numpy": """
import numpy as np

def attend(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    logits = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights @ v / weights.sum(-1, keepdims=True)).swapaxes(1, 2)
""",
}
MORE = "\ndef attend(q, k, v):\n    once(q[:1], k[:1], v[:1])\n    return once(q, k, v)\n"
"""One sequence of twenty is computed twice."""


def spin() -> None:
    """Keep a core busy for ever."""
    while True:
        sum(range(1000))


def measure(options: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * options.minutes
    counts = Counter({case: len(lines) for case, lines in decided(read(options.out)).items()})
    plan = [(condition, effect) for effect in options.effect for condition in options.condition]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        for framework, text in FUNCTIONS.items():
            more = text.replace("def attend", "def once") + MORE
            for name, content in (("one", text), ("same", text), ("+5 %", more)):
                Path(folder, framework).mkdir(exist_ok=True)
                Path(folder, framework, f"{name}.py").write_text(content)
        while time.monotonic() < end:
            condition, effect = min(plan, key=lambda case: counts[case])
            if counts[condition, effect] >= options.count:
                return
            framework = options.framework[counts[condition, effect] % len(options.framework)]
            a, b = (f"{folder}/{framework}/{name}.py:attend" for name in ("one", effect))
            how = {"framework": framework, "device": "cpu", "threads": options.threads, "budget_s": options.budget}
            with beside(spin, [()] if condition == "busy" and not options.beside else []):
                found = compare(a, b, WORKLOAD, **how)
            counts[condition, effect] += 1
            environment = found.record_a.environment if isinstance(found.record_a, Ok) else None
            facts = {
                "framework": framework,
                "threads": options.threads,
                "load": round(os.getloadavg()[0], 2),
                **({"beside": options.beside} if condition == "busy" and options.beside else {}),
                "notes": list(found.notes),
            }
            keep(options.out, condition, effect, found, **facts, cores=environment and environment.cores)


def summary(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each condition and effect: how many were called what, and the one-sided 95 % bound of the wrong ones."""
    rows = []
    for (condition, effect), mine in decided(lines).items():
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
                "machines": sorted(
                    {f"{line['device']}, {line['cores']} core{'' if line['cores'] == 1 else 's'}" for line in mine}
                ),
                "threads": sorted({str(line["threads"] or "all") for line in mine}),
                "beside": sorted({line.get("beside", "a loop") for line in mine if condition == "busy"}),
                "frameworks": dict(sorted(Counter(line["framework"] for line in mine).items())),
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
    parser.add_argument("--framework", nargs="+", default=list(FUNCTIONS), choices=FUNCTIONS, help="take turns")
    parser.add_argument("--beside", help="what keeps a core busy already, for the record: no loop is started then")
    parser.add_argument("--threads", type=int, help="as a user's compare has it: all cores")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("-o", "--out", type=Path, default=PUBLISHED)
    options = parser.parse_args()
    try:
        measure(options)
    except KeyboardInterrupt:
        print("stopped; the next call goes on", flush=True)
    text = json.dumps(summary(read(options.out)), indent=1) + "\n"
    options.out.with_suffix(".summary.json").write_text(text)
    if options.out == PUBLISHED:
        CALIBRATION.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
