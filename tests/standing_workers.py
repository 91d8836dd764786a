"""Worker processes that are forked from one standing process per framework, which has imported everything.

Importing a framework takes seconds, and hundreds of tests start workers. The forked process runs what
`python -m attnbench.run.worker` runs, with the environment, the folder and the descriptors that it would have had.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from tempfile import TemporaryFile

from attnbench.comparing.forkserver import CHECKS_IMPORT
from attnbench.measuring import anchors
from attnbench.run import remote
from attnbench.run.remote import Remote

READ_AT_IMPORT = ("OMP_", "MKL_", "OPENBLAS_", "XLA_", "JAX_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "MALLOC", "GLIBC")
READ_AT_IMPORT += ("LD_", "PYTHON", "CUDA_", "KINETO", "NPY_", "HOME", "ATTNBENCH_THREADS")
"""Beginnings of the variables that frameworks read while they are imported: other values need another process."""
PATIENCE_S = 60.0
forking = True
"""Whether workers are forks; tests marked `new_workers` turn it off."""
_start_new = Remote.start.__func__  # pyright: ignore[reportFunctionMemberAccess]
_parents: dict[tuple, Parent | None] = {}
_one_at_a_time = threading.Lock()


class Forked:
    """A worker's process as `attnbench.run.remote.Process` asks for it."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self._status, self._code, self._lock = pid, status, None, threading.Lock()

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            with self._lock:  # several threads may ask
                if self._code is None and select.select([self._status], [], [], 0.0)[0]:
                    self._code = int(os.read(self._status, 16) or b"1")
                    os.close(self._status)
            if self._code is None:
                if deadline is not None and time.monotonic() >= deadline:
                    break
                time.sleep(0.005)
        return self._code


class Parent:
    """A standing process, seen from the tests."""

    def __init__(self, framework: str, environ: dict[str, str]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), framework],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environ,
                start_new_session=True,
            )
        self.socket.settimeout(PATIENCE_S)
        atexit.register(self.socket.close)  # which ends it

    def fork(self, device: str | None, environ: dict[str, str], output: int) -> tuple[Forked, Connection]:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        text = json.dumps({"device": device, "environ": environ, "cwd": os.getcwd()}).encode()
        socket.send_fds(self.socket, [len(text).to_bytes(8)], [theirs.fileno(), output, writing])
        self.socket.sendall(text)
        theirs.close()
        os.close(writing)
        pid = int.from_bytes(_exactly(self.socket, 8))
        return Forked(pid, reading), Connection(ours.detach())


def start(cls, framework: str, device: str | None, threads: int | None):
    """Stand in for `Remote.start`: the first worker of a kind is a process of its own, those that follow are forks."""
    if not forking:
        return _start_new(cls, framework, device, threads)
    environ = remote._environment(device, threads, ())
    relevant = sorted(item for item in environ.items() if item[0].startswith(READ_AT_IMPORT))
    key = (framework, os.getpid(), *relevant)
    output = TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
    with _one_at_a_time:
        if key not in _parents:
            _parents[key] = None
            return cls(framework, *remote.start("attnbench.run.worker", framework, device, threads, output), output)
        parent = _parents[key]
        if parent is None or parent.process.poll() is not None:
            parent = _parents[key] = Parent(framework, environ)
        try:
            process, connection = parent.fork(device, environ, output.fileno())
        except BaseException:  # Ctrl-C, say: an answer may be on its way that nobody has read
            parent.socket.close()
            del _parents[key]
            raise
    remote.pin(process.pid, threads)
    return cls(framework, process, connection, output)


def _exactly(channel: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = channel.recv(size - len(found))
        if not piece:
            raise EOFError("the standing process is gone")
        found += piece
    return found


def _serve(channel: socket.socket, framework: str) -> None:
    """Fork a worker for each request, and write how it ended into the pipe that came with the request."""
    pipes: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([channel, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
        for pid in list(pipes):
            with suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with suppress(BrokenPipeError):
                        os.write(pipes[pid], str(os.waitstatus_to_exitcode(status)).encode())
                    os.close(pipes.pop(pid))
        if channel in ready:
            head, descriptors, _, _ = socket.recv_fds(channel, 8, 3)
            if not head:
                for pid in pipes:
                    os.kill(pid, signal.SIGKILL)
                return
            request = json.loads(_exactly(channel, int.from_bytes(head)))
            connection, output, status = descriptors
            pid = os.fork()
            if pid == 0:
                os.setsid()
                signal.set_wakeup_fd(-1)
                channel.sendall(os.getpid().to_bytes(8))
                for descriptor in (woken, wake, status, *pipes.values(), channel.detach()):
                    os.close(descriptor)
                _become_worker(request, framework, connection, output)
            for descriptor in (connection, output):
                os.close(descriptor)
            pipes[pid] = status


def _become_worker(request: dict, framework: str, connection: int, output: int) -> None:
    from attnbench.run import worker

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    sys.argv = [worker.__file__, str(connection), framework, request["device"] or ""]
    code = 1
    try:
        worker.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module("attnbench.run.worker")
    # What is measured of the machine is small here: samples of it took half of the time of runs.
    anchors.COPY_BYTES["cpu"], anchors.MATMUL_SIZE["cpu"] = 1 << 16, 64
    anchors.CEILING_MATMUL["cpu"], anchors.CEILING_SECONDS = anchors.SHORT_MATMUL, 0.1
    importlib.import_module(sys.argv[2])
    importlib.import_module(CHECKS_IMPORT)
    if sys.argv[2] != "numpy":  # it would have a second BLAS, whose threads are counted too
        importlib.import_module("scipy.special")  # which checks of 16 bits import when they first need it
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
