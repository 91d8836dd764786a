"""github-action-benchmark's own list (`tool: customSmallerIsBetter`): median time of each cell in ns."""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.results.exports.table import Source
from attnbench.results.exports.timed import Timed, facts, timed


def github_action_benchmark(sources: Sequence[Source]) -> list[dict[str, object]]:
    """An entry per cell; `range` is half the interval of the median."""
    return [_entry(one) for one in timed(sources)]


def _entry(one: Timed) -> dict[str, object]:
    entry: dict[str, object] = {"name": one.name, "unit": "ns", "value": one.time.median_ns}
    if one.time.ci95_ns is not None:
        low, high = one.time.ci95_ns
        entry["range"] = f"± {(high - low) / 2:.0f}"
    entry["extra"] = "\n".join(f"{name}: {value}" for name, value in facts(one).items())
    return entry
