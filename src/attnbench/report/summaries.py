"""`summary.txt`, `performance.json`, `memory.json` and `correctness.json`: a run for people and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from attnbench.drafts import write_texts
from attnbench.errors import UsageError
from attnbench.report.summary_documents import Document, Measured, correctness, memory, performance
from attnbench.report.summary_text import summary_text

FILES = ("correctness.json", "memory.json", "performance.json", "summary.txt")


def folder_of(page: Path) -> Path:
    """Where the summaries of a page lie: beside it."""
    return page.with_name(f"{page.stem}-summary")


def write_summaries(parts: Sequence[Measured], folder: Path, left: Sequence[str] = ()) -> list[Path]:
    """Write the four files into a folder, which is made if need be; nothing is replaced before all are on disk.

    `left` tells of runs that ended early.
    """
    speed = performance(parts)
    documents = {"performance.json": speed, "memory.json": memory(parts), "correctness.json": correctness(parts)}
    texts = {name: _json(document) for name, document in documents.items()}
    texts["summary.txt"] = summary_text(parts, speed, left)
    try:
        write_texts({folder / name: texts[name] for name in FILES})
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror or error}. Choose another folder with --summaries."
        ) from error
    return [folder / name for name in FILES]


def _json(document: Document) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
