r"""Text of other people's files and code -> text that a terminal or a CI log takes for nothing but text.

Everything that is printed goes through `printable`. A character that cannot be seen (control characters, ESC and C1
included, line breaks, marks that turn the direction of writing around) is shown as an escape such as \x1b; what GitHub
(`::error`), Azure (`##vso[`) and TeamCity (`##teamcity[`) would read as a command is broken up by one.
"""

from __future__ import annotations

import json
import re

LONGEST = 500
"""Characters of one name or reason in a table; `--json` has all of it."""
COMMANDS = (
    "add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|notice|remove-matcher|save-state|set-env|set-output|"
    "stop-commands|warning"
)
"""Commands that GitHub obeys. A long line may be folded anywhere, so these are broken up within words too."""
COMMAND = re.compile(rf"(?<!\S)::|::(?=(?:{COMMANDS})\b)|##(?=\w*\\*\[)", re.IGNORECASE)
UNSEEN = re.compile(r"[^\x20-\x7e\n]")


def printable(text: str) -> str:
    r"""Return the text as one visible line: `a\x1b[2J` for what would clear the screen, `:\x3aerror` for a command."""
    if not text.isprintable():
        text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return COMMAND.sub(lambda found: f"{found[0][0]}\\x{ord(found[0][1]):02x}", text)


def printable_lines(text: str) -> str:
    """Return the text with its line breaks, each line as `printable` gives it."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str, encoding: str = "utf-8") -> str:
    r"""Return the same JSON document with characters that cannot be seen, or that the encoding lacks, as `\u001b`."""

    def is_shown(text: str) -> bool:
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            return False
        return text.isprintable()

    if not is_shown(text.replace("\n", "")):
        text = UNSEEN.sub(lambda found: found[0] if is_shown(found[0]) else json.dumps(found[0])[1:-1], text)
    return re.sub(r"##(?=\w*\[)", r"#\\u0023", text)


def shortened(text: str, most: int = LONGEST) -> str:
    """Return at most so many characters of the text, and say how many more there are."""
    if len(text) <= most:
        return text
    return f"{text[:most]}… ({len(text) - most:,} more characters; --json has all)"
