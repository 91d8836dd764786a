"""Time of a captured call: the forward around the call, the backward around the operators that autograd recorded.

On a CPU torch computes when it is called, so the wall clock is right. On a GPU events are put into the stream and read
at the end: nothing waits while the step runs.

Activation checkpointing computes a region of the model again inside an operator of the backward pass, and attention
with it. That is not a call of its own and is not timed. An operator in which it happens is timed from the end of the
recomputation, if an exception through attention shows that end; else the operator is left out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

METHODS = {
    "cpu": "wall clock around each call and around the operators of its backward pass",
    "cuda": "CUDA events around each call and around the operators of its backward pass",
    "jax": "wall clock around each call, waiting for its arrays before and after",
    "numpy": "wall clock around each call",
}
EARLY_STOP = "_StopRecomputationError"
"""Name of the exception that torch.utils.checkpoint raises when it has recomputed all that it needs."""


class Recomputed(threading.local):
    """Calls inside the operators of a backward pass, as seen by the thread that runs them."""

    count = 0
    over: Any = None
    """Clock and time at which the last of them ended the recomputation; None if that went on."""

    def note(self, over: Any) -> None:
        """Count one more recomputed call."""
        self.count, self.over = self.count + 1, over


class Span:
    """Time intervals of one call, read when everything has run."""

    def __init__(self, kind: str, recomputed: Recomputed) -> None:
        self.kind = kind
        self._recomputed = recomputed
        self._intervals: list[tuple[Any, Any]] = []
        self._open: dict[int, tuple[Any, int]] = {}
        self.has_backward = False
        self.left_out = False
        """Whether an operator of the backward pass could not be timed."""

    def now(self) -> Any:
        """Return a point in time on the clock of the kind."""
        if self.kind != "cuda":
            return perf_counter_ns()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, call: Callable[[], Any]) -> Any:
        """Run the forward call and record its interval."""
        start = self.now()
        out = call()
        self._intervals.append((start, self.now()))
        return out

    def around_again(self, call: Callable[[], Any]) -> Any:
        """Run the call in a backward pass, and count it for the operator that is being timed."""
        over = None
        try:
            return self.around(call)
        except Exception as error:
            over = (self.kind, self.now()) if type(error).__name__ == EARLY_STOP else None
            raise
        finally:
            self._recomputed.note(over)

    def watch_backward(self, out: Any, inputs: tuple[Any, ...]) -> None:
        """Time each node of the graph between the output and the inputs when autograd runs it."""
        for node in list(_nodes_between(out.grad_fn, {getattr(x, "grad_fn", None) for x in inputs})):
            key = id(node)
            node.register_prehook(lambda *_, key=key: self._begin(key))
            node.register_hook(lambda *_, key=key: self._end(key))

    def _begin(self, key: int) -> None:
        self.has_backward = True
        self._open[key] = self.now(), self._recomputed.count

    def _end(self, key: int) -> None:
        if key not in self._open:
            return
        start, count = self._open.pop(key)
        if count != self._recomputed.count:
            kind, over = self._recomputed.over or (None, None)
            start = over if kind == self.kind else None
        if start is None:
            self.left_out = True
        else:
            self._intervals.append((start, self.now()))

    @property
    def seconds(self) -> float:
        """Length of all intervals; on a GPU the caller has synchronised."""
        if self.kind == "cuda":
            return sum(start.elapsed_time(end) for start, end in self._intervals) / 1e3
        return sum(end - start for start, end in self._intervals) / 1e9


def in_backward() -> bool:
    """Return whether autograd runs an operator of a backward pass in this thread; checkpointing asks the same way."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1


def _nodes_between(first: Any, stops: set[Any]) -> Iterator[Any]:
    """Yield nodes from `first` down to those that made the inputs, without these and leaves."""
    waiting, seen = [first], set(stops)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or type(node).__name__ == "AccumulateGrad":
            continue
        seen.add(node)
        yield node
        waiting += [parent for parent, _ in node.next_functions]
