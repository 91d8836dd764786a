"""The views of a section, in the order of the page: each has a heading, a sentence, charts and a table."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from attnbench.report.html import charts, derived, tables
from attnbench.report.html.cells import FARTHEST, Cells, winner_rows
from attnbench.report.html.charts import Chart
from attnbench.report.html.history import History, how_looked, of_section, point_rows, trend_rows, which_runs, why_none
from attnbench.report.html.layout import line_choices
from attnbench.report.html.sections import Section
from attnbench.report.html.tables import Table, own
from attnbench.results.ratios import EXCELLENT, GOOD, LEAST_DIFFERENCE

FEW = "The best and the plain ones are firm, the others faint until you point at their names."
MOST_LINES = 80
"""Most shapes that a chart with a line per shape draws."""


class View(Struct, frozen=True):
    """One part of a section; `empty` says in one line why there is nothing to see."""

    name: str
    title: str
    note: str = ""
    charts: list[Chart] = []
    table: Table | None = None
    empty: str = ""


def make_views(cells: Cells, labels: Sequence[str], history: View) -> list[View]:
    """Return every view that a section has data for, and a line for those that a reader would miss."""
    views = [
        *_speed(cells, labels),
        _memory(cells, labels),
        *_growth(cells),
        own_view("cache", "KV cache", "What keys and values of the whole context take in memory, whoever reads them.",
                 own(tables.CACHE, derived.kv_cache(cells), "cache", True)),
        _if_any(cells, "fragmentation", View("fragmentation", "Fragmentation",
                "1 - allocated / reserved of the whole process: what its allocator holds and nobody used at the "
                "peak, blocks kept for the next call included.", table=tables.FRAGMENTATION)),
        _roofline(cells, labels),
        _if_any(cells, "ns", View("percentiles", "Latency percentiles",
                "Every sample counts, none was dropped. A long tail is the machine's or the kernel's.",
                table=tables.PERCENTILES)),
        _compile(cells, labels),
        _correctness(cells, labels),
        _frameworks(cells),
        history,
        own_view("kernels", "Kernels that ran", "Read from a profile of the timed call, not from a name.",
                 own(tables.KERNELS, derived.kernels(cells), "label", made_by="kernels"), "No run was profiled."),
        _not_run(cells),
    ]  # fmt: skip
    return [view for view in views if view is not None]


def own_view(
    name: str, title: str, note: str, table: Table, empty: str = "", drawn: Sequence[Chart] = ()
) -> View | None:
    """Return a view of one table; without rows its reason, without a reason None."""
    if table.rows is not None and table.rows["count"]:
        return View(name, title, note, list(drawn), table)
    return View(name, title, empty=empty) if empty else None


def _if_any(cells: Cells, field: str, view: View, empty: str = "") -> View | None:
    if any(cell.get(field) is not None for cell in cells.rows):
        return view
    return View(view.name, view.title, empty=empty) if empty else None


def _speed(cells: Cells, labels: Sequence[str]) -> list[View | None]:
    choices = line_choices(cells.rows, "ns", cells.standings)
    time = charts.against_length(
        "time", labels, "ns", "Time per call (ms)", low="datum.low / 1e6", high="datum.high / 1e6", choices=choices
    )
    rate = charts.against_length(
        "rate",
        labels,
        "tflops",
        "Rate (TFLOP/s)",
        low="datum.tflops * datum.ns / datum.high",
        high="datum.tflops * datum.ns / datum.low",
        choices=choices,
    )
    fastest = sorted({row["label"] for row in winner_rows(cells.rows)})
    winners = View(
        "winners",
        "Winner map",
        "The fastest exact implementation at each batch and length; ≈ and a dashed frame where it is too close to "
        "call. Names of one kernel count once. Regret is the extra time that another choice costs. Kinds of shapes "
        "measured at one batch and length only are in the table.",
        [charts.winner_map(labels, fastest, one) for one in cells.maps],
        tables.WINNERS,
    )
    regret = View(
        "regret",
        "One for all shapes",
        "What it costs to use one implementation everywhere: compare those that ran on as many shapes.",
        table=tables.REGRET,
    )
    length = View(
        "length",
        "Time and rate against length",
        f"Medians with 95 % intervals; a line joins one implementation at one batch size. {FEW}{_beside(cells)}",
        [time, rate],
    )
    speedups = View(
        "speedups",
        "Speed-up",
        "By the edge of the 99 % interval that is nearer to 1: "
        f"excellent above {EXCELLENT:g} times, good from {GOOD:g}, measured from 1.01, investigate below 0.99. "
        "A ratio nearer to 1, or whose interval covers 1, is no significant difference "
        f"if the interval stays within {GOOD:g} times either way; else it cannot tell, and more rounds would.",
        table=tables.SPEEDUPS,
    )
    nothing = derived.why_nothing(cells.records)
    return [
        _if_any(cells, "ns", winners, nothing),
        _if_any(cells, "ns", regret),
        _if_any(cells, "ns", length),
        _if_any(cells, "gain0", speedups, "Nothing was timed that could be compared."),
    ]


def _beside(cells: Cells) -> str:
    told = " Batches that share a length stand side by side, the smallest on the left."
    return told if any("beside" in cell for cell in cells.rows) else ""


def _memory(cells: Cells, labels: Sequence[str]) -> View | None:
    choices = line_choices(cells.rows, "peak", cells.standings)
    title = "Peak memory beyond the inputs (MB)"
    chart = charts.against_length("memory", labels, "peak", title, theory="datum.theory / 1e6", choices=choices)
    note = (
        "Points are measured; a tick is what theory asks for (output, gradients, scores where they are stored)."
        f" {FEW}{_beside(cells)}"
    )
    view = View("memory", "Memory against length", note, [chart], tables.MEMORY)
    why = next((f": {cell['method']}" for cell in cells.rows if cell.get("method")), "")
    return _if_any(cells, "peak", view, f"No peak was measured{why}.")


def _growth(cells: Cells) -> list[View | None]:
    rows = derived.growth_rows(cells.records, cells.names)
    time, memory = ([row for row in rows if row.get(field) is not None] for field in ("time", "memory"))
    fitted = (
        "Exponents over the lengths measured at one batch size; 1 is O(n), 2 is O(n^2). Two lengths have no interval."
    )
    return [
        own_view("growth-time", "Growth of time with length",
                 f"{fitted} The ceiling follows from the FLOPs and bytes of the shapes, not from the implementation.",
                 own(tables.GROWTH_TIME, time, "track"),
                 "Nothing was timed at three lengths of one batch size, or at two that are 4 times apart."),
        own_view("growth-memory", "Growth of memory with length",
                 f"{fitted} Where it stops fitting the device (JAX: what its allocator may take of it) is said of "
                 "those that store the scores, up to 8 times the longest length measured.",
                 own(tables.GROWTH_MEMORY, memory, "track")),
    ]  # fmt: skip


def _not_run(cells: Cells) -> View:
    if all(cell["status"] == "ok" for cell in cells.rows):
        return View("not-run", "Skipped or failed", empty="Everything that was asked for ran and was right.")
    note = "Once per reason. What has no result has no time."
    return View("not-run", "Skipped or failed", note, table=tables.NOT_RUN)


def _roofline(cells: Cells, labels: Sequence[str]) -> View | None:
    note = (
        "Grey lines are the ceilings measured on this device by a large matrix product and a large copy. "
        "Which of the two binds follows from the FLOPs and bytes of a shape, whoever runs it: an implementation at 2 % "
        "of its ceiling is bound by something else."
    )
    view = View("roofline", "Roofline", note, [charts.roofline(labels, derived.roofs(cells))], tables.ROOFLINE)
    return _if_any(cells, "roofline", view, "No ceiling was measured for this device and precision.")


def _compile(cells: Cells, labels: Sequence[str]) -> View | None:
    chart = charts.strip("compile", labels, "datum.compile / 1e9", "Compile time (s)", "compile")
    view = View("compile", "Compile time", "Once per shape, before anything is timed.", [chart], tables.COMPILE)
    return _if_any(cells, "compile", view, "Nothing that was timed had to be compiled.")


def _correctness(cells: Cells, labels: Sequence[str]) -> View | None:
    beyond = any(cell.get("share", 0) > FARTHEST for cell in cells.rows)
    title = "Error / error allowed" + (f" ({FARTHEST:.0f}: as much or more)" if beyond else "")
    drawn = [charts.strip("correctness", labels, "datum.drawn_share", title, "drawn_share", limit=1)]
    if not any("drawn_share" in cell for cell in cells.rows):
        drawn = []
    note = (
        "Relative error against float64, of the output or of the gradients, whichever made more of what it may. What "
        "is allowed follows from plain attention in the same precision; beyond the dashed line a result is wrong and "
        "has no time."
    )
    return _if_any(cells, "verdict", View("correctness", "Correctness", note, drawn, tables.CORRECTNESS))


def _frameworks(cells: Cells) -> View | None:
    rows = derived.side_by_side(cells)
    note = (
        "The best exact implementation of each on the same shape, measured in interleaved rounds, with 99 % intervals, "
        "by the run that decides the shape if it has both, else by the newest that has. "
        f"One is faster where the whole interval lies more than {100 * (LEAST_DIFFERENCE - 1):.0f} % from 1; grey is "
        "too close to call, or cannot be told."
    )
    drawn = [charts.side_by_side(rows)] if 0 < len(rows) <= MOST_LINES else []
    table = own(tables.FRAMEWORKS, rows, "gain", True)
    return own_view("frameworks", "torch next to JAX", note, table, "No shape was timed in both frameworks.", drawn)


def history_view(history: History, section: Section, cells: Cells, labels: Sequence[str]) -> View:
    """Return the view of how the times of a section changed over its runs."""
    trends = of_section(history, section)
    if not trends:
        return View("history", "History", empty=why_none(history, section))
    note = (
        "A point is a run: the time of the cell over that of the anchor kernels timed beside it, so that what slows "
        f"the whole machine down moves nothing here. {which_runs(history)} {how_looked(trends)}"
    )
    chart = charts.history(labels, point_rows(trends, cells.names))
    table = own(tables.HISTORY, trend_rows(trends, cells.names), "moved", True)
    return View("history", "History", note, [chart], table)
