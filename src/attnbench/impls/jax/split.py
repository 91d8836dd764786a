"""jax.cudnn-split and jax.xla-split: a block_causal, documents or prefix mask as a few calls without a mask array.

pi0's training mask (816 prefix tokens, a state token, 50 actions) is three calls: queries of a block see exactly the
keys up to its end. cuDNN then needs no bias, whose array it would want for every batch and head. A causal piece that
does not start at its first key (the text after pi0-FAST's prefix) goes as an array in `jax.nn.dot_product_attention`,
so it is refused.

Where the kernel shows its passes, keys that all queries see are one call (`parts.jax_common_keys`): none copies rows.
`[sequences=8]` takes eight sequences of the batch at a time: what the kernel and the joins need beside inputs, output
and gradients is then that of eight.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from attnbench.errors import UsageError
from attnbench.impls.conditions import first_reason
from attnbench.impls.jax._masks import mask_arguments
from attnbench.impls.jax.nn import CUDNN, XLA
from attnbench.impls.partial.jax_common_keys import common_passes
from attnbench.impls.partial.jax_passes import differentiable
from attnbench.impls.partial.jax_turns import by_turns, split_passes
from attnbench.impls.partial.splitting import Split, cut_of
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload


class JaxSplit(Split):
    """Through one of `jax.nn`'s backends, all sequences of the batch at once (`sequences=0`) or so many at a time."""

    tunables = {"sequences": 0}

    def __init__(self, inner: Implementation, untested: tuple[str, ...], sequences: int = 0) -> None:
        super().__init__(inner)
        self.untested, self._sequences = untested, sequences

    def configs(self, workload: Workload) -> Sequence[Config]:
        """All at once, and an eighth and a quarter of a large batch."""
        parts = [workload.batch // share for share in (8, 4) if workload.batch >= 2 * share]
        able = [size for size in parts if self._cannot_part(workload, size) is None]
        return ({}, *({"sequences": size} for size in able))

    def configured(self, config: Config) -> JaxSplit:
        sequences = config.get("sequences", self._sequences)
        if not isinstance(sequences, int) or sequences < 0:
            raise UsageError(f"{self.name} takes a number of sequences at a time (0: all), not {sequences!r}.")
        return JaxSplit(self.inner, self.untested, sequences) if sequences != self._sequences else self

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(super().supports(workload, environment), self._cannot_part(workload, self._sequences))

    def _cannot_part(self, workload: Workload, size: int) -> str | None:
        if size and workload.batch % size:
            return f"cannot take a batch of {workload.batch} by {size} sequences at a time: use a divisor"
        if 0 < size < workload.batch and workload.visible_mask.per_batch:
            return f"takes {size} sequences at a time only where every one has the same mask"
        return None

    def build(self, workload: Workload, config: Config) -> Call:
        """Through the kernel's own passes where it shows them; else every turn keeps copies."""
        size = self.configured(config)._sequences
        common = common_passes(self.inner, workload, cut_of(workload), size)
        if common is not None:
            return differentiable(common, with_lse=False)
        turn = replace(workload, batch=size or workload.batch)
        passes = split_passes(self.inner, turn, cut_of(turn)) if size and workload.needs_gradients else None
        if passes is None:
            return by_turns(super().build(turn, {}), size)
        forward, backward = passes
        return differentiable((by_turns(forward, size), by_turns(backward, size)), with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        """All sequences at once only."""
        return None if self.configured(config)._sequences else super().build_lse(workload, {})

    def needs_array(self, part: Workload, environment: Environment) -> bool:
        return mask_arguments(part).needs_array

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        import jax.numpy as jnp

        return jnp.concatenate(parts, axis=axis)


CUDNN_SPLIT = JaxSplit(CUDNN, ())
XLA_SPLIT = JaxSplit(XLA, ("cuda", "rocm", "tpu"))
