"""Files that are written whole or not at all: what was there stays until its successor is complete."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield a new file in the same folder to write to, which takes the place of `path` if the block ends well.

    Its name cannot be foreseen, so nobody can have put a link there, and a link in place of `path` is replaced, not
    followed. The new file has the permissions of the old one. Folders are made if need be. A device or a pipe has
    nothing to keep and is written to directly.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        yield path
        return
    draft = path.with_name(f".attnbench-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        if path.is_file() and not path.is_symlink():
            draft.chmod(path.stat().st_mode & 0o7777)
        yield draft
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write all of them, or none: nothing is replaced before everything is on disk."""
    with ExitStack() as stack:
        for path, text in texts.items():
            stack.enter_context(draft_of(path)).write_text(text, encoding="utf-8", newline="")
