"""Helpers for JAX libraries: Pallas kernels in their interpreter, and imports that leave torch's Triton cache alone."""

from __future__ import annotations

import importlib
import os
from types import ModuleType


def interpreted(*platforms: str) -> bool:
    """Return whether JAX's default device is none of the platforms the kernel compiles for ("gpu", "tpu")."""
    import jax

    return jax.default_backend() not in platforms


def interpreter_reason(*platforms: str) -> str:
    """Return why the kernel may only be verified here; empty where it compiles. Imports JAX: asked inside workers
    only."""
    if not interpreted(*platforms):
        return ""
    return f"Pallas runs this kernel only on {' or '.join(platforms)}; here it runs in its interpreter"


CACHE = "TRITON_CACHE_DIR"


def import_beside_torch(name: str) -> ModuleType:
    """Return the module; Triton's cache stays where it was."""
    before = os.environ.get(CACHE)
    try:
        return importlib.import_module(name)
    finally:
        if before is None:
            os.environ.pop(CACHE, None)
        else:
            os.environ[CACHE] = before
