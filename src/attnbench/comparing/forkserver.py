"""A server that imports a framework once, then forks a fresh worker for each request.

Run as `python -m attnbench.comparing.forkserver FD FRAMEWORK DEVICE`. A launch of a comparison needs a new process with
a memory layout of its own, and importing a framework takes longer than the launch. So one process per side imports the
framework and the implementation, touches no device and runs no kernel (a process with such threads or a CUDA context
could not be forked), and every worker is a copy of that state.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import psutil
from msgspec import Struct

from attnbench import frameworks
from attnbench.processes import keep_children_together, kill_descendants
from attnbench.run import protocol as p
from attnbench.run.integrity import ProcessState
from attnbench.run.worker import load_from_ref, load_user_function, serve

LARGEST_PADDING = 1 << 20
CHECKS_IMPORT = "array_api_compat.numpy"
"""A module that every verification imports, with a hundred others and no thread; each worker would do so again."""


class Fork(Struct, tag="fork"):
    """A request to fork a worker; its socket follows the message. `seed` draws its heap padding."""

    seed: int


class Inquire(Struct, tag="inquire"):
    """A request to say how a worker ended."""

    pid: int


class Forked(Struct, tag="forked"):
    """A worker's process."""

    pid: int


class Ended(Struct, tag="ended"):
    """An exit code as subprocess has it (negative: signal), or None while the worker runs."""

    code: int | None


class Unforkable(Struct, tag="unforkable"):
    """An answer: the code is loaded, but loading it started threads or a device, so that no fork could be trusted."""


Request = p.Describe | p.Load | Fork | Inquire
Reply = p.Done | p.Refused | Forked | Ended | Unforkable
decode_request = msgspec.msgpack.Decoder(p.Numbered[Request]).decode
decode_reply = msgspec.msgpack.Decoder(p.Numbered[Reply]).decode


class Forkserver:
    """The parent of one side's workers."""

    def __init__(self, connection: Connection, framework: str, device: str | None) -> None:
        self._connection, self._framework, self._device = connection, framework, device
        self._ended: dict[int, int] = {}
        self._state: ProcessState | None = None
        """State of the process before the side's code was loaded."""

    def serve(self) -> None:
        """Answer requests until the other end hangs up, then end the workers."""
        while True:
            try:
                request = decode_request(p.receive(self._connection))
            except EOFError:
                kill_descendants()
                return
            p.send(self._connection, p.encode(p.Numbered(request.number, self._reply(request.message))))

    def _reply(self, request: Request) -> Reply:
        if isinstance(request, p.Describe):
            sys.path.extend(folder for folder in request.path if folder not in sys.path)
            if not frameworks.installed(self._framework):
                return p.Refused(f"{self._framework} is not installed: pip install 'attnbench[{self._framework}]'")
            importlib.import_module(self._framework)
            importlib.import_module(CHECKS_IMPORT)
            self._state = ProcessState(frameworks.get(self._framework))
            return self._loaded(lambda: load_from_ref(request))
        if isinstance(request, p.Load):
            return self._loaded(lambda: load_user_function(request))
        if isinstance(request, Inquire):
            if request.pid not in self._ended:
                with contextlib.suppress(ChildProcessError):
                    pid, status = os.waitpid(request.pid, os.WNOHANG)
                    if pid:
                        self._ended[pid] = os.waitstatus_to_exitcode(status)
            return Ended(self._ended.get(request.pid))
        return Forked(self._start_worker(request.seed))

    def _loaded(self, load: Callable[[], p.Answer]) -> Reply:
        """Load user code, and return Unforkable if that has started threads."""
        threads = psutil.Process().num_threads  # those of C libraries included
        before = threads()
        answer = load()
        assert isinstance(answer, p.Done | p.Refused)
        return Unforkable() if isinstance(answer, p.Done) and threads() > before else answer

    def _start_worker(self, seed: int) -> int:
        _, descriptors, _, _ = socket.recv_fds(socket.socket(fileno=os.dup(self._connection.fileno())), 1, 1)
        pid = os.fork()
        if pid:
            os.close(descriptors[0])
            return pid
        os.setsid()
        self._connection.close()
        padding = bytearray(random.Random(seed).randrange(LARGEST_PADDING))
        code = 0
        try:
            serve(Connection(descriptors[0]), self._framework, self._device, self._state)
        except BaseException:
            traceback.print_exc()
            code = 1
        del padding
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve one parent over the inherited socket."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_children_together()
    connection = Connection(int(sys.argv[1]))
    Forkserver(connection, sys.argv[2], sys.argv[3] or None).serve()


if __name__ == "__main__":
    main()
