"""Gemma of pi0 and pi0.5: several experts' tokens, each with its own weights, in one attention.

Constructor, call and parameter tree are openpi's; `use_flash_attention`, `flash_attention_impl`, `fallback` and
`fully_masked` are ours (see `attnbench.models.attention`). Everywhere openpi takes a boolean mask array, a
`masks.TokenMask` is welcome too, and the flash path needs no T x S array with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from attnbench.errors import UsageError
from attnbench.models.attention import FlashChoice, FullyMasked, Path, attend, flash_fields
from attnbench.models.gemma_config import PALIGEMMA_VOCAB_SIZE, Config, Variant, get_config
from attnbench.models.lora import Einsum, FeedForward, project_qkv
from attnbench.models.masks import TokenMask, prepared
from attnbench.models.rope import apply_rope

__all__ = [
    "PALIGEMMA_VOCAB_SIZE", "Attention", "Block", "Config", "Embedder", "FeedForward", "Module", "RMSNorm", "Variant",
    "get_config",
]  # fmt: skip
Tokens = Sequence[Array | None]
"""Tokens [B, T_i, D_i] of each expert; None for an expert that does not run."""
Cache = tuple[Array, Array]
"""K and V, [B, S, K, H] in a layer and [L, B, S, K, H] in a model."""


def named(name: str, expert: int) -> str:
    """Return a parameter name as openpi has it: the first expert has no suffix."""
    return name if expert == 0 else f"{name}_{expert}"


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
        self.input_embedding_table = self.param("input_embedding", self.init_fn, (self.vocab_size, self.embed_dim))

    def encode(self, x: Array) -> Array:
        """Return embeddings [B, T, D] of whole numbers [B, T]."""
        rows = self.input_embedding_table[x]
        return rows * jnp.sqrt(self.embed_dim).astype(rows.dtype)

    def decode(self, x: Array) -> Array:
        """Return logits [B, T, vocabulary] of x [B, T, D]."""
        return jnp.dot(x, self.input_embedding_table.T)


class Attention(nn.Module):
    """Joint attention of the experts; parameters q_einsum, kv_einsum (or qkv_einsum), attn_vec_einsum of each."""

    configs: Sequence[Config]
    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"

    @nn.compact
    def __call__(
        self, xs: Tokens, positions: Array, attn_mask: Array | TokenMask, kv_cache: Cache | None
    ) -> tuple[list[Array | None], Cache]:
        """Return the outputs per expert and the extended cache; the given cache does not change."""
        if len({(c.head_dim, c.num_heads, c.num_kv_heads) for c in self.configs}) != 1:
            raise UsageError("experts that attend together need the same head_dim, num_heads and num_kv_heads.")
        if len(xs) != len(self.configs) or all(x is None for x in xs):
            raise UsageError(
                f"{len(self.configs)} experts need as many token arrays, at least one of which is not None."
            )
        dtype = next(x.dtype for x in xs if x is not None)
        projected = []
        for i, (x, config) in enumerate(zip(xs, self.configs)):
            if x is not None:
                heads, inner = (config.num_heads, config.num_kv_heads), (config.width, config.head_dim)
                projected.append(project_qkv(x, heads, inner, config.lora_configs.get("attn"), named("", i)))
        q, k, v = (jnp.concatenate(parts, axis=1) for parts in zip(*projected, strict=True))
        q = apply_rope(q, positions).astype(dtype) * jnp.asarray(self.configs[0].head_dim ** -0.5, dtype)
        k = apply_rope(k, positions).astype(dtype)
        if kv_cache is not None:
            k, v = (jnp.concatenate([old, new], axis=1) for old, new in zip(kv_cache, (k, v)))
        encoded = attend(q, k, v, attn_mask, Path(**flash_fields(self)), dtype)
        outs: list[Array | None] = []
        start = 0
        init = nn.initializers.lecun_normal(in_axis=(-3, -2), out_axis=-1)
        for i, (x, config) in enumerate(zip(xs, self.configs)):
            if x is None:
                outs.append(None)
                continue
            shape = (config.num_heads, config.head_dim, config.width)
            back = Einsum(shape, init, config.lora_configs.get("attn"), name=named("attn_vec_einsum", i))
            outs.append(back("BTNH,NHD->BTD", encoded[:, start : start + x.shape[1]]))
            start += x.shape[1]
        return outs, (k, v)


class Block(nn.Module):
    """Attention and feed-forward with residuals; a condition modulates the norms and gates the residuals."""

    configs: Sequence[Config]
    dropout: float = 0.0
    dropout_bdims: tuple[int, ...] = ()
    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"

    @nn.compact
    def __call__(
        self,
        xs: Tokens,
        kv_cache: Cache | None,
        positions: Array,
        attn_mask: Array | TokenMask,
        adarms_cond: Tokens,
        deterministic: bool = True,
    ) -> tuple[list[Array | None], Cache]:
        attention = Attention(configs=self.configs, name="attn", **flash_fields(self))
        normed, gates = self._normed("pre_attention_norm", xs, adarms_cond)
        attended, kv_cache = attention(normed, positions, attn_mask, kv_cache)
        xs = self._added(xs, attended, gates, deterministic)
        normed, gates = self._normed("pre_ffw_norm", xs, adarms_cond)
        fed = [
            None if x is None else FeedForward(c.width, c.mlp_dim, c.lora_configs.get("ffn"), name=named("mlp", i))(x)
            for i, (x, c) in enumerate(zip(normed, self.configs))
        ]
        return self._added(xs, fed, gates, deterministic), kv_cache

    def _normed(self, name: str, xs: Tokens, conds: Tokens) -> tuple[list[Array | None], list[Array | None]]:
        pairs = [(None, None) if x is None else RMSNorm(name=named(name, i))(x, conds[i]) for i, x in enumerate(xs)]
        return [x for x, _ in pairs], [gate for _, gate in pairs]

    def _added(self, xs: Tokens, ys: Tokens, gates: Tokens, deterministic: bool) -> list[Array | None]:
        if self.dropout:
            drop = nn.Dropout(self.dropout, self.dropout_bdims)
            ys = [None if y is None else drop(y, deterministic) for y in ys]
        sums: list[Array | None] = []
        for x, y, gate in zip(xs, ys, gates, strict=True):
            if x is None or y is None:
                sums.append(None)
            else:
                sums.append(x + (y if gate is None else y * gate))
        return sums


def stacked(block: Any, depth: int, static: tuple[int, ...], policy: str) -> Any:
    """Return a class of blocks as a scan over layers, with one axis of layers in front of every parameter.

    Blocks are recomputed in the backward pass but for what the policy, of `jax.checkpoint_policies`, saves; "none"
    recomputes nothing. `static` are the positions of arguments that are not traced.
    """
    if policy != "none":
        saved = getattr(jax.checkpoint_policies, policy)
        block = nn.remat(block, prevent_cse=False, static_argnums=static, policy=saved)
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
        length=depth,
    )


class Module(nn.Module):
    """Transformer: blocks in a scan with stacked parameters under `layers`, and a final norm per expert."""

    configs: Sequence[Config]
    embed_dtype: str
    dropout: float = 0.0
    dropout_bdims: tuple[int, ...] = ()
    adarms: bool = False
    vocab_size: int = PALIGEMMA_VOCAB_SIZE
    use_flash_attention: bool = False
    flash_attention_impl: FlashChoice = "auto"
    fallback: bool = False
    fully_masked: FullyMasked = "uniform"

    def setup(self) -> None:
        """Create the embedder, the blocks (each recomputed in the backward pass, as in openpi) and the final norms."""
        if len({config.depth for config in self.configs}) != 1:
            raise UsageError("experts that attend together need the same depth.")
        self.embedder = Embedder(self.vocab_size, self.configs[0].width, name="embedder")
        layers = stacked(Block, self.configs[0].depth, (6,), "nothing_saveable")  # static: deterministic; 0 is self
        self.layers = layers(
            configs=self.configs, dropout=self.dropout, dropout_bdims=self.dropout_bdims, **flash_fields(self)
        )
        self.final_norms = [RMSNorm(name=named("final_norm", i)) for i in range(len(self.configs))]

    def embed(self, tokens: Array) -> Array:
        """Return the first expert's tokens for whole numbers [B, T]."""
        return self.embedder.encode(tokens).astype(self.embed_dtype)

    def __call__(
        self,
        embedded: Tokens,
        positions: Array,
        mask: Array | TokenMask,
        adarms_cond: Tokens | None = None,
        *,
        kv_cache: Cache | None = None,
        deterministic: bool = True,
    ) -> tuple[list[Array | None], Cache]:
        """Return the outputs per expert and the extended cache of all layers; `mask` is [B, T, S] or a TokenMask."""
        xs = [None if x is None else x.astype(self.embed_dtype) for x in embedded]
        mask = prepared(mask, self.use_flash_attention)
        conds = list(adarms_cond) if adarms_cond is not None else [None] * len(self.configs)
        xs, cache = self.layers(xs, kv_cache, positions, mask, conds, deterministic)
        outs = [
            None if x is None else norm(x, cond)[0] for norm, x, cond in zip(self.final_norms, xs, conds, strict=True)
        ]
        return outs, cache

    def init_all(self, use_adarms: Sequence[bool] | None = None) -> None:
        """Create every parameter: `module.init(key, method="init_all")`; openpi calls this method `init`."""
        use_adarms = use_adarms or [False] * len(self.configs)
        experts = len(self.configs)
        self.embed(jnp.zeros((1, 1), jnp.int32))
        self(
            [jnp.zeros((1, 1, config.width)) for config in self.configs],
            jnp.zeros((1, experts), jnp.int32),
            jnp.ones((1, experts, experts), bool),
            [jnp.zeros((1, c.width)) if used else None for used, c in zip(use_adarms, self.configs, strict=True)],
        )
