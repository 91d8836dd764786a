"""When a captured call ran: forward around the call, backward around the operators that autograd recorded in it.

On a CPU torch works when it is called, so the wall clock is right. On a GPU events are put into the stream and read at
the end: nothing waits for anything while the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

METHODS = {
    "cpu": "wall clock around each call and around the operators of its backward pass",
    "cuda": "CUDA events around each call and around the operators of its backward pass",
    "jax": "wall clock around each call, waiting for its arrays before and after",
    "numpy": "wall clock around each call",
}


class Span:
    """Intervals of one call, read when everything has run."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._intervals: list[tuple[Any, Any]] = []
        self._open: dict[int, Any] = {}
        self.has_backward = False

    def now(self) -> Any:
        """A point in time, on the clock of the kind."""
        if self.kind != "cuda":
            return perf_counter_ns()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, call: Callable[[], Any]) -> Any:
        """Run the forward call."""
        start = self.now()
        out = call()
        self._intervals.append((start, self.now()))
        return out

    def watch_backward(self, out: Any, inputs: tuple[Any, ...]) -> None:
        """Time each node of the graph between the output and the inputs when autograd runs it."""
        for node in list(_nodes_between(out.grad_fn, {x.grad_fn for x in inputs})):
            key = id(node)
            node.register_prehook(lambda *_, key=key: self._begin(key))
            node.register_hook(lambda *_, key=key: self._end(key))

    def _begin(self, key: int) -> None:
        self.has_backward = True
        self._open[key] = self.now()

    def _end(self, key: int) -> None:
        if key in self._open:
            self._intervals.append((self._open.pop(key), self.now()))

    @property
    def seconds(self) -> float:
        """Of all intervals; on a GPU the caller has synchronised."""
        if self.kind == "cuda":
            return sum(start.elapsed_time(end) for start, end in self._intervals) / 1e3
        return sum(end - start for start, end in self._intervals) / 1e9


def _nodes_between(first: Any, stops: set[Any]) -> Iterator[Any]:
    """Nodes from `first` down to the ones that made the inputs, those and leaves excluded."""
    waiting, seen = [first], set(stops)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or type(node).__name__ == "AccumulateGrad":
            continue
        seen.add(node)
        yield node
        waiting += [parent for parent, _ in node.next_functions]
