"""Files that are written whole or not at all: what was there stays until its successor is complete."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A file beside it to write to, which takes its place when the block ends well. Folders are made if need be."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()


def write_texts(texts: Mapping[Path, str]) -> None:
    """All of them, or none: nothing is replaced before everything is on disk."""
    with ExitStack() as stack:
        for path, text in texts.items():
            stack.enter_context(draft_of(path)).write_text(text, encoding="utf-8", newline="")
