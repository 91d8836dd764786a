"""Packed sequences as a batch that a mask can describe, in any framework and without reading a value.

Sequences follow each other on one axis; `offsets` [n + 1] say where each begins and the last one ends. Plain attention
computes them either as one row of all tokens, in which tokens of other sequences are hidden, or as a batch padded to
the longest sequence, whichever has fewer pairs. A mask inside of a sequence counts from its own first tokens;
bottom-right alignment is that of each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from attnbench.masks.base import Mask, MaskShape

LONGEST = 1 << 28
"""A length beyond that of any sequence, twice of which still fits 32 bits."""
Inside = Callable[[Any, Any, Any], Any]
"""Function (q position, shift, key position) -> visible: see `inside_of`."""


class PackedNamespace(Protocol):
    """The functions of a framework that packed sequences need."""

    def arange(self, size: Any, /) -> Any: ...
    def searchsorted(self, ends: Any, tokens: Any, /) -> Any: ...
    def clip(self, x: Any, low: int, high: int, /) -> Any: ...


class TokenPlaces(NamedTuple):
    """Sequence and position of each token, and which tokens lie in a sequence (others are behind the last offset)."""

    sequence: Any
    position: Any
    inside: Any


def places(offsets: Any, tokens: Any, namespace: PackedNamespace) -> TokenPlaces:
    """Return the place of each of `tokens` tokens."""
    at, last = namespace.arange(tokens), offsets.shape[0] - 2
    sequence = namespace.searchsorted(offsets[1:], at)
    inside = sequence <= last
    sequence = namespace.clip(sequence, 0, last)
    return TokenPlaces(sequence, at - offsets[sequence], inside)


def rows_of(offsets: Any, longest: Any, tokens: Any, namespace: PackedNamespace) -> Any:
    """Return the token of each place in a padded batch, [n, longest]; places of padding have any token."""
    return namespace.clip(offsets[:-1, None] + namespace.arange(longest)[None], 0, tokens - 1)


def padding_is_cheaper(sequences: Any, longest: tuple[Any, Any], tokens: tuple[Any, Any]) -> bool:
    """Return whether a padded batch has fewer pairs than one row of all tokens."""
    return sequences * longest[0] * longest[1] < tokens[0] * tokens[1]


def visible_in_rows(inside: Inside, q_offsets: Any, k_offsets: Any, q: TokenPlaces, k: TokenPlaces) -> Any:
    """Return visible pairs [1, 1, q tokens, k tokens] of all tokens in one row."""
    shift = (k_offsets[1:] - k_offsets[:-1]) - (q_offsets[1:] - q_offsets[:-1])
    rows = tuple([x[None, None, :, None] for x in (q.position, shift[q.sequence], q.sequence, q.inside)])
    seen = inside(rows[0], rows[1], k.position[None, None, None])
    return seen & (rows[2] == k.sequence[None, None, None]) & rows[3] & k.inside[None, None, None]


def visible_in_batch(
    inside: Inside, q_offsets: Any, k_offsets: Any, longest: tuple[Any, Any], namespace: PackedNamespace
) -> Any:
    """Return visible pairs [n, 1, longest q, longest k] of the padded batch."""
    k_lengths = (k_offsets[1:] - k_offsets[:-1])[:, None, None, None]
    shift = k_lengths - (q_offsets[1:] - q_offsets[:-1])[:, None, None, None]
    q_at, k_at = namespace.arange(longest[0])[None, None, :, None], namespace.arange(longest[1])[None, None, None]
    return inside(q_at, shift, k_at) & (k_at < k_lengths)


def inside_of(within: Mask) -> Inside:
    """Return a function (q position, shift, key position) -> visible, of arrays that broadcast.

    `shift` aligns the last query of a sequence with its last key.
    """
    shape = MaskShape(1, 1, LONGEST, LONGEST)  # in which both alignments are one
    tests = [(part.predicate(shape, np), getattr(part, "align", "") == "bottom-right") for part in within.split()]

    def inside(q_at: Any, shift: Any, k_at: Any) -> Any:
        seen = (q_at >= 0) & (k_at >= 0)
        for test, bottom_right in tests:
            seen = seen & test(0, 0, q_at + shift if bottom_right else q_at, k_at)
        return seen

    return inside
