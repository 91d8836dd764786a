"""Suites written as the TOML that `read_suite` reads: one [[workload]] table each, masks as text if they can be."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from attnbench.drafts import write_texts
from attnbench.errors import UsageError
from attnbench.spec import Workload
from attnbench.workloads import masks
from attnbench.workloads.masks import Mask

LARGEST_ARRAY = 1 << 20
"""Values of a mask that a file may hold."""

_SAME = {"kv_len": "q_len", "kv_heads": "heads", "v_head_dim": "head_dim"}
"""Fields that are as another one where they are not written."""


def write_suite(path: Path, name: str, description: str, workloads: Iterable[Workload]) -> None:
    """Write the file, whole or not at all; one that exists is replaced."""
    tables = [_table(workload) for workload in workloads]
    head = f"name = {_text(name)}\ndescription = {_text(description)}\n"
    try:
        write_texts({path: "\n".join([head, *tables])})
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}.") from error


def _table(workload: Workload) -> str:
    lines = ["[[workload]]"]
    for field in msgspec.structs.fields(Workload):
        value = getattr(workload, field.name)
        if field.name == "mask":
            value = None if isinstance(value, masks.Full) else mask_value(value)
        if value is None or value == field.default or value == getattr(workload, _SAME.get(field.name, ""), None):
            continue
        lines.append(f"{field.encode_name} = {_value(value)}")
    return "\n".join(lines) + "\n"


def mask_value(mask: Mask) -> str | dict[str, Any]:
    """Text such as `window:128:0`, or a table where the mask holds an array that text cannot say."""
    if isinstance(mask, masks.Both):
        parts = [mask_value(part) for part in mask.parts]
        texts = [part for part in parts if isinstance(part, str)]
        return "&".join(texts) if len(texts) == len(parts) else {"kind": "both", "parts": parts}
    align = ":top-left" if getattr(mask, "align", "") == "top-left" else ""
    if isinstance(mask, masks.Window):
        sides = ("all" if side is None else str(side) for side in (mask.left, mask.right))
        return f"window:{':'.join(sides)}{align}"
    if isinstance(mask, masks.Prefix):
        return f"prefix:{mask.n}{align}"
    if isinstance(mask, masks.Lengths):
        return "lengths:" + ",".join(str(length) for length in mask.kv_lengths.array)
    if isinstance(mask, masks.Dilated):
        branches = zip(mask.segment_lengths, mask.dilation_rates)
        return "dilated:" + "+".join(f"{w}r{r}" for w, r in branches) + (":group" if mask.offset == "group" else "")
    if isinstance(mask, masks.Full | masks.Causal):
        return mask.kinds[0] + align
    return _array_table(mask)


def _array_table(mask: Mask) -> dict[str, Any]:
    told: dict[str, str] = {}
    if isinstance(mask, masks.BlockCausal | masks.Documents):
        fields: dict[str, Any] = {"ids": mask.ids.array}
        if mask.q_ids is not None:
            fields["q_ids"] = mask.q_ids.array
    elif isinstance(mask, masks.Valid):
        fields = {"mask_bj": mask.keys.array}
    elif isinstance(mask, masks.Blocks):
        fields = {"block_mask": mask.block_mask.array, "block_size": mask.block_size}
    else:
        assert isinstance(mask, masks.Dense)
        fields = {"array": mask.values.array}
        told = {"dtype": "float32"} if mask.values.dtype == "float32" else {}  # numbers in TOML have 64 bits
    size = max(np.size(value) for value in fields.values())
    if size > LARGEST_ARRAY:
        raise UsageError(f"the mask {mask.id} holds {size} values, more than a suite file should: keep it in Python.")
    return {"kind": mask.kinds[0], **{name: np.asarray(value).tolist() for name, value in fields.items()}, **told}


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    return repr(value)


def _text(value: str) -> str:
    """JSON's escapes are TOML's too."""
    return msgspec.json.encode(value).decode()
