"""Two sides in fresh processes, launch by launch: verdicts, faults in the middle, and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from cli_process import alive, wait_for

from attnbench import processes
from attnbench.comparing import compare as comparing
from attnbench.comparing import experiment as module
from attnbench.comparing.compare import compare
from attnbench.comparing.experiment import Experiment, Terms
from attnbench.comparing.sides import ForkedSide, code_of
from attnbench.comparison import LOOKS, Block, Launch
from attnbench.errors import UsageError
from attnbench.processes import descendants
from attnbench.run.remote import Remote
from attnbench.spec import Workload

FUNCTIONS = str(Path(__file__).with_name("compared_functions.py"))
SMALL = Workload(batch=1, q_len=64, heads=2, head_dim=16)
ONE_LAUNCH = {"budget_s": 0.01}
"""For tests in which it does not matter what the clock says: a comparison ends with its first launch."""


def named(function):
    return f"{FUNCTIONS}:{function}"


@pytest.fixture(autouse=True)
def diary(monkeypatch, tmp_path):
    diary = tmp_path / "diary"
    diary.mkdir()
    monkeypatch.setenv("COMPARED_DIARY", str(diary))


def compared(a, b, **terms):
    sides = [code_of(named(one), "numpy") for one in (a, b)]
    facts = {"workload": SMALL, "launch_s": 0.05, "seed": 3, "budget_s": 150.0} | terms
    with ForkedSide(sides[0], "cpu", 1) as first, ForkedSide(sides[1], "cpu", 1) as second:
        return Experiment(first, second, Terms(**facts), lambda launches, decision: None).run()


def test_half_the_work_is_faster_and_twice_the_work_is_slower():
    forth, back = compared("thrice", "plain"), compared("plain", "thrice")
    assert (forth.verdict, back.verdict) == ("faster", "slower")
    assert forth.ratio < 0.7 < 1.5 < back.ratio
    assert forth.interval[0] < forth.ratio < forth.interval[1]
    assert set(forth.estimates) == {"wall", "cpu"}
    assert len(forth.launches) in LOOKS
    assert forth.record_a.status == forth.record_b.status == "ok"
    assert forth.record_a.time is None, "times are in the launches"
    assert forth.record_a.memory.peak_bytes is not None
    assert forth.smallest_slowdown > forth.floor


def test_neighbours_are_paired_and_both_orders_occur():
    found = compared("plain", "thrice")
    firsts = [launch.first for launch in found.launches]
    assert all({one, other} == {"a", "b"} for one, other in zip(firsts[::2], firsts[1::2])), "in every two launches"
    for launch in found.launches:
        assert len(launch.a) == len(launch.b) >= 2
        assert all(block.ns["wall"] > 0 and block.ns["cpu"] > 0 for block in (*launch.a, *launch.b))


def test_a_nap_is_seen_by_the_wall_clock_though_the_cpu_clock_does_not():
    found = compared("plain", "napping")
    assert found.verdict == "slower"
    assert found.estimates["wall"].ratio > 3
    assert found.estimates["wall"].ratio > 2 * found.estimates["cpu"].ratio


@pytest.mark.parametrize("seed", range(4), ids="order {}".format)
def test_a_faster_but_wrong_candidate_has_no_speed(seed):
    """Whichever is opened first, both records are known."""
    found = compared("plain", "wrong_and_fast", seed=seed)
    assert found.verdict is None
    assert found.ratio is found.interval is None
    assert found.record_a.status == "ok"
    assert found.record_b.status == "incorrect"
    assert "error allowed" in found.reason


@pytest.mark.parametrize(
    "function,status,reason",
    [
        ("dies_in_the_third", "failed", "in launch .*crashed with SIGABRT"),
        ("hangs_in_the_third", "timeout", "in launch .*no answer within"),
        ("runs_out_in_the_third", "out_of_memory", "in launch .*no room"),
        ("wrong_in_the_third", "incorrect", "in launch .*error allowed"),
    ],
)
def test_one_that_falls_in_the_middle_is_told_apart(function, status, reason):
    found = compared("plain", function, timeout_s=5.0 if status == "timeout" else 60.0)
    assert found.verdict is None
    assert found.record_b.status == status
    assert found.record_a.status == "ok"
    assert re.search(reason, found.reason), found.reason
    assert found.launches, "what was measured before is kept"


@pytest.mark.torch
def test_a_module_that_computes_while_it_loads_does_not_hang(tmp_path):
    """A fork of a process whose thread pool is up would wait for threads that it does not have."""
    (tmp_path / "eager.py").write_text(
        "import torch\nfrom torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "x = torch.randn(600, 600)\ny = torch.softmax(x @ x, -1) @ x\n\n"
        "def attend(q, k, v):\n    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n"
        "    return sdpa(q, k, v).transpose(1, 2)\n"
    )
    found = compare(f"{tmp_path}/eager.py:attend", "torch.sdpa", SMALL, device="cpu", **ONE_LAUNCH)
    assert found.record_a.status == found.record_b.status == "ok", found.reason


@pytest.mark.parametrize("line", ["import os; os._exit(3)", "raise SystemExit(4)", "import os; os.abort()"])
def test_code_that_ends_its_process_while_it_loads_is_a_usage_error(tmp_path, line):
    (tmp_path / "gone.py").write_text(f"{line}\n\ndef attend(q, k, v):\n    return q\n")
    with pytest.raises(UsageError, match="could not be loaded"):
        compare(named("plain"), f"{tmp_path}/gone.py:attend", SMALL, framework="numpy", budget_s=5)


def test_each_launch_is_a_fresh_process_and_nothing_is_left(monkeypatch):
    pids = []
    real = Remote.__init__

    def remember(self, framework, process, connection, output):
        pids.append(process.pid)
        real(self, framework, process, connection, output)

    monkeypatch.setattr(Remote, "__init__", remember)
    found = compared("plain", "thrice")
    assert len(set(pids)) == 2 + 2 * len(found.launches), "two forkservers, and two workers a launch"
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_the_budget_ends_a_fight_that_no_look_would():
    found = compared("plain", "plain", budget_s=0.5)
    assert len(found.launches) < LOOKS[0]
    assert found.verdict in ("same", "inconclusive")


def test_a_control_may_have_more_work():
    more = Workload(batch=1, q_len=128, kv_len=64, heads=2, head_dim=16)
    found = compared("plain", "plain", other=more)
    assert found.verdict == "slower"
    assert found.record_b.workload == more


def test_a_file_without_that_function_is_a_usage_error():
    with pytest.raises(UsageError, match="nobody could not be loaded"):
        compared("plain", "nobody")


def test_functions_travel_and_those_that_cannot_are_compared_here(monkeypatch):
    monkeypatch.setattr(comparing, "Terms", partial(Terms, launch_s=0.05))
    scale = 16**-0.5

    def quick(q, k, v):
        import numpy as np

        logits = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v).astype(q.dtype)

    lock = threading.Lock()

    def stuck(q, k, v):
        with lock:
            quick(q, k, v)
            return quick(q, k, v)

    here = compare(quick, stuck, SMALL, framework="numpy", budget_s=100)
    assert here.verdict == "slower"
    assert (here.a, here.b) == ("quick", "stuck")
    assert any("calling process" in note for note in here.notes)
    away = compare(quick, named("thrice"), SMALL, framework="numpy", budget_s=100)
    assert away.verdict == "slower"
    assert not any("calling process" in note for note in away.notes)


def test_a_worker_cannot_start_a_comparison(monkeypatch):
    monkeypatch.setenv("ATTNBENCH_WORKER", "1")
    with pytest.raises(UsageError, match="__main__"):
        compare("numpy.float32", "numpy.reference", SMALL)


def test_distortion_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(UsageError, match="CUDA_LAUNCH_BLOCKING"):
        compare("numpy.float32", "numpy.reference", SMALL)


@pytest.mark.parametrize("a,b,calls", [(1e3, 2e3, 400), (1e6, 5e6, 2), (50e6, 60e6, 1), (1e6, 190e6, 1)])
def test_blocks_are_long_enough_for_the_clock_and_short_enough_to_be_neighbours(a, b, calls):
    workers = [module.SideWorker.__new__(module.SideWorker) for _ in range(2)]
    for worker, ns in zip(workers, (a, b)):
        worker.call_ns, worker.clock = ns, "wall"
    assert module._calls(*workers) == calls


@pytest.mark.torch
@pytest.mark.jax
def test_frameworks_can_be_compared_with_each_other():
    found = compare("torch.sdpa", "jax.einsum", SMALL, device="cpu", threads=1, **ONE_LAUNCH)
    assert found.verdict is not None
    assert found.ratio > 0
    assert found.record_a.environment.framework == "torch"
    assert found.record_b.environment.framework == "jax"


def test_workers_on_an_accelerator_live_as_long_as_the_comparison(monkeypatch):
    started, start = [], ForkedSide.start_worker
    monkeypatch.setattr(ForkedSide, "start_worker", lambda self, seed: started.append(seed) or start(self, seed))
    monkeypatch.setattr(module.SideWorker, "on_device", property(lambda self: True))
    monkeypatch.setattr(module, "BLOCK_GPU_NS", module.BLOCK_NS)
    found = compared("plain", "thrice")
    assert found.verdict == "slower"
    assert len(found.launches) in LOOKS
    assert len(started) == 2


@pytest.mark.parametrize("kept,last", [({"a": None}, False), ({}, True)])
def test_opening_counts_once_where_workers_are_kept(monkeypatch, kept, last):
    """16 of 30 seconds, 15 of them opening: another launch fits if it need not open again."""
    asked = []
    monkeypatch.setattr(module, "decide", lambda *_, **words: asked.append(words["last"]))
    experiment = Experiment.__new__(Experiment)
    experiment._terms, experiment._kept = Terms(workload=SMALL, budget_s=30.0), kept
    experiment._opened_at = module.time.monotonic() - 1.0
    experiment._launches = [Launch(a=(Block({"wall": 1.0}),), b=(Block({"wall": 1.0}),))]
    experiment._decide(16.0)
    assert asked == [last]


def test_pairs_at_unequal_gpu_clocks_are_taken_again():
    experiment = Experiment.__new__(Experiment)
    experiment._unequal, experiment._launches, experiment._records, experiment._died = 0, [], {}, {}
    experiment._terms, experiment._opened_at = Terms(workload=SMALL), None
    experiment._sides = {side: SimpleNamespace(code=code_of(named("plain"), "numpy")) for side in "ab"}
    clocks = {"a": iter([1980.0] * 9), "b": iter([1700.0, 1700.0, 1975.0] + [1500.0] * 6)}

    class Fake:
        def __init__(self, side):
            self.side = side

        def block(self, calls):
            return Block({"device": 1e6}, 0, next(clocks[self.side]))

    workers = {side: Fake(side) for side in "ab"}
    assert experiment._pair("ab", workers, 1)["b"].sm_mhz == 1975.0
    assert experiment._answer(None, "", 0.0).notes == ()
    experiment._launches = [Launch(a=(Block({"device": 1.0}),) * 2, b=(Block({"device": 1.0}),) * 2)]
    experiment._pair("ba", workers, 1)
    assert "in 1 of 2 pairs" in experiment._answer(None, "", 0.0).notes[0]
    throttled = {side: SimpleNamespace(block=lambda calls: Block({}, 0, 1980.0, True)) for side in "ab"}
    experiment._pair("ab", throttled, 1)
    assert experiment._unequal == 2


def test_only_metrics_of_both_sides_are_judged(monkeypatch):
    experiment = Experiment.__new__(Experiment)
    experiment._terms, experiment._opened_at, experiment._kept = Terms(workload=SMALL), None, {}
    experiment._launches = [Launch(a=(Block({"device": 1.0, "wall": 2.0}),), b=(Block({"wall": 2.0, "cpu": 3.0}),))]
    asked = []
    monkeypatch.setattr(module, "decide", lambda launches, metrics, **_: asked.append(metrics))
    experiment._decide(0.0)
    assert asked == [("wall",)]


def test_block_survives_the_wire():
    block = Block({"wall": 1.5, "cpu": 2.0}, 3)
    assert msgspec.json.decode(msgspec.json.encode(block), type=Block) == block


# The idle side


def all_stopped(pids):
    """Whether all of these processes are stopped; a signal takes a moment."""
    rests = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return wait_for(lambda: all(psutil.Process(pid).status() in rests for pid in pids))


def test_all_processes_of_the_idle_side_are_stopped_in_the_others_turn(monkeypatch, tmp_path):
    """Threads and helpers that spin would take the core from the other: also one that has left its session."""
    monkeypatch.setenv("COMPARED_HELPERS", str(tmp_path / "helpers"))
    (tmp_path / "helpers").mkdir()
    monkeypatch.setattr(processes, "REFRESH_S", 0.0)
    block, seen = module.SideWorker.block, []

    def watched(self, calls):
        if self._side == "a":
            helpers = [int(path.name) for path in (tmp_path / "helpers").iterdir()]
            family = [process.pid for process in descendants(second._process.pid)]
            idle = [pid for pid in (*family, *helpers) if psutil.pid_exists(pid)]
            assert set(helpers) <= set(family)
            assert all_stopped([second._process.pid, *idle])
            seen.append(len(idle))
        return block(self, calls)

    monkeypatch.setattr(module.SideWorker, "block", watched)
    sides = [code_of(named(one), "numpy") for one in ("plain", "with_helpers")]
    terms = Terms(workload=SMALL, launch_s=0.0, budget_s=0.01)
    with ForkedSide(sides[0], "cpu", 1) as first, ForkedSide(sides[1], "cpu", 1) as second:
        found = Experiment(first, second, terms, lambda launches, decision: None).run()
        assert found.record_b.status == "ok", found.reason
        assert min(seen) >= 3, "a worker and its two helpers"
        helpers = [int(path.name) for path in (tmp_path / "helpers").iterdir()]
        wait_for(lambda: not any(map(alive, helpers)))


def test_what_a_crashed_worker_leaves_behind_is_gone_before_the_next(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPARED_HELPERS", str(tmp_path / "helpers"))
    (tmp_path / "helpers").mkdir()
    sides = [code_of(named(one), "numpy") for one in ("plain", "with_helpers_then_gone")]
    with ForkedSide(sides[0], "cpu", 1) as other, ForkedSide(sides[1], "cpu", 1) as side:
        found = Experiment(other, side, Terms(workload=SMALL), lambda launches, decision: None).run()
        assert found.died == ("b",)
        assert "crashed with SIGABRT" in found.reason, "though its helpers still hold the socket"
        helpers = [int(path.name) for path in (tmp_path / "helpers").iterdir()]
        assert helpers
        side.start_worker(1).kill()
        wait_for(lambda: not any(map(alive, helpers)))


def test_a_stopped_worker_ends_with_its_parent(tmp_path):
    """Its parent is killed while it is the other side's turn: nobody will ever let it go on."""
    code = (
        "import os, signal\nfrom attnbench.comparing.sides import ForkedSide, code_of\n"
        "with ForkedSide(code_of('numpy.float32', 'numpy'), 'cpu', 1) as side:\n"
        "    worker = side.start_worker(1)\n    side.pause()\n"
        "    print(side._process.pid, worker._process.pid, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_for(lambda: not any(map(alive, pids)))


def test_a_nursery_that_dies_is_started_again():
    sides = [code_of(named(one), "numpy") for one in ("plain", "thrice")]
    with ForkedSide(sides[0], "cpu", 1) as first, ForkedSide(sides[1], "cpu", 1) as second:
        os.kill(second._process.pid, signal.SIGKILL)
        found = Experiment(first, second, Terms(workload=SMALL, budget_s=0.01), lambda launches, decision: None).run()
        assert found.record_b.status == "ok", found.reason
        assert found.launches


def test_ctrl_c_while_both_open_does_not_wait_for_them(monkeypatch):
    """On an accelerator both open at once, in threads."""
    monkeypatch.setattr(module.SideWorker, "describe", lambda self: "cuda")
    both_open = Path(os.environ["COMPARED_DIARY"])

    def press():
        wait_for(lambda: len(list(both_open.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compared("hangs", "hangs", timeout_s=200.0)
    assert time.monotonic() - started < 100


def test_a_difference_is_confirmed_by_processes_that_are_newly_started(monkeypatch):
    monkeypatch.setattr(module, "is_overwhelming", lambda decision: False)
    sides = [code_of(named(one), "numpy") for one in ("plain", "thrice")]
    terms = Terms(workload=SMALL, launch_s=0.02, confirm=True, budget_s=300.0)
    with ForkedSide(sides[0], "cpu", 1) as first, ForkedSide(sides[1], "cpu", 1) as second:
        before = {first._process.pid, second._process.pid}
        found = Experiment(first, second, terms, lambda launches, decision: None).run()
        assert not before & {first._process.pid, second._process.pid}
    assert found.verdict == "slower"
    assert len(found.launches) in [2 * look for look in LOOKS]
    assert found.estimates["wall"].launches == len(found.launches)


def test_a_large_difference_needs_no_confirmation():
    found = compared("plain", "thrice", confirm=True, launch_s=0.3)
    assert found.verdict == "slower"
