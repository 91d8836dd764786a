"""The interface of a framework, implemented by numpy.py, torch/framework.py and jax/framework.py.

A call `(q, k, v) -> out` becomes Programs (one per part of the pass); a Clock samples a Program. Nothing else in the
package knows how a framework compiles, differentiates, synchronises, counts memory or names its kernels.
"""

from __future__ import annotations

import gc
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from sys import getprofile, gettrace
from time import perf_counter_ns
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from attnbench.frameworks.host_memory import filled_memory
from attnbench.masks import Namespace
from attnbench.spec import Array, Call, Environment, Layout, Pass, Ranks


class Setting(NamedTuple):
    """The value of a setting of the whole process."""

    value: Any
    refused: bool = False
    """Whether a kernel that changes it cannot be measured; otherwise the record notes the change."""
    remedy: str = ""
    """Advice for the user; {0} stands for the new value."""
    set_again: bool = False
    """Whether every cell begins by setting it, so that only its calls can leave it changed."""


def library_settings(framework: Framework) -> dict[str, str]:
    """Return the settings of a library in words, by name, but for numbers of threads, which every run decides."""
    return {name: f"{one.value}" for name, one in framework.settings().items() if "threads" not in name}


class Watched(NamedTuple):
    """The kinds of objects that are watched in a module or class which the clocks and checks use."""

    kinds: tuple[type, ...] = (FunctionType, BuiltinFunctionType, type)
    refused: bool = True
    harness: bool = True
    """False for objects of a library that other libraries may wrap."""
    code: bool = False
    """Whether the code of Python functions is watched too."""


class Inputs(NamedTuple):
    """Arrays of one call in the implementation's layout; `dout` is the random cotangent of the output, or a function
    that makes it, so that an earlier forward pass cannot know it."""

    q: Array
    k: Array
    v: Array
    dout: Any

    def cotangent(self) -> Array:
        """Return dO, made now if it was not there yet."""
        return self.dout() if callable(self.dout) else self.dout

    def settled(self) -> Inputs:
        """Return the same inputs with dO made."""
        return self._replace(dout=self.cotangent())


class InputSets(Protocol):
    """A list of inputs, or an object that makes each item when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Inputs: ...


@dataclass(frozen=True)
class Program:
    """`run(prepare(inputs))` is one call; only `run` is timed. It returns a tuple of arrays."""

    run: Callable[[Any], tuple[Array, ...]]
    prepare: Callable[[Inputs], Any] = lambda inputs: inputs


@dataclass(frozen=True)
class Programs:
    """A compiled cell: the pass that was asked for (returning OUTPUTS), and the parts of it that are also timed."""

    main: Program
    compile_ns: int
    """Tracing, lowering and compiling; 0 for an eager framework."""
    parts: Mapping[str, Program] = field(default_factory=dict)
    """For a train pass: "forward" (saving what backward needs) and "backward"."""
    temp_bytes: int | None = None
    """Peak scratch that the compiler planned; None if it does not report that."""


OUTPUTS: Mapping[Pass, tuple[str, ...]] = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "train": ("out", "dq", "dk", "dv"),
}
"""Names of the main program's outputs, by pass."""


class Samples(NamedTuple):
    """Samples of a clock, in nanoseconds per call."""

    ns: list[float]
    waited: float | None = None
    """Share of their median by which calls would have been shorter, at most, if no thread had waited for a core; None
    if that is not known."""


class Watch:
    """Observer of the outputs of timed calls, never while the clock runs. This base class looks at no output."""

    def pick(self, calls: int) -> Sequence[int]:
        """Choose which of the next `calls` calls are looked at, in order; called when their inputs are prepared."""
        return ()

    def picks(self, count: int, calls: int) -> frozenset[int]:
        """Choose among the calls of `count` samples at once, counted from the first call of the visit."""
        return frozenset(calls * sample + index for sample in range(count) for index in self.pick(calls))

    def look(self, call: int, output: tuple[Array, ...]) -> None:
        """Copy what is needed of the output of a picked call, whose inputs were item `call` of the visit's.

        With the clocks of an accelerator nothing has waited for the call yet: copies are made in stream order.
        """


UNWATCHED = Watch()


def cut_after(prepared: Sequence[Any], picked: Sequence[int]) -> list[Sequence[Any]]:
    """Cut prepared calls so that each picked call ends a piece: its output can be kept without work per call."""
    edges = [0, *(index + 1 for index in picked), len(prepared)]
    return [prepared[begin:end] for begin, end in pairwise(edges) if begin < end]


class Peak(NamedTuple):
    """Extra bytes at the peak of one call beyond its inputs, or None and the reason."""

    bytes: int | None
    reason: str | None = None
    reserved: int | None = None
    fragmentation: float | None = None
    method: str = ""


def unseen(framework: str) -> Peak:
    """Return that a peak is unknown because the output is larger than all memory that the call was seen to take."""
    return Peak(
        None,
        f"not seen: the output's own memory did not come from {framework}'s allocator in this call, but from another "
        "library or an earlier call",
    )


class Untrusted(Exception):
    """A function that interferes with its own measurement; the message is the reason of its `failed` record."""


def hooks() -> tuple[Any, ...]:
    """Return the functions that Python calls by itself: for profiles, traces, monitoring, garbage collection.

    A call that leaves such a function behind can go on working after the clock has been read, so the wall clocks
    compare these functions before they read the clock, in less than a microsecond.
    """
    tools = () if MONITORING is None else tuple(map(MONITORING.get_tool, range(TOOLS)))
    return id(getprofile()), id(gettrace()), tools, tuple(map(id, gc.callbacks))


MONITORING, TOOLS = getattr(sys, "monitoring", None), 6
"""Registry of monitoring tools (from Python 3.12 on), and their number."""


def require_unhooked(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """Require that a timed call left no function behind that Python calls later."""
    names = ("a profile function", "a trace function", "a tool of sys.monitoring", "a callback of garbage collection")
    if changed := [name for name, old, new in zip(names, before, after) if old != new]:
        raise Untrusted(
            f"a timed call added or removed {' and '.join(changed)}, which could do work after the clock has been read"
        )


RARELY_WAITS = 0.01
"""Share of the time that threads may wait for a core, in all samples of a visit, before each is looked at."""
TASKS = Path("/proc/self/task")


class CoreWaits:
    """Time that the threads of this process have waited for a core, ready to run while others had all of them (Linux).

    A call of several threads ends with its last one: if other programs share the cores, it may always take a hundred
    times as long, so that its times look steady.
    """

    _found: ClassVar[dict[int, CoreWaits | None]] = {}

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self.total_ns(anew=True)

    @classmethod
    def of_this_process(cls) -> CoreWaits | None:
        """Return the counter of this process, which a fork does not share; None if the system does not count."""
        if (process := os.getpid()) not in cls._found:
            try:
                cls._found[process] = cls()
            except (OSError, ValueError, IndexError):
                cls._found[process] = None
        return cls._found[process]

    def total_ns(self, anew: bool = False) -> int:
        """Return the sum over all threads that were there when it was last called `anew`."""
        if anew:
            there = os.listdir(TASKS)
            for name in self._files.keys() - set(there):
                os.close(self._files.pop(name))
            for name in there:
                if name not in self._files:
                    with suppress(OSError):  # the thread has ended
                        self._files[name] = os.open(TASKS / name / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
            if not self._files:
                raise OSError(f"{TASKS} has no schedstat")
        total = 0
        for file in self._files.values():
            with suppress(OSError):
                total += int(os.pread(file, 64, 0).split()[1])
        return total


class Clock(ABC):
    """A way to time a Program."""

    name: str
    repeats_inputs: bool = False
    """Whether the calls of one visit share a few prepared inputs, so that only the first of `inputs` are used."""

    @abstractmethod
    def sample(
        self, program: Program, inputs: InputSets, count: int, calls: int = 1, watch: Watch = UNWATCHED
    ) -> Samples:
        """Take `count` samples of the mean over `calls` calls, rotating through the inputs call by call."""


class WallClock(Clock):
    """Monotonic host clock around the call and the wait for its whole output tree."""

    name = "wall"

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._core_waits = CoreWaits.of_this_process()
        self._closely = False
        """Whether waits are read around each sample, which costs a little, and not only around all of them."""

    def sample(
        self, program: Program, inputs: InputSets, count: int, calls: int = 1, watch: Watch = UNWATCHED
    ) -> Samples:
        wait, now, run = self._framework.wait, self._now(), program.run
        waits, closely = self._core_waits, self._closely
        begin = 0 if waits is None else waits.total_ns(anew=True)
        ns: list[float] = []
        waited: list[int] = []
        output: tuple[Array, ...] = ()
        for first in range(0, count * calls, calls):
            prepared = [program.prepare(inputs[call % len(inputs)]) for call in range(first, first + calls)]
            wait(prepared)
            picked, kept = watch.pick(calls), []
            pieces = cut_after(prepared, picked)
            ready = waits.total_ns() if closely and waits is not None else 0
            before = hooks()
            start = now()
            for piece in pieces:
                for state in piece:
                    output = run(state)
                    wait(output)
                kept.append(output)
            after = hooks()
            ns.append((now() - start) / calls)
            if closely and waits is not None:
                waited.append(waits.total_ns() - ready)
            require_unhooked(before, after)
            for index, found in zip(picked, kept):
                watch.look(first + index, found)
        if waits is None:
            return Samples(ns)
        if closely:
            shortened = [max(0.0, took - lost / calls) for took, lost in zip(ns, waited)]
            share = 1 - float(np.median(shortened)) / max(float(np.median(ns)), 1.0)
        else:
            share = min(1.0, (waits.total_ns() - begin) / max(sum(ns) * calls, 1.0))
        self._closely = share > RARELY_WAITS
        return Samples(ns, share)

    def _now(self) -> Callable[[], float]:
        """Return the function that reads the clock, in nanoseconds."""
        return perf_counter_ns


class Stopwatch:
    """Time that calls measure themselves: the time of ranks that start together, without passing arrays to them."""

    def __init__(self) -> None:
        self.ns = 0.0


class OwnClock(WallClock):
    """Clock that reads what the calls measured."""

    name = "ranks"

    def __init__(self, framework: Framework, stopwatch: Stopwatch) -> None:
        super().__init__(framework)
        self._stopwatch, self._core_waits = stopwatch, None  # the ranks are other processes

    def _now(self) -> Callable[[], float]:
        return lambda: self._stopwatch.ns


class Framework(ABC):
    """Adapter of one array library. Instances are stateless and cheap; the library is imported on first use."""

    name: str
    compiles: bool = False
    """Whether every new computation costs a compilation first."""
    overwrites: bool = False
    """Whether arrays can be changed in place."""

    @abstractmethod
    def devices(self) -> tuple[str, ...]:
        """Return the device kinds usable here ("cuda", "cpu"), the best first."""

    @abstractmethod
    def environment(self, device: str) -> Environment:
        """Return light facts for `supports`: device, name, memory, capability, packages; no clocks or libraries."""

    def settings(self) -> Mapping[str, Setting]:
        """Return the settings of the whole process that calls of this library depend on, by name; start no device."""
        return {}

    def functions(self) -> Sequence[tuple[str, Any, Watched]]:
        """Return the modules and classes of this library whose functions the clocks and checks call, by name."""
        return ()

    @abstractmethod
    def namespace(self, device: str) -> Namespace:
        """Return the functions that mask predicates need, making arrays on the device."""

    @abstractmethod
    def array(self, values: np.ndarray, dtype: str, device: str) -> Array:
        """Convert a NumPy array to the framework, rounded to dtype."""

    @abstractmethod
    def numpy(self, array: Array) -> np.ndarray:
        """Convert an array to NumPy exactly (16-bit floats become float32)."""

    @abstractmethod
    def dtype(self, name: str) -> Any:
        """Return the framework's dtype object of that name."""

    def precision(self, dtype: str) -> AbstractContextManager[None]:
        """Compute in the precision that inputs of this dtype ask for, whatever the process's defaults are."""
        return nullcontext()

    @abstractmethod
    def cast(self, array: Array, dtype: str) -> Array:
        """Convert an array to another precision."""

    @abstractmethod
    def owns(self, value: Any) -> bool:
        """Return whether a value is a plain, concrete array of this framework (no lazy stand-in, no subclass)."""

    @abstractmethod
    def transpose(self, array: Array, source: Layout, target: Layout) -> Array:
        """Return a contiguous copy in another layout (the same array if the layouts agree)."""

    @abstractmethod
    def programs(self, call: Call, pass_: Pass, example: Inputs) -> Programs:
        """Compile the call for the pass. Arrays are passed as arguments, never captured."""

    def compiled(self, function: Callable[[Any], tuple[Array, ...]], state: Any) -> Programs:
        """Return a whole step `state -> outputs` as one program, compiled if the framework compiles."""
        return Programs(Program(run=function), compile_ns=0)

    @abstractmethod
    def wait(self, tree: Any) -> None:
        """Block until everything queued for the tree (or the whole device) is done."""

    @abstractmethod
    def snapshot(self, tree: tuple[Array, ...]) -> tuple[Array, ...]:
        """Copy arrays now, in the order of the current stream, without waiting for other streams or threads."""

    def part(self, array: Array, starts: Sequence[int], sizes: Sequence[int]) -> Array:
        """Copy a box of the array, in the order of the current stream."""
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes))
        return self.snapshot((array[box],))[0]

    def checksum(self, array: Array) -> bytes:
        """Return a digest of the bits of an array that can be changed in place, to tell later whether it was."""
        raise NotImplementedError(f"arrays of {self.name} cannot be changed in place")

    def on_one_device(self, array: Array) -> Array:
        """Return the array, gathered on one device if it is on several."""
        return array

    @abstractmethod
    def same_bits(self, a: Array, b: Array) -> bool:
        """Return whether two arrays are equal bit for bit (NaN equals the same NaN), compared on the device."""

    @abstractmethod
    def is_finite(self, array: Array) -> bool:
        """Return whether no element is NaN or infinite, decided on the device."""

    @abstractmethod
    def put(self, array: Array, index: tuple[Any, ...], value: float) -> Array:
        """Return a copy with the elements at the index replaced."""

    def overwrite(self, array: Array, values: Array) -> None:
        """Write other values into the array's memory, leaving no trace of that (such as torch's version counter)."""
        raise NotImplementedError(f"arrays of {self.name} cannot be changed in place")

    @abstractmethod
    def multiply(self, array: Array, factors: np.ndarray) -> Array:
        """Return a new array: this one times broadcast factors, in its own dtype."""

    @abstractmethod
    def clocks(self, device: str) -> tuple[str, ...]:
        """Return the names of the clocks that work on the device, the one to publish first."""

    @abstractmethod
    def clock(self, name: str, device: str) -> Clock:
        """Return the clock of that name."""

    @abstractmethod
    def peak(self, program: Program, inputs: Inputs, device: str, temp_bytes: int | None) -> Peak:
        """Return the peak extra memory of one call."""

    def held(self, device: str) -> int | None:
        """Return the bytes that the process holds now for arrays between calls; None if that is unknown."""
        return None

    def filled_memory(self, device: str) -> AbstractContextManager[bool]:
        """Fill memory with other numbers than zeros before it is handed out, while the block runs; the value says
        whether that works here."""
        return filled_memory() if device == "cpu" else nullcontext(False)

    def ranks(self, program: Program, inputs: Inputs, device: str) -> Ranks | None:
        """Return what each rank did if a call is spread over several, else None."""
        return None

    @abstractmethod
    def kernels(self, program: Program, inputs: Inputs, device: str) -> tuple[list[str] | None, str | None]:
        """Return the operators (CPU) or kernels (GPU) that one call ran, in order without repeats; or None and why."""

    @abstractmethod
    def trace(self, program: Program, inputs: Inputs, path: Path, device: str) -> Path:
        """Write a Chrome/Perfetto trace of one call and return the file."""

    @abstractmethod
    def matmul(self, size: int, dtype: str, device: str) -> Program:
        """Return the product of two random size^3 matrices, run -> (a @ b, a, b), as an anchor and a ceiling."""

    @abstractmethod
    def copy(self, size_bytes: int, device: str) -> Program:
        """Return the program of a device copy of that many bytes, run -> (target, source): anchor and ceiling."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether the exception means that memory ran out."""

    def exact(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a float64 computation on this framework's arrays (JAX: x64 and jit)."""
        return function

    def trim(self) -> None:  # noqa: B027 (an optional hook)
        """Give memory that is kept for reuse back to the device, if the framework can."""

    def reset(self) -> None:  # noqa: B027 (an optional hook)
        """Forget compiled code and free cached memory between workloads."""
