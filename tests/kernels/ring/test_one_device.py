"""What one device can do of a ring: virtual ranks with their own memory and time, and chunks one after the other."""

from __future__ import annotations

from functools import partial

import pytest

from attnbench import masks
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Ok, Workload

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from ring_cases import (
    CASES,
    WORK,
    case_of,
    draws,
    require_no_second_gradient,
    require_the_numbers_of_one_device,
    varied,
)

from attnbench.errors import UsageError
from attnbench.frameworks import Inputs, Program
from attnbench.frameworks.torch.programs import cpu_peak
from attnbench.kernels.chunked import CHUNKED, TilePlan
from attnbench.kernels.ring import torch_calls
from attnbench.kernels.ring.engine import RingEngine
from attnbench.kernels.ring.function import ring_attention
from attnbench.kernels.ring.schedule import RingProblem, RingSettings
from attnbench.kernels.ring.torch_calls import VirtualRing


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world, layout", [(1, "zigzag"), (2, "striped"), (3, "zigzag"), (5, "contiguous")])
def test_virtual_ranks_give_what_one_device_gives(world, layout, case):
    work = case_of(case)
    ring = VirtualRing(work, RingSettings.of({"world": world, "layout": layout}), with_lse=True)
    require_the_numbers_of_one_device(ring, work)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [1000, 16])
def test_chunks_give_what_one_call_gives(chunk, case):
    work = case_of(case)
    require_the_numbers_of_one_device(CHUNKED.build_lse(work, {"chunk": chunk}), work)


def test_chunks_cover_the_triangle_and_no_more():
    plan = TilePlan(
        Workload(batch=1, q_len=100, heads=1, head_dim=8, mask=masks.causal()), {"chunk": 30, "inner": "auto"}
    )
    tiles = [tile for _, chunk in plan.chunks() for tile in chunk]
    assert sum(tile.pairs for tile in tiles) == 100 * 101 // 2
    assert max(max(tile.shape) for tile in tiles) == 25, "at least four chunks"


def test_there_is_no_second_gradient():
    virtual = VirtualRing(WORK, RingSettings.of({"world": 2}))
    for call in (CHUNKED.build(WORK, {}), virtual, partial(ring_attention, causal=True)):
        require_no_second_gradient(call, WORK)


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        CHUNKED.build(WORK, {"chunk": 0})


@pytest.fixture
def one_accelerator(monkeypatch):
    """A CPU taken for a device that can host one rank only."""
    monkeypatch.setattr(torch_calls, "is_virtual", lambda device, world: True)


def test_the_record_of_virtual_ranks_says_so(one_accelerator):
    cell = Cell("torch.ring", varied(pass_="forward"), {"world": 3})
    record = Local("torch", "cpu").ask(p.Open(cell, False, True, None, 3), 60).record
    assert isinstance(record, Ok), record
    ranks = record.ranks
    assert (ranks.how, ranks.devices) == ("virtual", 1)
    assert ranks.communication_ns is None
    assert ranks.waiting_ns is None
    assert "communication is not" in ranks.reason
    assert ranks.reason in record.notes
    assert len(ranks.compute_ns) == len(ranks.peak_bytes) == 3
    assert record.memory.peak_bytes == max(ranks.peak_bytes)


@pytest.mark.parametrize("pass_", ["forward", "backward", "train"])
def test_memory_per_virtual_rank_falls_as_ranks_are_added(pass_):
    work = varied(q_len=512, batch=1)
    inputs = Inputs(*draws(work))
    rings = [VirtualRing(work, RingSettings.of({"world": world})) for world in (1, 2, 4)]
    peaks = [max(one.peak_bytes for one in ring.inspect(inputs, pass_)) for ring in rings]
    assert peaks[0] > 1.2 * peaks[1] > 1.2 * 1.2 * peaks[2], peaks


def test_chunks_need_little_beyond_the_results():
    """Accumulators of one chunk, not of the sequence."""
    work = varied(q_len=1024, batch=1, pass_="forward")
    inputs, peaks = Inputs(*draws(work)), []
    for chunk in (256, 64):
        call = CHUNKED.build(work, {"chunk": chunk})
        program = Program(run=lambda x, call=call: (call(x.q, x.k, x.v),))
        peaks.append(cpu_peak(program, inputs).bytes)
    results = 1024 * WORK.heads * (WORK.head_dim + 1) * 4
    assert results <= peaks[1] < peaks[0]
    assert peaks[1] - results < 0.45 * (peaks[0] - results)


class Recorder:
    """A transport and a work that only tell in which order they are asked."""

    channels = 1

    def __init__(self):
        self.events = []

    def keys(self, pair, coming, length):
        self.events.append(f"send keys, expect {coming}")
        return lambda: self.events.append(f"keys of {coming} arrived") or pair

    def gradients(self, pair, owner, length):
        self.events.append(f"send sums of {owner}")
        return lambda: self.events.append("sums arrived") or pair

    def attend(self, turn, q, pair, sums):
        self.events.append(f"compute {turn}")

    def differentiate(self, turn, q, pair, whole, grads):
        self.events.append(f"compute {turn}")


def test_messages_are_on_their_way_before_the_computation_that_hides_them():
    seen, arrays = Recorder(), [torch.zeros(1, 2, 1, 1) for _ in range(3)]
    engine = RingEngine(RingProblem(6, 6, 3, "contiguous", False), 1, seen)
    results = engine.forward(*arrays, seen)
    assert seen.events == [
        "send keys, expect 0", "compute 0", "keys of 0 arrived",
        "send keys, expect 2", "compute 1", "keys of 2 arrived",
        "compute 2",
    ]  # fmt: skip
    seen.events.clear()
    engine.backward(arrays, results, arrays[0], seen)
    assert seen.events == [
        "send keys, expect 0", "compute 0", "send sums of 1", "keys of 0 arrived",
        "send keys, expect 2", "compute 1", "sums arrived", "send sums of 0", "keys of 2 arrived",
        "compute 2", "sums arrived", "send sums of 2", "sums arrived",
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name, config", [("torch.ring", {"world": 4}), ("torch.chunked", {"chunk": 300})])
def test_on_a_gpu(name, config):
    work = Workload(
        batch=1, q_len=1111, heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", mask=masks.causal(), pass_="train"
    )
    record = Local("torch", "cuda").ask(p.Open(Cell(name, work, config), True, True, None, 3), 120).record
    assert isinstance(record, Ok), record
