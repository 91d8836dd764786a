"""The tables of the page: their columns and how each is written. The page fills, sorts and filters them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from attnbench.report.html.cells import pack

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
HISTORY = [
    LABEL, SHAPE, Column("runs", "runs", "number"), Column("first", "x anchors at first", "ratio"),
    Column("last", "x anchors now", "ratio"), Column("moved", "since the first", "percent"),
    Column("changes", "changes of level"),
]  # fmt: skip
KERNELS = [LABEL, Column("pass", "pass"), Column("shapes", "shapes", "number"), Column("kernels", "kernels", "list")]
