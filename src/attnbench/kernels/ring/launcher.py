"""The driver's end of a ring of processes: start them, ask all of them at once, and name the one that fails.

A ring stands or falls together: when one rank dies, hangs or raises, the others would wait for it for ever. So every
answer has a deadline, and after a failure all ranks are ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnbench.errors import Unsupported
from attnbench.kernels.ring import messages as m

if TYPE_CHECKING:
    import torch

GRACE_S = 2.0
"""How long the others are listened to after a failure, to tell the culprit from those that waited for it."""
START_S = 60.0
"""Importing torch in a fresh process, on a busy machine."""


class RankFailed(RuntimeError):
    """A rank died, hung or raised; all are gone now."""


class Reply(NamedTuple):
    """What a rank answered, with its arrays."""

    answer: m.Answer
    arrays: list[torch.Tensor]


class RankProcesses:
    """A ring of processes on one machine."""

    def __init__(self, world: int, device: str, threads: int, timeout_s: float) -> None:
        self.world, self._timeout_s = world, timeout_s
        self._folder = tempfile.mkdtemp(prefix="attnbench-ring-")
        self._log = Path(self._folder, "stderr").open("w+b")  # noqa: SIM115 (lives as long as the ranks)
        control, theirs = socket.socketpair()
        ends = [socket.socketpair() for _ in range(world)]
        for ours, _ in ends:
            _never_block(ours, timeout_s + GRACE_S)
        numbers = [theirs.fileno(), *(end.fileno() for _, end in ends)]
        facts = [str(world), device, str(max(1, threads // world)), str(timeout_s), f"{self._folder}/store"]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "attnbench.kernels.ring.rank", *facts, *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=_environment(),
            start_new_session=True,  # who kills a driver with all it started leaves this one to clear up
        )
        for end in (theirs, *(end for _, end in ends)):
            end.close()
        self._control, self._received = control, ""
        self._connections = [Connection(ours.detach()) for ours, _ in ends]
        self.alive, self._fresh = True, True
        atexit.register(self.close)

    def ask(
        self, questions: Sequence[tuple[m.Question, tuple[torch.Tensor, ...]]], patience: float = 1.0
    ) -> list[Reply]:
        """One question for each rank, one answer from each within `patience` timeouts.

        Raises RankFailed, Unsupported or MemoryError.
        """
        failed: dict[int, str] = {}
        for rank, (question, arrays) in enumerate(questions):
            try:
                m.post(self._connections[rank], question, arrays)
            except (BrokenPipeError, ConnectionResetError):
                failed[rank] = "died"
            except BlockingIOError:
                failed[rank] = "hung"
        replies = self._collect(failed, patience * self._timeout_s)
        broken = {rank: one.answer for rank, one in replies.items() if isinstance(one.answer, m.Broke)}
        if not failed and not broken:
            return [replies[rank] for rank in range(self.world)]
        if not failed and all(one.kind == "unsupported" for one in broken.values()):
            raise Unsupported(next(iter(broken.values())).reason)
        raise self._failure(failed, broken)

    def _collect(self, failed: dict[int, str], limit_s: float) -> dict[int, Reply]:
        """Answers by rank; who gives none in time is entered in `failed`."""
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + limit_s + GRACE_S + (START_S if self._fresh else 0.0)
        waiting = {self._connections[rank]: rank for rank in range(self.world) if rank not in failed}
        while waiting:
            if failed or any(isinstance(one.answer, m.Broke) for one in replies.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                failed |= dict.fromkeys(waiting.values(), "hung")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    message, arrays = m.fetch(connection)
                    replies[rank] = Reply(m.decode_answer(message), arrays)
                except (EOFError, OSError):
                    failed[rank] = "died"
        self._fresh = False
        return replies

    def _failure(self, failed: dict[int, str], broken: dict[int, m.Broke]) -> Exception:
        """Ends the ring and says who was to blame: the dead, then who raised of its own accord, then the silent."""
        dead, silent = ([rank for rank, how in failed.items() if how == kind] for kind in ("died", "hung"))
        own = [rank for rank, one in broken.items() if not _lost_a_peer(one)]
        culprit = None
        if dead:
            what = f"{_ranks(dead)} of {self.world} {self._ends(dead)}"
        elif own or not silent:
            first = own[0] if own else min(broken)
            culprit = broken[first]
            what = f"rank {first} of {self.world} raised {culprit.reason}"
        else:
            what = f"{_ranks(silent)} of {self.world} gave no answer within {self._timeout_s:g} s"
        details = [f"rank {rank}: {one.reason}\n{one.detail}" for rank, one in broken.items()]
        log = self._tail()
        self.close()
        text = "\n".join([what, *details, log]).strip()
        return MemoryError(text) if culprit is not None and culprit.kind == "out_of_memory" else RankFailed(text)

    def _ends(self, dead: Sequence[int]) -> str:
        """How those ranks ended, as the process that forked them saw it."""
        deadline = time.monotonic() + GRACE_S
        while (codes := self._codes()).keys().isdisjoint(dead) and time.monotonic() < deadline:
            time.sleep(0.02)
        ends = [codes[rank] for rank in dead if rank in codes]
        if not ends:
            return "ended without a word"
        return f"crashed with {signal.Signals(-ends[0]).name}" if ends[0] < 0 else f"ended with code {ends[0]}"

    def _codes(self) -> dict[int, int]:
        return {rank: number for word, rank, number in self._lines() if word == "end"}

    @property
    def pids(self) -> list[int]:
        """Process of each rank, once they are up."""
        found = {rank: number for word, rank, number in self._lines() if word == "pid"}
        return [found[rank] for rank in sorted(found)]

    def _lines(self) -> list[tuple[str, int, int]]:
        with contextlib.suppress(BlockingIOError, OSError):
            while chunk := self._control.recv(4096, socket.MSG_DONTWAIT):
                self._received += chunk.decode()
        whole = self._received.rpartition("\n")[0].splitlines()
        return [(word, int(rank), int(number)) for word, rank, number in map(str.split, whole)]

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2000))
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """End every rank at once; only processes that this one started."""
        if not self.alive:
            return
        self.alive = False
        atexit.unregister(self.close)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for connection in self._connections:
            connection.close()
        self._control.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _never_block(end: socket.socket, seconds: float) -> None:
    """A stopped rank reads nothing: even sending to it must have an end."""
    limit = struct.pack("ll", int(seconds), 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _environment() -> dict[str, str]:
    variables = dict(os.environ)
    root = str(Path(__file__).parents[3])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH")]))
    # The ring is on one machine: a host name that does not resolve must not matter.
    variables.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    return variables


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _lost_a_peer(broke: m.Broke) -> bool:
    """Whether a rank complains of another rather than of itself."""
    return any(words in broke.reason for words in ("closed by peer", "Timed out", "timed out"))
