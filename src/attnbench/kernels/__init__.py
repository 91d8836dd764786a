"""Attention that attnbench computes itself: dilated, block-sparse, over KV caches, ring and chunked.

The lab reaches these kernels by name, through the registry, as it reaches every other library.
"""

from __future__ import annotations

from abc import abstractmethod

from attnbench.spec import Array, Call, Config, Implementation, Workload


class WithLse(Implementation):
    """Implementation whose one call returns the output and the LSE, of which `build` drops the latter."""

    @abstractmethod
    def both(self, workload: Workload, config: Config) -> Call:
        """Return `(q, k, v) -> (out, lse)`, in torch; the LSE in any precision."""

    def build(self, workload: Workload, config: Config) -> Call:
        call = self.both(workload, config)
        return lambda q, k, v: call(q, k, v)[0]

    def build_lse(self, workload: Workload, config: Config) -> Call:
        call = self.both(workload, config)

        def with_lse(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = call(q, k, v)
            return out, lse.float()

        return with_lse
