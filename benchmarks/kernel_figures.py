"""Tables of docs/kernels.md and docs/kernels-block-sparse.md from results/h200: a part of `make figures`."""

from __future__ import annotations

import json
from typing import Any

from marked_blocks import Pages, result, table

SIZES = {"short": "128k", "long": "1M"}


def dilated() -> str:
    """Every rate against the dense one of its pass."""
    rows = []
    for dim, one in result("h200/dilated.json")["dims"].items():
        for name in ("forward", "train"):
            dense = one["dense"][name]
            rows.append([dim, name, "dense causal, cuDNN", "16k", *figures(dense), "100 %"])
            for length, tokens in SIZES.items():
                for kind, taken in one[length].items():
                    if name not in taken:
                        continue
                    share = f"{100 * taken[name]['tflops'] / dense['tflops']:.0f} %"
                    rows.append([dim, name, f"dilated, {kind}", tokens, *figures(taken[name]), share])
    return table(["head_dim", "pass", "what", "tokens", "ms", "TFLOP/s", "extra memory", "of dense"], rows)


def figures(taken: dict[str, Any]) -> list[str]:
    return [f"{taken['ms']:.2f}", f"{taken['tflops']:.0f}", f"{taken['peak_gib']:.2f} GiB"]


def steps() -> str:
    """Where a training step's device time goes."""
    spent = result("h200/dilated.json")["kernels_of_a_training_step_us"]
    rows = [[f"`{name.partition('(')[0][:60]}`", f"{took / 1e3:.2f}"] for name, took in spent.items() if took > 100]
    return table(["kernel", "ms"], rows)


def public() -> str:
    rows = []
    for tokens, one in result("h200/dilated_public.json")["tokens"].items():
        more = one["our_pairs_over_theirs"]
        for name in ("forward", "train"):
            ms, faster = one[name]["ms"], one[name]["faster"]
            times = [f"{ms[whose]:.2f}" for whose in ("ours", "theirs")]
            ratios = [f"{value:.{digits}f} x" for value, digits in ((faster, 2), (more, 1), (faster * more, 1))]
            rows.append([f"{int(tokens) // 1024}k", name, *times, *ratios])
    return table(["tokens", "pass", "ours, ms", "theirs, ms", "ours faster", "pairs we compute", "faster a pair"], rows)


def block_sparse() -> str:
    found = result("h200/block_sparse.json")
    rows = []
    for part in ("forward", "backward"):
        for name, times in found["times"].items():
            against = [found["speedup"][name][part]] if name in found["speedup"] else []
            told = [f"{one['value']:.2f} x ({one['ci95'][0]:.2f}-{one['ci95'][1]:.2f})" for one in against] or ["-"]
            took, rate = times[part]["median_ns"] / 1e6, found["tflops"][name][part]
            rows.append([part, found["implementations"][name], f"{took:.2f}", f"{rate:.0f}", *told])
    return table(["pass", "implementation", "ms", "TFLOP/s of the pairs kept", "ours faster"], rows)


def tiles() -> str:
    """Each tunable apart; the first row is the default of that run."""
    rows = []
    for name, times in result("h200/block_sparse.json")["tuning_ns"].items():
        changed = ", ".join(f"{key} {value}" for key, value in json.loads(name).items())
        rows.append([changed, f"{times['forward'] / 1e6:.2f}", f"{times['backward'] / 1e6:.2f}"])
    return table(["set to", "forward, ms", "backward, ms"], rows)


PAGES: Pages = {
    "docs/kernels.md": {
        "dilated": ("h200/dilated.json", dilated),
        "dilated-kernels": ("h200/dilated.json", steps),
        "dilated-public": ("h200/dilated_public.json", public),
    },
    "docs/kernels-block-sparse.md": {
        "block-sparse": ("h200/block_sparse.json", block_sparse),
        "block-sparse-tiles": ("h200/block_sparse.json", tiles),
    },
}
