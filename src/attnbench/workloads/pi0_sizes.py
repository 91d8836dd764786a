"""The sizes of pi0's and pi0-FAST's steps, as a workload gives them.

Of openpi's 8 heads of 256 follow its widths: 2048 (feed-forward 16,384) in the first expert, 1024 (4096) in that of the
actions. Depth and vocabulary are openpi's at that width, and small below it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attnbench.spec import Workload
from attnbench.workloads import masks

WHOLE_WIDTH, WHOLE_DEPTH, SMALL_DEPTH = 2048, 18, 2
WHOLE_VOCABULARY, SMALL_VOCABULARY = 257_152, 512
ACTION_DIM = 32
SAMPLER_STEPS = 10
PROMPT, TEXT = 1018, 250
"""Tokens of pi0-FAST's prompt, and how many of them are text; shorter ones are divided alike."""


class Expert(NamedTuple):
    """Widths of a token and of the feed-forward layer."""

    width: int
    wide: int


def experts(w: Workload) -> tuple[Expert, Expert]:
    """The prefix's and the actions'."""
    width = w.heads * w.head_dim
    return Expert(width, 8 * width), Expert(width // 2, 2 * width)


def depth(w: Workload) -> int:
    """Blocks of a whole model."""
    return WHOLE_DEPTH if w.heads * w.head_dim >= WHOLE_WIDTH else SMALL_DEPTH


def vocabulary(w: Workload) -> int:
    """Rows of pi0-FAST's embedding table."""
    return WHOLE_VOCABULARY if w.heads * w.head_dim >= WHOLE_WIDTH else SMALL_VOCABULARY


def text_tokens(prompt: int) -> int:
    """How many of a prompt's tokens are text, at least one; the others are images."""
    return max(1, round(prompt * TEXT / PROMPT))


def block_sizes(w: Workload) -> tuple[int, ...] | None:
    """Of a block-causal mask that is the same for every row; None of any other."""
    mask = w.visible_mask
    if not isinstance(mask, masks.BlockCausal) or len(mask.ids.array) > 1 or np.any(np.diff(mask.ids.array[0]) < 0):
        return None
    if np.any(mask.query_ids(w.mask_shape) != mask.ids.array[:, w.kv_len - w.q_len :]):
        return None
    return tuple(np.unique(mask.ids.array[0], return_counts=True)[1].tolist())


def parts(w: Workload) -> tuple[int, int, int]:
    """Tokens of the prefix, the state and the actions; all are the prefix's where the mask has not three blocks."""
    found = block_sizes(w)
    return (found[0], found[1], found[2]) if found is not None and len(found) == 3 else (w.kv_len, 0, 0)


def in_blocks(*sizes: int) -> masks.BlockCausal:
    """The block-causal mask of such sizes."""
    return masks.block_causal(np.repeat(np.arange(len(sizes)), sizes))
