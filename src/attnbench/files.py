"""Read files that others made, and write our own, whole or not at all; remove our folders.

One kind of error says what is wrong with a file, and none is read without limit. JSON that cannot be decoded for any
reason (no UTF-8, nested too deeply, an integer that no column holds) is a `msgspec.DecodeError`, of which each reader
makes a `BrokenFile` that names the file and the line.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from attnbench.errors import BrokenFile, UsageError

MIB = 1 << 20
LONGEST_LINE = 64 * MIB
LARGEST_DOCUMENT = 64 * MIB
LARGEST_TOML = 2 * MIB
RUN_BEGINS = b'{"line":"header"'
"""Beginning of every run file."""
DEEPEST = 100
"""Tables and lists within each other; nothing of ours goes beyond a dozen."""
INTEGERS = range(-(1 << 63), 1 << 63)
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_LONG_NUMBER = re.compile(rb"\d{19}")
_TOML_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'|#[^\n]*", re.DOTALL
)
"""Strings and comments."""
_TOML_KEY = re.compile(r"[^,=\[\]{}\n]+")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def files_in(folder: Path, *patterns: str) -> list[Path]:
    """Return the regular files below a folder that match a pattern; a pipe or a device has no place among results."""
    return sorted({path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()})


def remove_folder(folder: Path) -> None:
    """Remove a folder if it is there, with all that it holds, also in folders that their maker left read-only."""
    for place, names, _ in os.walk(folder):
        for name in names:
            if not os.path.islink(inner := os.path.join(place, name)):
                with suppress(OSError):
                    os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def read_content(path: Path, most: int = LARGEST_DOCUMENT) -> bytes:
    """Return the bytes of a file; raises BrokenFile, without reading on, if it has more than `most`."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise BrokenFile(path, None, f"larger than {most // MIB} MiB, the limit for files of this kind.")
    return content


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file without their ends; raises BrokenFile, without reading on, if one is too long."""
    lines: list[bytes] = []
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise BrokenFile(path, len(lines) + 1, f"longer than {LONGEST_LINE // MIB} MiB, the limit for a line.")
            lines.append(line.removesuffix(b"\n"))
    return lines


def decode_json(content: bytes, type: Any = Any) -> Any:
    """Return the value of a JSON document as `type`; `msgspec.DecodeError` for everything that is wrong with it."""
    with _decode_errors():
        _check_numbers_and_depth(content)
        return msgspec.json.decode(content, type=type)


def convert(value: Any, type: Any) -> Any:
    """Return decoded JSON or TOML as `type`; `msgspec.ValidationError` for everything that is wrong with it."""
    with _decode_errors():
        return msgspec.convert(value, type)


@contextmanager
def _decode_errors() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"not UTF-8: byte {error.object[error.start]:#04x}") from error
    except RecursionError as error:
        raise msgspec.ValidationError("nested too deeply") from error
    except MemoryError as error:
        raise msgspec.ValidationError("it does not fit into memory") from error
    except (ArithmeticError, ValueError) as error:
        raise error if isinstance(error, msgspec.DecodeError) else msgspec.ValidationError(str(error)) from error


def _check_numbers_and_depth(content: bytes) -> None:
    """Raise DecodeError for values that could be decoded, but not formatted, copied or stored afterwards."""
    long_numbers = _LONG_NUMBER.search(content) is not None
    if not long_numbers and content.count(b"[") + content.count(b"{") <= DEEPEST:
        return
    bare = _STRING.sub(b'""', content)
    depth = 0
    for bracket in bare.translate(None, _NO_BRACKET):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise msgspec.DecodeError(f"nested more than {DEEPEST} levels deep")
    if long_numbers:
        for found in _NUMBER.finditer(bare):
            digits = found[0]
            if len(digits) > 18 and not (found[1] or found[2]) and (len(digits) > 20 or int(digits) not in INTEGERS):
                raise msgspec.DecodeError(f"the integer {digits[:24].decode()}… has more than 64 bits")


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Return the table of a TOML file, and its text for the numbers of lines; whatever is wrong is a BrokenFile."""
    try:
        text = read_content(path, LARGEST_TOML).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BrokenFile(path, None, f"cannot be read: {error}") from error
    # Dotted keys of very many parts are refused: Python's parser spends the square of their number on them.
    bare = _TOML_TEXT.sub(lambda found: "s" + "\n" * found[0].count("\n"), text)
    for found in _TOML_KEY.finditer(bare):
        if found[0].count(".") > DEEPEST:
            raise BrokenFile(path, bare.count("\n", 0, found.start()) + 1, f"a key of more than {DEEPEST} parts.")
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise BrokenFile(path, None, "not valid TOML: nested too deeply.") from error
    except ValueError as error:  # TOMLDecodeError, and an integer of more digits than Python reads
        found = re.search(r"\(at line (\d+)|\(at end of document\)", str(error))
        line = int(found[1]) if found and found[1] else len(text.splitlines()) if found else None
        raise BrokenFile(path, line, f"not valid TOML: {error}") from error
    _check_values(path, table)
    return table, text


def line_of(text: str, key: str, after: int = 0) -> int | None:
    """Return the number of the first line beyond line `after` that sets the key."""
    return next((number for number in lines_of(text, key) if number > after), None)


def lines_of(text: str, key: str) -> Iterator[int]:
    """Return the numbers of the lines that set the key or open a table of that name."""
    pattern = re.compile(rf"""^\s*["']?{re.escape(key)}["']?\s*[=.]|^\s*\[+\s*{re.escape(key)}\s*\]+""")
    return (number for number, line in enumerate(text.splitlines(), start=1) if pattern.match(line))


def _check_values(path: Path, table: dict[str, Any]) -> None:
    """Raise BrokenFile for what TOML allows and we do not: integers of more than 64 bits, and deep nesting."""
    left: list[tuple[Any, int]] = [(table, 1)]
    while left:
        value, depth = left.pop()
        if isinstance(value, int) and value not in INTEGERS:
            raise BrokenFile(path, None, f"the integer {str(value)[:24]}… has more than 64 bits.")
        if isinstance(value, dict | list):
            if depth > DEEPEST:
                raise BrokenFile(path, None, f"nested more than {DEEPEST} levels deep.")
            left += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield a new file in the same folder to write to, which takes the place of `path` if the block ends well.

    Its name cannot be foreseen, so nobody can have put a link there, and a link in place of `path` is replaced, not
    followed. The new file has the permissions of the old one. Folders are made if need be. A device or a pipe has
    nothing to keep and is written to directly. Raises UsageError if `path` is a run file, whose measurements nobody can
    make again.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        yield path
        return
    refuse_run_file(path)
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


def refuse_run_file(path: Path) -> None:
    """Raise UsageError if something else is about to take the place of a run file."""
    if not path.is_file():
        return
    with suppress(OSError), path.open("rb") as old:
        if old.read(len(RUN_BEGINS)) == RUN_BEGINS:
            raise UsageError(f"{path} is a run file, which is never replaced: choose another path.")


@contextmanager
def write_errors(what: object, otherwise: str) -> Iterator[None]:
    """Raise UsageError, with what to do otherwise, if the system refuses to write in the block."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {what}: {error.strerror or error}. {otherwise}") from error


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write all of them, or none: nothing is replaced before everything is on disk."""
    with ExitStack() as stack:
        for path, text in texts.items():
            stack.enter_context(draft_of(path)).write_text(text, encoding="utf-8", newline="")
