"""jax.cudnn-split and jax.xla-split: a block_causal, documents or prefix mask as a few calls without a mask array.

pi0's training mask (816 prefix tokens, a state token, 50 actions) is three calls: queries of a block see exactly the
keys up to its end. cuDNN then needs no bias, whose array it would want for every batch and head. A causal piece that
does not start at its first key (the text after pi0-FAST's prefix) goes as an array in `jax.nn.dot_product_attention`,
so it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.impls.jax_masks import mask_arguments
from attnbench.impls.jax_nn import CUDNN, XLA, JaxNn
from attnbench.impls.parts.splitting import Split
from attnbench.spec import Array, Environment, Workload


class JaxSplit(Split):
    """Through one of `jax.nn`'s backends."""

    def __init__(self, inner: JaxNn, untested: tuple[str, ...]) -> None:
        super().__init__(inner)
        self.untested = untested

    def needs_array(self, part: Workload, environment: Environment) -> bool:
        return mask_arguments(part).needs_array

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        import jax.numpy as jnp

        return jnp.concatenate(parts, axis=axis)


CUDNN_SPLIT = JaxSplit(CUDNN, ("cuda",))
XLA_SPLIT = JaxSplit(XLA, ("cuda", "rocm", "tpu"))
