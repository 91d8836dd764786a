"""The charts whose rows are not cells: the history of a cell, and the frameworks side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from attnbench.report.html.charts import Chart
from attnbench.report.html.encodings import (
    KEYED,
    ROWS,
    Labels,
    Spec,
    colour,
    cut_bars,
    drawn_once,
    finish,
    log_axis,
    symbol,
)
from attnbench.report.html.packing import pack
from attnbench.report.html.picks import series_choices

GREY = "#888888"
GAINS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 2, 3, 4, 5, 7, 10, 20, 50]
SIDES = {"torch": "#e0703a", "JAX": "#3b8fd0", "too close to call": GREY, "cannot tell": "#bdbdbd"}
"""On light and on dark ground."""


def history(labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Chart:
    """One cell over the runs, its levels, and where they changed."""
    spec = _history_spec(tuple(labels))
    return Chart("history", spec, series_choices(rows), needs="ratio", legend=False, rows=pack(rows))


@drawn_once
def _history_spec(labels: Labels) -> Spec:
    base = (
        alt.Chart(ROWS)
        .transform_calculate(key=KEYED)
        .encode(
            x=alt.X(
                "when:O",
                title="Run, the oldest first",
                sort=alt.EncodingSortField("place", op="min"),
                axis=alt.Axis(labelAngle=-35, labelLimit=170, labelOverlap="greedy", grid=False),
            )
        )
    )
    title = "Time / time of the anchor kernels"
    y = alt.Y("ratio:Q", title=title, scale=alt.Scale(zero=False, nice=False, padding=12), axis=alt.Axis(tickCount=6))
    span = base.mark_rule(opacity=0).encode(y=alt.Y("least:Q", title=title), y2="most:Q")
    levels = base.mark_line(interpolate="step", strokeWidth=1.5, strokeDash=[5, 3], color=GREY)
    line = base.mark_line(strokeWidth=1, opacity=0.4).encode(y=y, color=colour(labels, alt.Color, legend=False))
    points = base.mark_point(filled=True, size=60).encode(
        y=y,
        color=colour(labels, alt.Color, legend=False),
        shape=symbol(labels),
        tooltip=[
            alt.Tooltip("series:N", title="cell"),
            alt.Tooltip("when:N", title="run"),
            alt.Tooltip("commit:N", title="commit"),
            alt.Tooltip("ratio:Q", title="x anchors", format=".4~g"),
            alt.Tooltip("level:Q", title="level", format=".4~g"),
            alt.Tooltip("step:N", title="changed here"),
        ],
    )
    changed = base.transform_filter("isValid(datum.step)")
    rules = changed.mark_rule(strokeWidth=1, color=GREY)
    early = changed.transform_filter("!datum.late").mark_text(align="left", baseline="top", dx=5)
    late = changed.transform_filter("datum.late").mark_text(align="right", baseline="top", dx=-5)
    words = [one.encode(y=alt.value(2), text="step:N") for one in (early, late)]
    return finish(alt.layer(span, rules, levels.encode(y=alt.Y("level:Q", title=title)), line, points, *words))


def side_by_side(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """How many times as fast the best of torch is as the best of JAX, a line per shape."""
    return Chart("frameworks", _side_spec(), needs="gain", lines="shape", step=20, legend=False, rows=pack(rows))


@drawn_once
def _side_spec() -> Spec:
    title = ["Time of the best of JAX / time of the best of torch", "(right of 1: torch is faster)"]
    x = alt.X("gain:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=16), axis=log_axis(values=GAINS))
    y = alt.Y(
        "shape:N",
        title=None,
        sort=alt.EncodingSortField("gain", op="max", order="descending"),
        axis=alt.Axis(labelLimit=330, ticks=False, domain=False),
    )
    side = alt.Color(
        "side:N",
        scale=alt.Scale(domain=list(SIDES), range=list(SIDES.values())),
        legend=alt.Legend(title="faster", orient="top", titleOrient="left"),
    )
    base = alt.Chart(ROWS).encode(y=y, color=side)
    bars = cut_bars(base, "gain", "gain_low", "gain_high")
    spread = bars.mark_rule(strokeWidth=2).encode(x=alt.X("bar_low:Q", title=title), x2="bar_high:Q")
    points = base.mark_point(filled=True, size=60, shape="circle").encode(
        x=x,
        tooltip=[
            alt.Tooltip("shape:N", title="shape"),
            alt.Tooltip("torch:N", title="best of torch"),
            alt.Tooltip("jax:N", title="best of JAX"),
            alt.Tooltip("gain:Q", title="torch is so many times as fast", format=".3~g"),
            alt.Tooltip("gain_low:Q", title="99 % from", format=".3~g"),
            alt.Tooltip("gain_high:Q", title="99 % to", format=".3~g"),
            alt.Tooltip("side:N", title="faster"),
        ],
    )
    one = alt.Chart(alt.InlineData(values=[{"gain": 1}])).mark_rule(strokeDash=[4, 3], color=GREY).encode(x=x)
    return finish(alt.layer(one, spread, points))
