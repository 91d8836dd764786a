"""Sizes of the Gemma variants that openpi uses, and the implementations of each flash path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from attnbench.errors import UnknownName

if TYPE_CHECKING:
    from attnbench.models.lora import LoRAConfig

PALIGEMMA_VOCAB_SIZE = 257_152
Variant = Literal["dummy", "gemma_300m", "gemma_300m_lora", "gemma_2b", "gemma_2b_lora"]
FLASH_CHOICES: dict[str, tuple[str, ...]] = {
    "auto": ("auto",),
    "cudnn": ("jax.cudnn",),
    "tokamax": ("jax.tokamax-mosaic", "jax.tokamax-triton", "jax.tokamax-xla-chunked"),
    "kvax": ("jax.kvax",),
    "pallas": ("jax.pallas-triton",),
    "jax": ("jax.xla",),
}
"""Implementations of each flash_attention_impl; the first that can run the call is used."""


def check_flash_choice(choice: object) -> None:
    """Raise for an unknown flash_attention_impl."""
    if not isinstance(choice, str) or choice not in FLASH_CHOICES:
        raise UnknownName("flash_attention_impl", str(choice), FLASH_CHOICES, "")


@dataclass(frozen=True)
class Config:
    """Sizes of an expert; experts that attend together have equal depth, heads and head_dim."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lora_configs: Mapping[str, LoRAConfig] = field(default_factory=dict)
    """Low-rank updates of "attn" and "ffn"; empty without updates."""


_SIZES = {
    "dummy": Config(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16),
    "gemma_300m": Config(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
    "gemma_2b": Config(width=2048, depth=18, mlp_dim=16_384, num_heads=8, num_kv_heads=1, head_dim=256),
}
_RANKS = {"gemma_300m_lora": 32, "gemma_2b_lora": 16}


def get_config(variant: Variant | Config | str) -> Config:
    """Return the sizes of a variant; a Config is returned unchanged."""
    if isinstance(variant, Config):
        return variant
    if variant in _SIZES:
        return _SIZES[variant]
    if variant not in _RANKS:
        raise UnknownName("Gemma variant", variant, [*_SIZES, *_RANKS], "")
    from attnbench.models.lora import LoRAConfig

    rank = _RANKS[variant]
    update = LoRAConfig(rank=rank, alpha=float(rank))
    return replace(_SIZES[variant.removesuffix("_lora")], lora_configs={"attn": update, "ffn": update})
