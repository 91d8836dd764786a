"""The parent's end of a worker: start it, ask it, and find the cause if it is lost."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from attnbench.frameworks.host_memory import host_memory
from attnbench.processes import ProcessTree
from attnbench.run import protocol as p
from attnbench.run.environment import without_home
from attnbench.run.machine import isa_cap
from attnbench.run.worker import Worker
from attnbench.spec import Failed, OutOfMemory, Timeout

POLL_S = 0.02
FAMILY_S = 0.5
"""Seconds between two sums of the memory of a worker and its child processes, since finding them takes milliseconds."""
SPARE_BYTES = 1 << 30
"""Bytes that a worker must leave of the memory that was free when it started."""
STEADY_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Variables of the workers of comparisons: freed memory is kept and used again, in huge pages if the system has them.
Otherwise it depends on a process's history whether each call pays for fresh pages, and two processes of the same code
differ by 10 % (measured: the spread between launches falls from 5.4 % to 1.1 %)."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
TAIL = 4000
"""Characters of a lost process's last output that are kept."""


class WorkerDied(Exception):
    """The loss of a worker process. `kind` is the status of the record it leaves: timeout, out_of_memory or failed.

    `unstarted`: the worker was lost before it was asked anything about a cell. `idle`: it ended after its last answer,
    before it was asked anything else.
    """

    def __init__(self, kind: str, reason: str, detail: str = "", unstarted: bool = False, idle: bool = False) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.detail, self.unstarted, self.idle = kind, reason, detail, unstarted, idle

    def record(self, **facts: Any) -> Failed | OutOfMemory | Timeout:
        """Return the record of the cell that the worker was busy with."""
        if self.unstarted:
            return Failed(reason=self.reason, detail=self.detail, unstarted=True, **facts)
        kind = {"timeout": Timeout, "out_of_memory": OutOfMemory, "failed": Failed}[self.kind]
        return kind(reason=self.reason, detail=self.detail, **facts)


class Process(Protocol):
    """The needed part of a running process: subprocess.Popen has it, and a fork of another process."""

    pid: int
    """Process id; also the id of the process group that it leads."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def pin(process: int, threads: int | None) -> None:
    """Keep a process on as many cores as it gets threads, since XLA starts a thread for each core it may use."""
    if threads is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process, sorted(os.sched_getaffinity(0))[:threads])


def start(
    module: str,
    framework: str,
    device: str | None,
    threads: int | None,
    output: IO[bytes],
    path: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    cwd: str = "",
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that serves one of our modules over a socket, and return it with the parent's end.

    `path` goes before all other import folders, `variables` are defaults that the user's environment overrides, and
    `cwd` is the folder in which the process runs.
    """
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(theirs.fileno()), framework, device or ""],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**(variables or {}), **_environment(device, threads, path)},
        cwd=cwd or None,
        start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends its workers
    )
    theirs.close()
    pin(process.pid, threads)
    return process, Connection(ours.detach())


class Remote:
    """A worker process."""

    def __init__(self, framework: str, process: Process, connection: Connection, output: IO[bytes]) -> None:
        self.framework, self._process, self._connection, self._stderr = framework, process, connection, output
        available = host_memory().available
        self._limit_bytes = max(available - SPARE_BYTES, available // 2)
        self._family_at = 0.0
        self._tree = ProcessTree(process.pid)

    @classmethod
    def start(cls, framework: str, device: str | None, threads: int | None) -> Remote:
        """Start a worker with an interpreter of its own."""
        output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        return cls(framework, *start("attnbench.run.worker", framework, device, threads, output), output)

    def ask(self, question: p.Question, timeout_s: float) -> p.Answer:
        """Return the worker's answer; raises WorkerDied."""
        sent_ns = time.monotonic_ns()
        answer = self.exchange(question, timeout_s, p.decode_answer)
        if (wrong := p.fault(question, answer, sent_ns, time.monotonic_ns())) is not None:
            raise self._reject_answer(wrong)
        return answer

    def exchange(
        self,
        question: Any,
        timeout_s: float,
        decode: Callable[[bytes], p.Numbered[Any]],
        passing: Callable[[], object] = lambda: None,
    ) -> Any:
        """Send a message and return the one that answers its number; raises WorkerDied for any other.

        `passing` is called when the question has been sent.
        """
        deadline, number = time.monotonic() + timeout_s, secrets.randbits(63)

        def wait() -> None:
            while not self._connection.poll(POLL_S):
                if time.monotonic() > deadline:
                    self.kill()
                    raise WorkerDied("timeout", f"no answer within {timeout_s:g} s", self._tail())
                self._watch_memory()

        idle = True
        try:
            if self._connection.poll(0):
                if not os.read(self._connection.fileno(), 1):
                    raise EOFError
                raise p.Garbled("a message arrived that answers no question")
            p.send(self._connection, p.encode(p.Numbered(number, question)))
            idle = False
            passing()
            message = p.receive(self._connection, wait)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise self.lost(idle) from error
        except (p.Garbled, OSError, MemoryError) as error:
            raise self._reject_answer(str(error) or type(error).__name__) from error
        try:
            answer = decode(message)
        except Exception as error:  # whatever it is that cannot be read, it is no answer of ours
            raise self._reject_answer(f"an answer that cannot be read ({type(error).__name__})") from error
        if answer.number != number:
            raise self._reject_answer("an answer to another question")
        return answer.message

    def _reject_answer(self, why: str) -> WorkerDied:
        """End a process that answered what no worker of ours answers, and return its loss."""
        self.kill()
        reason = f"its process sent an invalid answer: {why}; its code wrote to the connection, or changed attnbench"
        return WorkerDied("failed", reason, self._tail())

    def _watch_memory(self) -> None:
        try:
            worker = psutil.Process(self._process.pid)
            taken, by = worker.memory_info().rss, "took"
            if time.monotonic() >= self._family_at:
                self._family_at = time.monotonic() + FAMILY_S
                if children := worker.children(recursive=True):
                    taken, by = sum(map(_own_bytes, (worker, *children))), "and the processes that it started took"
            ended = worker.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            taken, by, ended = 0, "", True
        if ended and not self._connection.poll():
            raise EOFError  # whatever it has started may still hold its end of the socket
        if taken > self._limit_bytes:
            self.kill()
            limit = self._limit_bytes / 1e9
            raise WorkerDied(
                "out_of_memory", f"{by} more than the {limit:.3g} GB of memory that were free", self._tail()
            )

    def lost(self, idle: bool = False) -> WorkerDied:
        """Return the cause if the process has closed its connection; `idle` as in WorkerDied."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            return WorkerDied("failed", "closed its connection without ending", self._tail(), idle=idle)
        kind, detail = "failed", self._tail()
        if code == -signal.SIGKILL:
            kind, reason = "out_of_memory", "the system killed the process, most likely for its memory"
        elif code < 0:
            reason = f"crashed with {signal.Signals(-code).name}"
        else:
            last = (detail.strip().splitlines() or ["no message"])[-1]
            reason = f"the process ended with code {code}: {last[:200]}"
        return WorkerDied(kind, reason, detail, idle=idle)

    def _tail(self) -> str:
        """Return the end of the process's output, without the list of modules that hides the reason of a crash."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 4 * TAIL))
        lines = self._stderr.read().decode(errors="replace").splitlines(keepends=True)
        return without_home("".join(line for line in lines if not line.startswith("Extension modules: "))[-TAIL:])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def pause(self) -> None:
        """Stop the process and everything it started until `resume`."""
        self._tree.stop()

    def resume(self) -> None:
        self._tree.resume()

    def abort(self) -> None:
        """End the worker's processes, so that a thread which waits for its answer gets an error; `kill` must follow."""
        self._tree.kill()

    def kill(self) -> None:
        """End the worker at once, with everything it started."""
        if self._process.poll() is None:
            self._tree.kill()
        self._process.wait()
        self._connection.close()


class Local:
    """A worker inside the calling process, which nothing stops or ends."""

    alive = True

    def __init__(self, framework: str, device: str | None) -> None:
        self.framework = framework
        self._worker = Worker(framework, device)

    def ask(self, question: p.Question, timeout_s: float) -> p.Answer:
        """Return the answer, without protection against a hang or a crash."""
        return self._worker.answer(question)

    def pause(self) -> None:
        pass

    resume = abort = pause

    def kill(self) -> None:
        """Release the worker's arrays and compiled code."""
        self._worker.answer(p.Release())


def _own_bytes(process: psutil.Process) -> int:
    """Return the memory of a process; pages that several processes share count in equal parts."""
    try:
        return process.memory_full_info().pss
    except (AttributeError, psutil.AccessDenied):  # only Linux tells
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def _environment(device: str | None, threads: int | None, path: Sequence[str]) -> dict[str, str]:
    variables = dict(os.environ)
    package_root = str(Path(__file__).parents[2])
    # Absolute, because a worker of a git ref runs in another folder.
    given = [os.path.abspath(one) for one in variables.get("PYTHONPATH", "").split(os.pathsep) if one]
    variables["PYTHONPATH"] = os.pathsep.join([*path, package_root, *given])
    variables.update(isa_cap())
    variables.setdefault("KINETO_LOG_LEVEL", "99")  # its profiler is chatty on stderr
    variables.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if device == "cpu":
        variables["JAX_PLATFORMS"] = "cpu"
    if threads is not None:
        variables.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    return variables
