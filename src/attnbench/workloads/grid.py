"""Cartesian products of workload fields: how suites, TOML files and the command line make many workloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any, SupportsIndex

import msgspec

from attnbench.errors import InvalidWorkload, UnknownName
from attnbench.masks import MaskShape
from attnbench.masks.text import MOST_DIGITS, read_mask
from attnbench.spec import SAME, Workload
from attnbench.workloads.steps import STEPS

FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(Workload))
"""Names as a file spells them (`pass`, not `pass_`)."""
_PLAIN = ("source", "tags")
"""Describe all workloads of a grid; a list here is no axis."""
MOST_WORKLOADS = 100_000
"""Combinations that one grid or suite may ask for; a list with a digit too many would fill the memory."""
_REQUIRED = ("batch", "q_len", "heads", "head_dim")


def grid(**axes: Any) -> list[Workload]:
    """Every combination of the axes, the last one varying fastest; a list is an axis, anything else one value.

    `heads` takes 32, (32, 8) or "32:8"; `mask` a mask, its text ("window:128:0") or its table. No workload comes twice.
    """
    named = {name.rstrip("_"): value for name, value in axes.items()}
    for name in named:
        if name not in FIELDS:
            raise UnknownName("workload field", name, FIELDS, "attnbench list workloads --json")
    missing = [name for name in _REQUIRED if name not in named]
    if missing:
        raise InvalidWorkload(f"a workload needs {', '.join(missing)} too.")
    for name, value in named.items():
        if name not in _PLAIN and isinstance(value, list) and not value:
            raise InvalidWorkload(f"{name} is an empty list: give it at least one value, or leave it out.")
    if (count := count_workloads(named)) > MOST_WORKLOADS:
        raise InvalidWorkload(
            f"{count:,} combinations of {', '.join(_axes(named))}; {MOST_WORKLOADS:,} at most are made at once: "
            "shorten a list, or ask in parts."
        )
    unique = {workload.id: workload for workload in map(_workload, _combinations(named))}
    return list(unique.values())


def count_workloads(axes: Mapping[str, Any]) -> int:
    """Return how many combinations the axes have, without making them."""
    return prod(map(len, _axes(axes).values()))


def _axes(axes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the axes that are lists."""
    return {name: value for name, value in axes.items() if isinstance(value, list) and name not in _PLAIN}


def _combinations(axes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    values = [value if isinstance(value, list) and name not in _PLAIN else [value] for name, value in axes.items()]
    return (dict(zip(axes, combination)) for combination in product(*values))


def _workload(fields: dict[str, Any]) -> Workload:
    fields = fields | read_heads(fields["heads"], fields.get("kv_heads", SAME))
    fields["pass_"] = fields.pop("pass", "forward")
    fields["tags"] = _read_tags(fields.get("tags", ()))
    _check_words(fields)
    mask = fields.pop("mask", None)
    bare = Workload(**fields)
    if mask is None:
        return bare
    shape = MaskShape(bare.batch, bare.heads, bare.q_len, bare.kv_len)
    return msgspec.structs.replace(bare, mask=read_mask(mask, shape))


def _read_tags(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(tag, str) for tag in value):
        raise InvalidWorkload(f'tags are a list of words such as ["long", "nightly"], not {value!r}.')
    return tuple(value)


def _check_words(fields: Mapping[str, Any]) -> None:
    for name in ("dtype", "pass_", "inputs", "step", "source"):
        if not isinstance(fields.get(name, ""), str):
            raise InvalidWorkload(f"{name.rstrip('_')} must be text, not {fields[name]!r}.")
    step = fields.get("step", "")
    if step and step not in STEPS:
        raise UnknownName("step", step, STEPS, "")


def read_heads(value: Any, kv_heads: int = SAME) -> dict[str, Any]:
    """32, (32, 8) or "32:8" -> heads and kv_heads."""
    if isinstance(value, SupportsIndex):
        return {"heads": value, "kv_heads": kv_heads}
    given = value.split(":") if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    parts = [str(part).strip()[:MOST_DIGITS] for part in given]
    if len(parts) not in (1, 2) or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidWorkload(f"heads are a number, or query and key/value heads such as 32:8, not {value!r}.")
    numbers = [int(part) for part in parts]
    return {"heads": numbers[0], "kv_heads": numbers[1] if len(numbers) == 2 else kv_heads}
