"""pi0-FAST: actions as text tokens, prefill and autoregressive decode. Vision tokens come as embeddings.

Prompts are moved to the right end before decoding, so that every row writes the same cache slot. A generated token
has the position after the last valid one; `position_rule="openpi"` gives one position more, as openpi did before its
fix. A generated token sees the valid keys of the prefix and no others, wherever they are: a missing camera in the
middle is hidden too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.core import Tracer

from attnbench.errors import UsageError
from attnbench.impls._arguments import check_whole
from attnbench.models import gemma_fast
from attnbench.models.attention import FlashChoice, FullyMasked, flash_fields
from attnbench.models.gemma_config import PALIGEMMA_VOCAB_SIZE, Config
from attnbench.models.masks import TokenMask, in_blocks, up_to_own_id
from attnbench.models.pi0 import PaliGemma, check_shape, check_tokens, token_mask, valid_tokens

EOS = 1
PositionRule = Literal["contiguous", "openpi"]
RULES: dict[str, int] = {"contiguous": 0, "openpi": 1}
"""Position of the first generated token, counted from the number of valid prefix tokens."""


@dataclass(frozen=True)
class Pi0FastConfig:
    """Configuration with openpi's defaults; a variant is a name or sizes, and `vocab_size` shrinks the embedding table
    for tests."""

    dtype: str = "bfloat16"
    paligemma_variant: gemma_fast.Variant | Config = "gemma_2b"
    vocab_size: int = PALIGEMMA_VOCAB_SIZE
    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"


@struct.dataclass
class Observation:
    """Image and text tokens. Without `token_ar_mask` all of them see each other, as in a prompt."""

    image_tokens: Array
    """Output of the vision tower, [B, P, D]."""
    tokens: Array
    """Text, [B, L]."""
    image_mask: Array | None = None
    """Valid image tokens, [B, P]."""
    token_mask: Array | None = None
    """Valid text tokens, [B, L]."""
    token_ar_mask: Array | None = None
    """Text tokens [B, L] that are hidden from all tokens before them: 1, else 0."""
    token_loss_mask: Array | None = None
    """Text tokens that count in the loss, [B, L]."""


class Pi0Fast(nn.Module):
    """Decoder-only policy over image and text tokens."""

    config: Pi0FastConfig

    def setup(self) -> None:
        """Create `PaliGemma/llm`, with a cache in the model's dtype."""
        config = self.config
        sizes = gemma_fast.get_config(config.paligemma_variant) | {"vocab_size": config.vocab_size}
        llm = gemma_fast.Module(
            **sizes, embed_dtype=config.dtype, cache_dtype=config.dtype, **flash_fields(config), parent=None
        )
        self.PaliGemma = PaliGemma(llm)

    def embed_inputs(self, observation: Observation) -> tuple[Array, Array, Array | None]:
        """Return tokens [B, T, D], which of them are valid [B, T], and their autoregressive mask [B, T] or None."""
        width = gemma_fast.get_config(self.config.paligemma_variant)["width"]
        check_tokens(observation, width)
        images = observation.image_tokens.astype(self.config.dtype)
        tokens = jnp.concatenate([images, self.PaliGemma(observation.tokens, embed_only=True)], axis=1)
        ar = token_mask(observation, "token_ar_mask", observation.tokens.shape)
        if ar is not None:
            ar = jnp.pad(ar.astype(jnp.int32), ((0, 0), (images.shape[1], 0)))
        valid = valid_tokens(observation)
        return tokens, jnp.ones(tokens.shape[:2], bool) if valid is None else valid, ar

    def logits(self, observation: Observation) -> Array:
        """Return logits of every text token but the first, from the tokens before it, [B, L - 1, vocabulary]."""
        tokens, valid, ar = self.embed_inputs(observation)
        tokens, valid = tokens[:, :-1], valid[:, :-1]
        mask = _mask(valid, None if ar is None else jnp.cumsum(ar, axis=1)[:, :-1], valid.shape[1])
        hidden, _, _ = self.PaliGemma(embedded_prefix=tokens, mask=mask, return_prelogits=True)
        return self.PaliGemma(pre_logits=hidden[:, 1 - observation.tokens.shape[1] :])[0]

    def compute_loss(self, observation: Observation) -> Array:
        """Return the mean cross-entropy of the tokens that `token_loss_mask` selects, [B]."""
        if observation.token_loss_mask is None:
            raise UsageError("the loss needs Observation(token_loss_mask=[B, L]), which selects the tokens to predict.")
        logp = jax.nn.log_softmax(self.logits(observation).astype(jnp.float32), axis=-1)
        text = observation.tokens
        check_shape("token_loss_mask", observation.token_loss_mask, text.shape, "batch, length")
        of_text = jnp.take_along_axis(logp, text[:, 1:, None], axis=-1)[..., 0]
        counted = observation.token_loss_mask[:, 1:]
        return -(of_text * counted).sum(-1) / jnp.clip(counted.sum(-1), 1)

    def prefill(self, observation: Observation, room: int) -> tuple[Array, gemma_fast.Cache, Array]:
        """Return logits of the first generated token [B, 1, vocabulary], the cache with `room` free slots, and the
        valid slots."""
        tokens, valid, ar = self.embed_inputs(observation)
        ids = None if ar is None else jnp.cumsum(ar, axis=1)
        tokens, valid, ids = right_aligned(tokens, valid, ids)
        slots = tokens.shape[1] + room
        mask = _mask(valid, ids, slots)
        positions = jnp.cumsum(valid, axis=1) - 1
        hidden, cache, _ = self.PaliGemma(
            embedded_prefix=tokens, mask=mask, positions=positions, decode=True, return_prelogits=True
        )
        return self.PaliGemma(pre_logits=hidden[:, -1:])[0], cache, jnp.pad(valid, ((0, 0), (0, room)))

    def decode(self, token: Array, position: Array, cache: gemma_fast.Cache, valid: Array) -> tuple[Array, Any]:
        """Return logits after one more token [B, 1] at positions [B, 1]; `valid` [B, slots] includes that token."""
        mask = TokenMask(kv_len=valid.shape[1], runs=((1, valid.shape[1]),), sees_itself=True, valid=valid)
        logits, cache, _ = self.PaliGemma(token, mask=mask, positions=position, decode=True, kv_cache=cache)
        return logits, cache


def _mask(valid: Array, ids: Array | None, slots: int) -> TokenMask:
    return in_blocks((valid.shape[1],), valid, kv_len=slots) if ids is None else up_to_own_id(ids, valid, slots)


def right_aligned(tokens: Array, valid: Array, ids: Array | None) -> tuple[Array, Array, Array | None]:
    """Return every row rolled until its last valid token is the last of all."""
    length = valid.shape[1]
    used = jnp.max(jnp.where(valid, jnp.arange(length) + 1, 0), axis=1)
    order = (jnp.arange(length)[None] + used[:, None]) % length
    rolled = [None if x is None else jnp.take_along_axis(x, order, axis=1) for x in (valid, ids)]
    assert rolled[0] is not None
    return jnp.take_along_axis(tokens, order[..., None], axis=1), rolled[0], rolled[1]


def _check_temperature(temperature: Any) -> None:
    """Raise for a temperature that is not a number of at least 0; for a traced value only the type is known."""
    traced = isinstance(temperature, Tracer)
    value: Any = temperature if traced else np.asarray(temperature)
    numeric = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if value.shape != () or not numeric or not (traced or value >= 0):
        raise UsageError(f"temperature must be a number of at least 0, not {temperature!r}.")


def _next_tokens(key: Array, logits: Array, temperature: float | Array) -> Array:
    """Return tokens [B, 1]: the most likely at temperature 0, else drawn."""

    def drawn() -> Array:
        return jax.random.categorical(key, logits.astype(jnp.float32) / temperature, axis=-1)

    def greedy() -> Array:
        return jnp.argmax(logits, axis=-1)

    if isinstance(temperature, Tracer):
        return jax.lax.cond(temperature > 0, drawn, greedy)
    return drawn() if temperature > 0 else greedy()


def sample_tokens(
    model: Pi0Fast,
    params: Any,
    rng: Array,
    observation: Observation,
    *,
    max_decoding_steps: int = 256,
    temperature: float | Array = 0.0,
    position_rule: PositionRule = "contiguous",
) -> Array:
    """Return generated tokens [B, max_decoding_steps], with 0 after the end token of a row; greedy at temperature 0."""
    if position_rule not in RULES:
        raise UsageError(f'position_rule must be {" or ".join(RULES)}, not "{position_rule}".')
    check_whole("max_decoding_steps", max_decoding_steps, 1)
    _check_temperature(temperature)
    variables = {"params": params}
    prefilled: Any = model.apply(variables, observation, max_decoding_steps, method="prefill")
    logits, cache, valid = prefilled
    start = valid.shape[1] - max_decoding_steps
    first = valid.sum(axis=1)[:, None] + RULES[position_rule]
    written = jnp.zeros((valid.shape[0], max_decoding_steps), jnp.int32)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, ended, key, logits, cache, valid, written = carry
        key, draw = jax.random.split(key)
        token = jnp.where(ended[:, None], 0, _next_tokens(draw, logits, temperature)).astype(jnp.int32)
        written = jax.lax.dynamic_update_slice(written, token, (0, i))
        valid = valid | (jnp.arange(valid.shape[1]) == start + i)
        logits, cache = model.apply(variables, token, first + i, cache, valid, method="decode")
        return i + 1, ended | (token[:, 0] == EOS), key, logits, cache, valid, written

    def unfinished(carry: tuple[Any, ...]) -> Array:
        return (carry[0] < max_decoding_steps) & ~carry[1].all()

    start_carry = (jnp.int32(0), jnp.zeros(valid.shape[0], bool), rng, logits, cache, valid, written)
    return jax.lax.while_loop(unfinished, step, start_carry)[-1]
