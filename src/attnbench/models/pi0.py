"""pi0 and pi0.5: a prefix of image and text tokens, an action expert, flow matching. Vision tokens come as embeddings.

Names and shapes of parameters are openpi's (its vision tower, `PaliGemma/img`, is not here). Time runs as in its code:
1 is noise, 0 the actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from attnbench.errors import UsageError
from attnbench.impls._arguments import check_whole
from attnbench.models import gemma
from attnbench.models.attention import FlashChoice, FullyMasked, flash_fields
from attnbench.models.masks import TokenMask, in_blocks, truths

Params = Any


@dataclass(frozen=True)
class Pi0Config:
    """Configuration with openpi's defaults; a variant is a name or sizes, and `vocab_size` shrinks the embedding table
    for tests."""

    dtype: str = "bfloat16"
    paligemma_variant: gemma.Variant | gemma.Config = "gemma_2b"
    action_expert_variant: gemma.Variant | gemma.Config = "gemma_300m"
    action_dim: int = 32
    action_horizon: int = 50
    pi05: bool = False
    vocab_size: int = gemma.PALIGEMMA_VOCAB_SIZE
    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"


@struct.dataclass
class Observation:
    """Input of the policy. A mask of None means that all those tokens are valid, which spares the kernels a mask."""

    image_tokens: Array
    """Output of the vision tower [B, P, D], all cameras one after another."""
    image_mask: Array | None = None
    """Valid image tokens [B, P]; False for every token of a missing camera."""
    tokens: Array | None = None
    """Text, [B, L]."""
    token_mask: Array | None = None
    """Valid text tokens, [B, L]."""
    state: Array | None = None
    """State [B, action_dim]; pi0.5 has it in the text instead."""


def check_tokens(observation: Any, width: int) -> None:
    """Raise unless image tokens are [B, P, width] and text, if given, is whole numbers [B, L]."""
    images, text = observation.image_tokens, observation.tokens
    if images.ndim != 3 or images.shape[2] != width:
        raise UsageError(f"image_tokens must be [batch, tokens, {width}], not {list(images.shape)}.")
    if text is None:
        return
    if text.ndim != 2 or text.shape[0] != images.shape[0]:
        raise UsageError(f"tokens must be [batch, length], here [{images.shape[0]}, length], not {list(text.shape)}.")
    if not jnp.issubdtype(text.dtype, jnp.integer):
        raise UsageError(f"tokens must be whole numbers, not {text.dtype}.")


def check_shape(name: str, array: Array, wanted: tuple[int, ...], axes: str) -> None:
    """Raise for an array of another shape, with the names of its axes."""
    if array.shape != wanted:
        raise UsageError(f"{name} must be [{axes}], here {list(wanted)}, not {list(array.shape)}.")


def valid_tokens(observation: Any) -> Array | None:
    """Return which image and text tokens are valid, [B, P + L]; None if no mask was given."""
    parts = [(observation.image_tokens, "image_mask")]
    if observation.tokens is not None:
        parts.append((observation.tokens, "token_mask"))
    if all(getattr(observation, name) is None for _, name in parts):
        return None
    masks = [(tokens.shape[:2], token_mask(observation, name, tokens.shape[:2])) for tokens, name in parts]
    return jnp.concatenate([jnp.ones(shape, bool) if mask is None else mask for shape, mask in masks], axis=1)


def token_mask(observation: Any, name: str, wanted: tuple[int, ...]) -> Array | None:
    """Return a mask of the observation as booleans with a value for every token; None if it was not given."""
    mask = getattr(observation, name)
    if mask is None:
        return None
    if mask.shape != wanted:
        hint = "; repeat the value of a camera for all of its tokens" if name == "image_mask" else ""
        raise UsageError(
            f"{name} must have a value for every token, here {list(wanted)}, not {list(mask.shape)}{hint}."
        )
    return truths(name, mask)


class PaliGemma(nn.Module):
    """Node of the parameter tree that holds the language model, `PaliGemma/llm`."""

    llm: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.llm(*args, **kwargs)

    def embed(self, tokens: Array) -> Array:
        """Return the first expert's tokens of a text."""
        return self.llm.embed(tokens)  # pyright: ignore[reportAttributeAccessIssue]


class Pi0(nn.Module):
    """Policy with two experts, of the prefix and of the actions."""

    config: Pi0Config

    def setup(self) -> None:
        config = self.config
        experts = [gemma.get_config(config.paligemma_variant), gemma.get_config(config.action_expert_variant)]
        width = experts[1].width
        llm = gemma.Module(
            configs=experts,
            embed_dtype=config.dtype,
            adarms=config.pi05,
            vocab_size=config.vocab_size,
            **flash_fields(config),
            parent=None,
        )
        self.PaliGemma = PaliGemma(llm)
        self.action_in_proj = nn.Dense(width)
        self.action_out_proj = nn.Dense(config.action_dim)
        if config.pi05:
            self.time_mlp_in, self.time_mlp_out = nn.Dense(width), nn.Dense(width)
        else:
            self.state_proj = nn.Dense(width)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Dense(width), nn.Dense(width)

    @property
    def suffix_blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks after the prefix: the state alone (not in pi0.5), the actions."""
        return (self.config.action_horizon,) if self.config.pi05 else (1, self.config.action_horizon)

    def embed_prefix(self, observation: Observation) -> tuple[Array, Array | None]:
        """Return image and text tokens [B, P, D], and which of them are valid."""
        check_tokens(observation, gemma.get_config(self.config.paligemma_variant).width)
        parts, valid = [observation.image_tokens.astype(self.config.dtype)], valid_tokens(observation)
        if observation.tokens is not None:
            parts.append(self.PaliGemma.embed(observation.tokens))
        tokens = jnp.concatenate(parts, axis=1)
        if valid is None or not self.config.use_flash_attention:
            return tokens, valid
        # Invalid tokens go last: the attention is the same, since it depends on positions, which count valid tokens.
        order = jnp.argsort(~valid, axis=1, stable=True)
        return jnp.take_along_axis(tokens, order[..., None], axis=1), jnp.take_along_axis(valid, order, axis=1)

    def embed_suffix(self, observation: Observation, noisy: Array, time: Array) -> tuple[Array, Array | None]:
        """Return the action expert's tokens, and in pi0.5 the condition of its norms."""
        _check_actions("noisy actions", noisy, self.config, observation)
        actions = self.action_in_proj(noisy)
        when = time_embedding(time, actions.shape[-1])
        if self.config.pi05:
            return actions, nn.swish(self.time_mlp_out(nn.swish(self.time_mlp_in(when))))
        if observation.state is None:
            raise UsageError("pi0 needs Observation(state=[B, action_dim]); only pi0.5 has the state in its text.")
        wanted = (actions.shape[0], self.config.action_dim)
        check_shape("state", observation.state, wanted, "batch, action_dim")
        when = jnp.broadcast_to(when[:, None], actions.shape)
        mixed = self.action_time_mlp_in(jnp.concatenate([actions, when], axis=-1))
        mixed = self.action_time_mlp_out(nn.swish(mixed))
        return jnp.concatenate([self.state_proj(observation.state)[:, None], mixed], axis=1), None

    def velocity(self, observation: Observation, noisy: Array, time: Array) -> Array:
        """Return the velocity [B, horizon, action_dim] from one pass over prefix and suffix."""
        prefix, valid = self.embed_prefix(observation)
        suffix, cond = self.embed_suffix(observation, noisy, time)
        mask = self._mask(prefix.shape[1], valid, suffix=True)
        positions = jnp.concatenate([_positions(prefix, valid), self._suffix_positions(prefix, valid)], axis=1)
        (_, out), _ = self.PaliGemma([prefix, suffix], positions, mask, [None, cond])
        return self.action_out_proj(out[:, -self.config.action_horizon :])

    def compute_loss(self, rng: Array, observation: Observation, actions: Array) -> Array:
        """Return the flow-matching loss at a random time: squared error of the velocity, [B, horizon]."""
        _check_actions("actions", actions, self.config, observation)
        noise_rng, time_rng = jax.random.split(rng)
        noise = jax.random.normal(noise_rng, actions.shape)
        time = jax.random.beta(time_rng, 1.5, 1, actions.shape[:1]) * 0.999 + 0.001
        share = time[:, None, None]
        velocity = self.velocity(observation, share * noise + (1 - share) * actions, time)
        return jnp.mean(jnp.square(velocity - (noise - actions)), axis=-1)

    def prefill(self, observation: Observation) -> tuple[gemma.Cache, Array | None]:
        """Return the prefix's cache, and which of its tokens are valid."""
        prefix, valid = self.embed_prefix(observation)
        mask = self._mask(prefix.shape[1], valid, suffix=False)
        _, cache = self.PaliGemma([prefix, None], _positions(prefix, valid), mask)
        return cache, valid

    def denoise(
        self, observation: Observation, cache: gemma.Cache, valid: Array | None, noisy: Array, time: Array
    ) -> Array:
        """Return the velocity, computed with a prefix cache that does not change."""
        suffix, cond = self.embed_suffix(observation, noisy, time)
        prefix = cache[0][0]
        mask = self._mask(prefix.shape[1], valid, suffix=True, queries_from=prefix.shape[1])
        positions = self._suffix_positions(prefix, valid)
        (_, out), _ = self.PaliGemma([None, suffix], positions, mask, [None, cond], kv_cache=cache)
        return self.action_out_proj(out[:, -self.config.action_horizon :])

    def _mask(self, prefix: int, valid: Array | None, *, suffix: bool, queries_from: int = 0) -> TokenMask:
        blocks = self.suffix_blocks if suffix else ()
        if valid is not None:
            valid = jnp.pad(valid, ((0, 0), (0, sum(blocks))), constant_values=True)
        packed = prefix if self.config.use_flash_attention else 0
        mask = in_blocks((prefix, *blocks), valid, queries_from=queries_from, packed=packed)
        return mask.replace(q_valid=None) if queries_from else mask  # pyright: ignore[reportAttributeAccessIssue]

    def _suffix_positions(self, prefix: Array, valid: Array | None) -> Array:
        """Return the suffix's positions, which continue after the valid prefix tokens."""
        count = jnp.full(prefix.shape[0], prefix.shape[1]) if valid is None else valid.sum(axis=1)
        return count[:, None] + jnp.arange(sum(self.suffix_blocks))


def _positions(prefix: Array, valid: Array | None) -> Array:
    """Return the positions of the valid tokens, counted from 0."""
    if valid is None:
        return jnp.broadcast_to(jnp.arange(prefix.shape[1]), prefix.shape[:2])
    return jnp.cumsum(valid, axis=1) - 1


def _check_actions(name: str, actions: Array, config: Pi0Config, observation: Observation) -> None:
    wanted = (observation.image_tokens.shape[0], config.action_horizon, config.action_dim)
    check_shape(name, actions, wanted, "batch, action_horizon, action_dim")


def time_embedding(time: Array, width: int, shortest: float = 4e-3, longest: float = 4.0) -> Array:
    """Return sines and cosines of time [B] with periods from `shortest` to `longest`, [B, width].

    Angles reach 1570, so the rounding order of their factors matters: it is openpi's.
    """
    periods = shortest * (longest / shortest) ** jnp.linspace(0.0, 1.0, width // 2)
    angles = time[:, None] * (1.0 / periods * 2 * jnp.pi)[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def sample_actions(
    model: Pi0, params: Params, rng: Array, observation: Observation, *, num_steps: int = 10, noise: Array | None = None
) -> Array:
    """Return actions from noise by Euler steps: one pass over the prefix, then only the suffix against its cache."""
    config = model.config
    check_whole("num_steps", num_steps, 1)
    if noise is None:
        batch = observation.image_tokens.shape[0]
        noise = jax.random.normal(rng, (batch, config.action_horizon, config.action_dim))
    else:
        noise = jnp.asarray(noise)
        _check_actions("noise", noise, config, observation)
        if not jnp.issubdtype(noise.dtype, jnp.floating):
            raise UsageError(f"noise must be an array of floating-point numbers, not of {noise.dtype}.")
        noise = noise.astype(jnp.promote_types(noise.dtype, jnp.float32))  # the dtype of the velocities that are added
    cache, valid = model.apply({"params": params}, observation, method="prefill")
    step = -1.0 / num_steps

    def euler(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        actions, time = carry
        times = jnp.broadcast_to(time, actions.shape[:1])
        velocity: Any = model.apply({"params": params}, observation, cache, valid, actions, times, method="denoise")
        return actions + step * velocity, time + step

    return jax.lax.fori_loop(0, num_steps, euler, (noise, jnp.float32(1.0)))[0]


def random_observation(
    config: Pi0Config, rng: Array, batch: int = 1, image_tokens: int = 768, text_tokens: int | None = None
) -> Observation:
    """Return random valid tokens in a model's size, 48 of text by default (pi0.5: 200)."""
    length = text_tokens if text_tokens is not None else 200 if config.pi05 else 48
    keys = jax.random.split(rng, 3)
    width = gemma.get_config(config.paligemma_variant).width
    return Observation(
        image_tokens=jax.random.normal(keys[0], (batch, image_tokens, width)),
        tokens=jax.random.randint(keys[1], (batch, length), 0, config.vocab_size),
        state=None if config.pi05 else jax.random.normal(keys[2], (batch, config.action_dim)),
    )
