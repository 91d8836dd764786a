"""The NumPy adapter: what it says of the machine, memory that it sees, and memory that it cannot see."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from attnbench.frameworks import Inputs
from attnbench.frameworks.base import OwnClock, Program, Stopwatch
from attnbench.frameworks.numpy import FRAMEWORK, cpu_facts


@pytest.mark.parametrize(
    "value, threads", [("3", 3), ("2,1", 2), (" 5 , 2", 5), ("", None), ("0", None), ("many", None), ("-1", None)]
)
def test_threads_as_openmp_reads_them(value: str, threads: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert FRAMEWORK.environment("cpu").threads == (threads or cpu_facts()["cores"])


def peak(call):
    inputs = Inputs(*(np.ones((1, 256, 2, 16), np.float32) for _ in range(4)))
    return inputs.q.nbytes, FRAMEWORK.peak(FRAMEWORK.programs(call, "forward", inputs).main, inputs, "cpu", None)


def test_every_buffer_is_counted():
    size, found = peak(lambda q, k, v: np.exp(q + k)[:, ::-1])
    assert 2 * size <= found.bytes < 2 * size + 4096


def test_an_output_in_the_memory_of_an_input_takes_none():
    _, found = peak(lambda q, k, v: v[:, ::-1])
    assert found.bytes < 4096


def test_memory_of_another_kind_is_not_published_as_none_at_all():
    def mapped(q, k, v):
        out = np.frombuffer(mmap.mmap(-1, q.nbytes), q.dtype).reshape(q.shape)
        return np.add(q, 1, out=out)

    kept = np.ones((1, 256, 2, 16), np.float32)
    for call in (mapped, lambda q, k, v: kept):
        _, found = peak(call)
        assert found.bytes is None
        assert "did not come from NumPy's allocator" in found.reason


def test_calls_that_time_themselves_count_from_the_start_of_each_sample():
    stopwatch = Stopwatch()
    stopwatch.ns = 1e9  # of calls before the first sample

    def run(inputs: Inputs) -> tuple[np.ndarray, ...]:
        stopwatch.ns += float(inputs.q)
        return (inputs.q,)

    sets = [Inputs(*[np.array(float(n))] * 4) for n in (1, 3, 5)]
    samples = OwnClock(FRAMEWORK, stopwatch).sample(Program(run), sets, 3, 2)
    assert samples.ns == [2.0, 3.0, 4.0]  # means of 1 and 3, 5 and 1, 3 and 5
