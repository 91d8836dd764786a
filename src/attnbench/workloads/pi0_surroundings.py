"""What pi0's and pi0-FAST's steps cost around their attention.

The last block's feed-forward of the prefix feeds nothing but is computed by every implementation, and so is counted.
"""

from __future__ import annotations

from msgspec.structs import replace

from attnbench.spec import Workload
from attnbench.workloads import masks
from attnbench.workloads.pi0_sizes import (
    ACTION_DIM,
    SAMPLER_STEPS,
    Expert,
    depth,
    experts,
    parts,
    text_tokens,
    vocabulary,
)
from attnbench.workloads.surroundings import Around, Surroundings


def _projections(w: Workload, expert: Expert) -> int:
    return 2 * expert.width * (w.heads + w.kv_heads) * w.head_dim


def _block(w: Workload, expert: Expert) -> int:
    return _projections(w, expert) + 3 * expert.width * expert.wide


def _tokens(w: Workload) -> tuple[int, int]:
    """Of the prefix, and of state and actions."""
    prefix, state, actions = parts(w)
    return w.batch * prefix, w.batch * (state + actions)


def _joint(w: Workload, weights: tuple[int, int]) -> Around:
    """Both experts' tokens in and out, each with its own weights."""
    tokens, both = _tokens(w), experts(w)
    vectors = sum(n * expert.width for n, expert in zip(tokens, both))
    products = sum(n * size for n, size in zip(tokens, weights))
    return Around(weights=sum(weights), products=products, inputs=vectors, outputs=vectors, attention=((1, w),))


def _attention(w: Workload) -> Around:
    first, second = experts(w)
    return _joint(w, (_projections(w, first), _projections(w, second)))


def _one_block(w: Workload) -> Around:
    first, second = experts(w)
    return _joint(w, (_block(w, first), _block(w, second)))


def _around_actions(w: Workload) -> tuple[int, int]:
    """(weights, multiply-adds) of the layers between actions and the expert's tokens."""
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
    """The prefix once, state and actions ten times."""
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
    """All tokens through the blocks, the last one to logits; the cache is returned."""
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
    """q_len tokens one after another, each over all before it and itself; every step reads all weights."""
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


PI0_STEPS = {
    "pi0-attention": Surroundings("pi0's attention of two experts with its projections", _attention),
    "pi0-block": Surroundings("one pi0 block of two experts", _one_block),
    "pi0-model": Surroundings("pi0's flow-matching loss, both experts recomputed in the backward pass", _model),
    "pi0-sampler": Surroundings("pi0's prefix once, then ten Euler steps of the actions on its cache", _sampler),
    "pi0-fast-prefill": Surroundings("pi0-FAST's prompt to a cache and the logits of its last token", _prefill),
    "pi0-fast-decode": Surroundings("pi0-FAST's given tokens one after another on a cache, logits of each", _decode),
}
