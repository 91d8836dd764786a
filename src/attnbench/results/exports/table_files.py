"""The table as CSV, for spreadsheets. Lists of samples have no place in a cell and are left out."""

from __future__ import annotations

import csv
import io
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from attnbench.errors import UsageError
from attnbench.printable import printable
from attnbench.results.exports.table import COLUMNS, Source, rows, rows_of_64_bits

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Text that begins like this is run by spreadsheets; an apostrophe before it makes it text again."""
SHOWN = [name for name, kind in COLUMNS.items() if kind not in ("reals", "integers")]


def csv_text(sources: Sequence[Source]) -> str:
    """A heading and a line per record; what was not measured is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(SHOWN)
    for row in rows(sources):
        writer.writerow([_cell(row[name]) for name in SHOWN])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Text on one visible line: it may be printed, and spreadsheets run what looks like a formula."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"'{printable(value)}" if value.lstrip(" ").startswith(FORMULA) else printable(value)
    return value


PARQUET_TYPES = {
    "text": "VARCHAR",
    "integer": "BIGINT",
    "real": "DOUBLE",
    "boolean": "BOOLEAN",
    "reals": "DOUBLE[]",
    "integers": "BIGINT[]",
}


def write_parquet(sources: Sequence[Source], path: Path) -> None:
    """By way of JSON lines in a temporary folder, which is fast; OSError where the place cannot be written."""
    try:
        import duckdb
    except ImportError as error:
        raise UsageError('Parquet needs DuckDB: pip install "attnbench[report]", or choose --format csv.') from error
    columns = {name: PARQUET_TYPES[kind] for name, kind in COLUMNS.items()}
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


SQLITE_TYPES = {
    "text": "TEXT",
    "integer": "INTEGER",
    "real": "REAL",
    "boolean": "INTEGER",
    "reals": "TEXT",
    "integers": "TEXT",
}


def write_sqlite(sources: Sequence[Source], path: Path) -> None:
    """A new database, where at most an empty file may be yet; OSError where the place cannot be written."""
    columns = ", ".join(f'"{name}" {SQLITE_TYPES[kind]}' for name, kind in COLUMNS.items())
    places = ", ".join("?" for _ in COLUMNS)
    values = ([_value(row[name]) for name in COLUMNS] for row in rows_of_64_bits(sources))
    try:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"CREATE TABLE records ({columns})")
            connection.executemany(f"INSERT INTO records VALUES ({places})", values)
    except sqlite3.OperationalError as error:
        raise OSError(str(error)) from error


def _value(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, list) else value
