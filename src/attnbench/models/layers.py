"""Parts that the JAX models share: normalisation, token embedding, and checks of observations."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from attnbench.errors import UsageError
from attnbench.models.masks import truths


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + scale), computed in float32, in x's dtype; with a condition also a shift and a gate (pi0.5)."""

    @nn.compact
    def __call__(self, x: Array, cond: Array | None = None) -> tuple[Array, Array | None]:
        """Return (normalised, gate of the residual or None); `cond` is [B, D]."""
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        normed = x * jnp.reciprocal(jnp.sqrt(square + 1e-6))
        if cond is None:
            scale = self.param("scale", nn.initializers.zeros_init(), (x.shape[-1],))
            return (normed * (1 + scale)).astype(x.dtype), None
        modulation = nn.Dense(3 * x.shape[-1], kernel_init=nn.initializers.zeros, dtype=x.dtype, name="Dense_0")(cond)
        scale, shift, gate = jnp.split(modulation[:, None], 3, axis=-1)
        return (normed * (1 + scale) + shift).astype(x.dtype), gate


class Embedder(nn.Module):
    """Token embeddings, scaled by sqrt(D), and logits by the same table."""

    vocab_size: int
    embed_dim: int
    init_fn: nn.initializers.Initializer = nn.initializers.normal()

    def setup(self) -> None:
        """Create the table of embeddings."""
        self.input_embedding_table = self.param("input_embedding", self.init_fn, (self.vocab_size, self.embed_dim))

    def encode(self, x: Array) -> Array:
        """Return embeddings [B, T, D] of whole numbers [B, T]."""
        rows = self.input_embedding_table[x]
        return rows * jnp.sqrt(self.embed_dim).astype(rows.dtype)

    def decode(self, x: Array) -> Array:
        """Return logits [B, T, vocabulary] of x [B, T, D]."""
        return jnp.dot(x, self.input_embedding_table.T)


def check_tokens(observation: Any, width: int) -> None:
    """Raise unless image tokens are [B, P, width] and text, if given, is whole numbers [B, L]."""
    images, text = observation.image_tokens, observation.tokens
    if images.ndim != 3 or images.shape[2] != width:
        raise UsageError(f"image_tokens are [batch, tokens, {width}], not {list(images.shape)}.")
    if text is None:
        return
    if text.ndim != 2 or text.shape[0] != images.shape[0]:
        raise UsageError(f"tokens are [batch, length], here [{images.shape[0]}, length], not {list(text.shape)}.")
    if not jnp.issubdtype(text.dtype, jnp.integer):
        raise UsageError(f"tokens are whole numbers, not {text.dtype}.")


def check_shape(name: str, array: Array, wanted: tuple[int, ...], axes: str) -> None:
    """Raise for an array of another shape, with the names of its axes."""
    if array.shape != wanted:
        raise UsageError(f"{name} are [{axes}], here {list(wanted)}, not {list(array.shape)}.")


def which_are_there(observation: Any) -> Array | None:
    """Return which image and text tokens are valid, [B, P + L]; None if no mask was given."""
    parts = [(observation.image_tokens, "image_mask")]
    if observation.tokens is not None:
        parts.append((observation.tokens, "token_mask"))
    if all(getattr(observation, name) is None for _, name in parts):
        return None
    found = []
    for tokens, name in parts:
        mask = token_mask(observation, name, tokens.shape[:2])
        found.append(jnp.ones(tokens.shape[:2], bool) if mask is None else mask)
    return jnp.concatenate(found, axis=1)


def token_mask(observation: Any, name: str, wanted: tuple[int, ...]) -> Array | None:
    """Return a mask of the observation as booleans with a value for every token; None if it was not given."""
    mask = getattr(observation, name)
    if mask is None:
        return None
    if mask.shape != wanted:
        hint = "; repeat the value of a camera for all of its tokens" if name == "image_mask" else ""
        raise UsageError(f"{name} has a value for every token, here {list(wanted)}, not {list(mask.shape)}{hint}.")
    return truths(name, mask)
