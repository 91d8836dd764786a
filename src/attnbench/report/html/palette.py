"""Colours and symbols of the implementations, safe for colour-blind readers, on light and on dark ground."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

LIGHT = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#aa4499",
    "#b8860b",
    "#332288",
    "#3aa0c9",
    "#882255",
    "#6f7d1c",
    "#666666",
    "#8c510a",
    "#cc6677",
    "#1b1b1b",
    "#117733",
)
DARK = (
    "#4ea8e6",
    "#ff8a4c",
    "#2fc99a",
    "#dd88cc",
    "#f0b429",
    "#a79bf0",
    "#88ddff",
    "#ee7799",
    "#c6cf5b",
    "#b0b0b0",
    "#d8a36a",
    "#ffb3bf",
    "#f3e8ff",
    "#7fd68a",
)
SYMBOLS = ("circle", "square", "triangle-up", "diamond")
"""Four against fourteen colours: the pairs repeat only after twenty-eight implementations."""
DASHES = ([1, 0], [6, 3], [2, 2])
"""Lines have no symbols: those of one colour differ here."""


def order_labels(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """Winners first: they get the colours that are easiest to tell apart."""
    wins: Counter[str] = Counter()
    timed: Counter[str] = Counter()
    for cell in cells:
        if cell.get("ns") is not None:
            timed[cell["label"]] += 1
            wins[cell["label"]] += cell.get("rank") == 1
    return sorted(timed, key=lambda name: (-wins[name], -timed[name], name))


def ranges(count: int, colours: tuple[str, ...]) -> dict[str, list[str]]:
    """Vega's `config.range` for so many labels."""
    return {
        "category": [colours[place % len(colours)] for place in range(count)],
        "symbol": [SYMBOLS[place % len(SYMBOLS)] for place in range(count)],
    }


def dashes(count: int) -> list[list[int]]:
    """A dash per label, another one each time that the colours begin anew."""
    return [DASHES[place // len(LIGHT) % len(DASHES)] for place in range(count)]
