"""Rotary positions as Gemma has them: half-split, angles in float32, the result left in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def apply_rope(x: Array, positions: Array, base: float = 10_000.0) -> Array:
    """Rotate pair (i, i + H/2) of x [B, T, N, H] by positions [B, T] / base ** (2 i / H), computed in float32."""
    half = x.shape[-1] // 2
    wavelengths = base ** (jnp.arange(half, dtype=jnp.float32) * (2.0 / x.shape[-1]))
    angles = (positions[..., None].astype(jnp.float32) / wavelengths)[:, :, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
