"""torch modules built on the implementations; names are loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {  # public name -> the module it lives in
    "BlockSparseAttention": "attnbench.nn.block_sparse",
    "AdaptiveSparseAttention": "attnbench.nn.block_sparse",
    "create_block_sparse_attention": "attnbench.nn.block_sparse",
    "create_adaptive_sparse_attention": "attnbench.nn.block_sparse",
    "BlockGate": "attnbench.nn.sparse_gate",
    "train_gate": "attnbench.nn.sparse_gate",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'attnbench.nn' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
