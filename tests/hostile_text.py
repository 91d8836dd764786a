"""What a hostile file may hold, and what no output may hold, for the tests of everything that reads or prints."""

from __future__ import annotations

import re

HOSTILE = (
    "a\x1b]52;c;QQ\x07\x1b[2J[/x][red][link=http://x]\u202e\x9b31m\x85\u2028\n::error file=x.py::forged\r\n"
    "##[add-mask]x ##vso[task.complete]\x7f\x00\u200b|<script>:warning:"
)
"""Clipboard, clear screen, markup of rich, direction of writing, C1, line breaks, commands to CI systems, emoji."""
ANNOTATION = re.compile(r"::(error|warning|notice) title=")
"""Commands of our own, of which titles and messages are escaped."""


def danger(text: str) -> str:
    """What a terminal or a CI system would obey in a printed text; empty if there is nothing."""
    unseen = [one for one in text if not one.isprintable() and one != "\n"]
    if unseen:
        return f"holds {unseen[0]!r}"
    for line in text.split("\n"):
        if line.lstrip().startswith("::") and not ANNOTATION.match(line):
            return f"is a command: {line}"
    found = re.search(r"##\w*\[.*", text)
    return f"is a command: {found[0]}" if found else ""
