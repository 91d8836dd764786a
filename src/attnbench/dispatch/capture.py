"""`ab.capture`: the attention workloads that a model's step really computes, by any library.

Three functions are watched: `ab.attention` (and with it everything that is registered, redirected or handed to Flax
here), torch's `F.scaled_dot_product_attention`, and `jax.nn.dot_product_attention`. A call within another one is part
of it and is not counted again.

A call that a compiler traces is seen while it is traced and counted once for each workload; it is not seen when the
compiled code runs. Then there is no share, and a mask array, which has no values while it is traced, is written as
`full` with a note. torch.compile traces again inside the block; a function that jax.jit has traced before is not seen.
In JAX a call counts as training if `grad` is active while it is traced, so not if `grad` is outside of `jit`.

The time of a call is that of the forward around the call, and of the backward around the operators that autograd
recorded: by the wall clock on a CPU, by events that are read at the end on a GPU, so nothing waits while the step runs.

Attention that activation checkpointing computes again, inside an operator of the backward pass, is neither counted nor
timed. Such an operator is timed from the end of the recomputation, if an exception through attention shows that end;
else it is left out.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from attnbench.dispatch.capture_calls import (
    NESTED,
    SeenCall,
    clock_of,
    joined,
    note_attention,
    note_sdpa,
    read_attention,
    read_jax_nn,
    read_outline,
    read_sdpa,
    wants_gradient,
)
from attnbench.dispatch.torch_sdpa import Hook, fast_path_off, sdpa_hook
from attnbench.errors import UsageError
from attnbench.spec import Workload
from attnbench.workloads.suite_file import write_suite

SEEN_ONCE = "traced, so counted once however often it runs"
TRACED = "attention was traced, and the compiled code that computes it cannot be timed"
RECOMPUTED = "recomputed in the backward pass (checkpointing), which is neither counted nor timed"
IN_BACKWARD = "made in a backward pass, and counted as a separate call"
LEFT_OUT = "an operator of its backward pass could not be separated from the recomputation, and is not timed"
LESS = "without what the backward pass recomputes"
METHODS = {
    "cpu": "wall clock around each call and around the operators of its backward pass",
    "cuda": "CUDA events around each call and around the operators of its backward pass",
    "jax": "wall clock around each call, waiting for its arrays before and after",
    "numpy": "wall clock around each call",
}
EARLY_STOP = "_StopRecomputationError"
"""Name of the exception that torch.utils.checkpoint raises when it has recomputed all that it needs."""


class Captured(Struct, frozen=True):
    """Calls of one workload through one function."""

    workload: Workload
    count: int
    via: str
    seconds: float | None
    """Forward and backward of all calls; None if they could not be timed."""
    note: str = ""


class CapturedCalls:
    """Calls of a step, their share of its time, and the gain of a faster kernel; filled when the block ends."""

    def __init__(self) -> None:
        self.captured: list[Captured] = []
        self.unread: tuple[str, ...] = ()
        """Reasons why calls are missing, one for each."""
        self.step_seconds: float | None = None
        """Wall time of the block, the device's work included."""
        self.method = ""
        """How the share was measured."""
        self.reason = "the block has not ended"
        """Why there is no share; empty if there is one."""

    def __len__(self) -> int:
        return sum(one.count for one in self.captured)

    def __iter__(self) -> Iterator[Captured]:
        return iter(self.captured)

    @property
    def workloads(self) -> list[Workload]:
        """Each workload once, the most frequent first; its source says where it was captured."""
        counts: Counter[str] = Counter()
        for one in self.captured:
            counts[one.workload.id] += one.count
        by_id = {one.workload.id: one.workload for one in self.captured}
        notes = {one.workload.id: f"; {one.note}" for one in self.captured if one.note}
        return [
            replace(by_id[key], source=f"{count} of {len(self)} calls captured in a step{notes.get(key, '')}")
            for key, count in counts.most_common()
        ]

    @property
    def seconds(self) -> float | None:
        """Time in attention, forward and backward; None if a call could not be timed."""
        return None if self.reason else sum(one.seconds or 0.0 for one in self.captured)

    @property
    def share(self) -> float | None:
        """Approximate share of the block's wall time that attention takes (`method` says how it was measured)."""
        return None if self.seconds is None or not self.step_seconds else self.seconds / self.step_seconds

    def gain(self, speedup: float) -> float:
        """Return how many times as fast the step becomes with attention `speedup` times as fast (Amdahl's law)."""
        if not speedup > 0:
            raise UsageError(f"speedup must be a positive ratio, not {speedup!r}.")
        if self.share is None:
            raise UsageError(f"the share of attention is unknown: {self.reason}.")
        share = min(self.share, 1.0)
        return 1 / (1 - share + share / speedup)

    def save(self, path: str | Path, name: str | None = None) -> Path:
        """Write a suite file for `attnbench run PATH` and every command that takes a suite; return its path."""
        path = Path(path)
        if not self.captured:
            raise UsageError(f"nothing was captured, so {path} would be empty: {self.reason}.")
        description = f"{len(self)} attention calls of a model's step, captured"
        if self.unread:
            description += f"; {len(self.unread)} more cannot be written as workloads"
        write_suite(path, name or path.stem, description, self.workloads)
        return path

    def __str__(self) -> str:
        lines: list[str] = []
        for one in self:
            time = "" if one.seconds is None else f"  {1e3 * one.seconds:.3g} ms"
            line = f"{one.count:5} call{'s' * (one.count > 1)}  {one.workload.title}  via {one.via}{time}"
            lines.append(line + (f"  ({one.note})" if one.note else ""))
        lines += [f"{count:5} not captured: {why}" for why, count in Counter(self.unread).items()]
        if self.share is None:
            lines.append(f"share of the step: unknown ({self.reason})")
        else:
            lines.append(
                f"attention takes about {self.share:.0%} of the step's {1e3 * (self.step_seconds or 0):.3g} ms "
                f"({self.method}); attention twice as fast would make the step {self.gain(2):.2f}x as fast"
            )
        return "\n".join(lines)


@contextmanager
def capture() -> Iterator[CapturedCalls]:
    """Record the attention calls of the block; the yielded object is filled when the block ends, also by an exception.

    `with ab.capture() as calls: step()`, then `print(calls)`, `calls.save("model.toml")` for `attnbench run`,
    `calls.share` and `calls.gain(1.5)`. Run the step once before, so that its time is not that of a first call. Torch's
    fused fast path of MultiheadAttention and TransformerEncoderLayer, which calls no function, is off meanwhile.
    """
    calls, recorder, broken = CapturedCalls(), _CallRecorder(), ""
    try:
        with ExitStack() as stack:
            if "torch" in sys.modules:
                stack.enter_context(fast_path_off().held())
            for hook, via, read, outline in _hooks():
                stack.enter_context(hook.handled_by(recorder.handler(via, read, outline)))
            _synchronise()
            start = perf_counter()
            yield calls
            _synchronise()
            calls.step_seconds = perf_counter() - start
    except BaseException as error:
        broken = f"the block ended with {type(error).__name__}"
        raise
    finally:
        _fill(calls, recorder, timed=not broken)
        calls.reason = broken or calls.reason


class _Call(NamedTuple):
    via: str
    seen: SeenCall
    span: Span | None
    wants_gradients: bool
    again: bool = False
    """Whether it was made in a backward pass."""


class _CallRecorder:
    """Attention calls of a step in the order they were made."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.unread: list[str] = []
        self._here = threading.local()
        self._recomputed = Recomputed()

    def handler(
        self, via: str, read: Callable[..., SeenCall], outline: Callable[..., None] | None
    ) -> Callable[..., Any]:
        """Return the handler of a hook that records each call of one function and makes it."""

        def note(wants: bool, *outlined: Any) -> None:
            if outlined:
                self.calls.append(_Call(via, read_outline(read, *outlined), None, wants))
            else:
                self.unread.append(f"a call of {via} could not be read: {NESTED}")

        torch = sys.modules.get("torch")
        compiling = (lambda: False) if torch is None else torch.compiler.is_dynamo_compiling
        if torch is not None:  # while it traces, `note` is called with constants
            torch.compiler.assume_constant_result(note)

        def handle(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if getattr(self._here, "inside", False):
                return proceed(*args, **kwargs)
            self._here.inside = True
            try:
                if not compiling():
                    return self._recorded(via, read, proceed, args, kwargs)
                if any(x.is_nested for x in _first_three(args, kwargs)):
                    note(False)
                elif outline is not None:
                    outline(note, *args, **kwargs)
                return proceed(*args, **kwargs)
            finally:
                self._here.inside = False

        return handle

    def _recorded(self, via: str, read: Any, proceed: Any, args: Any, kwargs: Any) -> Any:
        inputs, torch = _first_three(args, kwargs), sys.modules.get("torch")
        # Whether autograd runs an operator of a backward pass in this thread; checkpointing asks the same way.
        again = torch is not None and torch._C._current_graph_task_id() != -1
        try:
            seen = read(*args, **kwargs)
            kind = clock_of(inputs[0])
        except Exception as error:  # the model must run even if its arrays cannot be read
            self.unread.append(f"a call of {via} could not be read: {_first_line(error)}")
            if again:
                self._recomputed.note(None)
            return proceed(*args, **kwargs)
        span = None if kind is None else Span(kind, self._recomputed)
        call = _Call(via, seen, span, any(wants_gradient(x) for x in inputs), again)
        if span is None:
            self.calls.append(call)
            return proceed(*args, **kwargs)
        if kind == "jax":
            _wait(inputs)
        if again:
            self.calls.append(call)  # also if it ends with the exception that stops the recomputation
            out = span.around_again(lambda: proceed(*args, **kwargs))
        else:
            out = span.around(lambda: _wait(proceed(*args, **kwargs)) if kind == "jax" else proceed(*args, **kwargs))
            self.calls.append(call)
        result = out[0] if isinstance(out, tuple) else out
        if getattr(result, "grad_fn", None) is not None:
            span.watch_backward(result, (*args, *kwargs.values()))
        return out


def _fill(calls: CapturedCalls, recorder: _CallRecorder, timed: bool) -> None:
    known: dict[Any, Any] = {}
    groups: dict[tuple[str, str, bool], Captured] = {}
    for call in sorted(recorder.calls, key=lambda one: one.again):
        try:
            workload, note = call.seen.workload(known)
        except Exception as error:
            recorder.unread.append(f"a call of {call.via} cannot be written as a workload: {_first_line(error)}")
            continue
        trains = call.wants_gradients if call.span is None else call.span.has_backward
        workload = replace(workload, pass_="train" if trains else "forward")
        if call.span is None:
            groups[workload.id, call.via, True] = Captured(workload, 1, call.via, None, joined(SEEN_ONCE, note))
            continue
        if call.again and not trains:
            keys = [(replace(workload, pass_=pass_).id, call.via, False) for pass_ in ("train", "forward")]
            repeated = next((key for key in keys if key in groups), None)
            if repeated is not None:
                groups[repeated] = replace(groups[repeated], note=joined(groups[repeated].note, RECOMPUTED))
                continue
        group = groups.get((workload.id, call.via, False), Captured(workload, 0, call.via, 0.0))
        total = (group.seconds or 0.0) + call.span.seconds if timed else None
        note = joined(group.note, note, IN_BACKWARD if call.again else "", LEFT_OUT if call.span.left_out else "")
        groups[workload.id, call.via, False] = replace(group, count=group.count + 1, seconds=total, note=note)
    calls.captured, calls.unread = sorted(groups.values(), key=lambda one: -one.count), tuple(recorder.unread)
    kinds = {call.span.kind for call in recorder.calls if call.span is not None}
    less = LESS if any(RECOMPUTED in one.note or LEFT_OUT in one.note for one in calls) else ""
    calls.method = joined(*(METHODS[kind] for kind in sorted(kinds)), less)
    if recorder.unread:
        calls.reason = recorder.unread[0]
    elif not recorder.calls:
        calls.reason = "no attention call was seen (it was compiled before, or uses a function that is not watched)"
    else:
        calls.reason = TRACED if any(call.span is None for call in recorder.calls) else ""


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message; its class if the message is empty."""
    return str(error).partition("\n")[0] or type(error).__name__


def _hooks() -> Iterator[tuple[Hook, str, Callable[..., SeenCall], Callable[..., None] | None]]:
    """Yield the hooks of the frameworks that are loaded: a model cannot run in one that is not."""
    attention = _hook("attnbench.dispatch.attention", "attention")
    yield attention, "ab.attention", read_attention, note_attention
    yield _hook("attnbench.dispatch.hf_decode", "attend"), "ab.attention", partial(read_attention, layout="bhsd"), None
    with_array = _hook("attnbench.dispatch.array_masks", "attention_with_array")
    yield with_array, "ab.attention", read_attention, note_attention
    if "torch" in sys.modules:
        yield sdpa_hook(), "F.scaled_dot_product_attention", read_sdpa, note_sdpa
    if "jax" in sys.modules:
        yield _hook("jax.nn", "dot_product_attention"), "jax.nn.dot_product_attention", read_jax_nn, None


@cache
def _hook(module: str, name: str) -> Hook:
    return Hook(getattr(import_module(module), name), module)


def _first_three(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    names = ("q", "k", "v") if "q" in kwargs or "k" in kwargs or "v" in kwargs else ("query", "key", "value")
    return (*args[:3], *(kwargs[name] for name in names[len(args[:3]) :] if name in kwargs))


def _wait(arrays: Any) -> Any:
    import jax

    return jax.block_until_ready(arrays)


def _synchronise() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Recomputed(threading.local):
    """Calls inside the operators of a backward pass, as seen by the thread that runs them."""

    count = 0
    over: Any = None
    """Clock and time at which the last of these calls ended the recomputation; None if the recomputation went on."""

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


def _nodes_between(first: Any, stops: set[Any]) -> Iterator[Any]:
    """Yield the nodes between `first` and the nodes that made the inputs, without the latter and without leaves."""
    waiting, seen = [first], set(stops)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or type(node).__name__ == "AccumulateGrad":
            continue
        seen.add(node)
        yield node
        waiting += [parent for parent, _ in node.next_functions]
