"""Gemma of pi0-FAST: one token list and a cache of fixed size, written one token at a time.

Constructor, call and parameter tree are openpi's. Unlike `gemma`, rotated queries stay float32 and K is rounded to
`cache_dtype` when stored; the flash path rounds the queries to K's dtype, since kernels take one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from attnbench.errors import UnknownName, UsageError
from attnbench.models import gemma_config
from attnbench.models.attention import FlashChoice, FullyMasked, Path, attend, flash_fields
from attnbench.models.gemma import Embedder, RMSNorm, stacked
from attnbench.models.lora import Einsum, FeedForward, LoRAConfig, project_qkv
from attnbench.models.masks import TokenMask, prepared
from attnbench.models.rope import apply_rope

__all__ = ["Attention", "Block", "Embedder", "FeedForward", "Module", "RMSNorm", "Variant", "get_config"]
Variant = Literal["dummy", "gemma_2b", "gemma_2b_lora"]
VARIANTS = ("dummy", "gemma_2b", "gemma_2b_lora")
Cache = tuple[Array, Array, Array]
"""Next free slot [B] (the same in all rows), K and V [B, S, K, H]; in a model with a leading axis of layers."""


def get_config(variant: Variant | gemma_config.Config | str) -> dict[str, Any]:
    """Return the arguments of `Module` for a variant or for sizes."""
    if isinstance(variant, str) and variant not in VARIANTS:
        raise UnknownName("Gemma variant", variant, VARIANTS, "")
    sizes = gemma_config.get_config(variant)
    return {
        **vars(sizes),
        "variant": variant if isinstance(variant, str) else "",
        "norm_eps": 1e-6,
        "vocab_size": gemma_config.PALIGEMMA_VOCAB_SIZE,
        "scan": True,
        "remat_policy": "nothing_saveable",
        "lora_configs": dict(sizes.lora_configs),
    }


class Attention(nn.Module):
    """Attention with a cache of fixed size; parameters q_einsum, kv_einsum (or qkv_einsum) and attn_vec_einsum."""

    num_heads: int
    num_kv_heads: int
    features: int
    head_dim: int
    cache_dtype: str | None = None
    lora_config: LoRAConfig | None = None
    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"

    @nn.compact
    def __call__(
        self,
        x: Array,
        positions: Array,
        attn_mask: Array | TokenMask,
        kv_cache: Cache | None,
        decode: bool = False,
        deterministic: bool = True,
    ) -> tuple[Array, Cache]:
        """Return the output and the cache.

        Without a cache the call takes any number of tokens, and the new cache is as long as the mask. With a cache it
        takes one more token.
        """
        del decode, deterministic  # part of openpi's call
        heads = self.num_heads, self.num_kv_heads
        q, k, v = project_qkv(x, heads, (self.features, self.head_dim), self.lora_config)
        q = apply_rope(q, positions) * self.head_dim**-0.5
        k = apply_rope(k, positions)
        slots = attn_mask.kv_len if isinstance(attn_mask, TokenMask) else attn_mask.shape[-1]
        cache = self._new_cache(k, v, slots) if kv_cache is None else self._grown(k, v, kv_cache)
        encoded = attend(q, cache[1], cache[2], attn_mask, Path(**flash_fields(self)), x.dtype)
        init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        shape = (self.num_heads, self.head_dim, self.features)
        out = Einsum(shape, init, self.lora_config, name="attn_vec_einsum")("BTNH,NHD->BTD", encoded)
        return out, cache

    def _new_cache(self, k: Array, v: Array, slots: int) -> Cache:
        dtype = self.cache_dtype or k.dtype
        free = ((0, 0), (0, slots - k.shape[1]), (0, 0), (0, 0))
        k_cache, v_cache = (jnp.pad(x.astype(dtype), free) for x in (k, v))
        return jnp.full(k.shape[0], k.shape[1], jnp.int32), k_cache, v_cache

    def _grown(self, k: Array, v: Array, cache: Cache) -> Cache:
        if k.shape[1] != 1:
            raise UsageError(f"a call with a cache takes one new token, not {k.shape[1]}.")
        slot, k_cache, v_cache = cache
        k_cache, v_cache = (
            jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, slot[0], 0, 0))
            for old, new in ((k_cache, k), (v_cache, v))
        )
        return slot + 1, k_cache, v_cache


class Block(nn.Module):
    """Attention and feed-forward with residuals."""

    num_heads: int
    num_kv_heads: int
    embed_dim: int
    head_dim: int
    hidden_dim: int
    dropout: float = 0.0
    dropout_bdims: tuple[int, ...] = ()
    cache_dtype: str | None = None
    lora_configs: Mapping[str, LoRAConfig] | None = None
    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"

    @nn.compact
    def __call__(
        self,
        x: Array,
        kv_cache: Cache | None,
        positions: Array,
        attn_mask: Array | TokenMask,
        decode: bool = False,
        deterministic: bool = True,
    ) -> tuple[Array, Cache]:
        lora = self.lora_configs or {}
        attention = Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            features=self.embed_dim,
            head_dim=self.head_dim,
            cache_dtype=self.cache_dtype,
            lora_config=lora.get("attn"),
            name="attn",
            **flash_fields(self),
        )
        normed, _ = RMSNorm(name="pre_attention_norm")(x)
        attended, kv_cache = attention(normed, positions, attn_mask, kv_cache, decode, deterministic)
        attended = attended.astype(x.dtype)  # without cache_dtype it is float32, and layers hand on one dtype
        x = x + self._dropped(attended, deterministic)
        normed, _ = RMSNorm(name="pre_ffw_norm")(x)
        fed = FeedForward(self.embed_dim, self.hidden_dim, lora.get("ffn"), name="mlp")(normed)
        return x + self._dropped(fed, deterministic), kv_cache

    def _dropped(self, x: Array, deterministic: bool) -> Array:
        return nn.Dropout(self.dropout, self.dropout_bdims)(x, deterministic) if self.dropout else x


class Module(nn.Module):
    """Transformer: blocks in a scan with stacked parameters under `layers`; fields are openpi's."""

    variant: str
    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    vocab_size: int
    embed_dtype: str
    dropout: float = 0.0
    dropout_bdims: tuple[int, ...] = ()
    cache_dtype: str | None = None
    scan: bool = True
    remat_policy: str = "none"
    lora_configs: Mapping[str, LoRAConfig] | None = None
    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"

    def setup(self) -> None:
        """Create the embedder, the blocks and the final norm.

        `norm_eps` and `scan` are ignored, as in openpi: the norms use 1e-6, the blocks are scanned.
        """
        self.embedder = Embedder(self.vocab_size, self.width, nn.initializers.zeros_init(), name="embedder")
        self.final_norm = RMSNorm(name="final_norm")
        self.layers = stacked(Block, self.depth, (5, 6), self.remat_policy)(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            embed_dim=self.width,
            head_dim=self.head_dim,
            hidden_dim=self.mlp_dim,
            dropout=self.dropout,
            dropout_bdims=self.dropout_bdims,
            cache_dtype=self.cache_dtype,
            lora_configs=self.lora_configs,
            **flash_fields(self),
        )

    def __call__(
        self,
        tokens: Array | None = None,
        embedded_prefix: Array | None = None,
        embed_only: bool = False,
        pre_logits: Array | None = None,
        positions: Array | None = None,
        mask: Array | TokenMask | None = None,
        decode: bool = False,
        kv_cache: Cache | None = None,
        deterministic: bool = True,
        return_prelogits: bool = False,
    ) -> Any:
        """Return (logits, cache, parts); the embeddings with `embed_only`; (logits, parts) with `pre_logits`.

        Without a mask the attention is causal; `mask` is [B, T, S] or a TokenMask, and S is the size of the cache.
        """
        if pre_logits is not None:
            logits = self.embedder.decode(pre_logits)
            return logits, {"pre_logits": pre_logits, "logits": logits}
        parts = [] if embedded_prefix is None else [embedded_prefix]
        if tokens is not None:
            parts.append(self.embedder.encode(tokens))
        x = jnp.concatenate(parts, axis=-2).astype(self.embed_dtype)
        if embed_only:
            return x
        if decode and (positions is None or mask is None):
            raise UsageError("decoding needs positions and a mask.")
        batch, length = x.shape[:2]
        if positions is None:
            positions = jnp.arange(length, dtype=jnp.int32)[None]
        if mask is None:
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
        mask = prepared(mask, self.use_flash_attention)
        x, kv_cache = self.layers(x, kv_cache, positions, mask, decode, deterministic)
        out = {"encoded": x}
        x = out["pre_logits"] = self.final_norm(x)[0]
        if return_prelogits:
            return x, kv_cache, out
        out["logits"] = self.embedder.decode(x)
        return out["logits"], kv_cache, out
