"""What pairing libraries gains in training: `python benchmarks/pairs.py [--smoke] [-o FILE]`, bfloat16 on a CUDA GPU.

For every shape first the forward and the backward pass of each library, measured apart; then in one run, verified and
timed in turn, training steps of every library and of the two pairs of `torch.pair` with the least sum of their parts.
What is chosen is the least sum, a pair only where its parts promise MARGIN over a library alone; a pair's own time has
no part in the choice. With `--chosen-by FILE...` it is whatever had the least training step in an earlier run. Claims:
>= 1.025 x the best library of each shape, >= 1.08 x any one library (both geometric means), never below 0.99 x.
`--resume FILE...` keeps the shapes of runs that were cut short; `--parts FILE...` takes the passes of each library from
earlier runs and measures the steps alone; `--records FILE` keeps the training steps as a run file, for `attnbench
choose`. `--smoke` runs all of it on tiny shapes on a CPU, where nothing is claimed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

import msgspec

from attnbench import masks, registry
from attnbench.results.run_file import RunWriter, new_header
from attnbench.run.launch import Listener, Request, launch
from attnbench.run.plan import Group
from attnbench.run.pool import Pool
from attnbench.spec import Ok, Record, Workload

TOKENS, WIDTH = 16384, 2048
"""Of a whole batch; heads x head_dim."""
LENGTHS, HEAD_DIMS = (2048, 4096, 8192, 16384), (64, 128, 256)
ALONE = ("torch.sdpa-flash", "torch.sdpa-cudnn", "torch.flash-attn", "torch.fa3", "torch.fa4")
PAIRS, SEED = 2, 1
MARGIN = 1.02
"""Sums of parts have been off by 2 %, once by 9 % (FA3 with cuDNN's backward, 4 x 4096 at head_dim 256), and a second
library in a training step should be worth it. With 1.005 one of 24 shapes would have lost 7.5 %."""
OVER_BEST, OVER_FIXED, WORST = 1.025, 1.08, 0.99
Steps = dict[str, dict[str, float]]
"""Workload -> library or pair -> milliseconds."""


def shapes(head_dims: Sequence[int], lengths: Sequence[int]) -> list[Workload]:
    return [
        Workload(
            batch=max(1, TOKENS // length), q_len=length, heads=WIDTH // head_dim, head_dim=head_dim,
            dtype="bfloat16", mask=mask, pass_="train",
        )
        for head_dim in head_dims
        for mask in (masks.full(), masks.causal())
        for length in lengths
    ]  # fmt: skip


def smoke_shapes() -> list[Workload]:
    return [Workload(batch=1, q_len=96, heads=2, head_dim=16, mask=masks.causal(), pass_="train")]


def launched(
    workloads: Sequence[Workload], implementations: Sequence[str], options: argparse.Namespace, pool: Pool
) -> list[Record]:
    records: list[Record] = []
    request = Request(
        workloads=tuple(workloads),
        implementations=tuple(implementations),
        budget_s=options.budget,
        timeout_s=options.timeout,
        seed=SEED,
        clock=None if options.smoke else "events",  # one for short and long calls, or sums would mix two
    )
    launch(request, records.extend, Listener(), pool=pool)
    return [record for record in records if not record.implementation.startswith("anchor.")]


class Parts(NamedTuple):
    """Nanoseconds of the forward and of the backward pass of each library, measured apart."""

    forward: dict[str, float]
    backward: dict[str, float]

    def sum(self, name: str) -> float | None:
        """What a library, or a pair `a + b`, should take for a training step."""
        forward, _, backward = name.partition(" + ")
        if forward not in self.forward or (backward or forward) not in self.backward:
            return None
        return self.forward[forward] + self.backward[backward or forward]


def parts_of(workload: Workload, records: Sequence[Record]) -> Parts:
    timed = [r for r in records if isinstance(r, Ok) and r.time is not None]
    return Parts(
        {r.implementation: r.time.median_ns for r in timed if r.workload != workload and r.time is not None},
        {r.implementation: r.also["backward"].median_ns for r in timed if r.workload == workload},
    )


def parts_known(workload: Workload, alone: Sequence[str], files: Sequence[Path]) -> Parts | None:
    """The parts that these libraries took for this shape in an earlier run; None where no file tells of all of them.

    One that could not run is told of too, and one may have had a forward part alone.
    """
    for one in (one for path in files for one in json.loads(path.read_text())["shapes"]):
        forward, backward = one["forward_ms"], one["backward_ms"]
        if one["workload"] == workload.id and {*alone} <= {*forward, *backward, *one["not_run"]}:
            return Parts(*({name: took[name] * 1e6 for name in alone if name in took} for took in (forward, backward)))
    return None


def promising(workload: Workload, parts: Parts, pool: Pool) -> list[str]:
    """The pairs that should be fastest, among those that run here."""
    pool.start([Group("torch")])
    environment = pool.environment("torch")
    assert environment is not None
    offered = registry.get("torch.pair").configs_here(workload, environment)
    sums = {(c["forward"], c["backward"]): parts.sum(f"{c['forward']} + {c['backward']}") for c in offered}
    known = sorted((took, pair) for pair, took in sums.items() if took is not None)
    return [f"torch.pair[forward={forward},backward={backward}]" for _, (forward, backward) in known[:PAIRS]]


def measured(workload: Workload, alone: Sequence[str], options: argparse.Namespace, pool: Pool) -> dict[str, Any]:
    """One shape: the parts of each library, then one run of the libraries and of the pairs that the parts speak for."""
    known = parts_known(workload, alone, options.parts)
    forward = msgspec.structs.replace(workload, pass_="forward")
    first = [] if known is not None else launched((workload, forward), alone, options, pool)
    parts = known or parts_of(workload, first)
    steps = launched((workload,), (*parts.backward, *promising(workload, parts, pool)), options, pool)
    if options.records is not None:
        writer = RunWriter(options.records, new_header(version("attnbench"), "pairs", seed=SEED))
        writer.write(steps)
        writer.close()
    refused = [r for r in first if r.workload == workload and r.time is None]
    return facts(workload, parts, steps, refused)


def name_of(record: Record) -> str:
    pair = record.config
    return f"{pair['forward']} + {pair['backward']}" if pair else record.implementation


def facts(workload: Workload, parts: Parts, steps: Sequence[Record], refused: Sequence[Record]) -> dict[str, Any]:
    """Times, and what the parts predict."""
    timed = [r for r in steps if isinstance(r, Ok) and r.time is not None]
    ns = {name_of(r): r.time.median_ns for r in timed if r.time is not None}
    predicted = {name: took for name in ns if (took := parts.sum(name)) is not None}
    return {
        "workload": workload.id,
        "train_ms": {name: took / 1e6 for name, took in ns.items()},
        "predicted_ms": {name: took / 1e6 for name, took in predicted.items()},
        "forward_ms": {name: took / 1e6 for name, took in parts.forward.items()},
        "backward_ms": {name: took / 1e6 for name, took in parts.backward.items()},
        "not_run": {name_of(r): f"{r.status}: {r.reason}" for r in (*refused, *steps) if r.time is None},
        "errors": {name_of(r): msgspec.to_builtins(r.errors) for r in timed},
        "clock": sorted({r.time.clock for r in timed if r.time is not None}),
        "environment": next((msgspec.to_builtins(r.environment) for r in timed), None),
    }


def choice(predicted: dict[str, float]) -> str | None:
    """The least sum; of a pair only if it is MARGIN less than any library's alone."""
    alone = {name: took for name, took in predicted.items() if " + " not in name}
    least = min(predicted, key=lambda name: predicted[name], default=None)
    best = min(alone, key=lambda name: alone[name], default=None)
    if best is None or least is None or alone[best] >= MARGIN * predicted[least]:
        return least
    return best


def judged(one: dict[str, Any], steps: Steps) -> dict[str, Any]:
    """What was measured of a shape, with what was chosen (by earlier steps, if there are some) and what that gained."""
    took, predicted = one["train_ms"], one["predicted_ms"]
    before = {name: ms for name, ms in steps.get(one["workload"], {}).items() if name in took}
    alone = {name: ms for name, ms in took.items() if " + " not in name}
    chosen = min(before, key=lambda name: before[name]) if before else choice(predicted)
    best = min(alone, key=lambda name: alone[name], default=None)
    told = chosen is not None and best is not None
    return one | {
        "chosen": chosen,
        "chosen_by": "an earlier run" if before else "parts",
        "best_alone": best,
        "over_best": alone[best] / took[chosen] if told else None,
        "over_each": {name: ms / took[chosen] for name, ms in alone.items()} if told else {},
        "predicted_over_best": predicted[best] / predicted[chosen] if told and {best, chosen} <= {*predicted} else None,
    }


def least(one: dict[str, Any]) -> float:
    return min(one["train_ms"].values())


def mean(ratios: Sequence[float]) -> float | None:
    return geometric_mean(ratios) if ratios else None


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over the shapes; of a library alone only where it ran on every one of them."""
    told = [one for one in found if one["over_best"] is not None]
    over_best = [one["over_best"] for one in told]
    names = {name for one in told for name in one["over_each"]}
    over_each = {name: [one["over_each"][name] for one in told if name in one["over_each"]] for name in sorted(names)}
    misses = [
        took / one["predicted_ms"][name] - 1
        for one in found
        for name, took in one["train_ms"].items()
        if name in one["predicted_ms"]
    ]
    return {
        "shapes": len(told),
        "over_best": mean(over_best),
        "over_best_if_all_were_known": mean([one["train_ms"][one["best_alone"]] / least(one) for one in told]),
        "worst": min(over_best, default=None),
        "over_fixed": {name: mean(ratios) for name, ratios in over_each.items() if len(ratios) == len(told)},
        "over_some_shapes": {name: mean(ratios) for name, ratios in over_each.items() if len(ratios) < len(told)},
        "measured_over_predicted": {
            "mean": fmean(misses), "least": min(misses), "most": max(misses)
        } if misses else None,
    }  # fmt: skip


def claims(total: dict[str, Any]) -> dict[str, bool]:
    fixed = total["over_fixed"].values()
    return {
        f">= {OVER_BEST} x the best library of each shape": (total["over_best"] or 0.0) >= OVER_BEST,
        f">= {OVER_FIXED} x any one library": bool(fixed) and min(fixed) >= OVER_FIXED,
        f"never below {WORST} x": (total["worst"] or 0.0) >= WORST,
    }


def line_of(one: dict[str, Any]) -> str:
    if one["chosen"] is None or one["over_best"] is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in one["not_run"].items())
        return f"{one['workload']}: nothing to compare: {reasons}"
    chosen, best = one["chosen"], one["best_alone"]
    predicted = "" if one["predicted_over_best"] is None else f", predicted {one['predicted_over_best']:.3f} x"
    return (
        f"{one['workload']}: {chosen} {one['train_ms'][chosen]:.3f} ms, "
        f"{best} {one['train_ms'][best]:.3f} ms: {one['over_best']:.3f} x{predicted}"
    )


def save(found: Sequence[dict[str, Any]], environment: Any, options: argparse.Namespace) -> None:
    """After every shape, so that a run that is cut short keeps what it has."""
    if options.out is None:
        return
    total = summary(found)
    document = {"smoke": options.smoke, "summary": total, "shapes": found, "environment": environment}
    if not options.smoke:
        document["claims"] = claims(total)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def earlier(files: Sequence[Path], steps: Steps) -> tuple[list[dict[str, Any]], Any]:
    """Shapes of earlier runs, judged again, and where they were measured."""
    documents = [json.loads(path.read_text()) for path in files]
    shapes = {one["workload"]: judged(one, steps) for document in documents for one in document["shapes"]}
    return list(shapes.values()), next((d["environment"] for d in documents), None)


def steps_in(files: Sequence[Path]) -> Steps:
    """The training steps of earlier runs."""
    return {one["workload"]: one["train_ms"] for path in files for one in json.loads(path.read_text())["shapes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--seq-len", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--impl", nargs="+", help="the libraries, instead of all that are known")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of sampling per cell")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a stage of a cell may take")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="files whose shapes are not measured again")
    parser.add_argument("--parts", type=Path, nargs="+", default=[], help="files that have the parts of these shapes")
    parser.add_argument("--chosen-by", type=Path, nargs="+", default=[], help="files whose steps decide what is chosen")
    parser.add_argument("--records", type=Path, help="a run file that the training steps are added to")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    alone = options.impl or (("torch.sdpa-flash", "torch.eager") if options.smoke else ALONE)
    wanted = smoke_shapes() if options.smoke else shapes(options.head_dim, options.seq_len)
    steps = steps_in(options.chosen_by)
    found, environment = earlier(options.resume, steps)
    done = {one["workload"] for one in found}
    with Pool((), "cpu" if options.smoke else "cuda", None) as pool:  # kernels are compiled once for all lengths
        for workload in wanted:
            if workload.id in done:
                continue
            one = judged(measured(workload, alone, options, pool), steps)
            environment = one.pop("environment") or environment
            found.append(one)
            print(line_of(found[-1]), flush=True)
            save(found, environment, options)
    save(found, environment, options)
    total = summary(found)
    print(json.dumps(total | ({} if options.smoke else {"claims": claims(total)}), indent=1))


if __name__ == "__main__":
    main()
