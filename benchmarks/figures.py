"""Figures of README.md, results/README.md and the pages on kernels that come from results/: `make figures`.

Every block between markers is written from a file there; a test holds the pages against them.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from kernel_figures import PAGES as KERNELS
from library_figures import PAGES as LIBRARIES
from marked_blocks import Pages, marked, replaced, result, table
from printed_ranking import fullest, printed
from rich.console import Console

from attnbench.comparing.text import print_comparison
from attnbench.comparison import Comparison
from attnbench.files import write_texts
from attnbench.results.advice import listed
from attnbench.results.records import by_workload
from attnbench.results.run_file import read_run
from attnbench.results.sentences import closing

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results/cpu"
COLUMNS = 200
COMPARE = "attnbench compare torch.eager torch.sdpa --seq-len 1024"
RULES = {
    "Welch's test": "Welch p < .05",
    "Mann-Whitney": "Mann-Whitney p < .05",
    "asv's rule": "asv: p < .002 and 1.1x",
}
MEANS = "mean > 20 %"


def count(text: str) -> tuple[int, int]:
    """`5/6 (...)` -> 5, 6."""
    hits, _, of = text.partition(" ")[0].partition("/")
    return int(hits), int(of)


def total(rows: list[dict[str, Any]], told: Callable[[dict[str, Any]], str]) -> tuple[int, int]:
    counts = [count(told(row)) for row in rows]
    return sum(hits for hits, _ in counts), sum(of for _, of in counts)


def rules() -> str:
    """What the usual rules and ours said of one code against itself, and of real slowdowns."""
    rows = result("cpu/gate_calibration.summary.json")
    same = [row for row in rows if row["effect"] == "A/A"]
    slower = [row for row in rows if row["effect"] != "A/A"]
    most = [row for row in rows if row["effect"] == "+10 %"]
    alarms, all_same = total(same, lambda row: row["false alarms"])
    found, real = total(slower, lambda row: row["found"])
    said = {name: total(same, lambda row, rule=rule: row["called slower by"][rule])[0] for name, rule in RULES.items()}
    told = listed([f"{name} in {hits}" for name, hits in said.items()])
    mean_alarms, _ = total(same, lambda row: row["called slower by"][MEANS])
    mean_found, tens = total(most, lambda row: row["called slower by"][MEANS])
    return wrapped(
        f"On the samples of {all_same} comparisons of one code with itself, one side after the other, the second was "
        f"called slower by {told}; by a 20 % threshold on means in {mean_alarms}, which saw {mean_found} of {tens} "
        "real slowdowns of 10 %. "
        f"attnbench called {alarms} of the {all_same} slower or faster, and found {found} of {real} real slowdowns of "
        "2.5 to 10 % (`results/cpu/gate_calibration.summary.json`, with the bounds of these counts)."
    )


def wrapped(text: str) -> str:
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)


def launches() -> str:
    """How far processes of one code lie apart."""
    settings = result("cpu/launch_spread.json")["settings"]
    kept, plain = settings["keeps freed memory"], settings["as the system has it"]
    told = [f"{100 * one['range']:.0f} % (standard deviation {100 * one['spread']:.1f} %)" for one in (kept, plain)]
    return wrapped(
        "How far processes of one code lie apart, and why launches are what is resampled: of "
        f"{len(plain['ns'])} launches of torch.sdpa each, by turns, the medians differed by up to {told[0]} with these "
        f"settings and by up to {told[1]} without (`results/cpu/launch_spread.json`)."
    )


def benched() -> str:
    """What `make bench` prints last: a table, that there are more, and the answer."""
    records = read_run(RESULTS / "quick.jsonl").records
    chosen = fullest(records)
    left = len(by_workload(records)) - 1
    more = f"[{left} more table{'' if left == 1 else 's'}; what was not run, and why]"
    return fenced("\n\n".join([printed(chosen), more, textwrap.fill(closing(records), 128)]))


def compared() -> str:
    comparison = msgspec.json.decode((RESULTS / "compare.json").read_bytes(), type=Comparison)
    text = io.StringIO()
    print_comparison(Console(file=text, width=COLUMNS), comparison)
    return fenced(f"$ {COMPARE}\n{text.getvalue()}")


def gated() -> str:
    return fenced((RESULTS / "gate_example.txt").read_text())


def fenced(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
    return f"```\n{lines}\n```"


def calibration() -> str:
    heading = ["load", "effect", "result", "target", "inconclusive", "median ratio", "seconds"]
    rows = result("cpu/gate_calibration.summary.json")
    what = {True: "false alarms", False: "found"}
    told = [(row, what["false alarms" in row]) for row in rows]
    lines = [
        [
            row["condition"],
            row["effect"],
            f"{name} {row[name]}",
            row["target"],
            row["inconclusive"],
            row["median ratio"],
            row["seconds"],
        ]
        for row, name in told
    ]
    return table(heading, lines)


def patterns() -> str:
    cases = [
        case for case in result("cpu/block_sparse_quality.json")["cases"] if case["case"]["inputs"] == "structured"
    ]
    cells: dict[str, list[str]] = {}
    heading = ["pattern"]
    for case in cases:
        kind = "causal" if case["case"]["causal"] else "full"
        heading += [f"{kind}, {100 * one:.0f} %" for one in sorted({row["sparsity"] for row in case["rows"]})]
        for row in sorted(case["rows"], key=lambda row: row["sparsity"]):
            cells.setdefault(row["pattern"], []).append(f"{row['recall']:.2f} / {row['output_error']:.2f}")
    return table(heading, [[name, *values] for name, values in cells.items()])


def report_size() -> str:
    found = {row["records"]: row for row in result("cpu/report_size.json")["reports"]}
    most, some = found[10_000], found[5_000]
    return wrapped(
        f"A report of 10,000 records takes {most['seconds']:.1f} s, {most['peak_bytes'] / 1e9:.2f} GB and "
        f"{most['page_bytes'] / 1e6:.1f} MB; one of 5,000 opens in {some['open_seconds']:.1f} s, and its last chart is "
        f"drawn after {some['all_drawn_seconds']:.1f} s."
    )


PAGES: Pages = {
    "README.md": {
        "bench": ("cpu/quick.jsonl", benched),
        "rules": ("cpu/gate_calibration.summary.json", rules),
        "launches": ("cpu/launch_spread.json", launches),
        "compare": ("cpu/compare.json", compared),
        "gate": ("cpu/gate_example.txt", gated),
    },
    "results/README.md": {
        "report-size": ("cpu/report_size.json", report_size),
        "patterns": ("cpu/block_sparse_quality.json", patterns),
        "calibration": ("cpu/gate_calibration.summary.json", calibration),
    },
    **KERNELS,
    **LIBRARIES,
}


def blocks(page: str) -> dict[str, str]:
    """Name -> block of a page."""
    return {
        name: marked(name, f"made by `make figures` from results/{source}", made())
        for name, (source, made) in PAGES[page].items()
    }


def main() -> None:
    write_texts({ROOT / page: replaced(ROOT / page, blocks(page)) for page in PAGES})
    print("\n".join(PAGES))


if __name__ == "__main__":
    main()
