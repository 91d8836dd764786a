"""The two sides of a comparison: where their code comes from, their worker processes, and how these take turns."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct, structs

from attnbench import registry
from attnbench.comparing import forkserver as n
from attnbench.comparison import Block
from attnbench.errors import UsageError
from attnbench.processes import ProcessTree, descendants
from attnbench.run import protocol as p
from attnbench.run.machine import scratch
from attnbench.run.origin import NotInRef, Origin
from attnbench.run.remote import STEADY_MEMORY, Local, Remote, WorkerDied, start
from attnbench.run.user_functions import CannotSend, UserFunction, from_object, from_reference
from attnbench.spec import Cell, Failed, Implementation, Ok, Record, Workload

START_S = 180.0


class Code(Struct, frozen=True, kw_only=True):
    """An implementation, and the place that its code comes from."""

    label: str
    """Name that people read: the implementation, with its ref if it comes from one."""
    name: str
    """Name of the implementation in the workers."""
    framework: str
    config: dict[str, int | float | str | bool] = {}
    user_function: UserFunction | None = None
    path: tuple[str, ...] = ()
    """Folders that come first on the workers' import path, those of a git ref; the code must come from them."""
    hidden: str = ""
    """Folder whose code the workers must not see: the repository that the ref was checked out of."""
    origin: Origin | None = None
    """Folders of the ref's code, and of other code of its repository."""
    cwd: str = ""
    """Working folder of the workers: that of a git ref, so that relative file names are its own; empty for this
    process's."""
    commit: str = ""

    def requests(self) -> list[p.Describe | p.Load]:
        """Return the first messages to each process of the side, which load the code. Further folders of its import
        path are this process's, without the hidden one if there is a ref."""
        further = [*sys.path, ""]
        if self.path:
            further = [folder for folder in sys.path if folder and not Path(folder).is_relative_to(self.hidden or "/")]
        if self.user_function is not None:
            return [p.Describe(further, self.origin, ""), self.user_function.load(self.path)]
        return [p.Describe(further, self.origin, "" if self.origin is None else self.name)]


def code_of(what: Any, framework: str) -> Code:
    """Return the side for a name, a `file.py:function` or `module:function` reference, a function or an Implementation.
    A reference is looked up by the workers and not here."""
    if isinstance(what, str) and ":" in what:
        user_function = from_reference(what, framework, set())
        return Code(label=what, name=user_function.name, framework=framework, user_function=user_function)
    if isinstance(what, str):
        name, config = registry.asked(what)
        implementation = registry.get(name)
        if config or registry.origin(name) != "this process":
            return Code(label=what, name=name, framework=implementation.framework, config=config)
        what = implementation
    implementation = registry.resolve(what, framework)
    user_function = from_object(what, framework, set())
    if user_function is None:
        raise CannotSend(f"{implementation.name} cannot be sent to a worker process.")
    name, framework = user_function.name, user_function.framework
    return Code(label=implementation.name, name=name, framework=framework, user_function=user_function)


class DiedLoading(UsageError):
    """A process that was lost while it loaded a side's code: the fault of the code, or of the machine."""


class Side:
    """A side of a comparison, whose processes can be paused and restarted if it has processes of its own."""

    code: Code

    def start_worker(self, seed: int) -> Remote | Local:
        """Start a fresh worker and return it."""
        raise NotImplementedError

    def pause(self) -> None:
        """Stop all processes of the side, helpers that its code has started included, while the other takes its
        turn."""

    def resume(self) -> None:
        """Let the stopped processes go on."""

    def restart(self) -> None:
        """End all processes and start new ones; raises WorkerDied if the code cannot be loaded any more."""


class _WorkerProcess:
    """A worker's process, asked for through its forkserver."""

    def __init__(self, pid: int, side: ForkedSide) -> None:
        self.pid, self._side = pid, side

    def family(self) -> list[psutil.Process]:
        """Return the worker and the processes that it has started."""
        with suppress(psutil.NoSuchProcess):
            return [psutil.Process(self.pid), *descendants(self.pid)]
        return []

    def poll(self) -> int | None:
        """Return the exit code, of which the forkserver knows; None while the worker runs."""
        try:
            reply = self._side.ask(n.Inquire(self.pid))
        except WorkerDied:
            return 1
        assert isinstance(reply, n.Ended)
        return reply.code

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (10.0 if timeout is None else timeout)
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return 1 if code is None else code


class ForkedSide(Side):
    """A side whose workers are forked from one process that has imported everything."""

    def __init__(self, code: Code, device: str | None, threads: int | None) -> None:
        self.code, self._device, self._threads = code, device, threads
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the side)
        try:
            self._start()
        except BaseException:
            self._output.close()
            raise

    def _start(self) -> None:
        """Start the forkserver and load the side's code in it; raises UsageError if that fails."""
        self._forks = True
        self._workers: list[_WorkerProcess] = []
        self._process, self._connection = started = self._process_of("attnbench.comparing.forkserver")
        self._tree = ProcessTree(self._process.pid)
        # Its last output is reported as that of a worker that died.
        self._forkserver = Remote(self.code.framework, *started, self._output)
        try:
            for request in self.code.requests():
                reply = self.ask(request)
                if isinstance(reply, p.Refused):
                    raise _refusal(self.code, reply)
                self._forks = self._forks and not isinstance(reply, n.Unforkable)
        except WorkerDied as died:
            self._forkserver.kill()
            raise DiedLoading(f"{self.code.label} could not be loaded: {died.reason}") from died
        except BaseException:
            self._forkserver.kill()
            raise
        self._helpers = descendants(self._process.pid)
        """Processes that loading has started, for all workers."""
        if not self._forks:
            self._forkserver.kill()

    def _process_of(self, module: str) -> tuple[subprocess.Popen[bytes], Connection]:
        code = self.code
        where = (code.path, STEADY_MEMORY, code.cwd)
        return start(module, code.framework, self._device, self._threads, self._output, *where)

    def __enter__(self) -> ForkedSide:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, question: n.Request, passing: socket.socket | None = None) -> n.Reply:
        """Return the forkserver's answer; `passing` is a socket that follows the question."""

        def pass_on() -> None:
            if passing is not None:
                with socket.socket(fileno=socket.dup(self._connection.fileno())) as channel:
                    socket.send_fds(channel, [b"+"], [passing.fileno()])

        self.resume()
        return self._forkserver.exchange(question, START_S, n.decode_reply, pass_on)

    def start_worker(self, seed: int) -> Remote:
        """Fork a worker with an untouched framework and its own heap padding, and return it. If loading the code
        started threads or a device, the worker is a new process instead. A forkserver that has ended is started again,
        once."""
        if not self._forks:
            return self._spawn()
        try:
            return self._fork(seed)
        except WorkerDied:
            self.restart()
            return self._fork(seed) if self._forks else self._spawn()

    def _fork(self, seed: int) -> Remote:
        self._workers = [worker for worker in self._workers if worker.poll() is None]
        known = {process for worker in self._workers for process in worker.family()} | set(self._helpers)
        for process in set(descendants(self._process.pid)) - known:
            ProcessTree(process).kill()  # what an earlier worker left behind
        ours, theirs = socket.socketpair()
        with theirs:
            reply = self.ask(n.Fork(seed), theirs)
        assert isinstance(reply, n.Forked)
        self._tree = ProcessTree(self._process.pid)
        self._workers.append(_WorkerProcess(reply.pid, self))
        return Remote(self.code.framework, self._workers[-1], Connection(ours.detach()), self._output)

    def _spawn(self) -> Remote:
        """Start a worker as a new process: slower than a fork, which might hang in other threads' locks."""
        process, connection = self._process_of("attnbench.run.worker")
        worker = Remote(self.code.framework, process, connection, self._output)
        self._tree = ProcessTree(process.pid)
        try:
            for request in self.code.requests():
                answer = worker.ask(request, START_S)
                if isinstance(answer, p.Refused) and answer.not_in_ref:
                    raise _refusal(self.code, answer)
                if isinstance(answer, p.Refused):
                    raise WorkerDied("failed", answer.reason)
        except BaseException:
            worker.kill()
            raise
        return worker

    def pause(self) -> None:
        self._tree.stop()

    def resume(self) -> None:
        self._tree.resume()

    def restart(self) -> None:
        self._forkserver.kill()
        try:
            self._start()
        except UsageError as error:
            raise WorkerDied("failed", str(error)) from error

    def close(self) -> None:
        """End the forkserver, its workers and whatever these have started."""
        self._forkserver.kill()
        self._output.close()


def _refusal(code: Code, answer: p.Refused) -> UsageError:
    kind = NotInRef if answer.not_in_ref else UsageError
    return kind(f"{code.label} could not be loaded: {answer.reason}")


class LocalSide(Side):
    """A side in the calling process, for a function that no other process can have: nothing is stopped or ended."""

    def __init__(self, code: Code, implementation: Implementation, device: str | None) -> None:
        self.code, self._device = code, device
        registry.register(implementation)

    def start_worker(self, seed: int) -> Local:
        """Return fresh sessions in this same process."""
        del seed
        return Local(self.code.framework, self._device)


class Lost(Exception):
    """The loss of a side's worker (`died`) or of its answer; `record` says what happened."""

    def __init__(self, side: str, record: Record, died: bool = False) -> None:
        super().__init__(record.reason)
        self.side, self.record, self.died = side, record, died


def verify_alone(side: Side, workload: Workload, timeout_s: float = 120.0) -> Record:
    """Verify a side that has nothing to be compared with; raises NotInRef as a comparison does."""
    try:
        worker = side.start_worker(secrets.randbits(31))
    except WorkerDied as died:
        return died.record(implementation=side.code.name, workload=workload, config=side.code.config)
    worker = SideWorker("b", side, worker, workload, timeout_s)
    try:
        with scratch() as folder:
            return worker.open(secrets.randbits(31), str(folder), again=False)
    except Lost as lost:
        return lost.record
    finally:
        worker.end()


class SideWorker:
    """One side's worker in one launch, with its cell open; it runs only while it is asked something. Between its turns
    all of its processes are stopped: threads that spin and helpers that it has started would take the processor from
    the other side, whose time would then be too long. A stopped process keeps its GPU context."""

    def __init__(self, side: str, live: Side, worker: Remote | Local, workload: Workload, timeout_s: float) -> None:
        self._side, self._live, self._worker, self._timeout_s = side, live, worker, timeout_s
        self._cell = Cell(live.code.name, workload, live.code.config)
        self.call_ns, self.clock, self.other_clocks = 0.0, "wall", ()

    def describe(self) -> str:
        """Return the kind of device that the worker runs on."""
        described = self._ask(p.Describe([]))
        assert isinstance(described, p.EnvironmentAnswer)
        return described.environment.device

    def open(self, seed: int, shared: str, again: bool) -> Ok:
        """Build and verify the cell; raises Lost if that fails."""
        opened = self._ask(p.Open(self._cell, False, True, None, seed, shared, again))
        assert isinstance(opened, p.Opened)
        if not opened.timed:
            raise Lost(self._side, self._failed(opened.record.notes[0] if opened.record.notes else "cannot be timed"))
        return opened.record

    def warm_up(self, clock: str | None = None, brief: bool = False) -> None:
        """Call until times are steady, by the clock named or the one that suits; `brief` if just in use."""
        warm = self._ask(p.WarmUp(self._cell.id, clock, brief))
        assert isinstance(warm, p.Warm)
        self.call_ns, self.clock, self.other_clocks = warm.call_ns, warm.clock, warm.other_clocks

    @property
    def on_device(self) -> bool:
        """Whether calls are timed by a clock of the device."""
        return self.clock != "wall"

    def block(self, calls: int) -> Block:
        """Time one block of calls."""
        taken = self._ask(p.TakeBlock(self._cell.id, calls))
        assert isinstance(taken, p.BlockTaken)
        return taken.block

    def _ask(self, question: p.Question) -> p.Answer:
        self._live.resume()
        try:
            answer = self._worker.ask(question, self._timeout_s)
        except WorkerDied as died:
            raise Lost(self._side, died.record(**structs.asdict(self._cell)), died=True) from died
        self._live.pause()
        if isinstance(answer, p.Closed):
            raise Lost(self._side, answer.record)
        if isinstance(answer, p.Refused) and answer.not_in_ref:
            raise NotInRef(f"{self._live.code.label}: {answer.reason}")
        if isinstance(answer, p.Refused):
            raise Lost(self._side, self._failed(answer.reason))
        return answer

    def _failed(self, reason: str) -> Failed:
        return Failed(reason=reason, **structs.asdict(self._cell))

    def abort(self) -> None:
        """Make a question that another thread has asked the worker fail at once."""
        self._worker.abort()

    def end(self) -> None:
        """End the worker: the launch is over."""
        self._worker.kill()
