"""The rings of this process, as the driver sees them: ask all ranks at once, and name the rank that fails.

`RankProcesses` starts rank processes on this machine; they are shared by all cells of the same size and replaced when
they fail. If one rank dies, hangs or raises, the others would wait for it for ever, so every answer has a deadline, and
after a failure all ranks are ended. `GroupRanks` is a group that torchrun started: rank 0 asks, the others serve, with
the same messages, so that a cell under torchrun is built, verified, timed and recorded like any other. Imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from attnbench.errors import Unsupported, UsageError
from attnbench.files import remove_folder
from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring.rank import Rank, broke

Asked = Sequence[tuple[m.Question, tuple[Tensor, ...]]]
"""A question to each rank, with its arrays."""
LAST = None
"""Scattered to the ranks of a group when there are no more questions."""
GRACE_S = 2.0
"""Seconds to wait for more answers after a failure, to distinguish the failed rank from ranks that waited for it."""
START_S = 60.0
"""Seconds that a new process may take to import torch on a busy machine."""


class RankFailed(RuntimeError):
    """A rank died, hung or raised; all ranks of its ring were ended."""


class Reply(NamedTuple):
    """Answer of a rank, with its arrays."""

    answer: m.Answer
    arrays: list[Tensor]


class RankProcesses:
    """A ring of processes on one machine."""

    def __init__(self, world: int, device: str, threads: int, timeout_s: float) -> None:
        self.world, self._timeout_s = world, timeout_s
        self._folder = Path(tempfile.gettempdir(), f"attnbench-ring-{secrets.token_hex(8)}").absolute()
        with contextlib.ExitStack() as held:  # if the start fails or is interrupted, it leaves nothing behind
            held.callback(remove_folder, self._folder)
            self._folder.mkdir(mode=0o700)
            self._start(device, threads, held)
            self._held = held.pop_all()
        self.alive, self._fresh = True, True
        atexit.register(self.close)

    def _start(self, device: str, threads: int, held: contextlib.ExitStack) -> None:
        """Start the process that forks the ranks; `held` ends it and closes what it is asked through."""
        world, timeout_s = self.world, self._timeout_s
        self._log = held.enter_context(Path(self._folder, "stderr").open("w+b"))  # noqa: SIM115 (lives as long as the ranks)
        control, theirs = socket.socketpair()
        self._control, self._received = held.enter_context(control), ""
        ends = [socket.socketpair() for _ in range(world)]
        limit = struct.pack("ll", int(timeout_s + GRACE_S), 0)
        for ours, _ in ends:  # a stopped rank reads nothing: no message to it may block for ever
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        numbers = [theirs.fileno(), *(end.fileno() for _, end in ends)]
        facts = [str(world), device, str(max(1, threads // world)), str(timeout_s), f"{self._folder}/store"]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "attnbench.kernels.ring.rank", *facts, *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=_environment(),
            start_new_session=True,  # it survives if the driver's process group is killed, and then clears up
        )
        held.callback(self._process.wait)
        held.callback(self._process.kill)
        for end in (theirs, *(end for _, end in ends)):
            end.close()
        self._connections = [held.enter_context(Connection(ours.detach())) for ours, _ in ends]

    def ask(self, questions: Asked, patience: float = 1.0) -> list[Reply]:
        """Send one question to each rank and return one answer from each, within `patience` timeouts.

        Raise RankFailed, Unsupported or MemoryError if a rank does not answer or raised.
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
        broken = {rank: reply.answer for rank, reply in replies.items() if isinstance(reply.answer, m.Broke)}
        if not failed and not broken:
            return [replies[rank] for rank in range(self.world)]
        if not failed and all(error.kind == "unsupported" for error in broken.values()):
            raise Unsupported(next(iter(broken.values())).reason)
        raise self._failure(failed, broken)

    def _collect(self, failed: dict[int, str], limit_s: float) -> dict[int, Reply]:
        """Collect the answers by rank; enter ranks that give none in time in `failed`."""
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + limit_s + GRACE_S + (START_S if self._fresh else 0.0)
        waiting = {self._connections[rank]: rank for rank in range(self.world) if rank not in failed}
        while waiting:
            if failed or any(isinstance(reply.answer, m.Broke) for reply in replies.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                failed |= dict.fromkeys(waiting.values(), "hung")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    replies[rank] = Reply(*m.fetch(connection))
                except (EOFError, OSError):
                    failed[rank] = "died"
        self._fresh = False
        return replies

    def _failure(self, failed: dict[int, str], broken: dict[int, m.Broke]) -> Exception:
        """End the ring; return an error that names a dead rank, else one that raised by itself, else a silent one."""
        dead, silent = ([rank for rank, how in failed.items() if how == kind] for kind in ("died", "hung"))
        own, culprit = _culprits(broken), None
        if dead:
            what = f"{_ranks(dead)} of {self.world} {self._ends(dead)}"
        elif own or not silent:
            first = own[0] if own else min(broken)
            culprit = broken[first]
            what = f"rank {first} of {self.world} raised {culprit.reason}"
        else:
            what = f"{_ranks(silent)} of {self.world} gave no answer within {self._timeout_s:g} s"
        details = [f"rank {rank}: {error.reason}\n{error.detail}" for rank, error in broken.items()]
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        log = self._log.read().decode(errors="replace")
        self.close()
        text = "\n".join([what, *details, log]).strip()
        return MemoryError(text) if culprit is not None and culprit.kind == "out_of_memory" else RankFailed(text)

    def _ends(self, dead: Sequence[int]) -> str:
        """Describe how those ranks ended, as reported by the process that forked them."""
        deadline = time.monotonic() + GRACE_S
        while (codes := self._reported("end")).keys().isdisjoint(dead) and time.monotonic() < deadline:
            time.sleep(0.02)
        ends = [codes[rank] for rank in dead if rank in codes]
        if not ends:
            return "ended without a report"
        return f"crashed with {signal.Signals(-ends[0]).name}" if ends[0] < 0 else f"ended with code {ends[0]}"

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, once the ranks are up."""
        pids = self._reported("pid")
        return [pids[rank] for rank in sorted(pids)]

    def _reported(self, what: str) -> dict[int, int]:
        """Return, by rank, the numbers that were reported so far under a word: "pid" or "end"."""
        with contextlib.suppress(BlockingIOError, OSError):
            while chunk := self._control.recv(4096, socket.MSG_DONTWAIT):
                self._received += chunk.decode()
        whole = self._received.rpartition("\n")[0].splitlines()
        return {int(rank): int(number) for word, rank, number in map(str.split, whole) if word == what}

    def close(self) -> None:
        """End every rank at once, and only processes that this ring started."""
        if not self.alive:
            return
        self.alive = False
        atexit.unregister(self.close)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._held.close()


def _environment() -> dict[str, str]:
    variables = dict(os.environ)
    root = str(Path(__file__).parents[3])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH")]))
    # The ring is on one machine: it must work even if the host name does not resolve.
    variables.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    return variables


def _culprits(broken: dict[int, m.Broke]) -> list[int]:
    """Return the ranks that raised by themselves, and not because they lost another one."""
    lost = ("closed by peer", "Timed out", "timed out")
    return [rank for rank, error in broken.items() if not any(words in error.reason for words in lost)]


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


class GroupRanks:
    """One process of torchrun's group: rank 0 asks, the others serve. If a rank dies, torchrun ends all of them."""

    def __init__(self, device: str, timeout_s: float) -> None:
        limit = timedelta(seconds=timeout_s)
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._mine = Rank(self.rank, self.world, device, None, timeout_s, None, int(os.environ.get("LOCAL_RANK", 0)))
        # Questions and arrays go over the host whatever the ranks' own links are.
        self._messages: Any = dist.new_group(backend="gloo", timeout=limit)
        self.alive = True

    def ask(self, questions: Asked, patience: float = 1.0) -> list[Reply]:
        """Send one question to each rank and return the answers; only on rank 0. Deadlines are the group's own."""
        del patience
        letters = [(question, [array.detach().cpu() for array in arrays]) for question, arrays in questions]
        self._scatter(letters)
        replies = self._gather(self._answer(*letters[0]))
        broken = {rank: reply.answer for rank, reply in enumerate(replies) if isinstance(reply.answer, m.Broke)}
        if not broken:
            return replies
        if all(error.kind == "unsupported" for error in broken.values()):
            raise Unsupported(next(iter(broken.values())).reason)
        rank = [*_culprits(broken), *broken][0]
        error = broken[rank]
        text = f"rank {rank} of {self.world} raised {error.reason}\n{error.detail}"
        raise MemoryError(text) if error.kind == "out_of_memory" else RankFailed(text)

    def serve(self) -> None:
        """Answer until rank 0 closes; on every rank but 0."""
        while (letter := self._scatter(None)) is not LAST:
            self._gather(self._answer(*letter))

    def close(self) -> None:
        """End the serving of the other ranks; on rank 0."""
        if self.alive:
            self.alive = False
            self._scatter([LAST] * self.world)

    def _answer(self, question: m.Question, arrays: list[Tensor]) -> Reply:
        try:
            answer, results = self._mine.answer(question, arrays)
        except Exception as error:
            answer, results = broke(error), ()
        return Reply(answer, [array.detach().cpu() for array in results])

    def _scatter(self, letters: list[Any] | None) -> Any:
        received = [None]
        dist.scatter_object_list(received, letters, src=0, group=self._messages)
        return received[0]

    def _gather(self, reply: Reply) -> list[Reply]:
        replies: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(reply, replies, dst=0, group=self._messages)
        return replies or []


RingOfRanks = RankProcesses | GroupRanks
"""Ranks that can be asked, whether started here or by torchrun."""
_rings: dict[tuple[int, str, int, float], RankProcesses] = {}
_group: list[GroupRanks] = []


def adopt(group: GroupRanks) -> None:
    """Use the group that torchrun started for every ring of this process from now on."""
    _group[:] = [group]


def adopted() -> bool:
    """Return whether the ranks of this process were started by torchrun."""
    return bool(_group)


def ring(world: int, device: str, threads: int, timeout_s: float) -> RingOfRanks:
    """Return the living ring of that kind; start one if there is none."""
    if _group:
        found = _group[0].world
        if found != world:
            raise UsageError(f"torchrun started {found} ranks, but world is {world}: set world={found}.")
        return _group[0]
    key = (world, device, threads, timeout_s)
    if key not in _rings or not _rings[key].alive:
        _rings[key] = RankProcesses(world, device, threads, timeout_s)
    return _rings[key]


def close_all() -> None:
    """End every ring of this process."""
    while _rings:
        _rings.popitem()[1].close()
    while _group:
        _group.pop().close()
