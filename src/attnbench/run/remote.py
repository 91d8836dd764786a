"""The parent's end of a worker: start it, ask it, and turn its death into a cause."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from attnbench.frameworks.host_memory import host_memory
from attnbench.run import protocol as p
from attnbench.run.environment import without_home
from attnbench.run.instructions import isa_cap
from attnbench.run.process_tree import ProcessTree
from attnbench.run.worker import Worker
from attnbench.spec import Failed, OutOfMemory, Timeout

POLL_S = 0.02
SPARE_BYTES = 1 << 30
"""What a worker must leave of the memory that was free when it started."""
STEADY_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""For comparisons: memory that is freed is kept and used again, in huge pages where the system has them. Otherwise it
depends on a process's history whether each call pays for fresh pages, and two processes of the same code differ by
10 % (measured: the spread between launches falls from 5.4 % to 1.1 %)."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerDied(Exception):
    """The process is gone. `kind` is the status of the record it leaves: timeout, out_of_memory or failed."""

    def __init__(self, kind: str, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.kind, self.reason, self.detail = kind, reason, detail

    def record(self, **facts: Any) -> Failed | OutOfMemory | Timeout:
        """What is left of the cell that it was busy with."""
        kind = {"timeout": Timeout, "out_of_memory": OutOfMemory, "failed": Failed}[self.kind]
        return kind(reason=self.reason, detail=self.detail, **facts)


class Process(Protocol):
    """What is needed of a running process: subprocess.Popen, or a fork of another process."""

    @property
    def pid(self) -> int:
        """Its number; it leads a process group of the same number."""
        ...

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, when it has ended."""
        ...


def start(
    module: str,
    framework: str,
    device: str | None,
    threads: int | None,
    output: IO[bytes],
    path: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process that serves one of our modules over a socket; `path` goes before all else that it imports from, and
    `variables` are set where the user has not set them."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(theirs.fileno()), framework, device or ""],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**(variables or {}), **_environment(device, threads, path)},
        start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends its workers
    )
    theirs.close()
    _pin(process.pid, threads)
    return process, Connection(ours.detach())


def _pin(pid: int, threads: int | None) -> None:
    """XLA takes as many threads as it may use cores, so a thread count is an affinity too."""
    if threads is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, sorted(os.sched_getaffinity(0))[:threads])


class Remote:
    """One worker process."""

    def __init__(self, framework: str, process: Process, connection: Connection, output: IO[bytes]) -> None:
        self.framework, self._process, self._connection, self._stderr = framework, process, connection, output
        available = host_memory().available
        self._limit_bytes = max(available - SPARE_BYTES, available // 2)

    @classmethod
    def start(cls, framework: str, device: str | None, threads: int | None) -> Remote:
        """A worker of its own interpreter."""
        output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        return cls(framework, *start("attnbench.run.worker", framework, device, threads, output), output)

    def ask(self, question: p.Question, timeout_s: float) -> p.Answer:
        """One question, one answer; raises WorkerDied."""
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.send_bytes(p.encode(question))
            while not self._connection.poll(POLL_S):
                if time.monotonic() > deadline:
                    self.kill()
                    raise WorkerDied("timeout", f"no answer within {timeout_s:g} s", self._tail())
                self._watch_memory()
            return p.decode_answer(self._connection.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise self.autopsy() from error

    def _watch_memory(self) -> None:
        try:
            process = psutil.Process(self._process.pid)
            resident, ended = process.memory_info().rss, process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            resident, ended = 0, True
        if ended and not self._connection.poll():
            raise EOFError  # whatever it has started may still hold its end of the socket
        if resident > self._limit_bytes:
            self.kill()
            limit = self._limit_bytes / 1e9
            raise WorkerDied(
                "out_of_memory", f"took more than the {limit:.3g} GB of memory that were free", self._tail()
            )

    def autopsy(self) -> WorkerDied:
        """What became of it."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            return WorkerDied("failed", "hung up without ending", self._tail())
        detail = self._tail()
        if code == -signal.SIGKILL:
            return WorkerDied("out_of_memory", "the system killed the process, most likely for its memory", detail)
        if code < 0:
            return WorkerDied("failed", f"crashed with {signal.Signals(-code).name}", detail)
        last = (detail.strip().splitlines() or ["no message"])[-1]
        return WorkerDied("failed", f"the process ended with code {code}: {last[:200]}", detail)

    def _tail(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 4000))
        return without_home(self._stderr.read().decode(errors="replace"))

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def abort(self) -> None:
        """End its processes, so that whoever waits for its answer learns of it; `kill` is still to come."""
        ProcessTree(self._process.pid).kill()

    def kill(self) -> None:
        """End it at once, with everything it started."""
        if self._process.poll() is None:
            ProcessTree(self._process.pid).kill()
        self._process.wait()
        self._connection.close()


class Local:
    """The same questions answered in the calling process."""

    def __init__(self, framework: str, device: str | None) -> None:
        self.framework = framework
        self._worker = Worker(framework, device)

    def ask(self, question: p.Question, timeout_s: float) -> p.Answer:
        """One question, one answer; nothing guards against a hang or a crash here."""
        return self._worker.answer(question)

    alive = True

    def abort(self) -> None:
        """Nothing can be ended here."""

    def kill(self) -> None:
        """Let go of arrays."""
        self._worker.answer(p.Release())


def _environment(device: str | None, threads: int | None, path: Sequence[str]) -> dict[str, str]:
    variables = dict(os.environ)
    package_root = str(Path(__file__).parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*path, package_root, variables.get("PYTHONPATH")]))
    variables.update(isa_cap())
    variables.setdefault("KINETO_LOG_LEVEL", "99")  # its profiler is chatty on stderr
    variables.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if device == "cpu":
        variables["JAX_PLATFORMS"] = "cpu"
    if threads is not None:
        variables.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    return variables
