"""A command that its terminal leaves behind ends as Ctrl-C would, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from attnbench import cli

HANDLERS = (
    "import signal\nfrom attnbench.cli import _end_tidily\n_end_tidily()\n"
    "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)\n"
)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_ends_a_command_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch, capsys, number: int):
    before = {one: signal.getsignal(one) for one in (signal.SIGHUP, signal.SIGTERM)}
    monkeypatch.setattr("attnbench.cli.app", lambda *given, **named: os.kill(os.getpid(), number))
    try:
        assert cli.execute(["list"]) == 130
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert "interrupted" in capsys.readouterr().err


def test_what_nohup_ignores_stays_ignored():
    done = subprocess.run(
        [sys.executable, "-c", HANDLERS],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "True", done.stderr


def test_a_folder_whose_owner_lives_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from attnbench.run.machine import remove_abandoned, scratch, this_system

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch() as live:
        (tmp_path / "attnbench-someones").mkdir()
        dead, elsewhere = tmp_path / "attnbench-1-dead", tmp_path / "attnbench-1-elsewhere"
        for folder, system in ((dead, this_system()), (elsewhere, "another machine")):
            folder.mkdir()
            (folder / ".owner").write_text(system)
        remove_abandoned()
        assert live.exists()
        assert not dead.exists()
        assert elsewhere.exists(), "a lock of another machine may not be seen here"
        assert (tmp_path / "attnbench-someones").exists(), "it does not say whose it is"
    assert not live.exists()


def test_an_interruption_while_a_folder_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from attnbench.run.machine import scratch

    make = os.mkdir

    def make_and_interrupt(*given, **named):
        make(*given, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.mkdir", make_and_interrupt)
    with pytest.raises(KeyboardInterrupt), scratch():
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_is_removed_with_the_read_only_folders_in_it(monkeypatch: pytest.MonkeyPatch):
    """As a build leaves them that keeps downloaded modules; root may write everywhere and would see no difference."""
    from attnbench.run.machine import scratch

    with tempfile.TemporaryDirectory() as outer, monkeypatch.context() as patch:
        os.chmod(outer, 0o777)
        patch.setattr("tempfile.tempdir", outer)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            with scratch() as place:
                kept = place / "modules" / "inner"
                kept.mkdir(parents=True)
                (kept / "file").write_text("kept")
                (place / "link").symlink_to("/")
                kept.chmod(0o555)
                kept.parent.chmod(0o000)
            assert not os.listdir(outer)
        finally:
            os.seteuid(user)


@pytest.mark.torch
def test_a_ring_that_cannot_start_leaves_no_process_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    from attnbench.kernels.ring import pool

    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def remember(*given, **named):
        started.append(start(*given, **named))
        return started[-1]

    def interrupt(handle: int):
        os.close(handle)
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", remember)
    monkeypatch.setattr(pool, "Connection", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.RankProcesses(2, "cpu", 1, 5.0)
    assert [process.poll() for process in started] == [-signal.SIGKILL]
    assert not list(tmp_path.iterdir())
