"""Runs as one flat table with a row per record, which the formats for databases and spreadsheets write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from attnbench.errors import UsageError
from attnbench.files import INTEGERS
from attnbench.measuring.rates import notes_of
from attnbench.results.records import framework_of
from attnbench.results.run_file import Header
from attnbench.spec import Environment, Ok, Record

Type = Literal["text", "integer", "real", "boolean", "reals", "integers"]
Row = dict[str, Any]
"""Column -> value; None if the record has none."""
PARTS = ("forward", "backward", "wall", "events", "kernel", "graph")
"""Other clocks and parts whose medians have a column of their own."""
TIMES = ("median", "min", "max", "p50", "p95", "p99", "mean", "std")
ERRORS = ("forward", "backward", "lse")


def _columns(kind: Type, names: str) -> dict[str, Type]:
    return dict.fromkeys(names.split(), kind)


COLUMNS: Mapping[str, Type] = {
    **_columns("text", "run created suite attnbench status reason implementation config framework workload"),
    **_columns("integer", "batch q_len kv_len heads kv_heads head_dim v_head_dim"),
    **_columns("text", "dtype mask pass"),
    **_columns("real", "scale softcap"),
    **_columns("text", "inputs source tags"),
    **_columns("boolean", "approximate deterministic"),
    "clock": "text",
    **{f"{name}_ns": "real" for name in TIMES},
    **_columns("real", "ci95_low_ns ci95_high_ns"),
    **_columns("integer", "outliers samples calls_per_sample"),
    **{f"{name}_median_ns": "real" for name in PARTS},
    **_columns("integer", "compile_ns first_call_ns"),
    **_columns("real", "tokens_per_s calls_per_s samples_per_s"),
    "peak_bytes": "integer",
    "peak_reason": "text",
    **_columns("integer", "theory_bytes scores_bytes kv_cache_bytes reserved_bytes"),
    "fragmentation": "real",
    "memory_method": "text",
    **_columns("integer", "flops least_bytes"),
    **_columns("real", "tflops gb_per_s roofline"),
    **_columns("text", "bound roofline_reason"),
    **{f"{name}_error": "real" for name in ERRORS},
    **_columns("real", "forward_error_allowed backward_error_allowed max_abs_error"),
    "hidden_nan": "text",
    "verified_share": "real",
    **_columns("text", "quality kernels notes isolation fingerprint device device_name"),
    "device_memory_bytes": "integer",
    "cpu": "text",
    **_columns("integer", "cores threads"),
    **_columns("text", "python system driver framework_version packages harness commit"),
    "samples_ns": "reals",
    "rounds": "integers",
}
"""Every column, in order. `config`, `quality` and `packages` are JSON; `reals` and `integers` are lists."""


class ExportedRun(Struct, frozen=True):
    """A run to export: name, header and records."""

    name: str
    header: Header
    records: Sequence[Record]
    dates: Sequence[str] = ()
    """When each record was made; empty if all were made when the run began."""

    @property
    def dated(self) -> list[tuple[str, Record]]:
        """The records, each with the date when it was made."""
        return list(zip(self.dates or [self.header.created] * len(self.records), self.records, strict=True))


def rows(sources: Sequence[ExportedRun]) -> Iterator[Row]:
    """Yield a row per record of any status, with every column."""
    for source in sources:
        header = {"run": source.name, "suite": source.header.suite, "attnbench": source.header.attnbench}
        for when, record in source.dated:
            found = {**header, "created": when, **_identity(record), **_where(record.environment), **_measured(record)}
            yield {name: found.get(name) for name in COLUMNS}


def rows_of_64_bits(sources: Sequence[ExportedRun]) -> Iterator[Row]:
    """Yield the same rows for a database; raises UsageError for an integer that no column can hold."""
    for row in rows(sources):
        for name, value in row.items():
            if isinstance(value, int) and value not in INTEGERS:
                cell = f"{row['implementation']} on {row['workload']}"
                raise UsageError(
                    f"{name} of {cell} in {row['run']} needs {value.bit_length()} bits, but a column holds 63: "
                    "leave this cell out with --filter, or choose --format csv."
                )
        yield row


def _identity(record: Record) -> Row:
    w = record.workload
    return {
        **w.axes,
        "status": record.status,
        "reason": record.reason,
        "implementation": record.implementation,
        "config": _json(record.config),
        "framework": framework_of(record),
        "workload": w.id,
        "scale": w.scale,
        "softcap": w.softcap,
        "inputs": w.inputs,
        "source": w.source,
        "tags": ", ".join(w.tags),
        "isolation": record.isolation,
    }


def _where(environment: Environment | None) -> Row:
    if environment is None:
        return {}
    same = ("device", "device_name", "cpu", "cores", "threads", "python", "system", "driver", "harness", "commit")
    return {name: getattr(environment, name) for name in same} | {
        "fingerprint": environment.fingerprint,
        "device_memory_bytes": environment.memory_bytes,
        "framework_version": environment.packages.get(environment.framework),
        "packages": _json(environment.packages),
    }


def _measured(record: Record) -> Row:
    """Return the figures of a record; `rows` leaves out fields that no column is named after."""
    row: Row = {}
    if record.errors is not None:
        row = {f"{name}_error": getattr(record.errors, name) for name in ERRORS}
        row |= {f"{name}_error_allowed": getattr(record.errors, f"{name}_allowed") for name in ("forward", "backward")}
        row |= {"max_abs_error": record.errors.max_abs, "hidden_nan": record.errors.hidden_nan}
    if not isinstance(record, Ok):
        return row
    memory, cost = asdict(record.memory), asdict(record.cost)
    row |= {"peak_reason": memory.pop("reason"), "memory_method": memory.pop("method"), **memory}
    row |= {"roofline_reason": cost.pop("reason"), "least_bytes": cost.pop("bytes"), **cost}
    row |= {f"{name}_median_ns": time.median_ns for name, time in record.also.items()}
    row |= {
        "approximate": record.approximate,
        "deterministic": record.deterministic,
        "verified_share": record.verified_at.share,
        "compile_ns": record.compile_ns,
        "first_call_ns": record.first_call_ns,
        "kernels": None if record.kernels is None else "; ".join(record.kernels),
        "quality": _json(record.quality),
        "notes": "; ".join(notes_of(record)),
    }
    if record.throughput is not None:
        row |= asdict(record.throughput)
    if record.time is not None:
        samples, (low, high) = list(record.time.samples_ns), record.time.ci95_ns or (None, None)
        row |= asdict(record.time) | {"samples": len(samples), "ci95_low_ns": low, "ci95_high_ns": high}
        row |= {"samples_ns": samples, "rounds": list(record.time.rounds)}
    return row


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
