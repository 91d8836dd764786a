"""Normalisation and embedding, shared by both Gemmas."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax import Array


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + scale), in float32, back in x's dtype; with a condition also a shift and a gate (pi0.5)."""

    @nn.compact
    def __call__(self, x: Array, cond: Array | None = None) -> tuple[Array, Array | None]:
        """(normalised, gate of the residual or None); `cond` is [B, D]."""
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        normed = x * jnp.reciprocal(jnp.sqrt(square + 1e-6))
        if cond is None:
            scale = self.param("scale", nn.initializers.zeros_init(), (x.shape[-1],))
            return (normed * (1 + scale)).astype(x.dtype), None
        modulation = nn.Dense(3 * x.shape[-1], kernel_init=nn.initializers.zeros, dtype=x.dtype, name="Dense_0")(cond)
        scale, shift, gate = jnp.split(modulation[:, None], 3, axis=-1)
        return (normed * (1 + scale) + shift).astype(x.dtype), gate


class Embedder(nn.Module):
    """Token embeddings, scaled by sqrt(D) on the way in, and the same table for logits."""

    vocab_size: int
    embed_dim: int
    init_fn: nn.initializers.Initializer = nn.initializers.normal()

    def setup(self) -> None:
        """One table."""
        self.input_embedding_table = self.param("input_embedding", self.init_fn, (self.vocab_size, self.embed_dim))

    def encode(self, x: Array) -> Array:
        """[B, T] whole numbers -> [B, T, D]"""
        rows = self.input_embedding_table[x]
        return rows * jnp.sqrt(self.embed_dim).astype(rows.dtype)

    def decode(self, x: Array) -> Array:
        """[B, T, D] -> [B, T, vocabulary]"""
        return jnp.dot(x, self.input_embedding_table.T)
