"""The clock "kernel" of JAX on CUDA: all device work of a call (kernels, copies, fills), from CUPTI's activity records.

torch's profiler counts the same three kinds. The profiler inside JAX (Mosaic GPU's) counts kernels only, so that a call
whose cuDNN plan also clears a buffer looked faster from JAX than the same plan does from torch. Each timed call follows
a flush of the L2 cache, and the flush's own kernel, whose name is found first, marks where one call ends and the next
begins in CUPTI's list.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnbench.errors import AttnBenchError
from attnbench.frameworks.base import UNWATCHED, Clock, Framework, Inputs, InputSets, Program, Samples, Watch
from attnbench.processes import mapped_files

FLUSH_BYTES = 256 << 20
"""Twice the largest L2 so far (a B200's 126 MB): JAX does not tell the device's."""
PREPARED = 2
"""Inputs that are prepared for a visit: preparing between calls would be seen by the profiler."""


class Flush:
    """Rewrites a buffer larger than the L2 cache, in place."""

    def __init__(self, device: Any) -> None:
        import jax

        self._buffer = jax.device_put(np.zeros(FLUSH_BYTES // 4, np.uint32), device)
        # xor: an elementwise kernel name that attention does not use.
        rewrite = jax.jit(lambda x: x ^ np.uint32(1), donate_argnums=0)
        self._rewrite = rewrite.trace(self._buffer).lower().compile()
        self()

    def __call__(self) -> None:
        self._buffer = self._rewrite(self._buffer)

    def wait(self) -> None:
        """Wait until the buffer is written."""
        self._buffer.block_until_ready()


@cache
def cupti_problem(device: Any) -> str | None:
    """Return why CUPTI does not see the kernels of this process, or None; it is tried once and the answer kept."""
    flush = Flush(device)
    try:
        activities = record(lambda: (flush(), flush.wait()))
    except CuptiFailed as error:
        return str(error)
    return None if activities else "CUPTI saw no kernel of a program that has one; is another profiler attached?"


class JaxKernelClock(Clock):
    """Sum of the durations of all device work of one call, each call after an L2 flush."""

    name = "kernel"
    repeats_inputs = True

    def __init__(self, framework: Framework, device: Any) -> None:
        self._framework = framework
        self._flush = Flush(device)
        self._flush_names = frozenset(work.name for work in record(lambda: (self._flush(), self._flush.wait())))

    def sample(
        self, program: Program, inputs: InputSets, count: int, calls: int = 1, watch: Watch = UNWATCHED
    ) -> Samples:
        prepared = [program.prepare(inputs[which]) for which in range(min(PREPARED, len(inputs), count * calls))]
        # XLA launches the first calls one by one and then records a CUDA graph: this happens before the clock starts.
        for state in prepared:
            self._framework.wait(program.run(state))
        picked = watch.pick(count * calls)  # their outputs are kept till the end: a copy would count as a kernel
        kept: list[tuple[Any, ...]] = []

        def body() -> None:
            for call in range(count * calls):
                self._flush()
                output = program.run(prepared[call % len(prepared)])
                self._framework.wait(output)
                if call in picked:
                    kept.append(output)

        seen = record(body)
        for call, output in zip(picked, kept):
            watch.look(call % len(prepared), output)
        each = split_calls(seen, self._flush_names, count * calls)
        return Samples([sum(each[start : start + calls]) / calls for start in range(0, len(each), calls)])


def split_calls(seen: Sequence[DeviceActivity], flush_names: frozenset[str], calls: int) -> list[float]:
    """Return the nanoseconds of device work of each call, leaving out the flushes between calls."""
    totals: list[float] = []
    counts: list[int] = []
    after_flush = False
    for work in seen:
        if work.name in flush_names:
            if not after_flush:
                totals.append(0.0)
                counts.append(0)
            after_flush = True
            continue
        after_flush = False
        if not totals:
            raise CuptiFailed(f"{work.name} ran before the first flush: other code in this process uses the GPU")
        totals[-1] += work.ns
        counts[-1] += 1
    if len(totals) != calls or 0 in counts:
        raise CuptiFailed(
            f"CUPTI saw {len(totals)} calls ({counts.count(0)} of them without device work), but {calls} were made: "
            "it may have dropped records; take fewer samples at once or use the wall clock"
        )
    if len(set(counts)) > 1:
        raise CuptiFailed(f"one call did {min(counts)} pieces of device work and another {max(counts)}")
    return totals


def kernel_names(program: Program, inputs: Inputs) -> list[str]:
    """List the kernels, copies and fills of one call, in order without repeats."""
    import jax

    state = jax.block_until_ready(program.prepare(inputs))
    activities = record(lambda: jax.block_until_ready(program.run(state)))
    return list(dict.fromkeys(work.name for work in activities))


KERNEL, COPY, FILL, COPY_BETWEEN_DEVICES = 10, 1, 2, 22
"""Numbers of CUPTI's activity kinds (CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, MEMCPY, MEMSET, MEMCPY2)."""
NAMES = {COPY: "Memcpy", FILL: "Memset", COPY_BETWEEN_DEVICES: "Memcpy PtoP"}
COPIES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
"""Names of the directions that a copy may have (CUpti_ActivityMemcpyKind), as torch's profiler writes them."""
KIND_AT, DIRECTION_AT, START_AT, END_AT, KERNEL_NAME_AT = 0, 4, 16, 24, 104
"""Bytes from the start of a record; the same in every version of these records since CUDA 9."""
BUFFER_BYTES = 8 << 20
NO_MORE_RECORDS = 12
"""CUPTI_ERROR_MAX_LIMIT_REACHED."""
FLUSH_FORCED = 1
LIBRARY = re.compile(r"/libcupti\.so[.\d]*$")


class CuptiFailed(AttnBenchError):
    """CUPTI cannot be used here, or it lost records."""


class DeviceActivity(NamedTuple):
    """One kernel, copy or fill on the device."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        """Time that it ran."""
        return self.end_ns - self.start_ns


def record(body: Callable[[], Any]) -> list[DeviceActivity]:
    """Run the body, which must wait for its own work; return all work of the device meanwhile, ordered by its start."""
    return _client().record(body)


class _CuptiClient:
    """The one client of CUPTI's activity records in this process."""

    def __init__(self) -> None:
        self._cupti = _load()
        self._buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._work: list[DeviceActivity] = []
        self._problem = ""
        size = ctypes.POINTER(ctypes.c_size_t)
        requested = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), size, size)
        completed = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
        )
        # CUPTI keeps the addresses: the callbacks must live as long as the process.
        self._callbacks = requested(self._give_buffer), completed(self._take_buffer)

    def record(self, body: Callable[[], Any]) -> list[DeviceActivity]:
        """Run the body and return all work of the device, as the function `record` does."""
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)
        self._call("cuptiActivityFlushAll", ctypes.c_uint32(FLUSH_FORCED))
        self._work, self._problem = [], ""
        with contextlib.ExitStack() as enabled:
            for kind in (KERNEL, COPY, FILL, COPY_BETWEEN_DEVICES):
                self._call("cuptiActivityEnable", ctypes.c_int(kind))
                enabled.callback(self._cupti.cuptiActivityDisable, ctypes.c_int(kind))
            body()
            self._call("cuptiActivityFlushAll", ctypes.c_uint32(FLUSH_FORCED))
        self._cupti.cuptiFinalize()  # detach: launches outside of a recording must not be slowed down
        work, self._work = sorted(self._work, key=lambda one: one.start_ns), []
        if self._problem:
            raise CuptiFailed(self._problem)
        return work

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cupti, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cupti.cuptiGetResultString(status, ctypes.byref(text))
            message = text.value.decode(errors="replace") if text.value else f"error {status}"
            raise CuptiFailed(f"{name}: {message}; is another profiler attached to this process?")

    def _give_buffer(self, buffer: Any, size: Any, most_records: Any) -> None:
        memory = ctypes.create_string_buffer(BUFFER_BYTES + 8)
        address = (ctypes.addressof(memory) + 7) & ~7
        self._buffers[address] = memory
        buffer[0], size[0], most_records[0] = address, BUFFER_BYTES, 0

    def _take_buffer(self, context: int | None, stream: int, buffer: int, size: int, used: int) -> None:
        try:
            self._work += self._records(buffer, used)
            dropped = ctypes.c_size_t(0)
            self._cupti.cuptiActivityGetNumDroppedRecords(
                ctypes.c_void_p(context), ctypes.c_uint32(stream), ctypes.byref(dropped)
            )
            if dropped.value:
                self._problem = f"CUPTI dropped {dropped.value} records; take fewer samples at once"
        except Exception as error:
            self._problem = f"CUPTI's records could not be read: {type(error).__name__}: {error}"
        finally:
            self._buffers.pop(buffer, None)

    def _records(self, buffer: int, used: int) -> Iterator[DeviceActivity]:
        at = ctypes.c_void_p(None)
        while used:
            status = self._cupti.cuptiActivityGetNextRecord(
                ctypes.c_void_p(buffer), ctypes.c_size_t(used), ctypes.byref(at)
            )
            if status == NO_MORE_RECORDS or at.value is None:
                return
            if status:
                self._problem = f"CUPTI's records could not be read: error {status}"
                return
            kind = ctypes.c_uint32.from_address(at.value + KIND_AT).value
            if kind == KERNEL:
                name = ctypes.c_char_p.from_address(at.value + KERNEL_NAME_AT).value or b"unnamed kernel"
                name = name.decode(errors="replace")
            elif kind in NAMES:
                direction = ctypes.c_uint8.from_address(at.value + DIRECTION_AT).value
                name = COPIES.get(direction, NAMES[kind]) if kind == COPY else NAMES[kind]
            else:
                continue
            start, end = (ctypes.c_uint64.from_address(at.value + offset).value for offset in (START_AT, END_AT))
            yield DeviceActivity(name, start, end)


_client = cache(_CuptiClient)


def _load() -> ctypes.CDLL:
    """Return the copy of CUPTI that this process has loaded, else the first one found: two copies would not work."""
    loaded = [file for file in mapped_files() if LIBRARY.search(file)]
    spec = find_spec("nvidia")  # the namespace package of NVIDIA's wheels
    folders = list(spec.submodule_search_locations or ()) if spec else []
    installed = sorted(str(path) for folder in folders for path in Path(folder).rglob("libcupti.so.*"))
    problems: list[str] = []
    for path in dict.fromkeys([*loaded, *installed, "libcupti.so", "libcupti.so.13", "libcupti.so.12"]):
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            problems.append(str(error))
    raise CuptiFailed(f"no CUPTI library could be loaded ({problems[0]})")
