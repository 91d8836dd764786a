"""The charts of the page as Vega-Lite without data: most show the cells of a section, some have rows of their own.

The place of a label in `labels` decides its colour. Vega keeps series in plain objects, where names such as
"constructor" are taken: it is given keys, never bare names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import altair as alt
import vl_convert
from msgspec import Struct

from attnbench.report.html.cells import pack
from attnbench.report.html.layout import RowFilter, WinnerMap

LIGHT = (
    "#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#332288", "#3aa0c9",
    "#882255", "#6f7d1c", "#666666", "#8c510a", "#cc6677", "#1b1b1b", "#117733",
)  # fmt: skip
DARK = (
    "#4ea8e6", "#ff8a4c", "#2fc99a", "#dd88cc", "#f0b429", "#a79bf0", "#88ddff",
    "#ee7799", "#c6cf5b", "#b0b0b0", "#d8a36a", "#ffb3bf", "#f3e8ff", "#7fd68a",
)  # fmt: skip
"""Colours on light and on dark ground, safe for colour-blind readers."""
SYMBOLS = ("circle", "square", "triangle-up", "diamond")
"""Symbols: four with fourteen colours, so that pairs repeat only after twenty-eight implementations."""
DASHES = ([1, 0], [6, 3], [2, 2])
"""Dashes by which lines of one colour differ."""
GREY = "#888888"
SIDES = {"torch": "#e0703a", "JAX": "#3b8fd0", "too close to call": GREY, "cannot tell": "#bdbdbd"}
"""Who is faster -> its colour on light and on dark ground."""
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""Version of Vega-Lite that the charts are written for."""
ROWS = alt.NamedData(name="rows")
PICKED = alt.param(name="picked", value="")
"""Parameter: the implementation that the reader points at; the others fade."""
FIRM, FAINTER = 1, 0.6
"""Opacity of points, and of what lies on top of each other."""
FADED = alt.condition("picked == '' || datum.label == picked", alt.value(FIRM), alt.value(0.12))
FAINT = alt.condition("picked == '' || datum.label == picked", alt.value(FAINTER), alt.value(0.08))


def _few(firm: float, faint: float) -> Any:
    """Return an opacity for lines: rows that the page marks as `minor` are faint until the reader points at them."""
    pointed = alt.when("picked == datum.label").then(alt.value(firm))
    return pointed.when("picked != '' || datum.minor").then(alt.value(faint)).otherwise(alt.value(firm))


FEW_FADED, FEW_FAINT = _few(FIRM, 0.15), _few(FAINTER, 0.1)
HEIGHT = 340
TICKS = {"name": "ticks", "value": [step * 10.0**power for power in range(-9, 10) for step in (1, 2, 5)]}
"""Parameter with the ticks: altair would copy them dozens of times if they stood in a chart."""
GAINS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 2, 3, 4, 5, 7, 10, 20, 50]
KEY = "="
"""Prefix of every name that Vega sees as the key of a series."""
KEYED = f"'{KEY}' + datum.label"
LONGEST_NAME = 48
LONGEST_BAR = 1.5
"""Times the largest value of its chart at which a bar ends, and part of the least."""
NEAR_ROOFS = 1.15
"""Ratio of two ceilings below which they share a label."""
NARROW = "bandwidth('x') < 50"
"""Expression: whether columns are too narrow for a title across."""
LONG_ROWS = "(width < 300 || length(rows[0] || '') > 56)"
"""Expression: whether names of rows are long or beside a narrow map, and broken word by word."""
MILLIONTHS = {"ns": "datum.ns / 1e6", "peak": "datum.peak / 1e6"}
"""Field -> expression that draws it in ms or MB."""
LENGTHS = "lengths"
"""Parameter of the charts over length."""
BARE: dict[str, Any] = {"ticks": False, "domain": False}
"""An axis of names alone."""
Spec = dict[str, Any]
Labels = tuple[str, ...]
drawn_once = lru_cache(64)
"""Cache for specifications: altair is slow, and the sections of a page have the same charts. They are never written."""


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


def keys(labels: Iterable[str]) -> list[str]:
    """Return the keys by which Vega knows implementations."""
    return [f"{KEY}{label}" for label in labels]


def order_labels(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return labels with those first that win most often: the first colours are the easiest to tell apart."""
    wins: Counter[str] = Counter()
    timed: Counter[str] = Counter()
    for cell in cells:
        if cell.get("ns") is not None:
            timed[cell["label"]] += 1
            wins[cell["label"]] += cell.get("rank") == 1
    return sorted(timed, key=lambda name: (-wins[name], -timed[name], name))


def ranges(count: int, colours: tuple[str, ...]) -> dict[str, list[str]]:
    """Return Vega's `config.range` for a number of labels."""
    return {
        "category": [colours[place % len(colours)] for place in range(count)],
        "symbol": [SYMBOLS[place % len(SYMBOLS)] for place in range(count)],
    }


@cache
def vega_script() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script that defines `vegaEmbed` and asks for nothing."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)


def _shortened(begin: int = 0) -> str:
    """Return an expression for `datum.label` from a place on, a long label without its middle."""
    half = LONGEST_NAME // 2
    cut = f"slice(datum.label, {begin}, {begin + half - 1}) + '…' + slice(datum.label, -{half})"
    return f"(length(datum.label) > {LONGEST_NAME + begin} ? {cut} : slice(datum.label, {begin}))"


SHORT_NAME = _shortened(len(KEY))
"""Expression for a label on axes and in legends, whose labels are keys."""


def _colour(
    labels: Labels, channel: type[Any], legend: bool = True, told: Sequence[str] = (), opacity: float = FIRM
) -> Any:
    """Return a channel with one colour per implementation, the same on the whole page."""
    shown = _legend(told or labels, opacity) if legend else None
    return channel("key:N", scale=alt.Scale(domain=keys(labels)), legend=shown)


def _symbol(labels: Labels, opacity: float = FIRM) -> alt.Shape:
    """Return a channel with one symbol per implementation."""
    return alt.Shape("key:N", scale=alt.Scale(domain=keys(labels)), legend=_legend(labels, opacity))


def _legend(labels: Sequence[str], opacity: float) -> alt.Legend:
    told = keys(labels)
    return alt.Legend(
        title=None, symbolLimit=60, labelLimit=260, labelExpr=SHORT_NAME, values=told, symbolOpacity=opacity
    )


def _logarithmic(channel: type[Any], field: str, title: Any, grid: bool = True, ticks: Sequence[float] = ()) -> Any:
    """Return a logarithmic channel with ticks at 1, 2 and 5 of every decade, or at given values."""
    axis = alt.Axis(format="~g", grid=grid, labelOverlap=True, values=list(ticks) or alt.ExprRef("ticks"))
    scale = alt.Scale(type="log", nice=False, padding=16 if channel is alt.X else 12)
    return channel(f"{field}:Q", title=title, scale=scale, axis=axis)


def _tooltip(**fields: str | tuple[str, str]) -> list[alt.Tooltip]:
    """Return what a reader sees who points at a row: field -> its title, of a figure with its format."""
    return [
        alt.Tooltip(f"{field}:N", title=told)
        if isinstance(told, str)
        else alt.Tooltip(f"{field}:Q", title=told[0], format=told[1])
        for field, told in fields.items()
    ]


def _cut_bars(base: alt.Chart, value: str, low: str, high: str) -> alt.Chart:
    """Return a chart whose rows have `bar_low` and `bar_high`, the interval as far as it is drawn: points set the axis,
    and a wide interval does not stretch it."""
    ends = base.transform_joinaggregate(least=f"min({value})", most=f"max({value})")
    return ends.transform_calculate(
        bar_low=f"max(datum.{low}, datum.least / {LONGEST_BAR})",
        bar_high=f"datum.{high} > 0 ? min(datum.{high}, datum.most * {LONGEST_BAR}) : datum.most * {LONGEST_BAR}",
    )


def _finish(chart: Any, *axes: str) -> Spec:
    """Return the chart as plain data, as wide as its place, with the parameters of its axes."""
    fitting = alt.AutoSizeParams(type="fit-x", contains="padding")
    with alt.data_transformers.enable(consolidate_datasets=False):
        drawn = chart.add_params(PICKED).properties(height=HEIGHT, width="container", autosize=fitting)
        spec = drawn.to_dict(validate=False)
    kept = {key: value for key, value in spec.items() if key != "config"}
    return kept | {"params": [*spec["params"], TICKS, *({"name": name, "value": []} for name in axes)]}


def winner_map(labels: Sequence[str], winners: Sequence[str], place: WinnerMap) -> Chart:
    """Return a map of who is fastest at each batch and length; its rows are those of `winner_rows`."""
    spec = _winner_spec(tuple(labels), tuple(winners), place.columns)
    name = f"winners-{place.number + 1}" if place.number else "winners"
    axes = {"rows": "row", "columns": "column"}
    return Chart(name, spec, needs="place", lines="row", step=34, axes=axes, map=place.number, title=place.title)


@drawn_once
def _winner_spec(labels: Labels, winners: Labels, title: str) -> Spec:
    rows = alt.Axis(
        labelExpr=f"{LONG_ROWS} ? split(datum.label, ' · ') : datum.label",
        labelLineHeight=11,
        labelOffset=alt.ExprRef(f"{LONG_ROWS} ? -11 : 0"),
        labelLimit=330,
        labelPadding=8,
        **BARE,
    )
    columns = alt.Axis(
        labelAngle=alt.ExprRef(f"{NARROW} ? -90 : 0"),
        labelAlign=alt.ExprRef(f"{NARROW} ? 'left' : 'center'"),
        orient="top",
        **BARE,
    )
    x = alt.X("column:O", title=title, scale=alt.Scale(domain=alt.ExprRef("columns")), axis=columns)
    fill, stroke = _colour(labels, alt.Fill, told=winners), _colour(labels, alt.Stroke, legend=False)
    base = (
        alt.Chart(ROWS)
        .transform_calculate(ms="datum.ns / 1e6", told=f"(datum.close ? '≈ ' : '') + {_shortened()}", key=KEYED)
        .encode(
            y=alt.Y("row:O", title=None, scale=alt.Scale(domain=alt.ExprRef("rows")), axis=rows),
            opacity=FADED,
            tooltip=_tooltip(
                label="fastest",
                ms=("time (ms)", ".4~g"),
                next_label="next best",
                regret=("regret of the next best", ".1%"),
                certain="certain",
                field=("measured here", "d"),
                workload="workload",
            ),
        )
    )

    def framed(shapes: alt.Chart, **place: Any) -> list[alt.Chart]:
        """Return a field per shape, in a dashed frame if its winner is too close to call."""
        looks: dict[str, Any] = {"fillOpacity": 0.3, "strokeWidth": 1.5, "cornerRadius": 2}
        return [
            shapes.transform_filter(which)
            .mark_rect(**looks, strokeDash=frame)
            .encode(fill=fill, stroke=stroke, **place)
            for which, frame in {"!datum.close": [1, 0], "datum.close": [4, 3]}.items()
        ]

    grid, models = (base.transform_filter(which) for which in ("isValid(datum.column)", "!isValid(datum.column)"))
    name = grid.mark_text(fontSize=alt.ExprRef(f"{NARROW} ? 0 : 11"), limit=alt.ExprRef("max(0, bandwidth('x') - 8)"))
    model_name = models.mark_text(fontSize=11, limit=alt.ExprRef("width - 8"))
    layers = [
        *framed(grid, x=x),
        name.encode(x=x, text="told:N"),
        *framed(models, x=alt.value(0), x2=alt.value("width")),
        model_name.encode(x=alt.value(alt.ExprRef("width / 2")), text="told:N"),
    ]
    return _finish(alt.layer(*layers), "rows", "columns")


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
        color=_colour(labels, alt.Color),
        detail="batch:N",
    )
    y = _logarithmic(alt.Y, "value", title)
    dashes = [DASHES[place // len(LIGHT) % len(DASHES)] for place in range(len(labels))]
    dash = alt.StrokeDash("key:N", scale=alt.Scale(domain=keys(labels), range=dashes), legend=None)
    lines = base.mark_line(strokeWidth=1.5).encode(y=y, opacity=FEW_FAINT, strokeDash=dash)
    tooltip = _tooltip(
        label="implementation",
        value=(title, ".4~g"),
        low_value=("95 % from", ".4~g"),
        high_value=("95 % to", ".4~g"),
        shape="shape",
    )
    points = base.mark_point(filled=True, size=55).encode(
        y=y, opacity=FEW_FADED, shape=_symbol(labels), tooltip=tooltip
    )
    layers = [lines, points]
    if low:
        bars = _cut_bars(base, "value", "low_value", "high_value").transform_filter("isValid(datum.low)")
        spread = bars.mark_rule(strokeWidth=1.5)
        layers.insert(0, spread.encode(y=alt.Y("bar_low:Q", title=title), y2="bar_high:Q", opacity=FEW_FADED))
    if theory:
        drawn = base.transform_filter("datum.theory > 0").mark_tick(orient="horizontal", thickness=2, size=18)
        layers.append(drawn.encode(y=alt.Y("theory_value:Q", title=title), opacity=FEW_FAINT))
    return _finish(alt.layer(*layers), LENGTHS)


def roofline(labels: Sequence[str], roofs: Sequence[dict[str, Any]]) -> Chart:
    """Return a chart of the rate against arithmetic intensity, under the ceilings that were measured."""
    known = tuple((roof["roof"], roof["intensity"], roof["tflops"]) for roof in roofs)
    return Chart("roofline", _roofline_spec(tuple(labels), known), needs="tflops")


@drawn_once
def _roofline_spec(labels: Labels, roofs: tuple[tuple[str, float, float], ...]) -> Spec:
    x = _logarithmic(alt.X, "intensity", "Arithmetic intensity (FLOP per byte)", grid=False)
    y = _logarithmic(alt.Y, "tflops", "Rate (TFLOP/s)")
    points = (
        alt.Chart(ROWS)
        .transform_filter("datum.tflops > 0 && datum.intensity > 0")
        .transform_calculate(key=KEYED)
        .mark_point(filled=True, size=45)
        .encode(
            x=x,
            y=y,
            color=_colour(labels, alt.Color, opacity=FAINTER),
            shape=_symbol(labels, FAINTER),
            opacity=FAINT,
            tooltip=_tooltip(
                label="implementation",
                tflops=("TFLOP/s", ".4~g"),
                gbs=("GB/s", ".4~g"),
                roofline=("share of the ceiling", ".0%"),
                bound="ceiling of the shape",
                shape="shape",
            ),
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
    return _finish(alt.layer(*layers))


@drawn_once
def strip(name: str, labels: Labels, value: str, title: str, needs: str, limit: float | None = None) -> Chart:
    """Return a chart with a tick per cell and a line per implementation, on a logarithmic scale."""
    x = _logarithmic(alt.X, "value", title)
    names = alt.Axis(labelExpr=SHORT_NAME, labelLimit=200, **BARE)
    ticks = (
        alt.Chart(ROWS)
        .transform_calculate(value=value, key=KEYED)
        .transform_filter("datum.value > 0")
        .mark_tick(thickness=2, size=14)
        .encode(
            x=x,
            y=alt.Y("key:N", title=None, sort=keys(labels), axis=names),
            color=_colour(labels, alt.Color, legend=False),
            opacity=FAINT,
            tooltip=_tooltip(label="implementation", value=(title, ".3~g"), shape="shape"),
        )
    )
    layers: list[alt.Chart] = [ticks]
    if limit is not None:
        bar = alt.Chart(alt.InlineData(values=[{"value": limit}])).mark_rule(strokeDash=[4, 3], color=GREY)
        layers.append(bar.encode(x=x))
    return Chart(name, _finish(alt.layer(*layers)), needs=needs, lines="label", step=22, legend=False)


def history(labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Return a chart of one cell over the runs, with its levels and where they changed."""
    choices = [RowFilter(name, series=name) for name in dict.fromkeys(row["series"] for row in rows)]
    return Chart("history", _history_spec(tuple(labels)), choices, needs="ratio", legend=False, rows=pack(rows))


@drawn_once
def _history_spec(labels: Labels) -> Spec:
    runs = alt.X(
        "when:O",
        title="Run, the oldest first",
        sort=alt.EncodingSortField("place", op="min"),
        axis=alt.Axis(labelAngle=-35, labelLimit=170, labelOverlap="greedy", grid=False),
    )
    base = alt.Chart(ROWS).transform_calculate(key=KEYED).encode(x=runs)
    title = "Time / time of the anchor kernels"
    y = alt.Y("ratio:Q", title=title, scale=alt.Scale(zero=False, nice=False, padding=12), axis=alt.Axis(tickCount=6))
    colour = _colour(labels, alt.Color, legend=False)
    span = base.mark_rule(opacity=0).encode(y=alt.Y("least:Q", title=title), y2="most:Q")
    levels = base.mark_line(interpolate="step", strokeWidth=1.5, strokeDash=[5, 3], color=GREY)
    line = base.mark_line(strokeWidth=1, opacity=0.4).encode(y=y, color=colour)
    tooltip = _tooltip(
        series="cell",
        when="run",
        commit="commit",
        ratio=("x anchors", ".4~g"),
        level=("level", ".4~g"),
        step="changed here",
    )
    points = base.mark_point(filled=True, size=60).encode(y=y, color=colour, shape=_symbol(labels), tooltip=tooltip)
    changed = base.transform_filter("isValid(datum.step)")
    rules = changed.mark_rule(strokeWidth=1, color=GREY)
    early = changed.transform_filter("!datum.late").mark_text(align="left", baseline="top", dx=5)
    late = changed.transform_filter("datum.late").mark_text(align="right", baseline="top", dx=-5)
    words = [one.encode(y=alt.value(2), text="step:N") for one in (early, late)]
    return _finish(alt.layer(span, rules, levels.encode(y=alt.Y("level:Q", title=title)), line, points, *words))


def side_by_side(rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Return a chart of how many times as fast the best of torch is as the best of JAX, with a line per shape."""
    return Chart("frameworks", _side_spec(), needs="gain", lines="shape", step=20, legend=False, rows=pack(rows))


@drawn_once
def _side_spec() -> Spec:
    title = ["Time of the best of JAX / time of the best of torch", "(right of 1: torch is faster)"]
    x = _logarithmic(alt.X, "gain", title, ticks=GAINS)
    most_first = alt.EncodingSortField("gain", op="max", order="descending")
    y = alt.Y("shape:N", title=None, sort=most_first, axis=alt.Axis(labelLimit=330, **BARE))
    side = alt.Color(
        "side:N",
        scale=alt.Scale(domain=list(SIDES), range=list(SIDES.values())),
        legend=alt.Legend(title="faster", orient="top", titleOrient="left"),
    )
    base = alt.Chart(ROWS).encode(y=y, color=side)
    bars = _cut_bars(base, "gain", "gain_low", "gain_high")
    spread = bars.mark_rule(strokeWidth=2).encode(x=alt.X("bar_low:Q", title=title), x2="bar_high:Q")
    tooltip = _tooltip(
        shape="shape",
        torch="best of torch",
        jax="best of JAX",
        gain=("torch is so many times as fast", ".3~g"),
        gain_low=("99 % from", ".3~g"),
        gain_high=("99 % to", ".3~g"),
        side="faster",
    )
    points = base.mark_point(filled=True, size=60, shape="circle").encode(x=x, tooltip=tooltip)
    one = alt.Chart(alt.InlineData(values=[{"gain": 1}])).mark_rule(strokeDash=[4, 3], color=GREY).encode(x=x)
    return _finish(alt.layer(one, spread, points))
