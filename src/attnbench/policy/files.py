"""Policy files: JSON that people can read, with one line for each part of an entry: its shape, its choice."""

from __future__ import annotations

import json
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from attnbench.config import load_settings
from attnbench.errors import BrokenFile, PolicyWarning, UsageError
from attnbench.files import convert, decode_json, read_content, write_errors, write_texts
from attnbench.policy.policy import SCHEMA, Policy
from attnbench.printable import printable

PACKAGED = "policies"
WIDTH = 120
"""Characters of a line; longer values are broken up, except within entries."""


def load_policy(path: str | Path) -> Policy:
    """Read a policy file; if it is missing, broken or of a newer attnbench, raise with one sentence that says so.

    A policy made under constraints is announced by a PolicyWarning, unless the setting `on_miss` is quiet.
    """
    path = Path(path)
    try:
        content = read_content(path)
    except OSError as error:
        raise UsageError(
            f"cannot read the policy {path}: {error.strerror or error}. `attnbench choose RUN -o {path}` makes one."
        ) from error
    found = read_policy(content, str(path))
    if found.within and load_settings().on_miss != "quiet":
        message = printable(f"{path} was made under constraints ({found.within}).")
        warnings.warn(message, PolicyWarning, stacklevel=2)
    return found


def read_policy(content: bytes, origin: str, remedy: str = "") -> Policy:
    """Return the policy in the content of a file; `remedy` is what an error advises if the content is broken."""
    remedy = remedy or f"`attnbench choose RUN -o {origin}` makes a new one."
    try:
        found = decode_json(content)
    except msgspec.DecodeError as error:
        line, why = _first_fault(content, error)
        raise BrokenFile(origin, line, f"this is not a policy file ({why}): {remedy}") from error
    if not isinstance(found, dict) or found.get("kind") != "policy":
        raise BrokenFile(origin, None, 'this is not a policy file (it has no "kind": "policy").')
    schema = found.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:
        raise BrokenFile(
            origin, None, f"written by a newer attnbench (schema {schema}; this one reads {SCHEMA}): upgrade."
        )
    try:
        return structs.replace(convert(found, Policy), origin=origin)
    except (msgspec.ValidationError, UsageError) as error:
        raise BrokenFile(origin, None, f"this policy is broken ({error}): {remedy}") from error


def _first_fault(content: bytes, error: Exception) -> tuple[int | None, str]:
    """Return the line at which the content stops being JSON (None if that is not known), and why."""
    try:
        json.loads(content)
    except json.JSONDecodeError as found:
        return found.lineno, f"{found.msg}, column {found.colno}"
    except UnicodeDecodeError as found:
        return content.count(b"\n", 0, found.start) + 1, str(error)
    except (ValueError, RecursionError):
        pass
    return None, str(error)


def save_policy(policy: Policy, path: str | Path) -> None:
    """Write a policy file, as a whole or not at all."""
    with write_errors(path, "Choose another file with -o."):
        write_texts({Path(path): policy_text(policy)})


def policy_text(policy: Policy) -> str:
    """Return the content of a policy's file; the same policy always gives the same text."""
    document = msgspec.to_builtins(structs.replace(policy, origin=""))
    return _indented({"kind": "policy", "schema": policy.schema, **document}, 0) + "\n"


def packaged() -> tuple[Policy, ...]:
    """Return the policies that come with attnbench, made from its published runs."""
    paths = [path for path in (files("attnbench") / PACKAGED).iterdir() if path.name.endswith(".json")]
    paths.sort(key=lambda path: path.name)
    return tuple(read_policy(path.read_bytes(), f"packaged {path.name}", "reinstall attnbench.") for path in paths)


def _indented(value: Any, depth: int) -> str:
    """Return indented JSON, with values that fit on one line, and the parts of what is said of a shape, on one line."""
    line = _line(value)
    if not isinstance(value, dict | list | tuple) or len(line) + depth <= WIDTH:
        return line
    pad, close = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        inner = [
            f"{pad}{_line(key)}: {_line(one) if 'at' in value else _indented(one, depth + 1)}"
            for key, one in value.items()
        ]
        return "{\n" + ",\n".join(inner) + f"\n{close}}}"
    inner = [pad + _indented(one, depth + 1) for one in value]
    return "[\n" + ",\n".join(inner) + f"\n{close}]"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
