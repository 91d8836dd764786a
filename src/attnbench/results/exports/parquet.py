"""The table as Parquet, written by DuckDB: types and lists of samples survive."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from attnbench.errors import UsageError
from attnbench.results.exports.table import COLUMNS, Source, rows_of_64_bits

TYPES = {
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
    columns = {name: TYPES[kind] for name, kind in COLUMNS.items()}
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
