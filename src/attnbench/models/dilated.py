"""Dilated attention (LongNet) for JAX models: a pure function, for jit, grad and vmap. Torch modules are in `nn`."""

from attnbench.kernels.dilated.jax_attention import dilated_attention

__all__ = ["dilated_attention"]
