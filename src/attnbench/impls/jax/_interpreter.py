"""Pallas kernels where their hardware is missing: the interpreter is exact, so they can be verified, never timed."""

from __future__ import annotations


def interpreted(*platforms: str) -> bool:
    """Whether JAX's default device is none of the platforms the kernel compiles for ("gpu", "tpu")."""
    import jax

    return jax.default_backend() not in platforms


def interpreter_reason(*platforms: str) -> str:
    """Why the kernel may only be verified here; empty where it compiles. Imports JAX: asked inside workers only."""
    if not interpreted(*platforms):
        return ""
    return f"Pallas runs this kernel only on {' or '.join(platforms)}; here it runs in its interpreter"
