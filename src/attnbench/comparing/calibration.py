"""How often verdicts of `compare` were wrong when that was measured: the fine print of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PACKAGED = Path(__file__).with_name("calibration.json")
"""Written by benchmarks/compare_calibration.py, equal to results/cpu/compare_calibration.summary.json."""
WHERE = {"idle": "on an idle machine", "busy": "beside a busy process"}


def fine_print() -> str:
    """Say how often a function compared with a copy of itself was called slower or faster, with the 95 % bound."""
    rows = [row for row in _rows() if row["effect"] == "same"]
    if not rows:
        return "How often a verdict is wrong on your functions has not been measured for this version."
    told = [
        f"{row['wrong']} of {row['comparisons']} {WHERE[row['condition']]} (at most {100 * row['at_most']:.2g} %, 95 % "
        "confidence)"
        for row in sorted(rows, key=lambda row: row["condition"], reverse=True)
    ]
    machines = "; ".join(sorted({machine for row in rows for machine in row["machines"]}))
    return f"Copies of one function were called slower or faster in {' and in '.join(told)}, measured on {machines}."


def _rows() -> list[dict[str, Any]]:
    return json.loads(PACKAGED.read_text(encoding="utf-8"))
