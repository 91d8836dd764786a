"""Tables of docs/libraries.md and docs/gemma.md from results/h200: a part of `make figures`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from marked_blocks import Pages, result, table

from attnbench.spec import Ok, Record
from attnbench.store.runfile import read_run

RESULTS = Path(__file__).parents[1] / "results/h200"
BASE = "jax.einsum"
PASSES = ("forward", "train")


def timed(records: Sequence[Record]) -> dict[str, Ok]:
    """By workload."""
    return {r.workload.id: r for r in records if isinstance(r, Ok) and r.time is not None}


def suite(name: str) -> str:
    records = [r for r in read_run(RESULTS / name).records if r.implementation.startswith("jax.")]
    rows = []
    for pass_ in PASSES:
        mine = [r for r in records if r.workload.pass_ == pass_]
        base = timed([r for r in mine if r.implementation == BASE])
        names = sorted({r.implementation for r in mine} - {BASE}, key=lambda one: (-len(ran(mine, one)), one))
        for one in names:
            rows.append([pass_, f"`{one}`", *against(ran(mine, one), base), limits(mine, one)])
    return table(
        ["pass", "library", "shapes", "times as fast as einsum", "its memory", "what it refused or got wrong"], rows
    )


def ran(records: Sequence[Record], name: str) -> dict[str, Ok]:
    return timed([r for r in records if r.implementation == name])


def against(mine: dict[str, Ok], base: dict[str, Ok]) -> list[str]:
    """Shapes, speed and memory against the base, geometric means with the least and the most."""
    both = [(mine[key], base[key]) for key in mine if key in base]
    if not both:
        return [f"0 of {len(base)}", "-", "-"]
    speeds = [b.time.median_ns / a.time.median_ns for a, b in both if a.time is not None and b.time is not None]
    weighed = [(a.memory.peak_bytes, b.memory.peak_bytes) for a, b in both]
    shares = [a / b for a, b in weighed if a and b]
    memory = spread([100 * share for share in shares], ".0f", " %") if shares else "-"
    return [f"{len(both)} of {len(base)}", spread(speeds, ".2f"), memory]


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Mean, least and most; one value alone has no spread."""
    ends = f" ({min(values):{form}}-{max(values):{form}})" if len(values) > 1 else ""
    return f"{geometric_mean(values):{form}}{unit}{ends}"


def limits(records: Sequence[Record], name: str) -> str:
    """Reasons, the most frequent first."""
    own = [r for r in records if r.implementation == name and not (isinstance(r, Ok) and r.time is not None)]
    reasons = Counter(f"{r.reason.partition(', not ')[0].partition(', kv_len')[0]}" for r in own)
    return "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3)) or "nothing"


def others() -> str:
    """Libraries that the suites did not have, on the one shape that all were tried on."""
    records = read_run(RESULTS / "earlier/all-implementations.jsonl").records
    base = timed([r for r in records if r.implementation == BASE])
    rows = []
    for record in records:
        if record.implementation in ("jax.kvax", "jax.flash-attn", "jax.splash", "jax.tokamax-xla-chunked"):
            rows.append([f"`{record.implementation}`", *against(timed([record]), base)[1:], record.reason or "nothing"])
    return table(["library", "times as fast as einsum", "its memory", "why it did not run"], rows)


def models() -> str:
    """Flash on against off; what is compared is the whole module, projections and all."""
    rows = []
    for name, one in result("h200/gemma_models.json")["jax"].items():
        if "speedup" not in one:
            continue
        times = [f"{one[path]['ms']:.2f}" for path in ("off", "on")]
        bytes_ = [f"{one[path]['temp_bytes'] / 1e9:.2f} GB" for path in ("off", "on")]
        rows.append([name, *times, f"{one['speedup']:.2f} x", *bytes_])
    return table(["what", "einsum, ms", "flash, ms", "faster", "temporaries, einsum", "flash"], rows)


def pairs() -> str:
    """Training steps: the best library alone, the best pair, and what was chosen by the parts measured apart."""
    rows = []
    for one in result("h200/pairs.json")["shapes"]:
        took, alone = one["train_ms"], one["best_alone"]
        pair = min((name for name in took if " + " in name), key=lambda name: took[name])
        shape = one["workload"].removesuffix("-bfloat16-train")
        best = [f"{name} {took[name]:.2f}" for name in (alone, pair)]
        rows.append([shape, *best, f"{took[alone] / took[pair]:.3f} x", one["chosen"], f"{one['over_best']:.3f} x"])
    columns = ["shape", "best library alone, ms", "best pair, ms", "pair faster", "chosen", "gain over the best alone"]
    return table(columns, rows)


PAGES: Pages = {
    "docs/libraries.md": {
        "grid": ("h200/grid-gpu.jsonl", lambda: suite("grid-gpu.jsonl")),
        "gemma": ("h200/gemma.jsonl", lambda: suite("gemma.jsonl")),
        "others": ("h200/earlier/all-implementations.jsonl", others),
    },
    "docs/pairs.md": {"pairs": ("h200/pairs.json", pairs)},
    "docs/gemma.md": {"models": ("h200/gemma_models.json", models)},
}
