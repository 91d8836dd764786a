"""Export formats by name. A new format is one small file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attnbench.drafts import draft_of
from attnbench.errors import UsageError
from attnbench.results.exports.benchmark_tools import (
    bencher,
    github_action_benchmark,
    google_benchmark,
    pytest_benchmark,
)
from attnbench.results.exports.table import Source
from attnbench.results.exports.table_files import csv_text, write_parquet, write_sqlite

Sources = Sequence[Source]
JSON: dict[str, Callable[[Sources], Any]] = {
    "pytest-benchmark": pytest_benchmark,
    "google-benchmark": google_benchmark,
    "bencher": bencher,
    "github-action-benchmark": github_action_benchmark,
}
"""Formats of other benchmark tools, timed cells only."""
BINARY: dict[str, Callable[[Sources, Path], None]] = {"parquet": write_parquet, "sqlite": write_sqlite}
"""Formats that are not text."""


def export_text(sources: Sources, form: str) -> str:
    """Return the whole document of a text format."""
    if form == "csv":
        return csv_text(sources)
    return msgspec.json.format(msgspec.json.encode(JSON[form](sources)), indent=2).decode() + "\n"


def export_file(sources: Sources, form: str, path: Path) -> None:
    """Write a file of any format; an existing one is replaced only once the new one is whole."""
    try:
        with draft_of(path) as draft:
            if form in BINARY:
                draft.touch()
                BINARY[form](sources, draft)
            else:
                draft.write_text(export_text(sources, form), encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}. Choose another file with -o.") from error
