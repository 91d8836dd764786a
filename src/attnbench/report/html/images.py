"""Every chart of the page as PNG and SVG, drawn offline, for papers and READMEs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import vl_convert

from attnbench.errors import AttnBenchError
from attnbench.files import draft_of, write_errors, write_texts
from attnbench.report.html.cells import Cell, pack, unpack, winner_rows
from attnbench.report.html.charts import LENGTHS, LIGHT, VEGA_LITE, Chart, keys, ranges
from attnbench.report.html.layout import RowFilter
from attnbench.report.html.page import Page, PageSection, one_way
from attnbench.results.run_file import slug

WIDTH = 640
SCALE = 2
GREY = "#d0d0d0"
LONGEST_ERROR = 200
CONFIG: dict[str, Any] = {
    "font": "DejaVu Sans, Helvetica, Arial, sans-serif",
    "background": "white",
    "view": {"stroke": None},
    "axis": {
        "titleFontWeight": "normal", "domainColor": "#bbbbbb", "tickColor": "#bbbbbb", "gridColor": "#e4e4e4",
        "labelFontSize": 11, "titleFontSize": 12,
    },
    "legend": {"labelFontSize": 12},
    "title": {"fontSize": 13},
}  # fmt: skip


def write_images(page: Page, folder: Path) -> list[Path]:
    """Draw every chart and return the files. A chart that shows one family of shapes at a time is drawn for each, a
    chart of one cell for the first cell. The first family, which the page shows first too, has the chart's own name."""
    written: list[Path] = []
    failed: list[str] = []
    with write_errors(f"to {folder}", "Give --png another folder."):
        folder.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(page.parts):
            tail = f"-{number + 1}" if len(page.parts) > 1 else ""
            for chart, name, choice in _pictures(part):
                spec = drawable(chart, part.cells.rows, page.labels, choice)
                text = one_way(msgspec.json.encode(spec).decode())
                try:
                    picture = vl_convert.vegalite_to_png(text, vl_version=VEGA_LITE, scale=SCALE)
                    drawing = vl_convert.vegalite_to_svg(text, vl_version=VEGA_LITE)
                except ValueError as error:
                    failed.append(f"{name}{tail} ({str(error).strip().splitlines()[0][:LONGEST_ERROR]})")
                    continue
                png, svg = (folder / f"{name}{tail}.{kind}" for kind in ("png", "svg"))
                with draft_of(png) as draft:
                    draft.write_bytes(picture)
                write_texts({svg: drawing})
                written += [png, svg]
    if failed:
        raise AttnBenchError(
            f"{len(written)} files were written to {folder}, but these charts could not be drawn: {'; '.join(failed)}."
        )
    return written


def _pictures(part: PageSection) -> Iterator[tuple[Chart, str, RowFilter | None]]:
    """Yield every chart, the name of its file, and the choice that it shows."""
    for chart in (chart for view in part.views for chart in view.charts):
        first, *more = chart.choices or [None]
        yield chart, chart.name, first
        for choice in more:
            if choice is not None and choice.first:
                yield chart, f"{chart.name}-{slug(choice.text)}", choice


def drawable(chart: Chart, rows: list[Cell], labels: Sequence[str], choice: RowFilter | None = None) -> dict[str, Any]:
    """Return the chart with its data and the colours of the light page, of one choice: by default the first. A chart of
    lines names few of its lines; the others are grey, below them, and counted."""
    mine = [row for row in unpack(chart.rows or pack(rows)) if row.get(chart.needs) is not None]
    mine = [row for row in mine if chart.map in (None, row.get("map"))]
    spec: dict[str, Any] = {key: value for key, value in chart.spec.items() if key != "autosize"} | {"width": WIDTH}
    shown = choice or next(iter(chart.choices), RowFilter(""))
    if chart.choices:
        mine = [row for row in mine if shown.accepts(row)]
    if heading := shown.text if chart.choices else chart.title:
        spec["title"] = {"text": heading, "fontWeight": "normal", "anchor": "start"}
    if chart.map is not None:
        mine = winner_rows(mine)
    drawn = {row["label"] for row in mine if "label" in row}
    named = set(shown.named) if LENGTHS in chart.axes else drawn
    if LENGTHS in chart.axes:
        told = ["a line joins one batch size"] * (len({row["batch"] for row in mine}) > 1)
        told += [f"{len(drawn - named)} more implementations in grey"] * bool(drawn - named)
        spec["title"] |= {"subtitle": "; ".join(told), "subtitleColor": "#666666"}
        mine = sorted(mine, key=lambda row: row["label"] in named)
    if chart.lines:
        spec["height"] = chart.step * len({row[chart.lines] for row in mine})
    axes = {name: listed(field, mine) for name, field in chart.axes.items()}
    params = [one | {"value": axes[one["name"]]} if one["name"] in axes else one for one in spec["params"]]
    found = ranges(len(labels), LIGHT)
    coloured = (name in named or name not in drawn for name in labels)
    found["category"] = [colour if one else GREY for colour, one in zip(found["category"], coloured)]
    data = {"params": params, "datasets": {"rows": mine}, "config": CONFIG | {"range": found}}
    return _with_drawn_legends(spec, set(keys(named))) | data


def listed(field: str, rows: list[Cell]) -> list[Any]:
    """Return the values of a field in their order, as the page does."""
    places = {row[field]: row.get(f"{field}_place", row[field]) for row in rows if field in row}
    return sorted(places, key=lambda value: places[value])


def _with_drawn_legends(node: Any, shown: set[str]) -> Any:
    """Return a copy of a specification whose legends list only the names that are drawn."""
    if isinstance(node, list):
        return [_with_drawn_legends(one, shown) for one in node]
    if not isinstance(node, dict):
        return node
    copy = {key: _with_drawn_legends(value, shown) for key, value in node.items()}
    if isinstance(legend := copy.get("legend"), dict) and "values" in legend:
        legend["values"] = [name for name in legend["values"] if name in shown]
    return copy
