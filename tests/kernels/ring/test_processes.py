"""Rings of real processes over gloo: the numbers of one device, less memory with more ranks, failures that speak."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from cli_process import alive, wait_for

from attnbench import masks
from attnbench.errors import Unsupported as Unsupported_
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Failed, Ok, Unsupported

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

from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring import pool
from attnbench.kernels.ring.pool import RankFailed
from attnbench.kernels.ring.schedule import RingSettings, problem_of
from attnbench.kernels.ring.torch_calls import RingCall
from attnbench.kernels.ring.torch_ring import TEMPLATED


@pytest.fixture(scope="module", autouse=True)
def rings():
    """Started once for all tests of this file."""
    yield
    pool.close_all()


def settings(**given):
    return RingSettings.of({"timeout_s": 60.0, **given})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world, layout", [(2, "zigzag"), (3, "striped"), (4, "contiguous"), (4, "zigzag")])
def test_a_ring_gives_what_one_device_gives(world, layout, case):
    work = case_of(case)
    call = RingCall(work, settings(world=world, layout=layout), with_lse=True)
    require_the_numbers_of_one_device(call, work)


def test_there_is_no_second_gradient():
    require_no_second_gradient(RingCall(WORK, settings(world=2)), WORK)


def open_cell(config, **given):
    cell = Cell("torch.ring", varied(**given), {"timeout_s": 60.0, **config})
    worker = Local("torch", "cpu")
    return worker, cell, worker.ask(p.Open(cell, False, True, None, 3), 60)


@pytest.fixture(scope="module")
def records():
    """The same workload over 1, 2 and 4 ranks."""
    shape = {"q_len": 512, "kv_len": 512, "batch": 1}
    return {world: open_cell({"world": world}, **shape)[2].record for world in (1, 2, 4)}


def test_the_record_tells_of_each_rank(records):
    for world, record in records.items():
        assert isinstance(record, Ok), record
        ranks = record.ranks
        assert (ranks.world, ranks.how, ranks.layout, ranks.inner) == (
            world, "processes over gloo", "zigzag", ("torch.sdpa-flash",),
        )  # fmt: skip
        assert sum(ranks.tokens) == 512
        assert sum(ranks.pairs) == 512 * 513 // 2
        for facts in (ranks.peak_bytes, ranks.compute_ns, ranks.waiting_ns, ranks.communication_ns):
            assert len(facts) == world
        assert min(ranks.compute_ns) > 0
        assert (min(ranks.communication_ns) > 1e5) == (world > 1) or world == 1
        assert 0 < ranks.balance <= 1
        assert record.memory.peak_bytes == max(ranks.peak_bytes)
        assert msgspec.json.decode(msgspec.json.encode(record), type=Ok).ranks == ranks
        assert any("flash_attention" in name for name in record.kernels)


def test_memory_per_rank_falls_as_ranks_are_added(records):
    peaks = [max(records[world].ranks.peak_bytes) for world in (1, 2, 4)]
    held = [max(records[world].ranks.shard_bytes) for world in (1, 2, 4)]
    assert peaks[0] > 1.2 * peaks[1] > 1.2 * 1.2 * peaks[2], peaks
    assert held[0] == 2 * held[1] == 4 * held[2]


def test_a_cell_is_timed_by_its_ranks():
    worker, cell, opened = open_cell({"world": 2})
    assert isinstance(opened, p.Opened)
    warm = worker.ask(p.WarmUp(cell.id), 60)
    assert (warm.clock, warm.parts) == ("ranks", ("main", "forward", "backward"))
    start = time.perf_counter_ns()
    sampled = worker.ask(p.TakeSample(cell.id, "main", 3, 1), 60)
    assert 0 < sum(sampled.ns) < time.perf_counter_ns() - start
    assert set(worker.ask(p.TakeBlock(cell.id, 2), 60).block.ns) == {"wall"}


@pytest.mark.parametrize("how, words", [(signal.SIGKILL, "crashed with SIGKILL"), (signal.SIGSTOP, "gave no answer")])
def test_a_rank_that_dies_or_hangs_is_named_within_the_timeout(how, words):
    worker, cell, opened = open_cell({"world": 3, "timeout_s": 4.0})
    assert isinstance(opened, p.Opened), opened
    (ring,) = [one for key, one in pool._rings.items() if key[0] == 3 and key[3] == 4.0]
    processes = ring.pids
    os.kill(processes[1], how)
    record = worker.ask(p.WarmUp(cell.id), 60).record  # a minute at most; a process group would wait for thirty
    assert isinstance(record, Failed)
    assert record.reason.startswith("RankFailed: rank 1 of 3 " + words)
    wait_for(lambda: not any(map(alive, processes)))
    q, k, v, _ = draws(WORK)
    again = RingCall(WORK, settings(world=3, timeout_s=4.0))(q, k, v)
    assert again.isfinite().all(), "a fresh ring serves the next cell"


def test_a_rank_that_raises_while_others_wait_is_named():
    """Rank 1 gets queries of another width: its kernel raises in the middle of a step."""
    timeout_s = 200.0
    ring = pool.ring(2, "cpu", torch.get_num_threads(), timeout_s)
    ring.ask([(m.OpenProblem(-7, problem_of(WORK, 2, "zigzag"), WORK, "torch.eager"), ())] * 2)
    q, k, v, _ = draws(WORK)
    shards = [(q[:, :37], k[:, :37], v[:, :37]), (q[:, :38, :, :8], k[:, :38], v[:, :38])]
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 2 raised RuntimeError"):
        ring.ask([(m.Forward(-7), shard) for shard in shards])
    assert time.monotonic() - start < timeout_s / 2, "nobody waited for the timeout"


def test_ranks_end_with_the_process_that_drives_them(tmp_path):
    """However it ends: workers are killed with their whole process group, and nothing is left on the disk."""
    program = (
        "import time; from attnbench.kernels.ring import messages as m, pool; "
        "ring = pool.ring(2, 'cpu', 1, 30.0); ring.ask([(m.Forget([]), ())] * 2); "
        "print(*ring.pids, flush=True); time.sleep(60)"
    )
    own = {"env": os.environ | {"TMPDIR": str(tmp_path)}, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, **own) as driver:
        ranks = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(ranks) == 2
        assert all(map(alive, ranks))
        assert list(tmp_path.glob("attnbench-ring-*"))
        os.killpg(driver.pid, signal.SIGKILL)
    wait_for(lambda: not any(map(alive, ranks)) and not any(tmp_path.glob("attnbench-ring-*")))


def test_what_a_kernel_cannot_do_is_refused_before_anything_is_sent():
    _, _, answer = open_cell({"inner": "torch.sdpa-flash"}, v_head_dim=8)
    assert isinstance(answer.record, Unsupported)
    assert "v_head_dim = head_dim" in answer.record.reason


@pytest.mark.parametrize(
    "config, words",
    [({"layout": "spiral"}, "not one of contiguous"), ({"world": 0}, "at least 1"), ({"speed": 9}, "no setting speed")],
)
def test_settings_that_mean_nothing_are_refused(config, words):
    _, _, answer = open_cell(config)
    assert isinstance(answer.record, Failed)
    assert words in answer.record.reason


def test_masks_that_a_ring_does_not_know_are_refused():
    _, _, answer = open_cell({}, mask=masks.window(8))
    assert isinstance(answer.record, Unsupported)
    assert "no window mask" in answer.record.reason


@pytest.mark.parametrize("case", ["full", "causal"])
def test_the_ring_inside_torch_gives_the_same(case):
    work = varied(q_len=64, mask=masks.full() if case == "full" else masks.causal())
    call = TEMPLATED.build_lse(work, {"timeout_s": 60.0})
    require_the_numbers_of_one_device(call, work)


def test_the_ring_inside_torch_takes_equal_shards_only():
    with pytest.raises(Unsupported_, match="4 equal parts"):
        TEMPLATED.build(varied(q_len=66), {})


def test_its_record_has_no_times_apart():
    answer = Local("torch", "cpu").ask(
        p.Open(
            Cell("torch.ring-templated", varied(q_len=64, pass_="forward"), {"timeout_s": 60.0}), False, True, None, 3
        ),
        60,
    )
    ranks = answer.record.ranks
    assert ranks.compute_ns is ranks.communication_ns is None
    assert len(ranks.peak_bytes) == 2
    assert "so their times are not known" in ranks.reason
