"""Implementations by libraries, a folder per framework, and two bases for those that make their calls in one place."""

from __future__ import annotations

from abc import abstractmethod

from attnbench.spec import Array, Call, Config, Implementation, Workload


class WithLse(Implementation):
    """Implementation that makes both of its calls in one place."""

    @abstractmethod
    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        """Return `(q, k, v) -> out`, or (out, lse) with `with_lse`."""

    def build(self, workload: Workload, config: Config) -> Call:
        return self.call(workload, config, with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        return self.call(workload, config, with_lse=True)


class AlwaysLse(WithLse):
    """Implementation whose one call returns the output and the LSE, of which `build` drops the latter."""

    @abstractmethod
    def both(self, workload: Workload, config: Config) -> Call:
        """Return `(q, k, v) -> (out, lse)`; the LSE in any precision."""

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        both = self.both(workload, config)
        if not with_lse:
            return lambda q, k, v: both(q, k, v)[0]

        def in_usual_width(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = both(q, k, v)
            if workload.dtype == "float64":
                return out, lse
            return out, lse.float() if self.framework == "torch" else lse.astype("float32")

        return in_usual_width
