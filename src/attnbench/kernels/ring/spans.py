"""Where a rank's time goes. Nothing is timed unless somebody wants to know, since that takes waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

from attnbench.frameworks.torch.programs import synchronize


class Spans:
    """Sums of wall time by kind, the device waited for at both ends."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.ns = {"compute": 0, "waiting": 0}

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add the block's time to its kind."""
        synchronize(self._device)
        start = perf_counter_ns()
        try:
            yield
        finally:
            synchronize(self._device)
            self.ns[kind] += perf_counter_ns() - start


class Untimed(Spans):
    """The same without clocks."""

    def __init__(self) -> None:
        super().__init__("cpu")

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Just the block."""
        yield
