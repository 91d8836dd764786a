"""Text of run files, without the characters that turn the rest of a line around."""

from __future__ import annotations

MARKS = (0x061C, 0x200E, 0x200F)
EMBEDDINGS = range(0x202A, 0x202F)
ISOLATES = range(0x2066, 0x206A)
NOTHING = dict.fromkeys((*MARKS, *EMBEDDINGS, *ISOLATES))


def one_way(text: str) -> str:
    """The same without controls of direction; letters that are written from the right stay."""
    return text.translate(NOTHING)
