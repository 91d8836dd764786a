"""Two measurements at once on one machine refuse each other; a dead one's lock does not count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.errors import UsageError
from attnbench.run.lock import machine_lock, measuring

HOLDER = (
    "import sys\nfrom attnbench.run.lock import machine_lock\n"
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
    assert (tmp_path / "attnbench" / "gate.lock").read_text().startswith(str(holder.pid))
    with machine_lock():
        assert (tmp_path / "attnbench" / "gate.lock").read_text().startswith(f"{os.getpid()} ")


def test_released_after_an_error():
    with pytest.raises(KeyboardInterrupt), machine_lock():
        raise KeyboardInterrupt
    with machine_lock(), pytest.raises(UsageError, match=f"pid {os.getpid()}"), machine_lock():
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
    monkeypatch.setattr("attnbench.run.lock.time.sleep", lambda seconds: (holder.kill(), holder.wait()))
    with measuring("compare", patience_s=60.0):
        pass


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set ATTNBENCH_CACHE"), machine_lock():
        pass
    with measuring("compare") as notes:
        assert "nothing keeps other measurements away: cannot lock" in notes[0]
