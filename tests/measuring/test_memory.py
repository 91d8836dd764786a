"""`ab.MemoryProfiler` sees what every library allocates, and says why where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import attnbench as ab
from attnbench import registry
from attnbench.errors import UsageError
from attnbench.frameworks import host_memory
from attnbench.measuring import memory
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Workload

SIZE = 64 << 20
SLACK = max(SIZE // 10, 1 << 20)


def assert_close(got, wanted=SIZE):
    assert got is not None
    assert abs(got - wanted) <= SLACK, f"{got / 2**20:.1f} MB instead of {wanted / 2**20:.0f}"


def numpy_block():
    return np.ones(SIZE // 4, np.float32)


def test_a_numpy_allocation():
    with ab.MemoryProfiler() as profiler:
        array = numpy_block()
    assert profiler.reason is None
    assert_close(profiler.get_peak_memory())
    del array


class FakeCuda:
    """The memory counters of two GPUs."""

    def __init__(self) -> None:
        self.now, self.peak, self.waited = [10, 20], [0, 0], []

    def is_available(self) -> bool:
        return True

    def init(self) -> None: ...

    def device_count(self) -> int:
        return 2

    def memory_reserved(self, index: int) -> int:
        return self.now[index]

    memory_allocated = memory_reserved

    def synchronize(self, index: int) -> None:
        self.waited.append(index)

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak[index] = self.now[index]

    def max_memory_allocated(self, index: int) -> int:
        return self.peak[index]


@pytest.mark.parametrize("device,peak", [("cuda:1", 300), ("cuda:0", 7), ("cuda", 307), (None, 307)])
def test_the_gpu_that_was_asked_for_is_counted(monkeypatch, device, peak):
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", type("Torch", (), {"cuda": cuda}))
    with ab.MemoryProfiler(device=device) as profiler:
        cuda.peak = [17, 320]
    assert profiler.get_peak_memory() == peak


def test_a_runner_refuses_a_gpu_that_it_would_not_measure():
    with pytest.raises(UsageError, match="set CUDA_VISIBLE_DEVICES=1"):
        ab.BenchmarkRunner(device="cuda:1")
    ab.BenchmarkRunner(device="cuda:0")


FREED_BEFORE = f"""
import ctypes
import numpy as np
import attnbench as ab
for option in (-1, -3):  # malloc keeps what is freed, and takes large blocks from the same heap
    ctypes.CDLL(None).mallopt(option, 1 << 30)
holes = [np.ones(20_000, np.uint8) for _ in range(400)]
blocks = [np.ones(1 << 20, np.uint8) for _ in range(64)]
del holes[::2], blocks  # small blocks come from the holes, none from the free end of the heap
with ab.MemoryProfiler(device="cpu") as profiler:
    np.ones(1 << 15, np.uint8)  # from the end of the heap, which is given back when this is freed
    array = np.ones({SIZE}, np.uint8)
print(profiler.get_peak_memory())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the high-water mark can be reset on Linux only")
def test_what_was_freed_before_is_not_taken_off():
    told = subprocess.run([sys.executable, "-c", FREED_BEFORE], capture_output=True, text=True, check=True).stdout
    assert_close(int(told))


@pytest.mark.torch
def test_a_torch_allocation():
    import torch

    torch.ones(8)
    with ab.MemoryProfiler(device="cpu") as profiler:
        array = torch.ones(SIZE // 4)
    assert_close(profiler.get_peak_memory())
    del array


@pytest.mark.jax
def test_a_jax_allocation():
    import jax.numpy as jnp

    jnp.full(SIZE // 4, 2.0).block_until_ready()  # compiled before it is weighed
    with ab.MemoryProfiler(device="cpu") as profiler:
        array = jnp.full(SIZE // 4, 3.0).block_until_ready()
    assert_close(profiler.get_peak_memory())
    del array


def test_it_is_the_peak_that_counts_not_what_remains():
    with ab.MemoryProfiler() as profiler:
        for _ in range(3):
            numpy_block()
    assert_close(profiler.get_peak_memory())


def test_what_was_freed_before_is_not_counted_again_nor_hidden():
    np.ones(SIZE, np.float32)  # four times as much, and gone
    with ab.MemoryProfiler() as profiler:
        array = numpy_block()
    assert_close(profiler.get_peak_memory())
    with ab.MemoryProfiler() as again:
        pass
    assert again.get_peak_memory() < 4 << 20
    del array


def test_a_block_that_raises_is_weighed_and_still_raises():
    profiler = ab.MemoryProfiler()

    def fail():
        numpy_block()
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"), profiler:
        fail()
    assert_close(profiler.get_peak_memory())


def test_before_the_block_there_is_nothing_to_tell():
    profiler = ab.MemoryProfiler()
    assert profiler.get_peak_memory() is None
    assert "not been run" in profiler.reason


@pytest.mark.parametrize(
    "patch, says",
    [
        (lambda m: m.setattr(memory.sys, "platform", "darwin"), "Linux only"),
        (lambda m: m.setattr(host_memory, "CLEAR", Path("/nowhere/clear_refs")), "cannot be reset here"),
    ],
    ids=["another system", "no permission"],
)
def test_where_it_cannot_be_had_it_is_null_with_a_reason(monkeypatch, patch, says):
    patch(monkeypatch)
    with ab.MemoryProfiler() as profiler:
        numpy_block()
    assert profiler.get_peak_memory() is None
    assert says in profiler.reason


def test_a_device_that_was_never_used_has_no_counter():
    with ab.MemoryProfiler(device="tpu") as profiler:
        pass
    assert profiler.get_peak_memory() is None
    assert "tpu" in profiler.reason


@pytest.mark.gpu
def test_a_cuda_allocation():
    import torch

    torch.ones(8, device="cuda")
    with ab.MemoryProfiler() as profiler:
        array = torch.ones(SIZE // 4, device="cuda")
    assert profiler.method == "torch CUDA allocator"
    assert_close(profiler.get_peak_memory())
    del array


SCORES = Workload(batch=1, q_len=1536, heads=4, head_dim=16)
SCORES_BYTES = 4 * 1536 * 1536 * 4


def memory_of(function, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry.register(registry.Function(function, "torch", "subject"))
    answer = Local("torch", "cpu").ask(p.Open(Cell("subject", SCORES), False, True, None, 1), 120)
    assert isinstance(answer, p.Opened), answer
    return answer.record.memory


def heads_first(*arrays):
    return [x.transpose(1, 2) for x in arrays]


@pytest.mark.torch
def test_scores_in_torch_s_memory_are_counted(monkeypatch):
    def honest(q, k, v):
        q, k, v = heads_first(q, k, v)
        return ((q @ k.mT * 0.25).softmax(-1) @ v).transpose(1, 2)

    found = memory_of(honest, monkeypatch)
    assert found.peak_bytes >= SCORES_BYTES
    assert "keeps" not in found.method


@pytest.mark.torch
def test_a_workspace_that_is_kept_between_calls_is_counted(monkeypatch):
    import torch

    kept = {}

    def workspace(q, k, v):
        q, k, v = heads_first(q, k, v)
        shape = (*q.shape[:3], k.shape[2])
        if shape not in kept:
            kept[shape] = torch.empty(shape)
        scores = kept[shape]
        torch.matmul(q, k.mT, out=scores).mul_(0.25)
        scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        scores.div_(scores.sum(-1, keepdim=True))
        return (scores @ v).transpose(1, 2)

    found = memory_of(workspace, monkeypatch)
    assert found.peak_bytes >= SCORES_BYTES
    assert found.method.endswith("38 MB that it keeps between calls")


@pytest.mark.torch
def test_memory_of_another_library_makes_the_peak_unknown(monkeypatch):
    import torch

    def numpy_scores(q, k, v):
        q, k, v = heads_first(q, k, v)
        scores = np.matmul(q.numpy(), k.mT.numpy())
        scores *= 0.25
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return (torch.from_numpy(scores) @ v).transpose(1, 2)

    found = memory_of(numpy_scores, monkeypatch)
    assert found.peak_bytes is None
    assert "memory that torch does not count" in found.reason


KEEPS = """
import numpy as np
from attnbench.frameworks.host_memory import allocated
for size in (40 << 20, 33 << 20):  # once a block is freed, malloc keeps blocks up to its size in the heap
    np.ones(size, np.uint8)
before = allocated()
kept = np.ones(30 << 20, np.uint8)
print(allocated() - before)
"""


def test_what_is_kept_is_seen_in_the_heap_too():
    done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, check=True)
    assert abs(int(done.stdout) - (30 << 20)) < 1 << 20
