"""Suites as TOML: reading with the line of every mistake, grids of workloads, and writing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any, SupportsIndex

import msgspec
from msgspec import Struct

from attnbench import masks
from attnbench.errors import BrokenFile, InvalidWorkload, UnknownName, UsageError
from attnbench.files import line_of, lines_of, read_toml, write_texts
from attnbench.masks.text import MOST_DIGITS, mask_value, read_mask
from attnbench.spec import SAME, Workload
from attnbench.workloads.steps import STEPS

_SUITE_KEYS = ("name", "description", "workload")


class Suite(Struct, frozen=True):
    """A named list of workloads."""

    name: str
    description: str
    workloads: tuple[Workload, ...]


def read_suite(path: Path) -> Suite:
    """Return a user's suite from a file with `name`, `description` and one `[[workload]]` table per grid."""
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


def _line_of_problem(text: str, number: int, entry: Mapping[str, Any], message: str) -> int | None:
    """Return the line of the field that the message names, else of the number-th [[workload]] header."""
    header = next(islice(lines_of(text, "workload"), number, None), None)
    if header is None:
        return None
    named = [key for key in entry if re.search(rf"\b{re.escape(key)}\b", message)]
    if "mask" in entry:
        with suppress(UsageError):
            grid(**{key: value for key, value in entry.items() if key != "mask"})
            named = ["mask"]  # everything else is right
    lines = [line for key in named if (line := line_of(text, key, after=header)) is not None]
    return min(lines, default=header)


@cache
def models() -> Mapping[str, list[Workload]]:
    """Return the workloads of each suite in models.toml."""
    table = tomllib.loads(files("attnbench.workloads").joinpath("models.toml").read_text(encoding="utf-8"))
    found: dict[str, list[Workload]] = {}
    for model in table["model"]:
        shared = {key: value for key, value in model.items() if key in FIELDS}
        shared["source"] = f"{model['name']}: {model['source']}"
        for entry in model["workload"]:
            tags = [model["name"], *entry["tags"]]
            found.setdefault(model["suite"], []).extend(grid(**shared | entry | {"tags": tags}))
    return found


_SAME = {"kv_len": "q_len", "kv_heads": "heads", "v_head_dim": "head_dim"}
"""Fields that default to another field."""


def write_suite(path: Path, name: str, description: str, workloads: Iterable[Workload]) -> None:
    """Write the file completely or not at all; an existing file is replaced."""
    lines = [f"name = {_value(name)}", f"description = {_value(description)}"]
    for workload in workloads:
        lines += ["", "[[workload]]"]
        for field in msgspec.structs.fields(Workload):
            value = getattr(workload, field.name)
            if field.name == "mask":
                value = None if isinstance(value, masks.Full) else mask_value(value)
            same = getattr(workload, _SAME.get(field.name, ""), None)
            if value is not None and value != field.default and value != same:
                lines.append(f"{field.encode_name} = {_value(value)}")
    try:
        write_texts({path: "\n".join([*lines, ""])})
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}.") from error


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # the escapes of JSON are valid in TOML
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    return repr(value)


FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(Workload))
"""Names of fields as a file spells them (`pass`, not `pass_`)."""
_PLAIN = ("source", "tags")
"""Fields that describe all workloads of a grid; a list in them is not an axis."""
MOST_WORKLOADS = 100_000
"""Largest number of combinations of a grid or suite, so that a list with a digit too many cannot fill the memory."""
_REQUIRED = ("batch", "q_len", "heads", "head_dim")


def grid(**axes: Any) -> list[Workload]:
    """Return every combination of the axes, the last one varying fastest; a list is an axis, anything else a single
    value.

    `heads` takes 32, (32, 8) or "32:8"; `mask` a mask, its text ("window:128:0") or its table. No workload comes twice.
    """
    named = {name.rstrip("_"): value for name, value in axes.items()}
    for name in named:
        if name not in FIELDS:
            raise UnknownName("workload field", name, FIELDS, "attnbench list workloads --json")
    missing = [name for name in _REQUIRED if name not in named]
    if missing:
        raise InvalidWorkload(f"a workload also needs {', '.join(missing)}.")
    lists = _axes(named)
    for name, values in lists.items():
        if not values:
            raise InvalidWorkload(f"{name} is an empty list: give it at least one value, or leave it out.")
    if (count := count_workloads(named)) > MOST_WORKLOADS:
        raise InvalidWorkload(
            f"{count:,} combinations of {', '.join(lists)}; {MOST_WORKLOADS:,} at most are allowed at once: "
            "shorten a list, or split it."
        )
    combinations = product(*(lists.get(name, [value]) for name, value in named.items()))
    workloads = (_workload(dict(zip(named, combination))) for combination in combinations)
    return list({workload.id: workload for workload in workloads}.values())


def count_workloads(axes: Mapping[str, Any]) -> int:
    """Return how many combinations the axes have, without making them."""
    return prod(map(len, _axes(axes).values()))


def _axes(axes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the axes that are given as lists."""
    return {name: value for name, value in axes.items() if isinstance(value, list) and name not in _PLAIN}


def _workload(fields: dict[str, Any]) -> Workload:
    fields = fields | read_heads(fields["heads"], fields.get("kv_heads", SAME))
    fields["pass_"] = fields.pop("pass", "forward")
    tags = fields.get("tags", ())
    if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) for tag in tags):
        raise InvalidWorkload(f'tags must be a list of words such as ["long", "nightly"], not {tags!r}.')
    fields["tags"] = tuple(tags)
    for name in ("dtype", "pass_", "inputs", "step", "source"):
        if not isinstance(fields.get(name, ""), str):
            raise InvalidWorkload(f"{name.rstrip('_')} must be text, not {fields[name]!r}.")
    step = fields.get("step", "")
    if step and step not in STEPS:
        raise UnknownName("step", step, STEPS, "")
    mask = fields.pop("mask", None)
    bare = Workload(**fields)
    return bare if mask is None else msgspec.structs.replace(bare, mask=read_mask(mask, bare.mask_shape))


def read_heads(value: Any, kv_heads: int = SAME) -> dict[str, Any]:
    """Return heads and kv_heads from 32, (32, 8) or "32:8"."""
    if isinstance(value, SupportsIndex):
        return {"heads": value, "kv_heads": kv_heads}
    given = value.split(":") if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    parts = [str(part).strip()[:MOST_DIGITS] for part in given]
    if len(parts) not in (1, 2) or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidWorkload(f"heads must be a number, or query and key/value heads such as 32:8, not {value!r}.")
    numbers = [int(part) for part in parts]
    return {"heads": numbers[0], "kv_heads": numbers[1] if len(numbers) == 2 else kv_heads}
