"""Whatever ends a run, finished workloads stay, the rest can be resumed, and no worker stays behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cli_in_process import attnbench
from cli_process import alive, finish, start, wait_for, workers

from attnbench.results.run_file import read_run

SLOW = f"{Path(__file__).parent / 'traps.py'}:slow"
HANGS = f"{Path(__file__).parent / 'traps.py'}:hangs"
SHAPE = ["--batch", "2", "--heads", "4:2", "--head-dim", "8", "--causal", "--framework", "numpy", "--budget", "0.05"]
TWO = ["run", "--impl", SLOW, "--against", "numpy.float32", "--seq-len", "16", "24", *SHAPE]


def first_workload_on_disk(folder):
    """The run file, as soon as it holds records."""
    for path in folder.glob("runs/*/*.jsonl"):
        if b'"line":"record"' in path.read_bytes():
            return path
    return None


@pytest.fixture
def second_workload(tmp_path):
    """A run that has written its first workload and is busy with its second: (process, run file, worker ids)."""
    process = start(tmp_path, *TWO)
    path = wait_for(lambda: first_workload_on_disk(tmp_path))
    yield process, path, workers(process)
    process.kill()


def lengths(path):
    return [record.workload.q_len for record in read_run(path).records if record.implementation == "slow"]


def test_ctrl_c_keeps_everything_and_says_how_to_go_on(second_workload, tmp_path):
    process, path, pids = second_workload
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    shown = path.relative_to(tmp_path)
    assert f"Continue with: attnbench run --resume {shown}" in done.stderr
    assert str(shown) in done.stdout
    assert lengths(path) == [16]
    assert pids
    wait_for(lambda: not any(map(alive, pids)))


def test_kill_loses_only_the_workload_in_progress_and_resume_goes_on(second_workload, tmp_path):
    process, path, pids = second_workload
    process.kill()
    process.wait()
    assert lengths(path) == [16]
    wait_for(lambda: not any(map(alive, pids)))
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"line":"record","record":{"status":"ok","impl')
    done = attnbench(tmp_path, "run", "--resume", path, "--impl", SLOW)
    assert done.returncode == 0, done.stderr
    assert "line was cut off" in done.stderr
    assert path.read_bytes().startswith(kept)
    assert lengths(path) == [16, 24]
    names = {record.implementation for record in read_run(path).records}
    assert names == {"slow", "numpy.float32", "anchor.matmul", "anchor.copy"}
    again = attnbench(tmp_path, "run", "--resume", path, "--impl", SLOW)
    assert again.returncode == 0
    assert lengths(path) == [16, 24]


def test_a_busy_worker_ends_with_its_parent(tmp_path):
    process = start(tmp_path, "run", "--impl", HANGS, "--against", "numpy.float32", "--seq-len", "16", *SHAPE)
    pids = wait_for(lambda: workers(process))
    assert "workload" in process.stderr.readline()  # the plan is made: the cells come next
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, pids)))
