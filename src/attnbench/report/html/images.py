"""Every chart of the page as PNG and SVG, drawn offline, for papers and READMEs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vl_convert

from attnbench.errors import UsageError
from attnbench.report.html.bundle import VEGA_LITE
from attnbench.report.html.cells import Cell
from attnbench.report.html.charts import Chart
from attnbench.report.html.packing import unpack
from attnbench.report.html.page import Page
from attnbench.report.html.palette import LIGHT, ranges

WIDTH = 640
SCALE = 2
AXIS = {"titleFontWeight": "normal", "domainColor": "#bbbbbb", "tickColor": "#bbbbbb", "gridColor": "#e4e4e4"}
FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"


def write_images(page: Page, folder: Path) -> list[Path]:
    """Draw them all; those that show one thing at a time show what the page does at first."""
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(page.parts):
            tail = f"-{number + 1}" if len(page.parts) > 1 else ""
            for chart in (chart for view in part.views for chart in view.charts):
                spec = drawable(chart, part.cells.rows, len(page.labels))
                png, svg = (folder / f"{chart.name}{tail}.{kind}" for kind in ("png", "svg"))
                png.write_bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=SCALE))
                svg.write_text(vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE), encoding="utf-8")
                written += [png, svg]
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror or error}. Give --png another folder.") from error
    return written


def drawable(chart: Chart, rows: list[Cell], colours: int) -> dict[str, Any]:
    """The chart with its data and the colours of the light page."""
    mine = [row for row in (unpack(chart.rows) if chart.rows else rows) if row.get(chart.needs) is not None]
    spec: dict[str, Any] = {key: value for key, value in chart.spec.items() if key != "autosize"} | {"width": WIDTH}
    if chart.choices:
        first = chart.choices[0]
        mine = [row for row in mine if first.accepts(row)]
        spec["title"] = {"text": first.text, "fontWeight": "normal", "anchor": "start"}
    config = {
        "range": ranges(colours, LIGHT),
        "font": FONT,
        "background": "white",
        "view": {"stroke": None},
        "axis": AXIS,
    }
    if chart.lines:
        spec["height"] = chart.step * len({row[chart.lines] for row in mine})
    lengths = {"name": "lengths", "value": sorted({row["len"] for row in mine if "len" in row})}
    params = [lengths if param["name"] == "lengths" else param for param in spec["params"]]
    return spec | {"params": params, "datasets": {"rows": mine}, "config": config}
