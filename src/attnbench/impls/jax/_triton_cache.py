"""Importing a library that may import jax-triton, which empties TRITON_CACHE_DIR for the whole process.

With it empty torch compiles no Triton kernel any more ("Could not create or locate cache dir"): it is put back.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

CACHE = "TRITON_CACHE_DIR"


def import_beside_torch(name: str) -> ModuleType:
    """The module; Triton's cache stays where it was."""
    before = os.environ.get(CACHE)
    try:
        return importlib.import_module(name)
    finally:
        if before is None:
            os.environ.pop(CACHE, None)
        else:
            os.environ[CACHE] = before
