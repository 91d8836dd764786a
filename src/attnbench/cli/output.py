"""Where output goes: data to stdout, everything about the way there to stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

WIDE = 200
"""Columns where nobody looks at a terminal, so that tables in files and pipes are not folded."""


class PipeConsole(Console):
    """Rich ends the program with code 1 when the reader of a pipe has gone; `execute` decides that here."""

    def on_broken_pipe(self) -> None:
        """Pass it on."""
        raise BrokenPipeError


def stdout_console() -> Console:
    """For tables and sentences; honours NO_COLOR."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """For progress and warnings."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    return PipeConsole(file=stream, soft_wrap=False, width=None if stream.isatty() else WIDE)


def print_json(document: Any) -> None:
    """One document and nothing else."""
    print(msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=2).decode())


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
