"""Blocks of a page that a command writes, between two comments that say which."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
Pages = dict[str, dict[str, tuple[str, Callable[[], str]]]]
"""Page -> block -> the file of results/ that it is made from, and what makes it."""
BLOCK = r"<!-- {name}: .*?<!-- end of {name} -->"


def result(name: str) -> Any:
    """A JSON file of results/."""
    return json.loads((RESULTS / name).read_text())


def marked(name: str, made: str, text: str) -> str:
    """A block; `made` says how and of what."""
    return f"<!-- {name}: {made} -->\n{text}\n<!-- end of {name} -->"


def replaced(page: Path, blocks: Mapping[str, str]) -> str:
    """The page with new blocks; a block that has no place in it is an error."""
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        text, count = re.subn(BLOCK.format(name=name), lambda _, block=block: block, text, flags=re.DOTALL)
        if count != 1:
            sys.exit(
                f"{page} has {count} blocks `<!-- {name}: ... -->` to `<!-- end of {name} -->`: there must be one."
            )
    return text


def table(heading: list[str], rows: list[list[Any]]) -> str:
    """In Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
