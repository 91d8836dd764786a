"""Statistics of samples, the stop rule, and the interleaving loop with sources that cost nothing; and which card NVML
is asked about: the one in use, not the first of the machine."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pynvml
import pytest

from attnbench.frameworks import base
from attnbench.frameworks.numpy import NumpyFramework
from attnbench.measuring import sampling
from attnbench.measuring.sampling import Dropped, Series, StopRule, interleave, median_interval, summarise
from attnbench.run import environment


class Fake:
    """A source whose calls take what `speed` says; it notes when it was visited."""

    parts = ("main",)
    slow_clock = False

    def __init__(self, name="a", call_ns=1e6, speed=lambda visit: 1e6, log=None, drop_at=None, parts=("main",)):
        self.name, self.call_ns, self.speed, self.log, self.drop_at = name, call_ns, speed, log, drop_at
        self.parts, self.visits, self.asked = parts, 0, []

    def sample(self, part, count, calls):
        if part == "main":
            self.visits += 1
            if self.log is not None:
                self.log.append(self.name)
            if self.visits == self.drop_at:
                raise Dropped
        self.asked.append((part, count, calls))
        return [self.speed(self.visits)] * count


@pytest.mark.parametrize("n", [6, 7, 10, 15, 30, 50])
def test_the_interval_of_the_median_covers_it_as_often_as_it_says(n):
    rng = np.random.default_rng(n)
    covered = 0
    for values in rng.exponential(size=(2000, n)):
        low, high = median_interval(values.tolist())
        covered += low <= np.log(2) <= high
    assert covered / 2000 >= 0.95 - 0.012, "four standard errors below the nominal 95 %"
    assert n < 15 or covered / 2000 <= 0.985, "and it is no wider than it need be"


def test_the_interval_of_the_median_is_one_of_order_statistics():
    for n in (6, 7, 8):
        assert median_interval(random.sample(range(n), n)) == (0, n - 1)
    assert median_interval(list(range(9))) == (1, 7)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_few_values_get_students_interval(n):
    rng = np.random.default_rng(n)
    intervals = [median_interval(values.tolist()) for values in 1e6 * np.exp(rng.normal(size=(2000, n)))]
    covered = sum(low <= 1e6 <= high for low, high in intervals)
    assert 0.91 <= covered / 2000 <= 0.99
    assert all(low > 0 for low, _ in intervals), "no time is negative"


def test_one_value_has_no_interval():
    assert median_interval([5.0]) is None


def test_rounds_not_samples_decide_the_interval():
    """Samples of one round share its luck: pooling them would claim far too much."""
    rng, covered = np.random.default_rng(1), 0
    for _ in range(300):
        rounds = [(100 * np.exp(rng.normal(0, 0.03) + rng.normal(0, 0.005, 50))).tolist() for _ in range(8)]
        low, high = summarise(rounds, "wall", 1).ci95_ns
        covered += low <= 100 <= high
    assert covered / 300 >= 0.93


def test_a_summary_against_numpy():
    rng = np.random.default_rng(0)
    rounds = [rng.gamma(4, 1e5, size=5).tolist() for _ in range(12)]
    rounds[3][2] = 9e7
    samples = np.concatenate(rounds)
    time = summarise(rounds, "wall", 3)
    assert time.samples_ns == tuple(np.round(samples, 1)), "in order, none dropped"
    assert time.rounds == (5,) * 12
    assert (time.clock, time.calls_per_sample) == ("wall", 3)
    assert (time.min_ns, time.max_ns) == (samples.min(), 9e7)
    assert time.median_ns == time.p50_ns == np.median(samples)
    assert [time.p95_ns, time.p99_ns] == np.percentile(samples, [95, 99]).tolist()
    assert time.mean_ns == pytest.approx(samples.mean())
    assert time.std_ns == pytest.approx(samples.std(ddof=1))
    low, high = median_interval([float(np.median(one)) for one in rounds])
    assert time.ci95_ns == (min(low, time.median_ns), max(high, time.median_ns))
    q1, q3 = np.percentile(samples, [25, 75])
    expected = [x for x in samples if x < q1 - 1.5 * (q3 - q1) or x > q3 + 1.5 * (q3 - q1)]
    assert time.outliers == len(expected) >= 1


def test_a_single_sample_has_no_spread():
    time = summarise([[5.0]], "wall", 1)
    assert (time.std_ns, time.ci95_ns, time.outliers) == (0.0, None, 0)


def series_of(medians, spent_s=0.0):
    series = Series(Fake())
    series.rounds = {"main": [[m] for m in medians]}
    series.spent_s = spent_s
    return series


def test_enough_when_tight():
    rule = StopRule(budget_s=1.0, precision=0.01)
    assert rule.enough(series_of([1e6] * 8))
    assert not rule.enough(series_of([1e6] * 7)), "so few rounds may tell two names for one function apart"
    assert not rule.enough(series_of([1e6, 1.1e6] * 4))


def test_enough_when_the_budget_is_spent_but_never_before_a_few_rounds():
    rule = StopRule(budget_s=1.0, precision=0.0001)
    noisy = [1e6, 1.5e6]
    assert not rule.enough(series_of(noisy * 10, spent_s=0.9))
    assert rule.enough(series_of(noisy * 10, spent_s=1.0))
    assert not rule.enough(series_of(noisy * 2, spent_s=2.0))
    assert rule.enough(series_of(noisy * 2, spent_s=3.1)), "very slow calls stop after three"
    assert not rule.enough(series_of(noisy, spent_s=99))


def test_trials_are_an_exact_number():
    rule = StopRule(budget_s=0.001, precision=0.5, trials=50)
    assert not rule.enough(series_of([1e6] * 49, spent_s=9))
    source = Fake(call_ns=100.0)
    (series,) = interleave([source], rule, random.Random(0))
    assert sum(len(visit) for visit in series.rounds["main"]) == 50


def test_short_calls_are_timed_several_at_a_time_and_long_ones_singly():
    short, long = Series(Fake(call_ns=1e3)), Series(Fake(call_ns=1e9))
    assert short.calls * 1e3 == pytest.approx(sampling.SHORTEST_SAMPLE_NS)
    assert 1 < short.count <= sampling.MOST_SAMPLES_PER_VISIT
    assert (long.calls, long.count) == (1, 1)


def test_every_round_has_its_own_random_order():
    log, names = [], "abcd"
    rule = StopRule(budget_s=0, precision=0, trials=40)
    interleave([Fake(name, log=log) for name in names], rule, random.Random(0))
    rounds = ["".join(log[n : n + 4]) for n in range(0, len(log), 4)]
    assert len(rounds) == 40
    assert all(sorted(one) == list(names) for one in rounds)
    assert len(set(rounds)) > 10, "24 orders are possible; a fixed one would be 1"


def test_companions_join_every_round_and_stop_with_the_last():
    log = []
    quick, slow = (Fake(name, log=log) for name in ("quick", "slow"))
    slow.speed = lambda visit: 1e6 * (1 + visit % 7)
    anchor = Fake("anchor", log=log)
    rule = StopRule(budget_s=1e-3, precision=0.001)
    found = interleave([quick, slow], rule, random.Random(0), always=[anchor])
    assert [one.source for one in found] == [quick, slow, anchor]
    assert log.count("quick") == 8, "tight at once"
    assert log.count("anchor") == max(log.count("slow"), log.count("quick"))


def test_a_source_that_is_dropped_leaves_and_the_others_go_on():
    bad, good = Fake("bad", drop_at=3), Fake("good")
    found = interleave([bad, good], StopRule(1.0, 0.01, trials=10), random.Random(0))
    assert bad.visits == 3
    assert good.visits == 10
    assert [one.done for one in found] == [True, True]


def test_all_parts_are_sampled_at_each_visit():
    source = Fake(parts=("main", "forward", "backward"))
    (series,) = interleave([source], StopRule(1.0, 0.01), random.Random(0))
    assert set(series.rounds) == {"main", "forward", "backward"}
    assert len({len(rounds) for rounds in series.rounds.values()}) == 1


def test_a_drifting_machine_slows_both_alike():
    """The ratio of neighbours is right although the machine gets 3 x slower on the way."""
    clock = iter(range(10_000))

    def speed(factor):
        return lambda visit: factor * 1e6 * (1 + next(clock) / 100)

    a, b = Fake("a", speed=speed(1.0)), Fake("b", speed=speed(1.2))
    first, second = interleave([a, b], StopRule(0, 0, trials=100), random.Random(1))
    mine, other = (np.array([visit[0] for visit in one.rounds["main"]]) for one in (first, second))
    assert mine[-1] > 2.5 * mine[0]
    assert np.median(other / mine) == pytest.approx(1.2, rel=0.005)


CARDS = {b"00000000:3B:00.0": 1980, b"00000000:86:00.0": 345}
"""Bus address -> clock of the multiprocessors; NVML's card 0 is the first."""


class Driver:
    """Stands in for libcuda: its device 0 is the machine's second card, as under CUDA_VISIBLE_DEVICES=1."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, ordinal):
        assert ordinal == 0
        return 0

    def cuDeviceGetPCIBusId(self, address, length, device):
        address.value = b"00000000:86:00.0"
        return 0


@pytest.fixture
def two_cards(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByPciBusId", lambda address: address)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: list(CARDS)[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, kind: CARDS[handle])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda handle: 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda handle, sensor: 40)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerManagementLimit", lambda handle: 700_000)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: [])
    sampling.nvml_handle.cache_clear()
    yield
    sampling.nvml_handle.cache_clear()


def test_the_card_in_use_is_read(two_cards):
    state = sampling.gpu_state()
    assert state is not None
    assert state.sm_mhz == 345
    assert environment._nvidia_facts()["sm_mhz"] == 345


def test_no_driver_means_no_facts(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    sampling.nvml_handle.cache_clear()
    assert sampling.gpu_state() is None
    assert environment._nvidia_facts() == {}
    sampling.nvml_handle.cache_clear()


def test_the_interval_reaches_as_far_down_as_threads_waited():
    rounds = [[1e6 + n] for n in range(10)]
    plain, waited = summarise(rounds, "wall", 1), summarise(rounds, "wall", 1, [0.1, 0.5, 0.9])
    assert plain.waited is None
    assert waited.waited == 0.5
    assert waited.median_ns == plain.median_ns
    assert waited.ci95_ns == (plain.ci95_ns[0] / 2, plain.ci95_ns[1])
    assert summarise(rounds, "wall", 1, [1.0]).ci95_ns[0] > 0


SHARED_CORE = """
import os, sys, time
from attnbench.frameworks.base import Program, WallClock
from attnbench.frameworks.numpy import NumpyFramework

core = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, [core])
neighbours = [os.fork() for _ in range(int(sys.argv[1]))]
if 0 in neighbours:
    while True:
        sum(range(1000))
try:
    def work(state):
        until = time.process_time() + 0.02  # it needs the core for as long
        while time.process_time() < until:
            pass
        return ()
    clock = WallClock(NumpyFramework())
    program = Program(prepare=lambda inputs: inputs, run=work)
    print(*[clock.sample(program, [()], 5).waited for _ in range(3)])
finally:
    for one in neighbours:
        os.kill(one, 9)
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count waits for a core")
def test_waits_for_a_core_are_seen():
    """Beside a process on the same core that never sleeps, each has it half of the time."""
    done = subprocess.run([sys.executable, "-c", SHARED_CORE, "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shares = [float(one) for one in done.stdout.split()]
    assert all(0.2 < share <= 1 for share in shares), shares


def test_where_waits_are_not_counted_nothing_is_said(monkeypatch):
    monkeypatch.setattr(base, "TASKS", Path("/nowhere"))
    monkeypatch.setattr(base.CoreWaits, "_found", {})
    assert base.CoreWaits.of_this_process() is None
    taken = base.WallClock(NumpyFramework()).sample(base.Program(lambda state: ()), [()], 3)
    assert len(taken.ns) == 3
    assert taken.waited is None
