"""Gemma as openpi uses it, and pi0, pi0.5 and pi0-FAST on top of it: flax linen modules with a flash path.
Also dilated attention as a function of JAX arrays.

Parts are imported by name (`attnbench.models.dilated`, `.gemma`, `.gemma_fast`, `.lora`, `.pi0`, `.pi0_fast`,
`.gemma_torch`), so that each brings only the framework it needs.
"""

from importlib import import_module
from typing import Any

_PARTS = ("dilated", "gemma", "gemma_fast", "gemma_torch", "lora", "masks", "pi0", "pi0_fast", "rope")

__all__ = [*_PARTS]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"attnbench.models.{name}")
    raise AttributeError(f"module 'attnbench.models' has no attribute '{name}'")
