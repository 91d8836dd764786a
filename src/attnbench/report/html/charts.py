"""The charts as Vega-Lite without their data: most show the cells of a section, some have rows of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
from msgspec import Struct

from attnbench.report.html.cells import pack
from attnbench.report.html.encodings import (
    FADED,
    FAINT,
    FAINTER,
    FEW_FADED,
    FEW_FAINT,
    KEYED,
    ROWS,
    SHORT_NAME,
    Labels,
    Spec,
    colour,
    cut_bars,
    dash,
    drawn_once,
    finish,
    keys,
    log_axis,
    shortened,
    symbol,
)
from attnbench.report.html.layout import RowFilter, WinnerMap

NEAR_ROOFS = 1.15
"""Ratio of two ceilings below which they share a label."""
CELL: dict[str, Any] = {"fillOpacity": 0.3, "strokeWidth": 1.5, "cornerRadius": 2}
FRAMES = {"!datum.close": [1, 0], "datum.close": [4, 3]}
"""Filter of shapes -> dashes of their frames: dashed if the winner is too close to call."""
NARROW = "bandwidth('x') < 50"
"""Expression: whether columns are too narrow for a title across."""
LONG_ROWS = "(width < 300 || length(rows[0] || '') > 56)"
"""Expression: whether names of rows are long or beside a narrow map, and broken word by word."""
ROW_NAME = f"{LONG_ROWS} ? split(datum.label, ' · ') : datum.label"
ABOVE: dict[str, Any] = {"orient": "top", "ticks": False, "domain": False}
MILLIONTHS = {"ns": "datum.ns / 1e6", "peak": "datum.peak / 1e6"}
"""Field -> expression that draws it in ms or MB."""
LENGTHS = "lengths"
"""Parameter of the charts over length."""
GREY = "#888888"
GAINS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 2, 3, 4, 5, 7, 10, 20, 50]
SIDES = {"torch": "#e0703a", "JAX": "#3b8fd0", "too close to call": GREY, "cannot tell": "#bdbdbd"}
"""Who is faster -> its colour on light and on dark ground."""


class Chart(Struct, frozen=True):
    """One chart of a view."""

    name: str
    spec: Spec
    choices: list[RowFilter] = []
    """Choices, one of which is shown at a time, the first one at first; without any, everything is."""
    needs: str = "ns"
    """Field without which a row is not drawn."""
    lines: str = ""
    """Field whose values set the height, `step` pixels each; without one it is 340."""
    step: int = 0
    legend: bool = True
    axes: dict[str, str] = {}
    """Parameter -> the field whose values it lists, in the order of `<field>_place` or of their size: where an axis has
    its ticks, or what it is made of."""
    rows: dict[str, Any] | None = None
    """Rows of its own, packed; without them it shows the cells of the section."""
    map: int | None = None
    """Number of the map whose cells it shows."""
    title: str = ""
    """Title, if the view has several charts."""


def winner_map(labels: Sequence[str], winners: Sequence[str], place: WinnerMap) -> Chart:
    """Return a map of who is fastest at each batch and length; its rows are those of `winner_rows`."""
    spec = _winner_spec(tuple(labels), tuple(winners), place.columns)
    name = f"winners-{place.number + 1}" if place.number else "winners"
    axes = {"rows": "row", "columns": "column"}
    return Chart(name, spec, needs="place", lines="row", step=34, axes=axes, map=place.number, title=place.title)


@drawn_once
def _winner_spec(labels: Labels, winners: Labels, title: str) -> Spec:
    base = (
        alt.Chart(ROWS)
        .transform_calculate(ms="datum.ns / 1e6", told=f"(datum.close ? '≈ ' : '') + {shortened()}", key=KEYED)
        .encode(
            y=alt.Y(
                "row:O",
                title=None,
                scale=alt.Scale(domain=alt.ExprRef("rows")),
                axis=alt.Axis(
                    labelExpr=ROW_NAME,
                    labelLineHeight=11,
                    labelOffset=alt.ExprRef(f"{LONG_ROWS} ? -11 : 0"),
                    labelLimit=330,
                    labelPadding=8,
                    ticks=False,
                    domain=False,
                ),
            ),
            opacity=FADED,
            tooltip=[
                alt.Tooltip("label:N", title="fastest"),
                alt.Tooltip("ms:Q", title="time (ms)", format=".4~g"),
                alt.Tooltip("next_label:N", title="next best"),
                alt.Tooltip("regret:Q", title="regret of the next best", format=".1%"),
                alt.Tooltip("certain:N", title="certain"),
                alt.Tooltip("field:Q", title="measured here"),
                alt.Tooltip("workload:N", title="workload"),
            ],
        )
    )
    x = alt.X(
        "column:O",
        title=title,
        scale=alt.Scale(domain=alt.ExprRef("columns")),
        axis=alt.Axis(
            labelAngle=alt.ExprRef(f"{NARROW} ? -90 : 0"),
            labelAlign=alt.ExprRef(f"{NARROW} ? 'left' : 'center'"),
            **ABOVE,
        ),
    )
    fill, stroke = colour(labels, alt.Fill, told=winners), colour(labels, alt.Stroke, legend=False)
    grid, models = (base.transform_filter(which) for which in ("isValid(datum.column)", "!isValid(datum.column)"))
    fits = alt.ExprRef(f"{NARROW} ? 0 : 11")
    layers = [
        *(
            grid.transform_filter(which).mark_rect(**CELL, strokeDash=frame).encode(x=x, fill=fill, stroke=stroke)
            for which, frame in FRAMES.items()
        ),
        grid.mark_text(fontSize=fits, limit=alt.ExprRef("max(0, bandwidth('x') - 8)")).encode(x=x, text="told:N"),
        *(
            models.transform_filter(which)
            .mark_rect(**CELL, strokeDash=frame)
            .encode(x=alt.value(0), x2=alt.value("width"), fill=fill, stroke=stroke)
            for which, frame in FRAMES.items()
        ),
        models.mark_text(fontSize=11, limit=alt.ExprRef("width - 8")).encode(
            x=alt.value(alt.ExprRef("width / 2")), text="told:N"
        ),
    ]
    return finish(alt.layer(*layers), "rows", "columns")


def against_length(
    name: str,
    labels: Sequence[str],
    field: str,
    title: str,
    low: str = "",
    high: str = "",
    theory: str = "",
    choices: Sequence[RowFilter] = (),
) -> Chart:
    """Return a chart of a figure over length on logarithmic axes, with a line per implementation and batch."""
    spec = _length_spec(tuple(labels), field, title, low, high, theory)
    return Chart(name, spec, list(choices), needs=field, axes={LENGTHS: "len"})


@drawn_once
def _length_spec(labels: Labels, field: str, title: str, low: str, high: str, theory: str) -> Spec:
    base = alt.Chart(ROWS).transform_filter(f"datum.{field} > 0")
    base = base.transform_calculate(
        value=MILLIONTHS.get(field, f"datum.{field}"),
        low_value=low or "null",
        high_value=high or "null",
        theory_value=theory or "null",
        along="isValid(datum.beside) ? datum.beside : datum.len",
        key=KEYED,
    ).encode(
        x=alt.X(
            "along:Q",
            title="Length (tokens)",
            scale=alt.Scale(type="log", base=2, nice=False, padding=16),
            axis=alt.Axis(format="d", grid=False, labelOverlap="greedy", values=alt.ExprRef(LENGTHS)),
        ),
        color=colour(labels, alt.Color),
        detail="batch:N",
    )
    y = alt.Y("value:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=12), axis=log_axis())
    lines = base.mark_line(strokeWidth=1.5).encode(y=y, opacity=FEW_FAINT, strokeDash=dash(labels))
    tooltip = [
        alt.Tooltip("label:N", title="implementation"),
        alt.Tooltip("value:Q", title=title, format=".4~g"),
        alt.Tooltip("low_value:Q", title="95 % from", format=".4~g"),
        alt.Tooltip("high_value:Q", title="95 % to", format=".4~g"),
        alt.Tooltip("shape:N", title="shape"),
    ]
    points = base.mark_point(filled=True, size=55).encode(y=y, opacity=FEW_FADED, shape=symbol(labels), tooltip=tooltip)
    layers = [lines, points]
    if low:
        bars = cut_bars(base, "value", "low_value", "high_value").transform_filter("isValid(datum.low)")
        spread = bars.mark_rule(strokeWidth=1.5)
        layers.insert(0, spread.encode(y=alt.Y("bar_low:Q", title=title), y2="bar_high:Q", opacity=FEW_FADED))
    if theory:
        drawn = base.transform_filter("datum.theory > 0").mark_tick(orient="horizontal", thickness=2, size=18)
        layers.append(drawn.encode(y=alt.Y("theory_value:Q", title=title), opacity=FEW_FAINT))
    return finish(alt.layer(*layers), LENGTHS)


def roofline(labels: Sequence[str], roofs: Sequence[dict[str, Any]]) -> Chart:
    """Return a chart of the rate against arithmetic intensity, under the ceilings that were measured."""
    known = tuple((roof["roof"], roof["intensity"], roof["tflops"]) for roof in roofs)
    return Chart("roofline", _roofline_spec(tuple(labels), known), needs="tflops")


@drawn_once
def _roofline_spec(labels: Labels, roofs: tuple[tuple[str, float, float], ...]) -> Spec:
    x = alt.X(
        "intensity:Q",
        title="Arithmetic intensity (FLOP per byte)",
        scale=alt.Scale(type="log", nice=False, padding=16),
        axis=log_axis(grid=False),
    )
    y = alt.Y("tflops:Q", title="Rate (TFLOP/s)", scale=alt.Scale(type="log", nice=False, padding=12), axis=log_axis())
    points = (
        alt.Chart(ROWS)
        .transform_filter("datum.tflops > 0 && datum.intensity > 0")
        .transform_calculate(key=KEYED)
        .mark_point(filled=True, size=45)
        .encode(
            x=x,
            y=y,
            color=colour(labels, alt.Color, opacity=FAINTER),
            shape=symbol(labels, FAINTER),
            opacity=FAINT,
            tooltip=[
                alt.Tooltip("label:N", title="implementation"),
                alt.Tooltip("tflops:Q", title="TFLOP/s", format=".4~g"),
                alt.Tooltip("gbs:Q", title="GB/s", format=".4~g"),
                alt.Tooltip("roofline:Q", title="share of the ceiling", format=".0%"),
                alt.Tooltip("bound:N", title="ceiling of the shape"),
                alt.Tooltip("shape:N", title="shape"),
            ],
        )
    )
    layers: list[alt.Chart] = [points]
    if roofs:
        values: list[dict[str, Any]] = [{"roof": name, "intensity": x, "tflops": y} for name, x, y in roofs]
        ceiling = alt.Chart(alt.InlineData(values=values)).mark_line(strokeWidth=1.5, color=GREY)
        layers.insert(0, ceiling.encode(x=x, y=y, strokeDash=alt.StrokeDash("roof:N", title="ceiling", legend=None)))
        told: list[dict[str, Any]] = []  # the name of each ceiling above its right end; close ones share a label
        for end in sorted({one["roof"]: one for one in values}.values(), key=lambda one: -one["tflops"]):
            if told and told[-1]["tflops"] < NEAR_ROOFS * end["tflops"]:
                told[-1]["told"] += f" / {end['roof']}"
            else:
                told.append(end | {"told": f"ceiling: {end['roof']}"})
        words = alt.Chart(alt.InlineData(values=told)).mark_text(align="right", baseline="bottom", dy=-4, color=GREY)
        layers.append(words.encode(x=x, y=y, text="told:N"))
    return finish(alt.layer(*layers))


def strip(name: str, labels: Sequence[str], value: str, title: str, needs: str, limit: float | None = None) -> Chart:
    """Return a chart with a tick per cell and a line per implementation, on a logarithmic scale."""
    spec = _strip_spec(tuple(labels), value, title, limit)
    return Chart(name, spec, needs=needs, lines="label", step=22, legend=False)


@drawn_once
def _strip_spec(labels: Labels, value: str, title: str, limit: float | None) -> Spec:
    x = alt.X("value:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=16), axis=log_axis())
    ticks = (
        alt.Chart(ROWS)
        .transform_calculate(value=value, key=KEYED)
        .transform_filter("datum.value > 0")
        .mark_tick(thickness=2, size=14)
        .encode(
            x=x,
            y=alt.Y(
                "key:N",
                title=None,
                sort=keys(labels),
                axis=alt.Axis(labelExpr=SHORT_NAME, labelLimit=200, ticks=False, domain=False),
            ),
            color=colour(labels, alt.Color, legend=False),
            opacity=FAINT,
            tooltip=[
                alt.Tooltip("label:N", title="implementation"),
                alt.Tooltip("value:Q", title=title, format=".3~g"),
                alt.Tooltip("shape:N", title="shape"),
            ],
        )
    )
    layers: list[alt.Chart] = [ticks]
    if limit is not None:
        bar = alt.Chart(alt.InlineData(values=[{"value": limit}])).mark_rule(strokeDash=[4, 3], color=GREY)
        layers.append(bar.encode(x=x))
    return finish(alt.layer(*layers))


def history(labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Return a chart of one cell over the runs, with its levels and where they changed."""
    choices = [RowFilter(name, series=name) for name in dict.fromkeys(row["series"] for row in rows)]
    return Chart("history", _history_spec(tuple(labels)), choices, needs="ratio", legend=False, rows=pack(rows))


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
    """Return a chart of how many times as fast the best of torch is as the best of JAX, with a line per shape."""
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
