"""What is said under the charts of the gallery: every figure is read from the rows that the chart is drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from attnbench.report.html.cells import winner_rows
from attnbench.report.html.charts import Chart
from attnbench.report.html.page import PageSection
from attnbench.report.html.views import side_by_side
from attnbench.report.units import percent, significant, size
from attnbench.results.ratios import Ratio
from attnbench.results.sentences import counted, format_ratio

Rows = list[dict[str, Any]]


def winners(part: PageSection, chart: Chart) -> str:
    del chart
    shapes = winner_rows(part.cells.rows)
    counts = Counter(row["label"] for row in shapes)
    close = sum(row["close"] for row in shapes)
    ran = Counter(row["label"] for row in part.cells.rows if "place" in row)
    first, *others = [f"{name} {count}" for name, count in counts.most_common()]
    fewer = ", ".join(f"{name} ran on {ran[name]}" for name in counts if ran[name] < len(shapes))
    return (
        f"The fastest of {len(ran)} implementations on {len(shapes)} shapes: {', '.join([f'{first} times', *others])}"
        f"{f' ({fewer} of them)' if fewer else ''}; "
        f"≈ if the next kernel is too close to call ({counted(close, 'shape')})."
    )


def rate(part: PageSection, chart: Chart) -> str:
    rows = _drawn(part, chart)
    best = max(rows, key=lambda row: row["tflops"])
    base = part.cells.baselines[0]
    slow = [row for row in rows if row["label"] == base and row["workload"] == best["workload"]]
    reached = f", {percent(best['roofline'])} of the ceiling measured on this device" if best.get("roofline") else ""
    beside = f"; {base} reaches {significant(slow[0]['tflops'])} there" if slow else ""
    return (
        f"Rate over length ({chart.choices[0].text}): {best['label']} reaches {significant(best['tflops'])} TFLOP/s at "
        f"{_place(best)}{reached}{beside}."
    )


def memory(part: PageSection, chart: Chart) -> str:
    rows = _drawn(part, chart)
    most = max(rows, key=lambda row: row["peak"])
    least = min((row for row in rows if row["workload"] == most["workload"]), key=lambda row: row["peak"])
    times = significant(most["peak"] / least["peak"])
    return (
        f"Memory beyond the inputs ({chart.choices[0].text}): at {_place(most)} {most['label']} needs "
        f"{size(most['peak'])}, {times} times the {size(least['peak'])} of {least['label']}; "
        "a tick is what theory asks for."
    )


def frameworks(part: PageSection, chart: Chart) -> str:
    del chart
    rows = sorted(side_by_side(part.cells), key=lambda row: row["gain"])
    torch, jax = (sum(_ratio(row).sign == side for row in rows) for side in (1, -1))
    near = len(rows) - torch - jax
    least, most = (f"{format_ratio(_ratio(row))} at {row['shape']}" for row in (rows[0], rows[-1]))
    return (
        f"The best of torch and the best of JAX on the {len(rows)} shapes that both ran: torch is faster on {torch}, "
        f"JAX on {jax}, {near} are too close to call; time of JAX / time of torch from {least} to {most}."
    )


CAPTIONS: Mapping[str, tuple[str, Callable[[PageSection, Chart], str]]] = {
    "winners": ("Winner map", winners),
    "rate": ("Rate over length", rate),
    "memory": ("Memory over length", memory),
    "frameworks": ("torch next to JAX", frameworks),
}
"""Chart -> what it is and what is said of it, in the order of the gallery."""


def _drawn(part: PageSection, chart: Chart) -> Rows:
    """Of those that the chart names."""
    first = chart.choices[0]
    rows = [row for row in part.cells.rows if row.get(chart.needs) is not None and first.accepts(row)]
    return [row for row in rows if row["label"] in first.named]


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['batch']} x {row['length']}"


def _ratio(row: Mapping[str, Any]) -> Ratio:
    return Ratio(row["gain"], row["gain_low"], row["gain_high"])
