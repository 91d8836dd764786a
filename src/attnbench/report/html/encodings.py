"""What the charts have in common: their rows, one colour, symbol and dash per implementation, axes.

A label has its place in `labels`, looked up in the palette. Vega keeps series in plain objects, where names such as
"constructor" are taken: it is given keys, never bare names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import altair as alt

from attnbench.report.html.palette import dashes

ROWS = alt.NamedData(name="rows")
PICKED = alt.param(name="picked", value="")
"""The implementation that the reader points at; the others fade."""
FIRM, FAINTER = 1, 0.6
"""Opacity of points, and of what lies on top of each other."""
FADED = alt.condition("picked == '' || datum.label == picked", alt.value(FIRM), alt.value(0.12))
FAINT = alt.condition("picked == '' || datum.label == picked", alt.value(FAINTER), alt.value(0.08))


def _few(firm: float, faint: float) -> Any:
    """The same where the page marks rows as `minor`: they are faint until the reader points at them."""
    pointed = alt.when("picked == datum.label").then(alt.value(firm))
    return pointed.when("picked != '' || datum.minor").then(alt.value(faint)).otherwise(alt.value(firm))


FEW_FADED, FEW_FAINT = _few(FIRM, 0.15), _few(FAINTER, 0.1)
HEIGHT = 340
TICKS = {"name": "ticks", "value": [step * 10.0**power for power in range(-9, 10) for step in (1, 2, 5)]}
"""A parameter: altair copies what stands in a chart dozens of times."""
KEY = "="
"""Before every name that Vega sees as the key of a series."""
KEYED = f"'{KEY}' + datum.label"
LONGEST_NAME = 48
LONGEST_BAR = 1.5
"""A bar ends at so many times the largest value of its chart, or at that part of the least."""


def shortened(begin: int = 0) -> str:
    """Expression: `datum.label` from there on, a long one without its middle."""
    half = LONGEST_NAME // 2
    cut = f"slice(datum.label, {begin}, {begin + half - 1}) + '…' + slice(datum.label, -{half})"
    return f"(length(datum.label) > {LONGEST_NAME + begin} ? {cut} : slice(datum.label, {begin}))"


SHORT_NAME = shortened(len(KEY))
"""What stands on axes and in legends, where a label is a key."""


Spec = dict[str, Any]
Labels = tuple[str, ...]
drawn_once = lru_cache(64)
"""altair takes its time, and the sections of a page have the same charts. Nobody writes on them."""


def keys(labels: Sequence[str]) -> list[str]:
    """What Vega knows these implementations by."""
    return [f"{KEY}{label}" for label in labels]


def colour(
    labels: Sequence[str], channel: type[Any], legend: bool = True, told: Sequence[str] = (), opacity: float = FIRM
) -> Any:
    """One colour per implementation, the same on the whole page."""
    shown = _legend(told or labels, opacity) if legend else None
    return channel("key:N", scale=alt.Scale(domain=keys(labels)), legend=shown)


def symbol(labels: Sequence[str], opacity: float = FIRM) -> alt.Shape:
    """One symbol per implementation."""
    return alt.Shape("key:N", scale=alt.Scale(domain=keys(labels)), legend=_legend(labels, opacity))


def dash(labels: Sequence[str]) -> alt.StrokeDash:
    """Lines of one colour differ in their dashes."""
    return alt.StrokeDash("key:N", scale=alt.Scale(domain=keys(labels), range=dashes(len(labels))), legend=None)


def _legend(labels: Sequence[str], opacity: float) -> alt.Legend:
    told = keys(labels)
    return alt.Legend(
        title=None, symbolLimit=60, labelLimit=260, labelExpr=SHORT_NAME, values=told, symbolOpacity=opacity
    )


def log_axis(grid: bool = True, values: Sequence[float] = ()) -> alt.Axis:
    """Ticks at 1, 2 and 5 of every decade, or at these."""
    return alt.Axis(format="~g", grid=grid, labelOverlap=True, values=list(values) or alt.ExprRef("ticks"))


def cut_bars(base: alt.Chart, value: str, low: str, high: str) -> alt.Chart:
    """With `bar_low` and `bar_high`, the interval as far as it is drawn: the points set the axis, not what few rounds
    leave open."""
    ends = base.transform_joinaggregate(least=f"min({value})", most=f"max({value})")
    return ends.transform_calculate(
        bar_low=f"max(datum.{low}, datum.least / {LONGEST_BAR})",
        bar_high=f"datum.{high} > 0 ? min(datum.{high}, datum.most * {LONGEST_BAR}) : datum.most * {LONGEST_BAR}",
    )


def finish(chart: Any, *axes: str) -> Spec:
    """The chart as plain data, as wide as its place, with the parameters of its axes."""
    fitting = alt.AutoSizeParams(type="fit-x", contains="padding")
    with alt.data_transformers.enable(consolidate_datasets=False):
        spec = (
            chart.add_params(PICKED)
            .properties(height=HEIGHT, width="container", autosize=fitting)
            .to_dict(validate=False)
        )
    kept = {key: value for key, value in spec.items() if key != "config"}
    return kept | {"params": [*spec["params"], TICKS, *({"name": name, "value": []} for name in axes)]}
