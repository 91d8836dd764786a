"""The views of a section, in the order of the page: each has a heading, a sentence, charts and a table, which the page
fills, sorts and filters; and the rows of those that do not show cells: frameworks side by side, KV cache, kernels,
growth with length, reasons, ceilings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from msgspec import Struct

from attnbench.report.html import charts
from attnbench.report.html.cells import FARTHEST, Cells, pack, short, winner_rows
from attnbench.report.html.charts import Chart
from attnbench.report.html.layout import line_choices
from attnbench.report.html.sections import ShapeNames
from attnbench.results.families import tracks
from attnbench.results.growth import Fit, compute_bound, exponent, fits_until, memory_points, time_points
from attnbench.results.ratios import EXCELLENT, GOOD, LEAST_DIFFERENCE
from attnbench.results.records import framework_of, is_timed, label, without_result
from attnbench.results.sentences import CANNOT_TELL, capped, category, counted, format_ratio
from attnbench.spec import Cost, Ok, Record

FEW = "The best and the plain ones are firm, the others faint until you point at their names."
MOST_LINES = 80
"""Most shapes that a chart with a line per shape draws."""
SIDES = {1: "torch", -1: "JAX", 0: "too close to call"}
"""Sign of a ratio -> the faster framework."""
MOST_KERNELS = 12
MOST_NAMES = 8
LONGEST_REASON = 400
SHORT_REASON = 200
MOST_REASONS = 3
CEILINGS = {"always": "compute", "never": "memory"}
"""Regime -> limit that sets the ceiling at all lengths of a track."""
Rows = list[dict[str, Any]]
Kind = Literal[
    "text", "label", "ns", "bytes", "number", "ratio", "percent", "half", "error", "gain", "interval", "list", "of"
]
"""Ways to write a field. An `interval` is the field of its low edge, by which rows are sorted; the high edge is called
`_high` for `_low`. A `gain` is written as its `_text`."""


class Column(Struct, frozen=True):
    """A field, its heading with the unit where the figures do not carry it, and how it is written."""

    field: str
    title: str
    kind: Kind = "text"


class Table(Struct, frozen=True, omit_defaults=True):
    """A table with `rows` of its own, or with the rows of the section that have the field `needs`."""

    columns: list[Column]
    sort: str
    needs: str = ""
    rows: dict[str, Any] | None = None
    made_by: str = ""
    """Function of the page that derives its rows from those that pass the filters."""
    descending: bool = False


def own(
    columns: list[Column], rows: Sequence[Mapping[str, Any]], sort: str, descending: bool = False, made_by: str = ""
) -> Table:
    """Return a table whose rows are not cells."""
    return Table(columns, sort, rows=pack(rows), made_by=made_by, descending=descending)


SHAPE = Column("shape", "shape")
LABEL = Column("label", "implementation", "label")
TIME = Column("ns", "time", "ns")
PEAK = Column("peak", "peak", "bytes")
RATE = Column("tflops", "TFLOP/s", "number")
REMARKS = Column("notes", "remarks")

WINNERS = Table([
    SHAPE, Column("label", "fastest", "label"), Column("same", "same kernel", "label"), TIME,
    Column("next_label", "next best", "label"), Column("regret", "regret of the next best", "percent"),
    Column("certain", "certain"), Column("field", "measured here", "number"), REMARKS,
], "shape", "ns", made_by="winners")  # fmt: skip
REGRET = Table([
    LABEL, Column("shapes", "shapes", "of"), Column("wins", "fastest", "number"),
    Column("mean_regret", "regret, mean", "percent"), Column("worst_regret", "regret, worst", "percent"),
    Column("worst_shape", "worst at"),
], "shapes", "ns", made_by="regret", descending=True)  # fmt: skip
SPEEDUPS = Table([
    SHAPE, LABEL, TIME, Column("half", "95 %", "half"), Column("gain", "times as fast (99 %)", "gain"),
    Column("gain_is", "category"), RATE, Column("tokens", "tokens/s", "number"), REMARKS,
], "gain", "ns", made_by="speedups")  # fmt: skip
MEMORY = Table([
    SHAPE, LABEL, PEAK, Column("theory", "theory", "bytes"), Column("over", "peak / theory", "ratio"),
    Column("method", "measured by"),
], "over", "peak", made_by="memory", descending=True)  # fmt: skip
FRAGMENTATION = Table([
    SHAPE, LABEL, Column("reserved", "reserved", "bytes"), PEAK, Column("fragmentation", "fragmentation", "percent"),
], "fragmentation", "fragmentation", descending=True)  # fmt: skip
PERCENTILES = Table([
    SHAPE, LABEL, Column("ns", "P50", "ns"), Column("p95", "P95", "ns"), Column("p99", "P99", "ns"),
    Column("max", "max", "ns"), Column("tail", "P99 / P50", "ratio"), Column("samples", "samples", "number"),
    Column("outliers", "outliers, kept", "number"), Column("clock", "clock"),
], "tail", "ns", made_by="tails", descending=True)  # fmt: skip
ROOFLINE = Table([
    SHAPE, LABEL, Column("roofline", "share reached", "percent"), Column("bound", "ceiling of the shape"), RATE,
    Column("gbs", "GB/s", "number"), Column("intensity", "FLOP per byte", "number"),
], "roofline", "roofline", descending=True)  # fmt: skip
COMPILE = Table([
    SHAPE, LABEL, Column("compile", "compile", "ns"), Column("first", "first call", "ns"),
], "compile", "compile", descending=True)  # fmt: skip
CORRECTNESS = Table([
    SHAPE, LABEL, Column("verdict", "result"), Column("error", "forward error", "error"),
    Column("allowed", "allowed", "error"), Column("share", "share of allowed", "percent"),
    Column("gradient", "gradient error", "error"), Column("gradient_allowed", "allowed", "error"),
    Column("lse", "LSE error", "error"), Column("deterministic", "deterministic"), Column("stable", "stable at"),
    Column("hidden_nan", "NaN behind the mask"), Column("checked", "rows checked", "percent"),
    Column("approximate", "approximate"), Column("why", "why"),
], "share", "verdict", descending=True)  # fmt: skip
NOT_RUN = Table([
    Column("status", "what happened"), Column("cells", "cells", "number"), Column("labels", "implementations"),
    Column("reason", "reason"), Column("where", "for example at"),
], "cells", "reason", made_by="skipped", descending=True)  # fmt: skip

FRAMEWORKS = [
    SHAPE, Column("torch", "best of torch", "label"), Column("torch_ns", "time", "ns"),
    Column("jax", "best of JAX", "label"), Column("jax_ns", "time", "ns"),
    Column("gain", "torch is so many times as fast (99 %)", "gain"), Column("side", "faster"),
]  # fmt: skip
CACHE = [
    SHAPE, Column("cache", "KV cache", "bytes"), Column("per_token", "per token of context", "bytes"),
    Column("scores", "scores, if they were stored", "bytes"),
]  # fmt: skip
GROWTH = [Column("track", "shapes"), LABEL, Column("lengths", "lengths")]
GROWTH_TIME = [
    *GROWTH, Column("time", "time ~ n to the power", "ratio"), Column("time_low", "95 %", "interval"),
    Column("time_theory", "in theory", "ratio"), Column("bound", "ceiling of the shapes"),
]  # fmt: skip
GROWTH_MEMORY = [
    *GROWTH, Column("memory", "memory ~ n to the power", "ratio"), Column("memory_low", "95 %", "interval"),
    Column("memory_theory", "in theory", "ratio"), Column("memory_is", "at the long end"),
    Column("fits", "fits until (tokens)", "number"),
]  # fmt: skip
KERNELS = [LABEL, Column("pass", "pass"), Column("shapes", "shapes", "number"), Column("kernels", "kernels", "list")]


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
    cached, launched = kv_cache(cells), kernels(cells)
    views = [
        *_speed(cells, labels),
        _memory(cells, labels),
        *_growth(cells),
        _shown(View("cache", "KV cache",
                    "What keys and values of the whole context take in memory, whoever reads them.",
                    table=own(CACHE, cached, "cache", True)), cached),
        _shown(View("fragmentation", "Fragmentation",
                    "1 - allocated / reserved of the whole process: what its allocator holds and nobody used at the "
                    "peak, blocks kept for the next call included.", table=FRAGMENTATION),
               _holds(cells, "fragmentation")),
        _shown(View("roofline", "Roofline",
                    "Grey lines are the ceilings measured on this device by a large matrix product and a large copy. "
                    "Which of the two binds follows from the FLOPs and bytes of a shape, whoever runs it: an "
                    "implementation at 2 % of its ceiling is bound by something else.",
                    [charts.roofline(labels, roofs(cells))], ROOFLINE),
               _holds(cells, "roofline"), "No ceiling was measured for this device and precision."),
        _shown(View("percentiles", "Latency percentiles",
                    "Every sample counts, none was dropped. A long tail is the machine's or the kernel's.",
                    table=PERCENTILES), _holds(cells, "ns")),
        _shown(View("compile", "Compile time", "Once per shape, before anything is timed.",
                    [charts.strip("compile", tuple(labels), "datum.compile / 1e9", "Compile time (s)", "compile")],
                    COMPILE), _holds(cells, "compile"), "Nothing that was timed had to be compiled."),
        _correctness(cells, labels),
        _frameworks(cells),
        history,
        _shown(View("kernels", "Kernels that ran", "Read from a profile of the timed call, not from a name.",
                    table=own(KERNELS, launched, "label", made_by="kernels")), launched, "No run was profiled."),
        _shown(View("not-run", "Skipped or failed", "Once per reason. What has no result has no time.",
                    table=NOT_RUN), any(cell["status"] != "ok" for cell in cells.rows),
               "Everything that was asked for ran and was right."),
    ]  # fmt: skip
    return [view for view in views if view is not None]


def _shown(view: View, there: Sequence[object] | bool, empty: str = "") -> View | None:
    """Return the view if there is something to see, else its title with the reason; without a reason None."""
    return view if there else View(view.name, view.title, empty=empty) if empty else None


def _holds(cells: Cells, field: str) -> bool:
    return any(cell.get(field) is not None for cell in cells.rows)


def _speed(cells: Cells, labels: Sequence[str]) -> list[View | None]:
    choices = line_choices(cells.rows, "ns", cells.standings)
    time = charts.against_length(
        "time", labels, "ns", "Time per call (ms)", low="datum.low / 1e6", high="datum.high / 1e6", choices=choices
    )
    low, high = "datum.tflops * datum.ns / datum.high", "datum.tflops * datum.ns / datum.low"
    rate = charts.against_length("rate", labels, "tflops", "Rate (TFLOP/s)", low, high, choices=choices)
    fastest = sorted({row["label"] for row in winner_rows(cells.rows)})
    winners = View(
        "winners",
        "Winner map",
        "The fastest exact implementation at each batch and length; ≈ and a dashed frame where it is too close to "
        "call. Names of one kernel count once. Regret is the extra time that another choice costs. Kinds of shapes "
        "measured at one batch and length only are in the table.",
        [charts.winner_map(labels, fastest, one) for one in cells.maps],
        WINNERS,
    )
    regret = View(
        "regret",
        "One for all shapes",
        "What it costs to use one implementation everywhere: compare those that ran on as many shapes.",
        table=REGRET,
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
        table=SPEEDUPS,
    )
    timed = _holds(cells, "ns")
    return [
        _shown(winners, timed, explain_nothing_timed(cells.records)),
        _shown(regret, timed),
        _shown(length, timed),
        _shown(speedups, _holds(cells, "gain0"), "Nothing was timed that could be compared."),
    ]


def _beside(cells: Cells) -> str:
    beside = any("beside" in cell for cell in cells.rows)
    return " Batches that share a length stand side by side, the smallest on the left." if beside else ""


def _memory(cells: Cells, labels: Sequence[str]) -> View | None:
    choices = line_choices(cells.rows, "peak", cells.standings)
    title = "Peak memory beyond the inputs (MB)"
    chart = charts.against_length("memory", labels, "peak", title, theory="datum.theory / 1e6", choices=choices)
    note = (
        "Points are measured; a tick is what theory asks for (output, gradients, scores where they are stored)."
        f" {FEW}{_beside(cells)}"
    )
    why = next((f": {cell['method']}" for cell in cells.rows if cell.get("method")), "")
    view = View("memory", "Memory against length", note, [chart], MEMORY)
    return _shown(view, _holds(cells, "peak"), f"No peak was measured{why}.")


def _growth(cells: Cells) -> list[View | None]:
    rows = growth_rows(cells.records, cells.names)
    time, memory = ([row for row in rows if row.get(field) is not None] for field in ("time", "memory"))
    fitted = (
        "Exponents over the lengths measured at one batch size; 1 is O(n), 2 is O(n^2). Two lengths have no interval."
    )
    return [
        _shown(View("growth-time", "Growth of time with length",
                    f"{fitted} The ceiling follows from the FLOPs and bytes of the shapes, not from the "
                    "implementation.", table=own(GROWTH_TIME, time, "track")), time,
               "Nothing was timed at three lengths of one batch size, or at two that are 4 times apart."),
        _shown(View("growth-memory", "Growth of memory with length",
                    f"{fitted} Where it stops fitting the device (JAX: what its allocator may take of it) is said of "
                    "those that store the scores, up to 8 times the longest length measured.",
                    table=own(GROWTH_MEMORY, memory, "track")), memory),
    ]  # fmt: skip


def _correctness(cells: Cells, labels: Sequence[str]) -> View | None:
    beyond = any(cell.get("share", 0) > FARTHEST for cell in cells.rows)
    title = "Error / error allowed" + (f" ({FARTHEST:.0f}: as much or more)" if beyond else "")
    drawn = [charts.strip("correctness", tuple(labels), "datum.drawn_share", title, "drawn_share", limit=1)]
    note = (
        "Relative error against float64, of the output or of the gradients, whichever made more of what it may. What "
        "is allowed follows from plain attention in the same precision; beyond the dashed line a result is wrong and "
        "has no time."
    )
    shown = drawn if _holds(cells, "drawn_share") else []
    return _shown(View("correctness", "Correctness", note, shown, CORRECTNESS), _holds(cells, "verdict"))


def _frameworks(cells: Cells) -> View | None:
    rows = side_by_side(cells)
    note = (
        "The best exact implementation of each on the same shape, measured in interleaved rounds, with 99 % intervals, "
        "by the run that decides the shape if it has both, else by the newest that has. "
        f"One is faster where the whole interval lies more than {100 * (LEAST_DIFFERENCE - 1):.0f} % from 1; grey is "
        "too close to call, or cannot be told."
    )
    drawn = [charts.side_by_side(rows)] if 0 < len(rows) <= MOST_LINES else []
    view = View("frameworks", "torch next to JAX", note, drawn, own(FRAMEWORKS, rows, "gain", True))
    return _shown(view, rows, "No shape was timed in both frameworks.")


def side_by_side(cells: Cells) -> Rows:
    """Return a row for every shape on which the winner of torch and that of JAX took turns."""
    torch, jax = (cells.standings.frameworks.get(name, {}) for name in ("torch", "jax"))
    rows: Rows = []
    for key in (key for key in torch if key in jax):
        ours, theirs = torch[key].first, jax[key].first
        both = cells.standings.together(key, ours, theirs) if ours is not None and theirs is not None else None
        if both is None or ours is None or theirs is None:
            continue
        ratio = both.ratio(ours, theirs)
        times = {"torch": ours, "torch_ns": both.times[ours], "jax": theirs, "jax_ns": both.times[theirs]}
        gain = {"gain": ratio.value, "gain_low": ratio.low, "gain_high": ratio.high, "gain_text": format_ratio(ratio)}
        side = CANNOT_TELL if category(ratio) == CANNOT_TELL else SIDES[ratio.sign]
        rows.append(cells.names.fields(both.workload) | times | gain | {"side": side})
    return rows


def kv_cache(cells: Cells) -> Rows:
    """Return the bytes of a cache of keys and values at each shape; they do not depend on an implementation."""
    rows: dict[str, dict[str, Any]] = {}
    for record in cells.records:
        if isinstance(record, Ok) and record.memory.kv_cache_bytes:
            workload = record.workload
            rows[workload.id] = cells.names.fields(workload) | {
                "cache": record.memory.kv_cache_bytes,
                "per_token": round(record.memory.kv_cache_bytes / (workload.batch * workload.kv_len)),
                "scores": record.memory.scores_bytes or None,
            }
    return list(rows.values())


def kernels(cells: Cells) -> Rows:
    """Return the kernels that each cell launched; the page joins shapes that launched the same."""
    return [
        {"label": label(record), "framework": framework_of(record)}
        | cells.names.fields(record.workload)
        | {"kernels": "\n".join(capped([*map(short, record.kernels)], MOST_KERNELS))}
        for record in cells.records
        if isinstance(record, Ok) and record.kernels
    ]


def explain_nothing_timed(records: Iterable[Record]) -> str:
    """Return the reasons that most cells without a result have."""
    reasons = Counter(record.reason for record in records if not isinstance(record, Ok))
    told = [
        f"{' '.join(reason.split())[:SHORT_REASON].rstrip('.')} ({counted(count, 'cell')})"
        for reason, count in reasons.most_common(MOST_REASONS)
    ]
    return "Nothing was timed." + (f" The reasons given most often: {'; '.join(told)}." if told else "")


def not_run(records: Iterable[Record], names: ShapeNames) -> Rows:
    """Return a row per reason for the cells without a result."""
    return [
        {
            "status": status,
            "cells": len(group),
            "labels": ", ".join(capped(list(dict.fromkeys(map(label, group))), MOST_NAMES)),
            "reason": short(reason, LONGEST_REASON),
            "where": names.shape(group[0].workload),
        }
        for (status, reason), group in without_result(records).items()
    ]


def roofs(cells: Cells) -> Rows:
    """Return the measured ceilings as lines, worked out from the shares that were reached under them."""
    points: dict[str, list[Cost]] = {}
    for record in (record for run in cells.standings.runs for record in run):
        if is_timed(record) and record.cost.roofline and record.cost.bytes:
            points.setdefault(f"{framework_of(record)}, {record.workload.dtype}", []).append(record.cost)
    reached = [cost.flops / cost.bytes for costs in points.values() for cost in costs]
    rows: Rows = []
    for name, costs in points.items():
        tflops, gb_per_s = _ceiling(costs, "compute"), _ceiling(costs, "memory")
        ends = [min(reached), max(reached)]
        if tflops and gb_per_s and ends[0] < 1e3 * tflops / gb_per_s < ends[1]:
            ends.insert(1, 1e3 * tflops / gb_per_s)  # the memory ceiling rises until the compute ceiling binds
        for x in ends:
            limits = [limit for limit in (tflops, gb_per_s and gb_per_s * x / 1e3) if limit]
            if limits:
                rows.append({"roof": name, "intensity": round(x, 3), "tflops": round(min(limits), 4)})
    return rows


def _ceiling(costs: Iterable[Cost], bound: str) -> float | None:
    """Return TFLOP/s or GB/s of a ceiling; None if nothing was bound by it."""
    rates = [
        rate / cost.roofline
        for cost in costs
        if cost.bound == bound and cost.roofline and (rate := cost.tflops if bound == "compute" else cost.gb_per_s)
    ]
    return median(rates) if rates else None


def growth_rows(records: Iterable[Record], names: ShapeNames) -> Rows:
    """Return a row per implementation and track that was measured at two lengths or more."""
    rows: Rows = []
    for track, members in tracks(records).items():
        regime = compute_bound(record for mine in members.values() for record in mine)
        ceiling = None if regime is None else CEILINGS.get(regime.begins)
        if regime is not None and ceiling is None:
            ceiling = f"compute, from somewhere between {regime.below:,} and {regime.length:,} tokens"
        for name, mine in members.items():
            time, memory = exponent(time_points(mine)), exponent(memory_points(mine))
            shapes = [record.workload for record in mine if isinstance(record, Ok)]
            row: dict[str, Any] = {
                "label": name,
                "framework": track.family.framework,
                "pass": track.family.pass_,
                "track": names.track(shapes[0]) if shapes else "",
                # What the filters look at, a line for each shape.
                "words": "\n".join("{workload} {shape} {kind}".format(**names.fields(w)) for w in shapes),
            }
            if time is not None:
                row |= _fit_fields("time", time) | {"bound": ceiling}
            if memory is not None:
                limit = fits_until(mine)
                fits = None if limit is None else limit.length
                row |= _fit_fields("memory", memory) | {"memory_is": memory.growth, "fits": fits}
            if time is not None or memory is not None:
                rows.append(row)
    return rows


def _fit_fields(name: str, fit: Fit) -> dict[str, Any]:
    low, high = fit.overall.interval or (None, None)
    return {
        "lengths": f"{fit.lengths[0]} to {fit.lengths[-1]}",
        name: fit.overall.exponent,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_theory": fit.overall.theory,
    }
