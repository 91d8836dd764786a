"""Rows as compact JSON that is safe inside a script element, and text without controls of direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

DIGITS = 5
DIRECTIONS = dict.fromkeys((0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))
"""Marks, embeddings and isolates: characters that turn the rest of a line around."""


def one_way(text: str) -> str:
    """Return a text without controls of direction; letters that are written from the right stay."""
    return text.translate(DIRECTIONS)


def pack(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows as columns, with text as places in a list of words; columns that are empty are left out."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    kept = {name: _column(values) for name, values in columns.items() if any(value is not None for value in values)}
    return {"count": len(rows), "columns": kept}


def _column(values: list[Any]) -> Any:
    if any(isinstance(value, str) for value in values):
        words = {word: place for place, word in enumerate(dict.fromkeys(v for v in values if v is not None))}
        return {"words": list(words), "codes": [None if value is None else words[value] for value in values]}
    return [rounded(value) for value in values]


def rounded(value: Any) -> Any:
    """Return a float with two digits more than are shown, so that rounding twice changes hardly any; whole floats lose
    their point, other values stay."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if abs(short) < 1e15 and short.is_integer() else short


def unpack(packed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return packed rows again, without the fields that are not known."""
    rows: list[dict[str, Any]] = [{} for _ in range(packed["count"])]
    for name, column in packed["columns"].items():
        values = column
        if isinstance(column, dict):
            values = [None if code is None else column["words"][code] for code in column["codes"]]
        for row, value in zip(rows, values):
            if value is not None:
                row[name] = value
    return rows


def script_json(document: Any) -> str:
    """Return JSON without any character that could end a script element, begin markup or turn a line around."""
    text = one_way(msgspec.json.encode(document).decode())
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
