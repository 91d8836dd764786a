"""A worker process, `python -m attnbench.run.worker FD FRAMEWORK DEVICE`: answers questions about cells until its
parent ends.

The same `Worker` also serves in the calling process, for a function that cannot be sent. After every turn of a cell it
looks for changes in the process: a cell that changed what its time or its checks rely on is `failed`.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic_ns, perf_counter_ns
from typing import Any

from msgspec import structs

from attnbench import errors, frameworks, registry
from attnbench.frameworks.base import Untrusted, library_settings
from attnbench.measuring import anchors
from attnbench.measuring.session import FellBack, Options, Session, refusal
from attnbench.measuring.step_session import StepSession
from attnbench.processes import die_with_parent, keep_children_together, kill_descendants
from attnbench.run import origin
from attnbench.run import protocol as p
from attnbench.run.environment import commit_of, describe, without_home
from attnbench.run.integrity import ProcessState, StateChange, frozen
from attnbench.run.plan import does_not_fit, inputs_do_not_fit
from attnbench.run.user_functions import own_folder, unpack
from attnbench.spec import Cell, Environment, Failed, Implementation, Incorrect, OutOfMemory, Unsupported
from attnbench.steps import StepImplementation
from attnbench.verifying.draws import Draws
from attnbench.verifying.subject import Wrong

LOADED, ASKED = "while it was loaded", "when it was asked what it supports"
WHEN: dict[type, str] = {
    p.Load: LOADED,
    p.Refusals: ASKED,
    p.VerifyOnly: ASKED,
    p.Open: "while it was built and checked",
    p.WarmUp: "while it was timed",
    p.TakeSample: "while it was timed",
    p.SampleOther: "while it was timed",
    p.TakeBlock: "while it was timed",
    p.ExamineAfter: "while it was checked after sampling",
}
"""When the code under test ran, in the words of messages, by the question that runs it."""
_encode = p.encode  # bound before any kernel is loaded
_measured: Path | None = None
"""Folder of the user function that was loaded last; a process measures one."""
_set_otherwise: dict[str, str] = {}
"""Notes on settings of the library that are others in the process that gave this function, by the setting's name."""


def load_user_function(question: p.Load) -> p.Answer:
    """Load a function or object from outside the registry and make it known to this process."""
    global _measured, _set_otherwise
    try:
        if question.pickled is not None:
            loaded = unpack(question.pickled)
        else:
            assert question.reference is not None
            loaded = registry.load_reference(question.reference)
            where = question.reference.rpartition(":")[0]
            if question.within:  # the code may lie outside of the git ref, such as in an editable install
                require = origin.require_file if where.endswith(".py") else origin.require_module
                require(where, question.within)
        implementation = registry.resolve(loaded, question.framework)
    except (Exception, SystemExit) as error:
        return refused(error)
    if reason := origin.other_code():
        return p.Refused(reason, not_in_ref=True)
    code = getattr(inspect.unwrap(loaded) if callable(loaded) else loaded, "__code__", None)
    module = sys.modules.get(getattr(loaded, "__module__", None) or type(loaded).__module__)
    file = code.co_filename if code is not None else getattr(module, "__file__", None)
    _measured = Path(file).parent if isinstance(file, str) and Path(file).is_file() else None
    implementation.name = question.name
    registry.register(implementation)
    here = library_settings(frameworks.get(question.framework)) if question.settings else {}
    _set_otherwise = {
        name: f"measured with {name} as {here[name]}, which the calling process has set to {there}"
        for name, there in question.settings.items()
        if here.get(name, there) != there
    }
    return p.Done()


def refused(error: BaseException) -> p.Refused:
    """Return the answer to a question that failed while code was loaded."""
    reason = str(error) if isinstance(error, errors.UsageError) else f"{type(error).__name__}: {error}"
    return p.Refused(reason, not_in_ref=isinstance(error, origin.NotInRef))


def load_from_ref(question: p.Describe) -> p.Done | p.Refused:
    """Run as the code of a git ref from now on, and load the implementation that the question names from it."""
    if question.origin is None:
        return p.Done()
    origin.expect(question.origin)
    if not question.name:
        return p.Done()
    try:
        registry.get(question.name)
        origin.require(question.name)
    except (Exception, SystemExit) as error:
        return refused(error)
    reason = origin.other_code()
    return p.Refused(reason, not_in_ref=True) if reason else p.Done()


class Worker:
    """Open cells of one framework on one device."""

    def __init__(self, framework: str, device: str | None, state: ProcessState | None = None) -> None:
        """Start with the `state` of the process that was taken before the code under test was loaded; by default, take
        it now."""
        self._pid = os.getpid()
        self._framework = frameworks.get(framework)
        devices = self._framework.devices()
        if device is not None and device not in devices:
            raise errors.UsageError(f"{framework} has no {device} here, only {' and '.join(devices)}")
        self._device = device or devices[0]
        self._environment = self._framework.environment(self._device)
        self._implementations: dict[str, Implementation] = {}
        self._commits: dict[str, str] = {}
        """Commit of each implementation that another package brings from a folder of its own."""
        self._early: dict[str, tuple[str, bool]] = {}
        """Changes that a user function made before a cell was opened: text and whether it is refused, by name."""
        self._noted: dict[str, set[str]] = {}
        self._pending_notes: list[str] = []
        """Notes for the next answer that can carry notes."""
        self._sessions: dict[str, Session | anchors.AnchorSession] = {}
        self._cells: dict[str, Cell] = {}
        self._draws: dict[str, Draws] = {}
        self._answers: dict[type, Callable[[Any], p.Answer]] = {
            p.Describe: self._describe,
            p.Load: self._load,
            p.Refusals: self._refusals,
            p.VerifyOnly: lambda q: p.Reasons([self._implementation(q.implementation).verify_only or None]),
            p.Open: self._open,
            p.MeasureCeilings: self._ceilings,
            p.Release: self._release,
        }
        self._turns: dict[type, Callable[[Any, Any], p.Answer]] = {
            p.WarmUp: _warm_up,
            p.TakeSample: lambda session, q: _sampled(session, lambda: session.sample(q.part, q.count, q.calls)),
            p.TakeBlock: _take_block,
            p.SampleOther: lambda session, q: _sampled(session, lambda: session.sample_other(q.clock, q.count)),
            p.ExamineAfter: _examine_after,
            p.Trace: _trace,
        }
        """Answers to questions about an open cell, from its session and the question."""
        # Bound here, so that replacing the method later is without effect.
        self._changes = (state or ProcessState(self._framework)).changes
        if state is not None:
            self._remember_changes(LOADED)

    def answer(self, question: p.Question) -> p.Answer:
        """Return the answer to a question; errors of a cell become its record."""
        if isinstance(question, p.Turn):
            if (session := self._sessions.get(question.cell)) is None:
                return p.Refused(f"{question.cell} is not open in this process", not_open=True)
            turn = self._turns[type(question)]
            answer = self._guarded(session.cell, lambda: turn(session, question))
        else:
            answer = self._answers[type(question)](question)
        if os.getpid() != self._pid:
            os._exit(1)  # a fork that a kernel made and let return: only one may answer
        return self._checked(question, answer) if type(question) in WHEN else answer

    def _checked(self, question: p.Question, answer: p.Answer) -> p.Answer:
        """Return the answer, or the cell's failure if the cell changed what its time or its checks rely on."""
        when = WHEN[type(question)]
        if isinstance(question, p.Load):
            self._remember_changes(when)
            return answer
        if isinstance(question, p.Refusals | p.VerifyOnly):
            cells = question.cells if isinstance(question, p.Refusals) else [question]
            if not all(_is_ours(cell.implementation) for cell in cells):
                self._remember_changes(when)
            return answer
        assert isinstance(question, p.Open | p.Turn)
        if reason := origin.noticed():
            return p.Refused(reason, not_in_ref=True)
        cell = question.cell if isinstance(question, p.Open) else self._cells[question.cell]
        if cell.implementation in anchors.NAMES or isinstance(answer, p.Refused):
            return answer
        refused, notes = self._judged(cell, when)
        if isinstance(answer, p.Closed):
            return p.Closed(answer.record, answer.poisoned or bool(refused))
        if refused:
            self._sessions.pop(cell.id, None)
            return p.Closed(Failed(reason=refused[0], **self._facts(cell)), poisoned=True)
        self._pending_notes += notes
        if not isinstance(answer, p.Opened | p.Sampled):
            return answer
        changed, self._pending_notes = tuple(self._pending_notes), []
        if isinstance(answer, p.Sampled):
            return structs.replace(answer, changed=changed)
        record = structs.replace(answer.record, notes=(*answer.record.notes, *changed))
        return structs.replace(answer, record=record)

    def _remember_changes(self, when: str) -> None:
        """Store the changes made by loading a user function or asking what it supports, and the settings that the
        process which gave it has changed: they concern all its cells."""
        self._early.update({name: (text, False) for name, text in _set_otherwise.items()})
        for change in self._changes():
            refused = _is_refused(change, when, ours=False)
            self._early.setdefault(change.what, (_change_text(change, when, refused), refused))

    def _judged(self, cell: Cell, when: str) -> tuple[list[str], list[str]]:
        """Return the changes for which a cell is refused, and the changes to note in its record.

        A shared worker notes a change once, with the cell that made it.
        """
        ours = _is_ours(cell.implementation)
        earlier = {} if ours else self._early
        noted = self._noted.setdefault("" if ours else cell.id, set())
        notes = [text for what, (text, refused) in earlier.items() if not refused and what not in noted]
        noted.update(earlier)
        refused: list[str] = []
        for change in self._changes():
            if _is_refused(change, when, ours):
                known = earlier.get(change.what, ("", False))[1]  # it was refused when it was opened
                refused += [] if known else [_change_text(change, when, True)]
            elif change.what not in noted:
                noted.add(change.what)
                notes.append(_change_text(change, when, False))
        return refused, notes

    def _implementation(self, name: str) -> Implementation:
        """Return the implementation of that name; a user's implementation is frozen."""
        if name not in self._implementations:
            one = registry.get(name)
            self._implementations[name] = one if registry.origin(name) == registry.OURS else frozen(one)
            if (folder := own_folder(name)) is not None:
                self._commits[name] = commit_of(folder)
        return self._implementations[name]

    def _environment_of(self, cell: Cell) -> Environment:
        """Return the environment with the commit of the code that the cell measures."""
        commit = self._commits.get(cell.implementation)
        if commit is None or not self._environment.harness:  # a light environment names none
            return self._environment
        return structs.replace(self._environment, commit=commit)

    def _facts(self, cell: Cell) -> dict[str, Any]:
        return structs.asdict(cell) | {"environment": self._environment_of(cell)}

    def _load(self, question: p.Load) -> p.Answer:
        """Load a user function; from now on the commit is that of its file."""
        answer = load_user_function(question)
        if self._environment.harness and isinstance(answer, p.Done):  # it was described before
            self._environment = structs.replace(self._environment, commit=commit_of(_measured))
        return answer

    def _describe(self, question: p.Describe) -> p.EnvironmentAnswer | p.Refused:
        sys.path.extend(folder for folder in question.path if folder not in sys.path)
        if isinstance(answer := load_from_ref(question), p.Refused):
            return answer
        self._environment = describe(self._framework, self._device, _measured)
        return p.EnvironmentAnswer(self._environment)

    def _refusals(self, question: p.Refusals) -> p.Reasons:
        clocks = ("wall", *self._framework.clocks(self._device))
        if question.clock is not None and question.clock not in clocks:
            have = " and ".join(dict.fromkeys(clocks))
            reason = f"{self._framework.name} has no {question.clock} clock on {self._device}, only {have}"
            return p.Reasons([reason] * len(question.cells))
        return p.Reasons([self._refusal(cell) for cell in question.cells])

    def _refusal(self, cell: Cell) -> str | None:
        if cell.implementation in anchors.NAMES:
            return None
        if (reason := inputs_do_not_fit(cell.workload, self._environment)) is not None:
            return reason
        try:
            implementation = self._implementation(cell.implementation)
            try:
                implementation = implementation.configured(cell.config)
            except errors.UsageError:
                return None  # a setting that cannot be: opening the cell fails with that sentence
            reason = refusal(implementation, cell.workload, self._environment)
        except Exception as error:
            # A third party's mistake costs its own cells, not the run.
            return f"could not say whether it supports this: {type(error).__name__}: {error}"
        return reason or does_not_fit(implementation, cell.workload, self._environment)

    def _open(self, question: p.Open) -> p.Answer:
        cell = question.cell
        self._cells[cell.id] = cell

        def start() -> p.Answer:
            early = next((text for text, is_refused in self._early.values() if is_refused), "")
            if early and not _is_ours(cell.implementation):
                raise Untrusted(early)
            if (reason := self._refusal(cell)) is not None:
                raise errors.Unsupported(reason)
            session = self._session(question)
            if isinstance(session, anchors.AnchorSession | StepSession):
                record = session.open()
            else:
                shared = None if question.shared is None else Path(question.shared)
                if cell.workload.id not in self._draws:
                    draws = Draws(self._framework, self._device, cell.workload, question.seed, shared)
                    self._draws[cell.workload.id] = draws
                record = session.open(self._draws[cell.workload.id])
            self._sessions[cell.id] = session
            self._framework.trim()  # of what verification needed: other workers share the device
            return p.Opened(record, session.timed)

        answer = self._guarded(cell, start, opening=True)
        # What a function imports only when it is called has been imported by now.
        reason = origin.other_code()
        return p.Refused(reason, not_in_ref=True) if reason else answer

    def _session(self, question: p.Open) -> Session | anchors.AnchorSession:
        cell = question.cell
        if cell.implementation in anchors.NAMES:
            return anchors.AnchorSession(self._framework, self._environment, cell)
        options = Options(question.thorough, question.measure, question.clock, question.seed, question.again)
        implementation = self._implementation(cell.implementation).configured(cell.config)
        if isinstance(implementation, StepImplementation):
            return StepSession(self._framework, self._environment_of(cell), implementation, cell, options)
        return Session(self._framework, self._environment_of(cell), implementation, cell, options)

    def _guarded(self, cell: Cell, action: Callable[[], p.Answer], opening: bool = False) -> p.Answer:
        """Run an action of a cell and return its answer; an exception becomes the cell's record.

        Only while a cell is opened may it say that it is not supported; after its verification that is a failure.
        """
        facts = self._facts(cell)
        try:
            return action()
        except Untrusted as untrusted:
            record = Failed(reason=str(untrusted), **facts)
        except Wrong as wrong:
            record = Incorrect(reason=str(wrong), errors=wrong.errors, detail=wrong.detail, **facts)
        except FellBack as fell:
            record = Failed(reason=str(fell), **facts)
        except (Exception, SystemExit) as error:
            if opening and isinstance(error, NotImplementedError):
                # errors.Unsupported, and how the field says "I cannot do this case"
                return p.Closed(Unsupported(reason=str(error) or "not implemented", **facts))
            detail = without_home(traceback.format_exc())[-4000:]
            first_line = (str(error).strip().splitlines() or [""])[0][:300]
            if self._framework.is_out_of_memory(error):
                record = OutOfMemory(reason=first_line or "out of memory", detail=detail, **facts)
            else:
                record = Failed(reason=f"{type(error).__name__}: {first_line}", detail=detail, **facts)
        self._sessions.pop(cell.id, None)
        gc.collect()
        return p.Closed(record, poisoned=not self._healthy(record))

    def _healthy(self, record: p.NotOk) -> bool:
        """Return whether other cells can go on in this process: the device still answers (an illegal memory access ends
        a CUDA context), and the shared inputs are unchanged (not checked if memory ran out)."""
        try:
            small = self._framework.copy(1024, self._device)
            self._framework.wait(small.run(None))
            cell, used = record.cell, self._draws.get(record.cell.workload.id)
            if isinstance(record, OutOfMemory) or used is None or cell.implementation in anchors.NAMES:
                return True
            layout = self._implementation(cell.implementation).layout
            drawn = Draws(self._framework, self._device, cell.workload, used.seed)
            pairs = zip(used.inputs(layout), drawn.inputs(layout))
            return all(self._framework.same_bits(a, b) for mine, fresh in pairs for a, b in zip(mine, fresh))
        except Exception:
            return False

    def _ceilings(self, question: p.MeasureCeilings) -> p.Answer:
        where = (self._framework, self._device)
        try:
            return p.MeasuredCeilings(anchors.measure_ceilings(*where, question.dtype, question.brief))
        except Exception as error:
            return p.Refused(f"{type(error).__name__}: {error}")

    def _release(self, question: p.Release) -> p.Done:
        self._sessions.clear()
        self._cells.clear()
        self._draws.clear()
        self._framework.reset()
        return p.Done()


def _warm_up(session: Session | anchors.AnchorSession, question: p.WarmUp) -> p.Warm:
    start = perf_counter_ns()
    session.warm_up(question.clock, question.brief)
    facts = (session.call_ns, session.parts, session.slow_clock, session.clock_name, session.other_clocks)
    return p.Warm(*facts, perf_counter_ns() - start)


def _sampled(session: Session | anchors.AnchorSession, sample: Callable[[], list[float]]) -> p.Sampled:
    began_ns = monotonic_ns()
    ns = sample()
    facts = (session.repeats, session.clock_ns, session.check_ns, began_ns, monotonic_ns())
    return p.Sampled(ns, *facts, waited=session.waited)


def _take_block(session: Session, question: p.TakeBlock) -> p.BlockTaken:
    began_ns = monotonic_ns()
    return p.BlockTaken(session.block(question.calls), began_ns, monotonic_ns())


def _examine_after(session: Session, question: p.ExamineAfter) -> p.Done:
    session.examine_after()
    return p.Done()


def _trace(session: Session, question: p.Trace) -> p.Answer:
    try:
        return p.Traced(str(session.trace(Path(question.folder))))
    except Exception as error:
        return p.Refused(f"{type(error).__name__}: {error}")


def _is_refused(change: StateChange, when: str, ours: bool) -> bool:
    """Return whether a cell cannot be measured after a change."""
    if not change.refused or (change.set_again and when in (LOADED, ASKED)):
        return False
    # A library that one of ours needs may wrap functions of its framework; no user's code need do so.
    return change.harness or not ours


def _change_text(change: StateChange, when: str, refused: bool) -> str:
    text = f"changed {change.what} {when}"
    return f"{text}: {change.remedy or 'its time cannot be trusted'}" if refused else text


def _is_ours(name: str) -> bool:
    return name in anchors.NAMES or registry.origin(name) == registry.OURS


def main() -> None:
    """Serve one parent over the inherited socket."""
    faulthandler.enable()
    serve(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3] or None)


def serve(connection: Connection, framework: str, device: str | None, state: ProcessState | None = None) -> None:
    """Answer the questions of one parent until it closes the socket; `state` as in Worker."""
    os.environ["ATTNBENCH_WORKER"] = "1"
    os.set_inheritable(connection.fileno(), False)
    keep_children_together()
    die_with_parent(connection.fileno(), kill_descendants)
    try:
        answer = Worker(framework, device, state).answer
        gc.freeze()  # each collection would take 0.3 s to walk the modules of the framework
    except errors.AttnBenchError as error:
        why = str(error)  # `error` itself is gone when the first question arrives
        answer = lambda question: p.Refused(why)  # noqa: E731
    send, receive, numbered, release = p.send, p.receive, p.Numbered, p.Release
    while True:
        try:
            asked = p.decode_question(receive(connection))
        except EOFError:
            kill_descendants()
            return
        send(connection, _encode(numbered(asked.number, answer(asked.message))))
        if isinstance(asked.message, release):  # no cell is open: what is left are modules that were imported since
            gc.collect()
            gc.freeze()


if __name__ == "__main__":
    main()
