"""The table as an SQLite database: table `records`, lists of samples as JSON that `json_each` can unfold."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from attnbench.results.exports.table import COLUMNS, Source, rows_of_64_bits

TYPES = {
    "text": "TEXT",
    "integer": "INTEGER",
    "real": "REAL",
    "boolean": "INTEGER",
    "reals": "TEXT",
    "integers": "TEXT",
}


def write_sqlite(sources: Sequence[Source], path: Path) -> None:
    """A new database, where at most an empty file may be yet; OSError where the place cannot be written."""
    columns = ", ".join(f'"{name}" {TYPES[kind]}' for name, kind in COLUMNS.items())
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
