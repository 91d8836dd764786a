"""One attention for both Gemmas: the standard path (einsum) and the flash path, with the same result.

A query that sees no key gives the mean of V, as in openpi (`fully_masked="uniform"`), or 0 (`"zero"`), on either path.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from attnbench.errors import Unsupported, UsageError
from attnbench.models.flash import flash_attention
from attnbench.models.gemma_config import check_flash_choice
from attnbench.models.masks import TokenMask, fitted

FlashChoice = Literal["auto", "cudnn", "tokamax", "kvax", "pallas", "jax"]
FullyMasked = Literal["uniform", "zero"]
HIDDEN = -2.3819763e38
"""openpi's logit of a hidden pair: finite, so that a row without keys becomes uniform."""
_warned: set[str] = set()


@dataclass(frozen=True)
class Path:
    """How an attention module computes; the fields of `gemma.Attention` and `gemma_fast.Attention`."""

    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"

    def __post_init__(self) -> None:
        check_flash_choice(self.flash_attention_impl)
        for name in ("use_flash_attention", "fallback"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is True or False, not {getattr(self, name)!r}.")
        if self.fully_masked not in ("uniform", "zero"):
            raise UsageError(f'fully_masked is "uniform" or "zero", not "{self.fully_masked}".')


FLASH_FIELDS = tuple(field.name for field in fields(Path))


def flash_fields(module: Any) -> dict[str, Any]:
    """What a module hands on to the modules inside it."""
    return {name: getattr(module, name) for name in FLASH_FIELDS}


def path_of(module: Any) -> Path:
    """The path of an attention module."""
    return Path(**flash_fields(module))


def attend(q: Array, k: Array, v: Array, attn_mask: Array | TokenMask, path: Path, dtype: Any) -> Array:
    """q [B, T, N, H], scaled; k and v [B, S, K, H]; the mask [B, 1, T, S] or a TokenMask; `dtype` of probabilities."""
    attn_mask = fitted(attn_mask, q.shape[0], q.shape[1], k.shape[1])
    if path.use_flash_attention:
        try:
            out = flash_attention(q.astype(k.dtype), k, v, attn_mask, path.flash_attention_impl)
        except Unsupported as refusal:
            if not path.fallback:
                raise Unsupported(f"{refusal} fallback=True uses the standard attention instead.") from refusal
            _warn_once(f"the standard attention is used: {refusal}")
        else:
            out = out.astype(jnp.result_type(dtype, v.dtype))
            return _fill(out, v, _rows_that_see(attn_mask), path.fully_masked, dtype)
    array = attn_mask.array() if isinstance(attn_mask, TokenMask) else attn_mask
    out = standard_attention(q, k, v, array, dtype)
    if path.fully_masked == "uniform":
        return out
    return _fill(out, v, _rows_that_see(attn_mask), "zero", dtype)


def standard_attention(q: Array, k: Array, v: Array, mask: Array, dtype: Any) -> Array:
    """Logits and softmax in float32, probabilities in `dtype`; stores T x S."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(jnp.where(mask[:, :, None], logits, HIDDEN), axis=-1).astype(dtype)
    return jnp.einsum("bkgts,bskh->btkgh", probabilities, v).reshape(*q.shape[:3], v.shape[-1])


def _rows_that_see(attn_mask: Array | TokenMask) -> Array | None:
    return attn_mask.rows_that_see() if isinstance(attn_mask, TokenMask) else attn_mask.any(-1)[:, 0]


def _fill(out: Array, v: Array, rows: Array | None, how: FullyMasked, dtype: Any) -> Array:
    """Rows without keys: 0, or what equal probabilities of `dtype` give."""
    if rows is None:
        return out
    other = jnp.zeros((), out.dtype)
    if how == "uniform":
        mean = jnp.einsum("s,bskh->bkh", jnp.full(v.shape[1], 1 / v.shape[1], dtype), v)
        other = jnp.repeat(mean, out.shape[2] // v.shape[2], axis=1)[:, None].astype(out.dtype)
    return jnp.where(rows[..., None, None], out, other)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)
