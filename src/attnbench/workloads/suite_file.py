"""Suites and models read from TOML: every wrong file ends as BrokenFile with the line, never as a traceback."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct

from attnbench.errors import BrokenFile, UnknownName, UsageError
from attnbench.reading import read_toml
from attnbench.spec import Workload
from attnbench.workloads.grid import FIELDS, MOST_WORKLOADS, count_workloads, grid

_SUITE_KEYS = ("name", "description", "workload")


class Suite(Struct, frozen=True):
    """A named list of workloads."""

    name: str
    description: str
    workloads: tuple[Workload, ...]


def read_suite(path: Path) -> Suite:
    """A user's suite: `name`, `description` and one `[[workload]]` table per grid."""
    table, text = read_toml(path)
    for key in table:
        if key not in _SUITE_KEYS:
            raise BrokenFile(path, line_of(text, key), str(UnknownName("suite field", key, _SUITE_KEYS, "README.md")))
    grids = table.get("workload")
    if not isinstance(grids, list) or not grids or not all(isinstance(entry, dict) for entry in grids):
        raise BrokenFile(path, None, "a suite needs at least one [[workload]] table.")
    count = sum(map(count_workloads, grids))
    if count > MOST_WORKLOADS:
        why = f"{count:,} workloads; a suite holds {MOST_WORKLOADS:,} at most: shorten its lists, or split it."
        raise BrokenFile(path, None, why)
    workloads: dict[str, Workload] = {}
    for number, entry in enumerate(grids):
        try:
            workloads.update({workload.id: workload for workload in grid(**entry)})
        except UsageError as error:
            raise BrokenFile(path, _line_of_problem(text, number, entry, str(error)), str(error)) from error
    name, description = str(table.get("name", path.stem)), str(table.get("description", f"from {path}"))
    return Suite(name, description, tuple(workloads.values()))


def line_of(text: str, key: str, after: int = 0) -> int | None:
    """Number of the first line past `after` that sets the key."""
    return next((number for number in lines_of(text, key) if number > after), None)


def lines_of(text: str, key: str) -> Iterator[int]:
    """Numbers of the lines that set the key, or open a table of that name."""
    pattern = re.compile(rf"""^\s*["']?{re.escape(key)}["']?\s*[=.]|^\s*\[+\s*{re.escape(key)}\s*\]+""")
    return (number for number, line in enumerate(text.splitlines(), start=1) if pattern.match(line))


def _line_of_problem(text: str, number: int, entry: Mapping[str, Any], message: str) -> int | None:
    """The line of the field that the message names, else of the number-th [[workload]] header."""
    header = next(islice(lines_of(text, "workload"), number, None), None)
    if header is None:
        return None
    named = [key for key in entry if re.search(rf"\b{re.escape(key)}\b", message)]
    if "mask" in entry and _is_fine({key: value for key, value in entry.items() if key != "mask"}):
        named = ["mask"]
    lines = [line for key in named if (line := line_of(text, key, after=header)) is not None]
    return min(lines, default=header)


def _is_fine(entry: Mapping[str, Any]) -> bool:
    try:
        grid(**entry)
    except UsageError:
        return False
    return True


@cache
def models() -> tuple[tuple[str, str, tuple[Workload, ...]], ...]:
    """(suite, model, workloads) of everything in models.toml."""
    table = tomllib.loads(files("attnbench.workloads").joinpath("models.toml").read_text(encoding="utf-8"))
    found: list[tuple[str, str, tuple[Workload, ...]]] = []
    for model in table["model"]:
        shared = {key: value for key, value in model.items() if key in FIELDS}
        shared["source"] = f"{model['name']}: {model['source']}"
        entries = [shared | {**entry, "tags": [model["name"], *entry["tags"]]} for entry in model["workload"]]
        found.append((model["suite"], model["name"], tuple(w for entry in entries for w in grid(**entry))))
    return tuple(found)
