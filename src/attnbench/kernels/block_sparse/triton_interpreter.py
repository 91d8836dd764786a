"""Triton's interpreter on a CPU: whether this process uses it, and a mend for versions before 3.9 under NumPy 2.4."""

from __future__ import annotations

import os
from typing import Any


def interpreted() -> bool:
    """Whether Triton kernels of this process run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def mend() -> None:
    """Loop bounds are arrays of one element there, which int() of NumPy 2.4 refuses: take the element instead."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "mended", False):
        return

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_and_mend.mended = True  # pyright: ignore[reportFunctionMemberAccess]
    interpreter._patch_lang_tensor = patch_and_mend
