"""Consoles and JSON output: results go to stdout, progress and warnings to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from attnbench.printable import printable, printable_json, printable_lines, shortened
from attnbench.report.terminal import plain_table

WIDE = 200
"""Columns if the stream is no terminal, so that tables in files and pipes are not folded."""
LONGEST_TEXT = 20_000
"""Characters of anything that is printed as one text."""


class PlainConsole(Console):
    """Prints what others wrote as text and nothing else: every string is one visible line (`printable`), so lines of
    ours are printed one by one."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Take a string or a cell of a table, before it is laid out."""
        return super().render_str(printable(shortened(text, LONGEST_TEXT)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Take everything else (bars, spinners) as it is written."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise the error, which `execute` handles; Rich would end the program with code 1."""
        raise BrokenPipeError


def stdout_console() -> Console:
    """Return the console for tables and sentences; it honours NO_COLOR."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """Return the console for progress and warnings."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    return PlainConsole(file=stream, emoji=False, highlight=False, width=None if stream.isatty() else WIDE)


def say(text: Any) -> None:
    """Print one line of the answer, never folded, on stdout."""
    stdout_console().print(text, markup=False, soft_wrap=True)


def note(text: Any) -> None:
    """Print one line about the way to the answer, never folded, on stderr."""
    stderr_console().print(text, markup=False, soft_wrap=True)


def warn(text: Any) -> None:
    """Print a warning of one line on stderr."""
    note(f"warning: {text}")


def print_json(document: Any) -> None:
    """Print one JSON document and nothing else."""
    print_json_text(msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=2).decode() + "\n")


def print_json_text(text: str) -> None:
    """Write a JSON document to stdout, as any terminal and any encoding can show it."""
    sys.stdout.write(printable_json(text, sys.stdout.encoding or "utf-8"))


def print_rows(rows: Sequence[dict[str, Any]], json: bool) -> int:
    """Print a table, or with `json` its rows as they are; return the exit code."""
    if json:
        print_json(rows)
    else:
        stdout_console().print(plain_table(rows))
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
