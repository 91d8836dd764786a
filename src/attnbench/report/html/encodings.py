"""The parts that charts share: their rows, one colour, symbol and dash per implementation, axes, and Vega itself.

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
KEY = "="
"""Prefix of every name that Vega sees as the key of a series."""
KEYED = f"'{KEY}' + datum.label"
LONGEST_NAME = 48
LONGEST_BAR = 1.5
"""Times the largest value of its chart at which a bar ends, and part of the least."""


def shortened(begin: int = 0) -> str:
    """Return an expression for `datum.label` from a place on, a long label without its middle."""
    half = LONGEST_NAME // 2
    cut = f"slice(datum.label, {begin}, {begin + half - 1}) + '…' + slice(datum.label, -{half})"
    return f"(length(datum.label) > {LONGEST_NAME + begin} ? {cut} : slice(datum.label, {begin}))"


SHORT_NAME = shortened(len(KEY))
"""Expression for a label on axes and in legends, whose labels are keys."""


Spec = dict[str, Any]
Labels = tuple[str, ...]
drawn_once = lru_cache(64)
"""Cache for specifications: altair is slow, and the sections of a page have the same charts. They are never written."""


def keys(labels: Sequence[str]) -> list[str]:
    """Return the keys by which Vega knows implementations."""
    return [f"{KEY}{label}" for label in labels]


def colour(
    labels: Sequence[str], channel: type[Any], legend: bool = True, told: Sequence[str] = (), opacity: float = FIRM
) -> Any:
    """Return a channel with one colour per implementation, the same on the whole page."""
    shown = _legend(told or labels, opacity) if legend else None
    return channel("key:N", scale=alt.Scale(domain=keys(labels)), legend=shown)


def symbol(labels: Sequence[str], opacity: float = FIRM) -> alt.Shape:
    """Return a channel with one symbol per implementation."""
    return alt.Shape("key:N", scale=alt.Scale(domain=keys(labels)), legend=_legend(labels, opacity))


def dash(labels: Sequence[str]) -> alt.StrokeDash:
    """Return a channel with a dash per implementation, by which lines of one colour differ."""
    return alt.StrokeDash("key:N", scale=alt.Scale(domain=keys(labels), range=dashes(len(labels))), legend=None)


def _legend(labels: Sequence[str], opacity: float) -> alt.Legend:
    told = keys(labels)
    return alt.Legend(
        title=None, symbolLimit=60, labelLimit=260, labelExpr=SHORT_NAME, values=told, symbolOpacity=opacity
    )


def log_axis(grid: bool = True, values: Sequence[float] = ()) -> alt.Axis:
    """Return a logarithmic axis with ticks at 1, 2 and 5 of every decade, or at given values."""
    return alt.Axis(format="~g", grid=grid, labelOverlap=True, values=list(values) or alt.ExprRef("ticks"))


def cut_bars(base: alt.Chart, value: str, low: str, high: str) -> alt.Chart:
    """Return a chart whose rows have `bar_low` and `bar_high`, the interval as far as it is drawn: points set the axis,
    and a wide interval does not stretch it."""
    ends = base.transform_joinaggregate(least=f"min({value})", most=f"max({value})")
    return ends.transform_calculate(
        bar_low=f"max(datum.{low}, datum.least / {LONGEST_BAR})",
        bar_high=f"datum.{high} > 0 ? min(datum.{high}, datum.most * {LONGEST_BAR}) : datum.most * {LONGEST_BAR}",
    )


def finish(chart: Any, *axes: str) -> Spec:
    """Return the chart as plain data, as wide as its place, with the parameters of its axes."""
    fitting = alt.AutoSizeParams(type="fit-x", contains="padding")
    with alt.data_transformers.enable(consolidate_datasets=False):
        spec = (
            chart.add_params(PICKED)
            .properties(height=HEIGHT, width="container", autosize=fitting)
            .to_dict(validate=False)
        )
    kept = {key: value for key, value in spec.items() if key != "config"}
    return kept | {"params": [*spec["params"], TICKS, *({"name": name, "value": []} for name in axes)]}


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


def dashes(count: int) -> list[list[int]]:
    """Return a dash per label, another dash each time that the colours begin anew."""
    return [DASHES[place // len(LIGHT) % len(DASHES)] for place in range(count)]


@cache
def vega_script() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script that defines `vegaEmbed` and asks for nothing."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
