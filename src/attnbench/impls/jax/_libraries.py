"""Helpers for JAX libraries: Pallas kernels in their interpreter, and imports that leave torch's Triton cache alone."""

from __future__ import annotations

import importlib
import os
from types import ModuleType


def interpreted(*platforms: str) -> bool:
    """Return whether JAX's default device is none of the platforms that the kernel compiles for ("gpu", "tpu")."""
    import jax

    return jax.default_backend() not in platforms


def interpreter_reason(*platforms: str) -> str:
    """Return why the kernel may only be verified here; empty if it compiles.

    The interpreter is exact, so kernels can be verified in it, but never timed. This function imports JAX: call it in
    workers only.
    """
    if not interpreted(*platforms):
        return ""
    return f"Pallas runs this kernel only on {' or '.join(platforms)}; here it runs in its interpreter"


CACHE = "TRITON_CACHE_DIR"


def import_beside_torch(name: str) -> ModuleType:
    """Import a module and restore TRITON_CACHE_DIR, which jax-triton empties for the whole process.

    With an empty TRITON_CACHE_DIR torch compiles no Triton kernel any more ("Could not create or locate cache dir").
    """
    before = os.environ.get(CACHE)
    try:
        return importlib.import_module(name)
    finally:
        if before is None:
            os.environ.pop(CACHE, None)
        else:
            os.environ[CACHE] = before
