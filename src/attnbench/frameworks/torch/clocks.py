"""Clocks of torch accelerators: events around the call, the profiler's kernel times, CUDA-graph replay.

All three write twice the L2 cache before each call, so that every sample starts cold, and let outputs be looked at in
stream order before anything waits: work left behind on another stream shows as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import torch

from attnbench.frameworks.base import UNWATCHED, Clock, Inputs, InputSets, Program, Samples, Watch
from attnbench.frameworks.torch.programs import ReplayableProgram, is_device_work, raw_events, recorded, synchronize

UNKNOWN_CACHE_BYTES = 64 << 20
QUEUED_CALLS = 20
"""Calls enqueued before the host waits."""
LONGEST_HOLD_NS = 2_000_000
GRAPHS = 2
"""Graphs that are captured, each with inputs of its own."""
CYCLES_PER_NS = 2
"""About 2 GHz; only how long the stream is held depends on it."""


class ColdCache:
    """Buffer of twice the L2 cache, of 16-bit integers: nothing else fills those (see TorchKernelClock)."""

    def __init__(self, device: str) -> None:
        properties = torch.get_device_module(device).get_device_properties()
        size = getattr(properties, "L2_cache_size", 0) or UNKNOWN_CACHE_BYTES
        self._buffer = torch.empty(size, dtype=torch.int16, device=device)
        self._mark = torch.empty(1024, dtype=torch.int16, device=device)

    def flush(self) -> None:
        """Remove the data of the last call from the cache."""
        self._buffer.fill_(1)

    def mark(self) -> None:
        """Write a few values, which the profiler shows as the end of a call."""
        self._mark.fill_(1)


class _DeviceClock(Clock):
    def __init__(self, device: str, snapshot: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
        self._device = device
        self._snapshot = snapshot

    def _event(self) -> torch.Event:
        return torch.get_device_module(self._device).Event(enable_timing=True)

    def _timed(
        self,
        calls: Sequence[Callable[[], tuple[Any, ...]]],
        prepare: Callable[[int], None],
        picked: Collection[int],
        look: Callable[[int, tuple[Any, ...]], None],
    ) -> list[float]:
        """Return nanoseconds of each call between two events, a few enqueued at a time; `look` follows the second."""
        pairs: list[tuple[Any, Any]] = []
        ns: list[float] = []
        for index, call in enumerate(calls):
            prepare(index)
            start, stop = self._event(), self._event()
            start.record()
            output = call()
            stop.record()
            pairs.append((start, stop))
            if index in picked:
                look(index, output)
            if index == len(calls) - 1 or len(pairs) == QUEUED_CALLS:
                synchronize(self._device)
                ns += [begin.elapsed_time(end) * 1e6 for begin, end in pairs]
                pairs.clear()
        return ns


class EventClock(_DeviceClock):
    """Events on the stream before and after each call.

    The stream is held while the host enqueues the call, so that launch latency is not counted as device time.
    """

    name = "events"

    def sample(
        self, program: Program, inputs: InputSets, count: int, calls: int = 1, watch: Watch = UNWATCHED
    ) -> Samples:
        cold, hold = ColdCache(self._device), self._hold(program, inputs[0])
        state: Any = None

        def prepare(index: int) -> None:
            nonlocal state
            state = program.prepare(inputs[index % len(inputs)])
            cold.flush()
            hold()

        each = [lambda: program.run(state)] * (count * calls)
        return Samples(_means(self._timed(each, prepare, watch.picks(count, calls), watch.look), calls))

    def _hold(self, program: Program, inputs: Inputs) -> Callable[[], None]:
        state = program.prepare(inputs)
        synchronize(self._device)
        start = perf_counter_ns()
        program.run(state)
        host_ns = min((perf_counter_ns() - start) * 3 // 2, LONGEST_HOLD_NS)
        synchronize(self._device)
        if self._device != "cuda" or not hasattr(torch.cuda, "_sleep"):
            return lambda: None
        return lambda: torch.cuda._sleep(host_ns * CYCLES_PER_NS)


class TorchKernelClock(_DeviceClock):
    """Sum of the durations of all device work of a call, from the profiler: no gaps, no launch latency."""

    name = "kernel"

    def sample(
        self, program: Program, inputs: InputSets, count: int, calls: int = 1, watch: Watch = UNWATCHED
    ) -> Samples:
        cold = ColdCache(self._device)
        fences = _fence_names(self._device)
        picked = watch.picks(count, calls)
        with recorded(self._device, host=False) as profiler:
            for index in range(count * calls):
                state = program.prepare(inputs[index % len(inputs)])
                cold.flush()
                output = program.run(state)
                cold.mark()
                if index in picked:
                    watch.look(index, output)
            synchronize(self._device)
        return Samples(_means(_between_fences(raw_events(profiler), fences, count * calls), calls))


@cache
def _fence_names(device: str) -> frozenset[str]:
    """Return the kernel names of flush and mark, found by profiling them alone."""
    cold = ColdCache(device)
    synchronize(device)
    with recorded(device, host=False) as profiler:
        cold.flush()
        cold.mark()
        synchronize(device)
    if not (names := frozenset(event.name() for event in raw_events(profiler) if is_device_work(event))):
        raise RuntimeError("the kernel clock sees no kernels: the profiler has no CUPTI here; use the events clock.")
    return names


def _between_fences(events: Sequence[Any], fences: frozenset[str], calls: int) -> list[float]:
    """Return device nanoseconds of each call, between the flush that opens it and the mark that closes it."""
    ns = [0.0] * calls
    seen = 0
    for event in events:
        if not is_device_work(event):
            continue
        if event.name() in fences:
            seen += 1
        elif seen % 2 and seen < 2 * calls:
            ns[seen // 2] += event.duration_ns()
    if seen != 2 * calls:
        raise RuntimeError(
            f"the kernel clock saw {seen} fences for {calls} calls: the implementation fills 16-bit integers itself, "
            "or the profiler dropped events; use the events clock."
        )
    return ns


class GraphClock(_DeviceClock):
    """Replay of a captured CUDA graph between events: what a launch-bound call costs without its launches."""

    name = "graph"
    repeats_inputs = True

    def sample(
        self, program: Program, inputs: InputSets, count: int, calls: int = 1, watch: Watch = UNWATCHED
    ) -> Samples:
        cold = ColdCache(self._device)
        replays = [self._capture(program, inputs[which]) for which in range(min(GRAPHS, len(inputs), count * calls))]

        def look(index: int, output: tuple[Any, ...]) -> None:
            # A copy, because each replay overwrites the result of the last one.
            watch.look(index % len(replays), self._snapshot(output))

        each = [replays[index % len(replays)] for index in range(count * calls)]
        return Samples(_means(self._timed(each, lambda _: cold.flush(), watch.picks(count, calls), look), calls))

    def _capture(self, program: Program, inputs: Inputs) -> Callable[[], tuple[Any, ...]]:
        run = program.rerun if isinstance(program, ReplayableProgram) and program.rerun else program.run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # Preparation runs on the capturing stream: autograd's backward follows the stream of its forward.
        with torch.cuda.stream(side):
            for _ in range(3):
                run(program.prepare(inputs))
            state = program.prepare(inputs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            output = run(state)

        def replay(kept: Any = (state, inputs)) -> tuple[Any, ...]:
            graph.replay()
            return output

        return replay


def _means(ns: Sequence[float], calls: int) -> list[float]:
    """Return the mean over the calls of each sample."""
    edges = range(0, len(ns) + 1, calls)
    return [sum(ns[begin:end]) / calls for begin, end in pairwise(edges)]


CLOCKS: dict[str, type[_DeviceClock]] = {clock.name: clock for clock in (EventClock, TorchKernelClock, GraphClock)}
