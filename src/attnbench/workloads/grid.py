"""Cartesian products of workload fields: how suites, TOML files and the command line make many workloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import msgspec

from attnbench.errors import InvalidWorkload, UnknownName
from attnbench.spec import SAME, Workload
from attnbench.workloads.mask_text import read_mask
from attnbench.workloads.masks import MaskShape

FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(Workload))
"""Names as a file spells them (`pass`, not `pass_`)."""
_PLAIN = ("source", "tags")
"""Describe all workloads of a grid; a list here is no axis."""
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
    unique = {workload.id: workload for workload in map(_workload, _combinations(named))}
    return list(unique.values())


def _combinations(axes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    values = [value if isinstance(value, list) and name not in _PLAIN else [value] for name, value in axes.items()]
    return (dict(zip(axes, combination)) for combination in product(*values))


def _workload(fields: dict[str, Any]) -> Workload:
    fields = fields | read_heads(fields["heads"], fields.get("kv_heads", SAME))
    fields["pass_"] = fields.pop("pass", "forward")
    fields["tags"] = tuple(fields.get("tags", ()))
    mask = fields.pop("mask", None)
    bare = Workload(**fields)
    if mask is None:
        return bare
    shape = MaskShape(bare.batch, bare.heads, bare.q_len, bare.kv_len)
    return msgspec.structs.replace(bare, mask=read_mask(mask, shape))


def read_heads(value: Any, kv_heads: int = SAME) -> dict[str, int]:
    """32, (32, 8) or "32:8" -> heads and kv_heads."""
    parts = str(value).split(":") if isinstance(value, str) else value
    if isinstance(parts, int):
        return {"heads": parts, "kv_heads": kv_heads}
    if len(parts) not in (1, 2) or not all(str(part).strip().isdecimal() and int(part) for part in parts):
        raise InvalidWorkload(f"heads are a number, or query and key/value heads such as 32:8, not {value!r}.")
    numbers = [int(part) for part in parts]
    return {"heads": numbers[0], "kv_heads": numbers[1] if len(numbers) == 2 else kv_heads}
