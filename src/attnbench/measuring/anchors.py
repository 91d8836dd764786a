"""The anchors, a matrix product and a copy that are timed among the cells of every run, and the device's ceilings.

Anchors show whether two runs found the machine equally fast. Ceilings are the best rates of a larger product and copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from time import perf_counter, perf_counter_ns

import numpy as np
from msgspec.structs import asdict

from attnbench.frameworks import Framework, Inputs, Program
from attnbench.measuring.rates import Ceilings
from attnbench.spec import Cell, Cost, Environment, Errors, Memory, Ok, Record, VerifiedAt
from attnbench.verifying.subject import Wrong, run

NAMES = ("anchor.matmul", "anchor.copy")
MATMUL_SIZE = {"cpu": 512}
COPY_BYTES = {"cpu": 1 << 25}
ACCELERATOR_MATMUL, ACCELERATOR_COPY = 4096, 1 << 29
CEILING_MATMUL = {"cpu": 1024}
CEILING_MATMUL_ACCELERATOR = 8192
CEILING_SECONDS = 0.4
SHORT_MATMUL = 384
"""Size of a product of about a millisecond on a CPU. On a busy machine a long product is always interrupted, and short
calls of an honest kernel would seem to exceed the ceiling."""
NOTHING = Inputs(None, None, None, None)
NO_ANCHORS = "no anchors of its sitting"


def anchors_beside(record: Record, records: Iterable[Record]) -> list[Ok]:
    """Return the anchors that took turns with a timed record: those of its workload and its sitting.

    Anchors of another sitting tell how fast the machine was at another time, so they are not a measure for this record.
    """
    if not isinstance(record, Ok) or record.time is None:
        return []
    return [
        one
        for one in records
        if one.implementation in NAMES
        and isinstance(one, Ok)
        and one.time is not None
        and one.time.sitting == record.time.sitting
        and one.workload.id == record.workload.id
    ]


def lacks_anchors(record: Record, records: Iterable[Record], otherwise: str) -> str:
    """Return why a run has no anchors beside a record: `otherwise`, or that they belong to other sittings."""
    known = {
        one.implementation
        for one in records
        if isinstance(one, Ok) and one.time is not None and one.workload.id == record.workload.id
    }
    return NO_ANCHORS if known >= set(NAMES) else otherwise


class AnchorSession:
    """An anchor, opened and sampled like any cell."""

    parts = ("main",)
    other_clocks: tuple[str, ...] = ()
    timed = True
    repeats = True
    clock_ns = check_ns = 0
    waited: float | None = None

    def __init__(self, framework: Framework, environment: Environment, cell: Cell) -> None:
        self._framework, self._environment, self.cell = framework, environment, cell
        device = environment.device
        self._dtype = "float32" if device == "cpu" else "bfloat16"
        self._size = MATMUL_SIZE.get(device, ACCELERATOR_MATMUL)
        self._bytes = COPY_BYTES.get(device, ACCELERATOR_COPY)
        if cell.implementation == "anchor.matmul":
            self._program = framework.matmul(self._size, self._dtype, device)
        else:
            self._program = framework.copy(self._bytes, device)
        self._clock = framework.clock(framework.clocks(device)[0], device)
        self.slow_clock = self._clock.name == "kernel"

    @property
    def clock_name(self) -> str:
        return self._clock.name

    def open(self) -> Ok:
        """Check the anchor's own result on a few rows, and return its record without times."""
        error = self._check()
        matmul = self.cell.implementation == "anchor.matmul"
        return Ok(
            **asdict(self.cell),
            environment=self._environment,
            errors=Errors(forward=error),
            verified_at=VerifiedAt(
                shape={"size": self._size} if matmul else {"bytes": self._bytes},
                share=1 / self._size if matmul else 1.0,
            ),
            deterministic=True,
            memory=Memory(peak_bytes=None, reason="memory of an anchor is not measured"),
            cost=Cost(flops=2 * self._size**3 if matmul else 0, bytes=0 if matmul else 2 * self._bytes),
        )

    def warm_up(self, clock: str | None = None, brief: bool = False) -> None:
        """Call the anchor a few times and estimate its time."""
        del brief
        if clock is not None:
            self._clock = self._framework.clock(clock, self._environment.device)
            self.slow_clock = clock == "kernel"
        self.call_ns = float(np.median(self._clock.sample(self._program, [NOTHING], 5).ns))

    def sample(self, part: str, count: int, calls: int) -> list[float]:
        """Return nanoseconds per call of each sample."""
        start = perf_counter_ns()
        taken = self._clock.sample(self._program, [NOTHING], count, calls)
        self.clock_ns, self.waited = perf_counter_ns() - start, taken.waited
        return taken.ns

    def _check(self) -> float:
        output = run(self._program, NOTHING)
        self._framework.wait(output)
        if self.cell.implementation == "anchor.copy":
            if not self._framework.same_bits(output[0], output[1]):
                raise Wrong("the copy anchor did not copy")
            return 0.0
        row, a, b = (self._framework.numpy(x).astype(np.float64) for x in (output[0][:1], output[1][:1], output[2]))
        error = float(np.linalg.norm(row - a @ b) / np.linalg.norm(a @ b))
        if not error < 0.02:
            raise Wrong(f"the matmul anchor is off by {error:.1e}")
        return error


def measure_ceilings(framework: Framework, device: str, dtype: str, brief: bool = False) -> Ceilings:
    """Return the best rates of a large product and a large copy within a fraction of a second.

    `brief` takes a quarter of the time and a smaller copy, which is enough to confirm stored ceilings.
    """
    size = CEILING_MATMUL.get(device, CEILING_MATMUL_ACCELERATOR)
    seconds = CEILING_SECONDS / 4 if brief else CEILING_SECONDS
    dtypes, sizes, copied = {dtype}, [size], 1 << 31
    if device == "cpu":  # where a kernel may well work in float32 inside
        dtypes, sizes, copied = {dtype, "float32"}, [size, SHORT_MATMUL], 1 << 28
    flops = max(
        2 * n**3 / _best_s(framework, framework.matmul(n, name, device), device, seconds / len(sizes))
        for n in sizes
        for name in dtypes
    )
    copied >>= 2 if brief else 0
    copy_s = _best_s(framework, framework.copy(copied, device), device, seconds)
    return Ceilings(flops, 2 * copied / copy_s, _cache_bytes(device))


def _best_s(framework: Framework, program: Program, device: str, seconds: float) -> float:
    clock = framework.clock(framework.clocks(device)[0], device)
    best, start = float("inf"), perf_counter()
    while perf_counter() - start < seconds:
        best = min(best, *clock.sample(program, [NOTHING], 4).ns)
    return best * 1e-9


def _cache_bytes(device: str) -> int:
    """Return the size of a CPU's last-level cache; 0 for an accelerator, whose cache is flushed before each call."""
    if device != "cpu":
        return 0
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.rstrip("KM")) << (10 if text.endswith("K") else 20)
    except (OSError, ValueError):
        return 32 << 20
