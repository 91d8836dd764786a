"""Steps: computations that attention is a part of, their sizes, and the cost of everything around the attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from attnbench import masks
from attnbench.spec import Workload


class Around(Struct, frozen=True, kw_only=True):
    """Cost of one step on one workload, apart from the attention."""

    weights: int
    """Number of weights in memory."""
    products: int
    """Multiply-adds with the weights in one forward pass."""
    inputs: int
    """Number of input values beside the weights."""
    outputs: int
    """Number of values that a forward pass returns."""
    attention: tuple[tuple[int, Workload], ...]
    """Attention problems inside the step, each with how often it is computed."""
    reads: int = 0
    """Number of weights that a forward pass must read, counting repeated reads; 0 if each is read once."""
    input_gradients: bool = True
    """Whether a training step returns gradients of the inputs too, beside those of the weights."""


class Surroundings(Struct, frozen=True):
    """Description of a step, and the function that computes its cost."""

    description: str
    around: Callable[[Workload], Around]


def same_tokens(w: Workload, width: int, weights: int, layers: int = 1) -> Around:
    """Return the cost of a step that multiplies every token with every weight once and keeps the tokens' width."""
    tokens = w.batch * w.q_len
    return Around(
        weights=weights,
        products=tokens * weights,
        inputs=tokens * width,
        outputs=tokens * width,
        attention=((layers, w),),
    )


WHOLE_WIDTH, WHOLE_DEPTH, SMALL_DEPTH = 2048, 18, 2
WHOLE_VOCABULARY, SMALL_VOCABULARY = 257_152, 512
ACTION_DIM = 32
SAMPLER_STEPS = 10
PROMPT, TEXT = 1018, 250
"""Tokens of pi0-FAST's prompt, and how many of them are text; shorter prompts have the same share."""


class Expert(NamedTuple):
    """Widths of a token and of the feed-forward layer of one expert."""

    width: int
    wide: int


def experts(w: Workload) -> tuple[Expert, Expert]:
    """Return the experts of the prefix and of the actions."""
    width = w.heads * w.head_dim
    return Expert(width, 8 * width), Expert(width // 2, 2 * width)


def depth(w: Workload) -> int:
    """Return the number of blocks of a whole model."""
    return WHOLE_DEPTH if w.heads * w.head_dim >= WHOLE_WIDTH else SMALL_DEPTH


def vocabulary(w: Workload) -> int:
    """Return the number of rows of pi0-FAST's embedding table."""
    return WHOLE_VOCABULARY if w.heads * w.head_dim >= WHOLE_WIDTH else SMALL_VOCABULARY


def text_tokens(prompt: int) -> int:
    """Return how many of a prompt's tokens are text, at least one; the others are image tokens."""
    return max(1, round(prompt * TEXT / PROMPT))


def block_sizes(w: Workload) -> tuple[int, ...] | None:
    """Return the sizes of a block-causal mask that is equal for all batch rows; None for any other mask."""
    mask = w.visible_mask
    if not isinstance(mask, masks.BlockCausal) or len(mask.ids.array) > 1 or np.any(np.diff(mask.ids.array[0]) < 0):
        return None
    if np.any(mask.query_ids(w.mask_shape) != mask.ids.array[:, w.kv_len - w.q_len :]):
        return None
    return tuple(np.unique(mask.ids.array[0], return_counts=True)[1].tolist())


def parts(w: Workload) -> tuple[int, int, int]:
    """Return the tokens of prefix, state and actions; all are of the prefix unless the mask has three blocks."""
    sizes = block_sizes(w)
    return (sizes[0], sizes[1], sizes[2]) if sizes is not None and len(sizes) == 3 else (w.kv_len, 0, 0)


def in_blocks(*sizes: int) -> masks.BlockCausal:
    """Return the block-causal mask with blocks of these sizes."""
    return masks.block_causal(np.repeat(np.arange(len(sizes)), sizes))


def _projections(w: Workload, expert: Expert) -> int:
    return 2 * expert.width * (w.heads + w.kv_heads) * w.head_dim


def _block(w: Workload, expert: Expert) -> int:
    return _projections(w, expert) + 3 * expert.width * expert.wide


def _tokens(w: Workload) -> tuple[int, int]:
    """Return the tokens of the prefix, and of state and actions, over the batch."""
    prefix, state, actions = parts(w)
    return w.batch * prefix, w.batch * (state + actions)


def _joint(w: Workload, weights: Callable[[Workload, Expert], int]) -> Around:
    """Return the cost of both experts' tokens in and out, each with its own weights."""
    tokens, both = _tokens(w), experts(w)
    sizes = [weights(w, expert) for expert in both]
    vectors = sum(n * expert.width for n, expert in zip(tokens, both))
    products = sum(n * size for n, size in zip(tokens, sizes))
    return Around(weights=sum(sizes), products=products, inputs=vectors, outputs=vectors, attention=((1, w),))


def _around_actions(w: Workload) -> tuple[int, int]:
    """Return (weights, multiply-adds) of the layers between actions and the expert's tokens."""
    width, (_, state, actions) = experts(w)[1].width, parts(w)
    per_action = 2 * ACTION_DIM * width + 3 * width * width
    per_state = ACTION_DIM * width
    return per_action + per_state, w.batch * (actions * per_action + state * per_state)


def _model(w: Workload) -> Around:
    layers, tokens = depth(w), _tokens(w)
    blocks = [layers * _block(w, expert) for expert in experts(w)]
    weights, products = _around_actions(w)
    actions = w.batch * parts(w)[2] * ACTION_DIM
    return Around(
        weights=sum(blocks) + weights,
        products=sum(n * size for n, size in zip(tokens, blocks)) + products,
        inputs=tokens[0] * experts(w)[0].width + 2 * actions + w.batch * (ACTION_DIM + 1),
        outputs=actions + actions // ACTION_DIM,
        attention=((layers, w),),
        input_gradients=False,
    )


def _sampler(w: Workload) -> Around:
    """Return the cost of the prefix once, and of state and actions ten times."""
    layers, tokens = depth(w), _tokens(w)
    blocks = [layers * _block(w, expert) for expert in experts(w)]
    weights, products = _around_actions(w)
    prefill = replace(w, q_len=parts(w)[0], kv_len=parts(w)[0], mask=masks.full())
    actions = w.batch * parts(w)[2] * ACTION_DIM
    return Around(
        weights=sum(blocks) + weights,
        products=tokens[0] * blocks[0] + SAMPLER_STEPS * (tokens[1] * blocks[1] + products),
        inputs=tokens[0] * experts(w)[0].width + actions + w.batch * ACTION_DIM,
        outputs=actions,
        attention=((layers, prefill), (SAMPLER_STEPS * layers, w)),
        reads=blocks[0] + SAMPLER_STEPS * (blocks[1] + weights),
    )


def _cache(w: Workload, tokens: int) -> int:
    return depth(w) * w.batch * tokens * w.kv_heads * (w.head_dim + w.value_dim)


def _prefill(w: Workload) -> Around:
    """Return the cost of all tokens through the blocks and of the last token's logits; the cache is returned."""
    expert = experts(w)[0]
    blocks, table = depth(w) * _block(w, expert), vocabulary(w) * expert.width
    return Around(
        weights=blocks + table,
        products=w.batch * (w.q_len * blocks + table),
        inputs=w.batch * ((w.q_len - text_tokens(w.q_len)) * expert.width + text_tokens(w.q_len)),
        outputs=w.batch * vocabulary(w) + _cache(w, w.kv_len),
        attention=((depth(w), w),),
    )


def _decode(w: Workload) -> Around:
    """Return the cost of q_len tokens in turn, each attending to all before it; every step reads all weights."""
    expert = experts(w)[0]
    weights = depth(w) * _block(w, expert) + vocabulary(w) * expert.width
    prompt = max(0, w.kv_len - w.q_len)
    steps = [replace(w, q_len=1, kv_len=prompt + n + 1, mask=masks.full()) for n in range(w.q_len)]
    return Around(
        weights=weights,
        products=w.batch * w.q_len * weights,
        inputs=_cache(w, prompt) + w.batch * w.q_len,
        outputs=w.batch * w.q_len * vocabulary(w),
        attention=tuple((depth(w), step) for step in steps),
        reads=w.q_len * weights,
    )


GEMMA_DEPTH = 4
"""Blocks of the step `gemma-stack`: enough to include what lies between blocks, few enough for one device."""


def gemma_width(w: Workload) -> int:
    """Return the width of a token in the step `gemma-stack`; for Gemma-2B 2048, 8 heads of 256."""
    return w.heads * w.head_dim


def _multihead(w: Workload) -> Around:
    width = w.heads * w.head_dim
    return same_tokens(w, width, width * (2 * width + 2 * w.kv_heads * w.head_dim))


def _gemma_stack(w: Workload) -> Around:
    """Return the cost of all blocks: projections, and a gated feed-forward layer that is 8 times as wide."""
    width = gemma_width(w)
    weights = GEMMA_DEPTH * (2 * width * width + 2 * width * w.kv_heads * w.head_dim + 3 * width * 8 * width)
    return same_tokens(w, width, weights, layers=GEMMA_DEPTH)


STEPS: Mapping[str, Surroundings] = {
    "multihead": Surroundings("x in, x out: projections to Q, K and V, attention, projection back", _multihead),
    "gemma-stack": Surroundings("four Gemma blocks and a final norm, recomputed in the backward pass", _gemma_stack),
    "pi0-attention": Surroundings(
        "pi0's attention of two experts with its projections", lambda w: _joint(w, _projections)
    ),
    "pi0-block": Surroundings("one pi0 block of two experts", lambda w: _joint(w, _block)),
    "pi0-model": Surroundings("pi0's flow-matching loss, both experts recomputed in the backward pass", _model),
    "pi0-sampler": Surroundings("pi0's prefix once, then ten Euler steps of the actions on its cache", _sampler),
    "pi0-fast-prefill": Surroundings("pi0-FAST's prompt to a cache and the logits of its last token", _prefill),
    "pi0-fast-decode": Surroundings("pi0-FAST's given tokens one after another on a cache, logits of each", _decode),
}
