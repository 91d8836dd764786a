"""Tables of the pages on libraries, Gemma, pairs, steps and choosing from results: a part of `make figures`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from marked_blocks import Pages, result, table

from attnbench.results.ratios import paired_ratio
from attnbench.results.records import label
from attnbench.results.run_file import read_run
from attnbench.spec import Ok, Record
from attnbench.workloads.cost import demand

RESULTS = Path(__file__).parents[1] / "results/h200"
BASE, LINK = "jax.einsum", "torch.sdpa"
PASSES = ("forward", "train")
COULD_NOT_RUN = ("jax.flash-attn", "jax.splash")


class Weighed(NamedTuple):
    """A cell's time and its memory beyond inputs."""

    ns: float
    bytes: int


def timed(records: Sequence[Record], name: str) -> dict[str, Weighed]:
    """By workload."""
    return {
        r.workload.id: Weighed(r.time.median_ns, r.memory.peak_bytes or 0)
        for r in records
        if isinstance(r, Ok) and r.time is not None and r.implementation == name
    }


def suite(name: str) -> str:
    """Every JAX library against einsum, each by the one of two runs in which it took more of the shapes."""
    both = [read_run(RESULTS / f"{name}{part}.jsonl").records for part in ("", "-rest")]
    rows = []
    for pass_ in PASSES:
        first, second = ([r for r in records if r.workload.pass_ == pass_] for records in both)
        bases = [(first, timed(first, BASE)), (second, base_of(second, first))]
        found = []
        for one in jax_libraries([*first, *second]):
            able = [run for run in bases if one in jax_libraries(run[0])]
            records, base = max(able, key=lambda run: len(timed(run[0], one)))
            found.append((timed(records, one), one, base, records))
        for mine, one, base, records in sorted(found, key=lambda each: (-len(each[0]), each[1])):
            rows.append([pass_, f"`{one}`", *against(mine, base, len(bases[0][1])), limits(records, one)])
    return table(
        ["pass", "library", "shapes", "times as fast as einsum", "its memory", "what it refused or got wrong"], rows
    )


def jax_libraries(records: Sequence[Record]) -> list[str]:
    return sorted({r.implementation for r in records if r.implementation.startswith("jax.")} - {BASE})


def base_of(run: Sequence[Record], other: Sequence[Record]) -> dict[str, Weighed]:
    """Einsum's in a run; where it was not part of it, the other run's, by what LINK took in both."""
    if found := timed(run, BASE):
        return found
    here, there, base = timed(run, LINK), timed(other, LINK), timed(other, BASE)
    return {key: base[key]._replace(ns=base[key].ns * here[key].ns / there[key].ns) for key in here if key in base}


def against(mine: dict[str, Weighed], base: dict[str, Weighed], shapes: int) -> list[str]:
    """Shapes, speed and memory against the base, geometric means with the least and the most."""
    both = [(mine[key], base[key]) for key in mine if key in base]
    if not both:
        return [f"0 of {shapes}", "-", "-"]
    shares = [a.bytes / b.bytes for a, b in both if a.bytes and b.bytes]
    memory = spread([100 * share for share in shares], ".0f", " %") if shares else "-"
    return [f"{len(both)} of {shapes}", spread([b.ns / a.ns for a, b in both], ".2f"), memory]


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Mean, least and most; one value alone has no spread."""
    ends = f" ({min(values):{form}}-{max(values):{form}})" if len(values) > 1 else ""
    return f"{geometric_mean(values):{form}}{unit}{ends}"


def limits(records: Sequence[Record], name: str) -> str:
    """Reasons, the most frequent first."""
    own = [r for r in records if r.implementation == name and not (isinstance(r, Ok) and r.time is not None)]
    reasons = Counter((r.reason or "").partition(", not ")[0].partition(", kv_len")[0] for r in own)
    return "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3)) or "nothing"


def others() -> str:
    """Libraries that could not be made to run."""
    records = read_run(RESULTS / "earlier/all-implementations.jsonl").records
    rows = [
        [f"`{r.implementation}`", r.reason] for r in records if r.implementation in ("jax.flash-attn", "jax.splash")
    ]
    return table(["library", "why it did not run"], rows)


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


def stack() -> str:
    """The same training step of the Gemma stack in both frameworks."""
    found = result("h200/gemma_models.json")
    rows = []
    for name, one in found["torch"].items():
        tokens, other = name.rpartition(" ")[2], found["jax"][name]
        times = [f"{each[path]['ms']:.1f}" for each in (other, one) for path in ("off", "on")]
        rows.append([tokens, *times, f"{other['speedup']:.2f} x", f"{one['speedup']:.2f} x"])
    columns = ["JAX, einsum, ms", "flash", "PyTorch, einsum, ms", "SDPA", "JAX faster", "PyTorch faster"]
    return table(["tokens", *columns], rows)


def turns() -> str:
    """pi0's training step in attention alone: time, and memory with and without outputs and gradients."""
    records = read_run(RESULTS / "gemma-turns.jsonl").records
    found = {label(r): (r.time.median_ns, r.memory.peak_bytes) for r in records if isinstance(r, Ok) and r.time}
    weighed = {name: Weighed(ns, peak) for name, (ns, peak) in found.items() if peak is not None}
    outputs, base = demand(records[0].workload).output_bytes, weighed[BASE]
    rows = []
    for name, one in sorted(weighed.items(), key=lambda each: each[1].ns):
        less = [1 - (one.bytes - apart) / (base.bytes - apart) for apart in (0, outputs)]
        times = [f"{one.ns / 1e6:.2f}", f"{base.ns / one.ns:.2f} x", f"{one.bytes / 1e6:.0f} MB"]
        rows.append([f"`{name}`", *times, *(f"{100 * share:.0f} %" for share in less)])
    columns = ["implementation", "ms", "faster", "beyond inputs", "less", "less, outputs and gradients apart"]
    return table(columns, rows)


def steps() -> str:
    """Flash against einsum in pi0's steps."""
    records = read_run(RESULTS / "models-e2e.jsonl").records
    rows = []
    for workload in dict.fromkeys(r.workload for r in records):
        mine = {r.implementation: r for r in records if r.workload == workload and isinstance(r, Ok)}
        plain, flash = (mine[f"jax.{workload.step}{end}"] for end in ("", "-flash"))
        times = [f"{one.time.median_ns / 1e6:.2f}" for one in (plain, flash) if one.time]
        peaks = [f"{(one.memory.peak_bytes or 0) / 1e9:.2f} GB" for one in (plain, flash)]
        faster = paired_ratio(flash, plain).value
        rows.append([f"`{workload.step}`", workload.pass_, *times, f"{faster:.2f} x", *peaks])
    return table(["step", "pass", "einsum, ms", "flash, ms", "faster", "beyond inputs, einsum", "flash"], rows)


def pairs() -> str:
    """Training steps: the best library alone, the best pair, and what was chosen by an earlier run."""
    rows = []
    for one in result("h200/pairs.json")["shapes"]:
        took, alone = one["train_ms"], one["best_alone"]
        pair = min((name for name in took if " + " in name), key=lambda name: took[name])
        shape = one["workload"].removesuffix("-bfloat16-train")
        best = [f"{name} {took[name]:.2f}" for name in (alone, pair)]
        rows.append([shape, *best, f"{took[alone] / took[pair]:.3f} x", one["chosen"], f"{one['over_best']:.3f} x"])
    columns = ["shape", "best library alone, ms", "best pair, ms", "pair faster", "chosen", "gain over the best alone"]
    return table(columns, rows)


def stability() -> str:
    """How often picks stay when rounds are drawn again."""
    rows = [
        [
            f"`{name}`",
            one["shapes"],
            *(f"{100 * one[part]:.1f} %" for part in ("agreement", "least")),
            f"{one['regret']:.3f}",
        ]
        for name, one in result("cpu/choice_stability.json")["runs"].items()
    ]
    return table(["run", "shapes", "picks that stay", "of the least steady shape", "regret in the run"], rows)


def predictions() -> str:
    """What predicted picks lose beside the nearest measured shape and the fixed order."""
    found = result("cpu/predicted_picks.json")
    names = {"shape": "one shape", "class": "a class", "head_dim": "a head_dim", "mask": "a kind of mask"}

    def told(one: dict[str, Any] | None) -> str:
        return "" if one is None else f"{one['mean']:.3f}, worst {one['worst']:.2f} ({one['shapes']})"

    rows = []
    for one in found["places"]:
        where = f"{one['device']}, {one['framework']}"
        for part, check in one["left_out"].items():
            near = one["nearest"] if part == "shape" else None
            used = "yes" if check["followed"] else "no"
            rows.append([where, names[part], told(near), told(check["predicted"]), told(check["fixed"]), used])
    for one in found["unseen"]:
        where = f"{one['device']}, {one['framework']}"
        rows.append([where, "none: unseen shapes", *(told(one[how]) for how in ("nearest", "predicted", "fixed")), ""])
    return table(["place", "left out", "nearest entry", "predicted", "fixed order", "followed"], rows)


PAGES: Pages = {
    "docs/choose.md": {
        "stability": ("cpu/choice_stability.json", stability),
        "predictions": ("cpu/predicted_picks.json", predictions),
    },
    "docs/libraries.md": {
        "grid": ("h200/grid-gpu.jsonl and grid-gpu-rest.jsonl", lambda: suite("grid-gpu")),
        "gemma": ("h200/gemma.jsonl and gemma-rest.jsonl", lambda: suite("gemma")),
        "others": ("h200/earlier/all-implementations.jsonl", others),
    },
    "docs/steps.md": {"steps": ("h200/models-e2e.jsonl", steps)},
    "docs/pairs.md": {"pairs": ("h200/pairs.json", pairs)},
    "docs/gemma.md": {
        "turns": ("h200/gemma-turns.jsonl", turns),
        "models": ("h200/gemma_models.json", models),
        "stack": ("h200/gemma_models.json", stack),
    },
}
