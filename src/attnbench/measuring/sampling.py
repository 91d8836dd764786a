"""Sampling: the loop that interleaves cells, its stop rule, and the summary of samples as a Time; and the block, one
side's turn in a comparison: several calls by wall time and by CPU or device time, with the GPU's clock."""

from __future__ import annotations

import ctypes
import random
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import comb, exp
from time import perf_counter, perf_counter_ns, process_time_ns
from typing import Any, NamedTuple, Protocol

import numpy as np

from attnbench.comparison import Block
from attnbench.frameworks import Clock, Framework, Program
from attnbench.frameworks.base import InputSets, OwnClock, WallClock, Watch, cut_after, hooks, require_unhooked
from attnbench.spec import Time

ESTIMATOR = 2
"""Version of the estimate of a published time: what a clock counts, warm-up, visits, summaries. Times of two versions
are not compared."""
VISIT_NS = 10e6
"""Time for which one implementation is sampled before the next has its turn."""
SLOW_VISIT_NS, MOST_BY_SLOW_CLOCK, FEWEST_BY_SLOW_CLOCK = 50e6, 20, 3
"""Length of a visit by a profiler, which costs about as much as these calls, and its fewest and most calls."""
SHORTEST_SAMPLE_NS = 50e3
"""Length below which several calls make one sample: the clock and the wait around a call cost about a microsecond."""
MIN_ROUNDS = 8
"""Fewest rounds; with fewer, one function under two names may seem to differ."""
FEW = 6
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles of Student's t by number of values."""
FEW_ROUNDS = 3
"""Fewest rounds of a cell so slow that it has used three times its budget."""
MOST_SAMPLES_PER_VISIT = 50
VARIED = 0.3
"""Share by which visits are longer or shorter at random, so that a kernel cannot know which call is the last."""
WAITED = "busy machine"
"""Beginning of the note in a record whose threads waited for a core."""
MOST_WAITED = 1 - 1e-6
"""Largest share of a time that threads may have waited, so that something is left of it."""
WALL_SHARE = 8
"""Number of calls by the device's clock for each call by the wall clock, on an accelerator."""


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the median of independent values; None for a single value.

    From 6 values on it consists of order statistics, which assume nothing about the noise. For 2 to 5 values, of which
    no order statistic reaches 95 %, it is Student's t of the logarithms.
    """
    ordered, n = sorted(values), len(values)
    if n < 2:
        return None
    if n < FEW:
        middle, half = float(np.median(ordered)), STUDENT[n] * float(np.std(np.log(ordered), ddof=1)) / n**0.5
        return middle / exp(half), middle * exp(half)
    tail, rank = 0.0, 0
    while rank < n // 2 and tail + comb(n, rank) / 2**n <= 0.025:
        tail += comb(n, rank) / 2**n
        rank += 1
    return ordered[rank - 1], ordered[n - rank]


def summarise(
    rounds: Sequence[Sequence[float]], clock: str, calls_per_sample: int, waited: Sequence[float] = ()
) -> Time:
    """Return the Time of the samples of all rounds; its interval is that of the rounds' medians.

    `waited` are the shares of rounds in which threads waited for a core: without them the time may have been so much
    shorter, so the interval reaches as far down.
    """
    share = min(float(np.median(waited)), MOST_WAITED) if len(waited) else None
    samples = np.array([sample for visit in rounds for sample in visit])
    q1, p50, q3, p95, p99 = map(float, np.percentile(samples, [25, 50, 75, 95, 99]))
    fence, median = 1.5 * (q3 - q1), p50
    interval = median_interval([float(np.median(visit)) for visit in rounds if len(visit)])
    if interval is not None:
        interval = min(median, interval[0]) * (1 - (share or 0.0)), max(median, interval[1])
    return Time(
        samples_ns=tuple(round(float(sample), 1) for sample in samples),
        median_ns=median,
        ci95_ns=interval,
        min_ns=float(samples.min()),
        max_ns=float(samples.max()),
        p50_ns=p50,
        p95_ns=p95,
        p99_ns=p99,
        mean_ns=float(samples.mean()),
        std_ns=float(samples.std(ddof=1)) if len(samples) > 1 else 0.0,
        outliers=int(np.count_nonzero((samples < q1 - fence) | (samples > q3 + fence))),
        clock=clock,
        calls_per_sample=calls_per_sample,
        rounds=tuple(len(visit) for visit in rounds),
        waited=share,
    )


def round_medians(time: Time) -> np.ndarray:
    """Return the median of each interleaving round, in order; empty if the samples do not come in rounds."""
    if not time.rounds or sum(time.rounds) != len(time.samples_ns):
        return np.empty(0)
    samples = np.asarray(time.samples_ns)
    if len(time.rounds) == len(samples):
        return samples
    if len(set(time.rounds)) == 1:
        return np.median(samples.reshape(len(time.rounds), -1), axis=1)
    parts = np.split(samples, np.cumsum(time.rounds)[:-1])
    return np.array([np.median(part) for part in parts if len(part)])


class Dropped(Exception):
    """A source that cannot be sampled any more; the others go on."""


class SampleSource(Protocol):
    """A cell in a worker or an anchor, which can be sampled."""

    @property
    def call_ns(self) -> float:
        """Time of one call, estimated in the warm-up."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts sampled at each visit: "main", and for a train pass "forward" and "backward"."""
        ...

    @property
    def slow_clock(self) -> bool:
        """Whether each visit has a large fixed cost (a profiler), so that fewer and fuller visits pay."""
        ...

    def sample(self, part: str, count: int, calls: int) -> list[float]:
        """Return nanoseconds per call of each sample."""
        ...


@dataclass
class Series:
    """Samples of one source."""

    source: SampleSource
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    calls: int = 1
    count: int = 1
    spent_s: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        call = max(self.source.call_ns, 1.0)
        self.calls = 1 if self.source.slow_clock else max(1, round(SHORTEST_SAMPLE_NS / call))
        per_visit = int(VISIT_NS / (call * self.calls))
        if self.source.slow_clock:
            per_visit = min(max(int(SLOW_VISIT_NS / call), FEWEST_BY_SLOW_CLOCK), MOST_BY_SLOW_CLOCK)
        self.count = min(max(1, per_visit), MOST_SAMPLES_PER_VISIT)

    def visit(self, count: int) -> None:
        """Sample every part once."""
        start = perf_counter()
        for part in self.source.parts:
            self.rounds.setdefault(part, []).append(self.source.sample(part, count, self.calls))
        self.spent_s += perf_counter() - start

    def tight(self, precision: float) -> bool:
        """Return whether the 95 % interval of the median is within +-precision of it."""
        rounds = self.rounds["main"]
        if len(rounds) < MIN_ROUNDS:
            return False
        medians = [float(np.median(visit)) for visit in rounds]
        interval = median_interval(medians)
        return interval is not None and (interval[1] - interval[0]) / 2 <= precision * float(np.median(medians))


@dataclass(frozen=True)
class StopRule:
    """The rule for when a source has enough samples."""

    budget_s: float
    precision: float
    trials: int | None = None

    def enough(self, series: Series) -> bool:
        """Return whether the number of samples, the precision or the budget is reached, never before a few rounds."""
        rounds = series.rounds.get("main", [])
        if self.trials is not None:
            return sum(len(visit) for visit in rounds) >= self.trials
        least = MIN_ROUNDS if series.spent_s < 3 * self.budget_s else FEW_ROUNDS
        if len(rounds) < least:
            return False
        return series.spent_s >= self.budget_s or series.tight(self.precision)


def varied(count: int, rng: random.Random) -> int:
    """Draw a number near this one, at least 1."""
    return max(1, round(count * rng.uniform(1 - VARIED, 1 + VARIED)))


def interleave(
    sources: Sequence[SampleSource], rule: StopRule, rng: random.Random, always: Sequence[SampleSource] = ()
) -> list[Series]:
    """Visit all sources in a fresh random order each round until each has enough samples; `always` join each round.

    Visits of a source differ in length at random.
    """
    series = [Series(source) for source in sources]
    companions = [Series(source) for source in always]
    while any(not one.done for one in series):
        waiting = [one for one in series if not one.done] + companions
        rng.shuffle(waiting)
        for one in waiting:
            try:
                fixed = rule.trials is not None and one not in companions
                one.visit(1 if fixed else varied(one.count, rng))
                one.done = rule.enough(one)
            except Dropped:
                one.done = True
    return series + companions


def take_block(
    framework: Framework, device: str, clock: Clock, program: Program, inputs: InputSets, calls: int, watch: Watch
) -> Block:
    """Time some calls and return nanoseconds per call by each metric."""
    if clock.name == OwnClock.name:  # the processor's time of this process is not that of the ranks
        return Block({"wall": float(np.median(clock.sample(program, inputs, calls, 1, watch).ns))})
    if device != "cpu" and clock.name != "wall":
        by_wall = WallClock(framework).sample(program, inputs, max(1, calls // WALL_SHARE), 1, watch)
        taken = clock.sample(program, inputs, calls, 1, watch)
        mhz, throttled = gpu_state() or (None, False)
        return Block({"device": float(np.median(taken.ns)), "wall": float(np.median(by_wall.ns))}, 0, mhz, throttled)
    prepared = [program.prepare(inputs[call % len(inputs)]) for call in range(calls)]
    framework.wait(prepared)
    wait, run, output, kept = framework.wait, program.run, (), []
    picked = watch.pick(calls)
    pieces = cut_after(prepared, picked)
    before = hooks()
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    cpu, wall = process_time_ns(), perf_counter_ns()
    for piece in pieces:
        for state in piece:
            output = run(state)
            wait(output)
        kept.append(output)
    after = hooks()
    wall, cpu = perf_counter_ns() - wall, process_time_ns() - cpu
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
    require_unhooked(before, after)
    for index, output_of_call in zip(picked, kept):
        watch.look(index, output_of_call)
    # A call that only sleeps has used no CPU time at all: a nanosecond keeps its ratio defined.
    ns = {"wall": wall / calls, "cpu": max(cpu, 1) / calls}
    return Block(ns, switches)


class GpuState(NamedTuple):
    """Clock of the multiprocessors; `throttled`: heat or the power supply slows them down. The ordinary power limit,
    under which heavy kernels always run, does not count, since the clock shows it."""

    sm_mhz: float
    throttled: bool


def gpu_state() -> GpuState | None:
    """Return the clock of the GPU in use; None if the driver does not report it."""
    import pynvml

    if (handle := nvml_handle()) is None:
        return None

    try:
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except pynvml.NVMLError:
        return None
    slowdowns = (
        pynvml.nvmlClocksThrottleReasonHwSlowdown
        | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    return GpuState(float(clock), bool(bits & slowdowns))


@cache
def nvml_handle() -> Any:
    """Return NVML's handle of the GPU that this process calls device 0; None if there is none.

    NVML numbers all cards of the machine by bus address; CUDA numbers those that CUDA_VISIBLE_DEVICES names, by speed
    unless CUDA_DEVICE_ORDER says otherwise. So the card is found by its bus address. Call this after the framework was
    used: it initialises CUDA, which a process that forks later must not do.
    """
    import pynvml

    if (address := _bus_address()) is None:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByPciBusId(address)
    except pynvml.NVMLError:
        return None


def _bus_address() -> bytes | None:
    """Ask the CUDA driver for the bus address of device 0, such as b"00000000:3B:00.0"."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
    return None if failed or driver.cuDeviceGetPCIBusId(address, len(address), device) else address.value
