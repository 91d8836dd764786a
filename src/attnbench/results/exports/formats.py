"""Export formats by name: one flat table with a row per record as CSV, Parquet and SQLite, and other tools' formats.

CSV is for spreadsheets and leaves out lists of samples. Parquet, written by DuckDB, keeps types and lists. SQLite keeps
lists as JSON that `json_each` can unfold. A new format is one small file and one line here.
"""

from __future__ import annotations

import csv
import io
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import asdict

from attnbench.errors import UsageError
from attnbench.files import INTEGERS, draft_of, write_errors
from attnbench.measuring.rates import notes_of
from attnbench.printable import printable
from attnbench.results.exports.benchmark_tools import (
    bencher,
    github_action_benchmark,
    google_benchmark,
    pytest_benchmark,
)
from attnbench.results.records import framework_of
from attnbench.results.run_file import NamedRun
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


def rows(sources: Sequence[NamedRun]) -> Iterator[Row]:
    """Yield a row per record of any status, with every column."""
    for source in sources:
        header = {"run": source.name, "suite": source.run.header.suite, "attnbench": source.run.header.attnbench}
        for when, record in source.run.dated:
            found = {**header, "created": when, **_identity(record), **_where(record.environment), **_measured(record)}
            yield {name: found.get(name) for name in COLUMNS}


def rows_of_64_bits(sources: Sequence[NamedRun]) -> Iterator[Row]:
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


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Beginnings of text that spreadsheets run as a formula; an apostrophe before it makes it text again."""
SHOWN = [name for name, kind in COLUMNS.items() if kind not in ("reals", "integers")]
TYPES = {
    "text": ("VARCHAR", "TEXT"),
    "integer": ("BIGINT", "INTEGER"),
    "real": ("DOUBLE", "REAL"),
    "boolean": ("BOOLEAN", "INTEGER"),
    "reals": ("DOUBLE[]", "TEXT"),
    "integers": ("BIGINT[]", "TEXT"),
}
"""Kind of a column -> its types in Parquet and in SQLite."""


def csv_text(sources: Sequence[NamedRun]) -> str:
    """Return a heading and a line per record; fields without a measurement are empty. Text is on one visible line that
    neither a terminal nor a spreadsheet interprets."""

    def cell(value: Any) -> Any:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str):
            return f"'{printable(value)}" if value.lstrip(" ").startswith(FORMULA) else printable(value)
        return value

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(SHOWN)
    for row in rows(sources):
        writer.writerow([cell(row[name]) for name in SHOWN])
    return out.getvalue()


def write_parquet(sources: Sequence[NamedRun], path: Path) -> None:
    """Write the table as Parquet; raises OSError if the file cannot be written. DuckDB reads it from JSON lines in a
    temporary folder, which is fast."""
    try:
        import duckdb
    except ImportError as error:
        raise UsageError('Parquet needs DuckDB: pip install "attnbench[report]", or choose --format csv.') from error
    columns = {name: TYPES[kind][0] for name, kind in COLUMNS.items()}
    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
        lines = Path(folder) / "rows.jsonl"
        longest = 0
        with lines.open("wb") as file:
            for row in rows_of_64_bits(sources):
                longest = max(longest, file.write(msgspec.json.encode(row) + b"\n"))
        table = connection.read_json(
            str(lines), columns=columns, format="newline_delimited", maximum_object_size=max(longest + 1, 1 << 24)
        )
        try:
            table.write_parquet(str(path), compression="zstd")
        except duckdb.IOException as error:
            raise OSError(" ".join(str(error).split())) from error


def write_sqlite(sources: Sequence[NamedRun], path: Path) -> None:
    """Write the table `records` to a new database or an empty file; raises OSError if that cannot be written."""
    columns = ", ".join(f'"{name}" {TYPES[kind][1]}' for name, kind in COLUMNS.items())
    places = ", ".join("?" for _ in COLUMNS)
    values = (
        [msgspec.json.encode(v).decode() if isinstance(v := row[name], list) else v for name in COLUMNS]
        for row in rows_of_64_bits(sources)
    )
    try:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"CREATE TABLE records ({columns})")
            connection.executemany(f"INSERT INTO records VALUES ({places})", values)
    except sqlite3.OperationalError as error:
        raise OSError(str(error)) from error


JSON: dict[str, Callable[[Sequence[NamedRun]], Any]] = {
    "pytest-benchmark": pytest_benchmark,
    "google-benchmark": google_benchmark,
    "bencher": bencher,
    "github-action-benchmark": github_action_benchmark,
}
"""Formats of other benchmark tools, timed cells only."""
BINARY: dict[str, Callable[[Sequence[NamedRun], Path], None]] = {"parquet": write_parquet, "sqlite": write_sqlite}
"""Formats that are not text."""


def export_text(sources: Sequence[NamedRun], form: str) -> str:
    """Return the whole document of a text format."""
    if form == "csv":
        return csv_text(sources)
    return msgspec.json.format(msgspec.json.encode(JSON[form](sources)), indent=2).decode() + "\n"


def export_file(sources: Sequence[NamedRun], form: str, path: Path) -> None:
    """Write a file of any format; an existing one is replaced only once the new one is whole."""
    with write_errors(path, "Choose another file with -o."), draft_of(path) as draft:
        if form in BINARY:
            draft.touch()
            BINARY[form](sources, draft)
        else:
            draft.write_text(export_text(sources, form), encoding="utf-8", newline="")
