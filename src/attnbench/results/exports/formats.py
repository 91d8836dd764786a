"""Export formats by name: the table as CSV, Parquet and SQLite, and the formats of other benchmark tools.

CSV is for spreadsheets and leaves out lists of samples. Parquet, written by DuckDB, keeps types and lists. SQLite keeps
lists as JSON that `json_each` can unfold. A new format is one small file and one line here.
"""

from __future__ import annotations

import csv
import io
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from attnbench.errors import UsageError
from attnbench.files import draft_of, write_errors
from attnbench.printable import printable
from attnbench.results.exports.benchmark_tools import (
    bencher,
    github_action_benchmark,
    google_benchmark,
    pytest_benchmark,
)
from attnbench.results.exports.table import COLUMNS, ExportedRun, rows, rows_of_64_bits

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


def csv_text(sources: Sequence[ExportedRun]) -> str:
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


def write_parquet(sources: Sequence[ExportedRun], path: Path) -> None:
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


def write_sqlite(sources: Sequence[ExportedRun], path: Path) -> None:
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


JSON: dict[str, Callable[[Sequence[ExportedRun]], Any]] = {
    "pytest-benchmark": pytest_benchmark,
    "google-benchmark": google_benchmark,
    "bencher": bencher,
    "github-action-benchmark": github_action_benchmark,
}
"""Formats of other benchmark tools, timed cells only."""
BINARY: dict[str, Callable[[Sequence[ExportedRun], Path], None]] = {"parquet": write_parquet, "sqlite": write_sqlite}
"""Formats that are not text."""


def export_text(sources: Sequence[ExportedRun], form: str) -> str:
    """Return the whole document of a text format."""
    if form == "csv":
        return csv_text(sources)
    return msgspec.json.format(msgspec.json.encode(JSON[form](sources)), indent=2).decode() + "\n"


def export_file(sources: Sequence[ExportedRun], form: str, path: Path) -> None:
    """Write a file of any format; an existing one is replaced only once the new one is whole."""
    with write_errors(path, "Choose another file with -o."), draft_of(path) as draft:
        if form in BINARY:
            draft.touch()
            BINARY[form](sources, draft)
        else:
            draft.write_text(export_text(sources, form), encoding="utf-8", newline="")
