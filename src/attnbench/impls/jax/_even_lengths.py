"""Odd lengths for a library that trains on even ones only: one more query, one more key that nobody sees.

JAX takes the empty array that stands for "no bias" as a bias when it checks what cuDNN can train (0.10 and 0.11), so it
refuses odd lengths with any mask. The added query sees a key, since a row without one would have NaN gradients; what
is cut off has no gradient of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnbench.impls.jax._masks import MaskArguments
from attnbench.spec import Array, Workload


@dataclass(frozen=True)
class Evened:
    """A workload with `queries` and `keys` (0 or 1) added at the ends."""

    workload: Workload
    queries: int
    keys: int

    def arrays(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        return _longer(q, self.queries), _longer(k, self.keys), _longer(v, self.keys)

    def cut(self, out: Array) -> Array:
        return out[:, : self.workload.q_len]

    def keywords(self, arguments: MaskArguments, full_pairs: bool) -> dict[str, Any]:
        """As `MaskArguments.keywords`. Of a window the added query might see no key: it goes as an array."""
        import jax.numpy as jnp

        if arguments.window is not None:
            arguments = MaskArguments(rest=self.workload.visible_mask)
        words = arguments.keywords(self.workload, full_pairs)
        if "mask" in words:
            seen = jnp.pad(words["mask"], ((0, 0), (0, 0), (0, self.queries), (0, self.keys)))
            words["mask"] = seen.at[..., self.workload.q_len :, 0].set(True)
        elif self.keys and "key_value_seq_lengths" not in words:
            words["key_value_seq_lengths"] = jnp.asarray(np.full(self.workload.batch, self.workload.kv_len), jnp.int32)
        return words


def evened(workload: Workload) -> Evened | None:
    """None where both lengths are even."""
    odd = workload.q_len % 2, workload.kv_len % 2
    return Evened(workload, *odd) if any(odd) else None


def _longer(x: Array, tokens: int) -> Array:
    import jax.numpy as jnp

    return jnp.pad(x, ((0, 0), (0, tokens), (0, 0), (0, 0))) if tokens else x
