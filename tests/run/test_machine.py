"""Two measurements at once on one machine refuse each other, a dead one's lock does not count, and a run takes no more
threads than other programs leave cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from record_factory import ok, unsupported

from attnbench.errors import UsageError
from attnbench.run import launch as launching
from attnbench.run.environment import threads_left
from attnbench.run.launch import Listener, Request, launch
from attnbench.run.machine import machine_lock, measuring
from attnbench.run.pool import Pool
from attnbench.spec import Ok, Record, Workload

HOLDER = (
    "import sys\nfrom attnbench.run.machine import machine_lock\n"
    "with machine_lock('gate'):\n    print('held', flush=True)\n    sys.stdin.read()\n"
)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path))


@pytest.fixture
def holder():
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_another_process_is_named(holder: subprocess.Popen[str]):
    pattern = rf"another attnbench gate \(pid {holder.pid}, since \d\d:\d\d\) is measuring on this machine: wait for it"
    with pytest.raises(UsageError, match=pattern), machine_lock():
        pass
    with machine_lock("other"):
        pass


def test_the_lock_of_a_killed_process_does_not_count(holder: subprocess.Popen[str], tmp_path: Path):
    holder.kill()
    holder.wait()
    (file,) = (tmp_path / "attnbench").glob("gate-*.lock")
    assert file.read_text().startswith(f"{holder.pid} ")
    with machine_lock():
        assert file.read_text().startswith(f"{os.getpid()} ")


def test_released_after_an_error():
    with pytest.raises(KeyboardInterrupt), machine_lock():
        raise KeyboardInterrupt
    with machine_lock(), pytest.raises(UsageError, match=f"pid {os.getpid()}"), machine_lock():
        pass


def test_machines_that_share_a_home_folder_do_not_lock_each_other(
    holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("platform.node", lambda: "another")
    with machine_lock():
        pass


def test_the_one_who_waits_is_told_for_whom_and_gets_it(holder: subprocess.Popen[str]):
    told = []

    def end_it(text: str) -> None:
        told.append(text)
        holder.communicate("")

    with (
        machine_lock(doing="run", patience_s=60.0, tell=end_it),
        pytest.raises(UsageError, match=r"another attnbench run"),
        machine_lock(),
    ):
        pass
    (text,) = told
    assert text.startswith("waiting up to 60 s for another attnbench gate (pid ")


def test_waiting_has_an_end(holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr("attnbench.run.machine.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("attnbench.run.machine.time.sleep", lambda seconds: None)
    with pytest.raises(UsageError, match=f"pid {holder.pid}, since"), machine_lock(patience_s=60.0):
        pass


@pytest.mark.parametrize("measure", [True, False])
def test_what_is_timed_takes_the_lock_and_what_is_checked_does_not(holder: subprocess.Popen[str], measure: bool):
    on = Workload(batch=1, q_len=8, heads=1, head_dim=4)
    request = Request(workloads=(on,), implementations=("numpy.float32",), measure=measure, budget_s=0.01)
    if measure:
        with pytest.raises(UsageError, match=f"another attnbench gate .pid {holder.pid}"):
            launch(request, [].extend, Listener(), patience_s=0.0)
    else:
        launch(request, [].extend, Listener(), patience_s=0.0)


def test_a_cache_that_cannot_be_written_does_not_keep_a_run_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "file"))
    told, records = [], []
    listener = Listener()
    listener.warning = told.append
    on = Workload(batch=1, q_len=8, heads=1, head_dim=4)
    launch(Request(workloads=(on,), implementations=("numpy.float32",), budget_s=0.01), records.extend, listener)
    assert records[0].status == "ok"
    assert any(
        "set ATTNBENCH_CACHE" in text and "other measurements on this machine cannot be kept out" in text
        for text in told
    )


def test_who_holds_it_may_measure_within():
    with machine_lock(), measuring("comparison") as notes:
        assert notes == []
    with machine_lock():
        pass


def test_who_holds_the_lock_may_measure_within(holder: subprocess.Popen[str]):
    with pytest.raises(UsageError, match="another attnbench gate"), measuring("compare"):
        pass
    holder.kill()
    holder.wait()
    with machine_lock(doing="bisect"), measuring("compare") as notes:
        assert notes == []
        with pytest.raises(UsageError, match=rf"another attnbench bisect \(pid {os.getpid()}"), machine_lock():
            pass


def test_a_worker_asks_for_no_lock(holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNBENCH_WORKER", "1")
    with measuring("compare") as notes:
        assert notes == []


def test_the_patient_get_the_lock_when_it_is_free(holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnbench.run.machine.time.sleep", lambda seconds: (holder.kill(), holder.wait()))
    with measuring("compare", patience_s=60.0):
        pass


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set ATTNBENCH_CACHE"), machine_lock():
        pass
    with measuring("compare") as notes:
        assert "other measurements on this machine cannot be kept out: cannot lock" in notes[0]


@pytest.mark.parametrize(
    "busy, device, driver, threads",
    [
        (0.1, None, "", None),
        (0.4, None, "", None),
        (1.1, None, "", 3),
        (2.6, "cpu", "", 1),
        (4.0, None, "", 1),
        (4.0, None, "580", None),
        (4.0, "cuda", "580", None),
        (4.0, "cpu", "580", 1),
    ],
)
def test_a_run_takes_the_cores_that_others_leave(monkeypatch: pytest.MonkeyPatch, busy, device, driver, threads):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr("psutil.cpu_percent", lambda seconds: 100 * busy / 4)
    monkeypatch.setattr("attnbench.run.environment.driver_version", lambda: driver)
    found, told = threads_left(device)
    assert found == threads
    assert bool(told) == (threads is not None)
    if told:
        assert f"other programs use {busy:.1f} of 4 cores: measured with {threads} thread" in told
        assert "(--threads 4 takes all)" in told


def test_who_names_a_number_of_threads_gets_it(monkeypatch: pytest.MonkeyPatch):
    """Neither is the machine looked at if nothing is timed."""
    asked: list[str | None] = []
    pools: list[int | None] = []
    monkeypatch.setattr(launching, "threads_left", lambda device: (asked.append(device) or 1, "busy"))
    listener = Listener()
    told: list[str] = []
    listener.warning = told.append  # pyright: ignore[reportAttributeAccessIssue]

    class Opened(Exception):
        pass

    def pool(functions, device, threads, in_process):
        pools.append(threads)
        raise Opened

    monkeypatch.setattr(launching, "Pool", pool)
    for fields in ({"threads": 2}, {"measure": False}, {}):
        request = Request(workloads=(), implementations=("numpy.float32",), framework="numpy", **fields)
        with pytest.raises(Opened):
            launch(request, lambda records: None, listener)
    assert pools == [2, None, 1]
    assert asked == [None]
    assert told == ["busy"]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count waits for a core")
@pytest.mark.parametrize("looks, counted", [([0.1, 0.2], False), ([1.0, 0.1], True), ([0.1, 0.7], True)])
def test_waits_count_only_beside_other_programs(monkeypatch: pytest.MonkeyPatch, looks, counted):
    monkeypatch.setattr("attnbench.run.workload.busy_cores", lambda: looks.pop(0))
    records: list[Record] = []
    request = Request(
        workloads=(Workload(batch=1, q_len=16, heads=2, head_dim=8),), implementations=("numpy.float32",),
        framework="numpy", budget_s=0.01, device="cpu",
    )  # fmt: skip
    launch(request, records.extend, Listener())
    times = [one.time for one in records if isinstance(one, Ok)]
    assert times
    assert all(time is not None and (time.waited is not None) == counted for time in times)


@pytest.mark.parametrize(
    "told", ["", "other programs use 1.5 of 4 cores: measured with 2 threads (--threads 4 takes all)"]
)
def test_workers_with_a_given_number_of_threads_tell_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch, told: str):
    monkeypatch.setattr(launching, "threads_left", lambda device: (None, told))
    timed, refused = ok("numpy.float32", [1e6, 1e6]), unsupported("torch.fa3", "needs cuda")
    monkeypatch.setattr(launching, "_run_all", lambda request, wanted, sink, *_: sink([timed, refused]))
    records: list[Record] = []
    request = Request(workloads=(), implementations=("numpy.float32",), framework="numpy")
    launch(request, records.extend, Listener(), pool=cast(Pool, object()))
    note = "other programs use 1.5 of 4 cores when it began: threads may have waited"
    assert [record.notes for record in records if isinstance(record, Ok)] == [(note,) if told else ()]
    assert records[1] == refused
