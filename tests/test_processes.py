"""Signals reach a process and what it started, and nobody who has got the number of one that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from cli_process import alive, wait_for

from attnbench.processes import ProcessTree, descendants
from attnbench.run.remote import Remote

FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that leads a group of its own, and the number of its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What would have been sent, and to whom; nothing is."""
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(("process", pid)))
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append(("group", group)))
    return sent


def let_others_have_the_numbers(tree: ProcessTree) -> None:
    """As if each known process had ended, and one that was started later had got its number."""
    for one in tree._known:
        one._ident = (one._ident[0], one._ident[1] - 1)  # pyright: ignore[reportAttributeAccessIssue]


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_all_are_stopped_let_go_on_and_ended(family: tuple[subprocess.Popen[str], int]):
    process, child = family
    tree = ProcessTree(process.pid)
    tree.stop()
    wait_for(lambda: stopped(process.pid) and stopped(child))
    tree.resume()
    wait_for(lambda: not stopped(process.pid) and not stopped(child))
    tree.kill()
    wait_for(lambda: not alive(process.pid) and not alive(child))


@pytest.mark.parametrize("action", [ProcessTree.stop, ProcessTree.resume, ProcessTree.kill])
def test_a_number_that_another_process_has_got_is_left_alone(
    family: tuple[subprocess.Popen[str], int], signals: list[tuple[str, int]], action
):
    process, child = family
    tree = ProcessTree(process.pid)
    tree.stop()
    assert set(signals) == {("process", process.pid), ("group", process.pid), ("process", child)}
    signals.clear()
    let_others_have_the_numbers(tree)
    action(tree)
    assert signals == []


def test_a_group_is_signalled_as_long_as_one_of_its_processes_is_the_one_known(
    family: tuple[subprocess.Popen[str], int], signals: list[tuple[str, int]]
):
    process, child = family
    tree = ProcessTree(process.pid)
    tree.stop()
    signals.clear()
    (parent,) = (one for one in tree._known if one.pid == process.pid)
    parent._ident = (parent._ident[0], parent._ident[1] - 1)  # pyright: ignore[reportAttributeAccessIssue]
    tree.resume()
    assert set(signals) == {("group", process.pid), ("process", child)}


def test_one_that_is_gone_is_nobody(signals: list[tuple[str, int]]):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    known = psutil.Process(gone.pid)
    gone.wait()
    for root in (gone.pid, known):
        tree = ProcessTree(root)
        for action in (tree.stop, tree.resume, tree.kill):
            action()
        assert descendants(root) == []
    assert signals == []


def test_a_worker_is_known_from_its_start(family: tuple[subprocess.Popen[str], int], signals: list[tuple[str, int]]):
    """The parent of a forked worker cannot reap it, so it may be gone whenever it is to be ended."""
    process, _ = family
    worker = Remote("numpy", process, None, None)  # pyright: ignore[reportArgumentType]
    let_others_have_the_numbers(worker._tree)
    worker.abort()
    assert signals == []
