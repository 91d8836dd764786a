"""Which kernels were launched, as far as profiles show."""

from __future__ import annotations

from attnbench.spec import Ok


def same_kernel(a: Ok, b: Ok) -> bool:
    """Whether profiles of both show the same kernels; without a profile nobody knows."""
    return bool(a.kernels) and set(a.kernels or ()) == set(b.kernels or ())
