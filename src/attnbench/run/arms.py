"""The two sides of a comparison, each a nursery of fresh workers."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil
from msgspec import Struct

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.run import nursery as n
from attnbench.run import protocol as p
from attnbench.run.launch import CannotTravel
from attnbench.run.origin import NotInRef, Origin
from attnbench.run.process_tree import ProcessTree, descendants
from attnbench.run.remote import STEADY_MEMORY, Local, Remote, WorkerDied, start
from attnbench.run.travel import Traveller, from_object, from_reference
from attnbench.spec import Implementation

START_S = 180.0


class Arm(Struct, frozen=True, kw_only=True):
    """An implementation, and where its code comes from."""

    label: str
    """What people read: a name, or a name with the ref it comes from."""
    name: str
    """What its workers call it."""
    framework: str
    config: dict[str, int | float | str | bool] = {}
    """What it is set to beyond its defaults."""
    traveller: Traveller | None = None
    path: tuple[str, ...] = ()
    """Folders before all others on the import path of its workers: a git ref's. Its code must come from them."""
    hidden: str = ""
    """Folder whose code its workers must not see: the repository that the ref was checked out of."""
    origin: Origin | None = None
    """Where the code of the git ref lies, and where other code of its repository does."""
    commit: str = ""

    def describe(self) -> p.Describe:
        """The first message to each of its processes."""
        by_name = self.origin is not None and self.traveller is None
        return p.Describe(self.import_path, self.origin, self.name if by_name else "")

    @property
    def import_path(self) -> list[str]:
        """Where else its workers may look: everywhere this process does, or for a ref everywhere else."""
        if not self.path:
            return [*sys.path, ""]
        return [folder for folder in sys.path if folder and not Path(folder).is_relative_to(self.hidden or "/")]


def arm_of(
    what: Any,
    framework: str,
    label: str = "",
    path: tuple[str, ...] = (),
    hidden: str = "",
    commit: str = "",
    origin: Origin | None = None,
) -> Arm:
    """An arm from a name, a `file.py:function` or `module:function` reference, a function or an Implementation.

    A reference or a name under another import path is looked up by the workers, not here.
    """
    facts = {"path": path, "hidden": hidden, "commit": commit, "origin": origin}
    if isinstance(what, str) and ":" in what:
        traveller = from_reference(what, framework, set())
        return Arm(label=label or what, name=traveller.name, framework=framework, traveller=traveller, **facts)
    if isinstance(what, str):
        name, config = registry.asked(what)
        implementation = registry.get(name)
        if config or registry.origin(name) != "this process":
            known = {"framework": implementation.framework, "config": config}
            return Arm(label=label or what, name=name, **known, **facts)
        what = implementation
    implementation = registry.resolve(what, framework)
    traveller = from_object(what, framework, set())
    if traveller is None:
        raise CannotTravel(f"{implementation.name} cannot be sent to a worker process.")
    label = label or implementation.name
    return Arm(label=label, name=traveller.name, framework=traveller.framework, traveller=traveller, **facts)


class DiedLoading(UsageError):
    """A process was lost while it loaded an arm's code: perhaps the code's doing, perhaps the machine's."""


class Side(Protocol):
    """A live arm."""

    arm: Arm

    def hatch(self, seed: int) -> Remote | Local:
        """A fresh worker."""
        ...

    def pause(self) -> None:
        """Stop all its processes while it is the other side's turn."""
        ...

    def resume(self) -> None:
        """Let them go on."""
        ...

    def restart(self) -> None:
        """Begin again with new processes."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


class _Fledgling:
    """A worker's process as its nursery sees it."""

    def __init__(self, pid: int, side: NurserySide) -> None:
        self.pid, self._side = pid, side

    def family(self) -> list[psutil.Process]:
        """Return the worker and the processes that it has started."""
        with suppress(psutil.NoSuchProcess):
            return [psutil.Process(self.pid), *descendants(self.pid)]
        return []

    def poll(self) -> int | None:
        return self._side.exit_code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (10.0 if timeout is None else timeout)
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return 1 if code is None else code


class NurserySide:
    """An arm whose workers are forked from one process that has imported everything."""

    def __init__(self, arm: Arm, device: str | None, threads: int | None) -> None:
        self.arm, self._device, self._threads = arm, device, threads
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the side)
        try:
            self._start()
        except BaseException:
            self._output.close()
            raise

    def _start(self) -> None:
        """Start the nursery and load the arm's code in it; raises UsageError if that cannot be."""
        self._forks = True
        self._workers: list[_Fledgling] = []
        arm, module = self.arm, "attnbench.run.nursery"
        started = start(module, arm.framework, self._device, self._threads, self._output, arm.path, STEADY_MEMORY)
        self._process, self._connection = started
        self._tree = ProcessTree(self._process.pid)
        # What it says when it dies is told as a worker's last words are.
        self._nursery = Remote(arm.framework, *started, self._output)
        try:
            self._demand(arm.describe())
            if arm.traveller is not None:
                self._demand(arm.traveller.enlist(arm.path))
        except WorkerDied as died:
            self._end_nursery()
            raise DiedLoading(f"{arm.label} could not be loaded: {died.reason}") from died
        except BaseException:
            self._end_nursery()
            raise
        self._helpers = descendants(self._process.pid)
        """What loading has started, for all workers."""
        if not self._forks:
            self._end_nursery()

    def __enter__(self) -> NurserySide:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _demand(self, question: p.Describe | p.Enlist) -> None:
        reply = self._ask(question)
        if isinstance(reply, p.Refused):
            raise _refusal(self.arm, reply)
        self._forks = self._forks and not isinstance(reply, n.Unforkable)

    def _ask(self, question: n.Request, passing: socket.socket | None = None) -> n.Reply:
        def pass_on() -> None:
            if passing is not None:
                with socket.socket(fileno=socket.dup(self._connection.fileno())) as channel:
                    socket.send_fds(channel, [b"+"], [passing.fileno()])

        self.resume()
        return self._nursery.exchange(question, START_S, n.decode_reply, pass_on)

    def hatch(self, seed: int) -> Remote:
        """A fork with an untouched framework and its own heap padding; a new process where loading began to compute.

        A nursery that is gone is started again, once.
        """
        if not self._forks:
            return self._spawn()
        try:
            return self._fork(seed)
        except WorkerDied:
            self.restart()
            return self._fork(seed) if self._forks else self._spawn()

    def _fork(self, seed: int) -> Remote:
        self._workers = [one for one in self._workers if one.poll() is None]
        known = {process for one in self._workers for process in one.family()} | set(self._helpers)
        for process in descendants(self._process.pid):
            if process not in known:
                ProcessTree(process).kill()  # what an earlier worker left behind
        ours, theirs = socket.socketpair()
        with theirs:
            reply = self._ask(n.Hatch(seed), theirs)
        assert isinstance(reply, n.Hatched)
        self._tree = ProcessTree(self._process.pid)
        self._workers.append(_Fledgling(reply.pid, self))
        return Remote(self.arm.framework, self._workers[-1], Connection(ours.detach()), self._output)

    def _spawn(self) -> Remote:
        """Slower to start than a fork, but one with other threads' locks in it might never answer."""
        arm = self.arm
        module = "attnbench.run.worker"
        started = start(module, arm.framework, self._device, self._threads, self._output, arm.path, STEADY_MEMORY)
        worker = Remote(arm.framework, *started, self._output)
        self._tree = ProcessTree(started[0].pid)
        questions = [arm.describe(), *([] if arm.traveller is None else [arm.traveller.enlist(arm.path)])]
        try:
            for question in questions:
                answer = worker.ask(question, START_S)
                if isinstance(answer, p.Refused) and answer.not_in_ref:
                    raise _refusal(arm, answer)
                if isinstance(answer, p.Refused):
                    raise WorkerDied("failed", answer.reason)
        except BaseException:
            worker.kill()
            raise
        return worker

    def pause(self) -> None:
        """Take the processor away from all processes of this side, helpers that its code has started included."""
        self._tree.stop()

    def resume(self) -> None:
        """Let them go on."""
        self._tree.resume()

    def restart(self) -> None:
        """Begin again with new processes; raises WorkerDied if the code cannot be loaded any more."""
        self._end_nursery()
        try:
            self._start()
        except UsageError as error:
            raise WorkerDied("failed", str(error)) from error

    def exit_code(self, pid: int) -> int | None:
        """How a worker ended; None while it runs."""
        try:
            reply = self._ask(n.Inquire(pid))
        except WorkerDied:
            return 1
        assert isinstance(reply, n.Ended)
        return reply.code

    def close(self) -> None:
        """End the nursery with its workers and whatever these have started."""
        self._end_nursery()
        self._output.close()

    def _end_nursery(self) -> None:
        if self._process.poll() is None:
            ProcessTree(self._process.pid).kill()
        self._process.wait()
        self._connection.close()


def _refusal(arm: Arm, answer: p.Refused) -> UsageError:
    kind = NotInRef if answer.not_in_ref else UsageError
    return kind(f"{arm.label} could not be loaded: {answer.reason}")


class LocalSide:
    """An arm in the calling process, for a function that no other process can have."""

    def __init__(self, arm: Arm, implementation: Implementation, device: str | None) -> None:
        self.arm, self._device = arm, device
        registry.register(implementation)

    def hatch(self, seed: int) -> Local:
        """Fresh sessions; the process stays the same."""
        del seed
        return Local(self.arm.framework, self._device)

    def pause(self) -> None:
        """Both sides are this process, which cannot be stopped."""

    def resume(self) -> None:
        """Nothing was stopped."""

    def restart(self) -> None:
        """There is no process to begin again with."""

    def close(self) -> None:
        """Nothing to end."""
