"""The protocol between a parent and its workers: questions and answers as msgpack messages over a socket pair.

The kernel under test lives in the worker's process and may write to the socket too, by accident or on purpose. So every
question has a number that cannot be guessed, its answer carries the same one, and `fault` returns what is wrong with an
answer that no honest worker gives.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from multiprocessing.connection import Connection
from os import read, write  # bound before any kernel is loaded
from struct import Struct as Layout
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from attnbench.comparison import Block
from attnbench.measuring.rates import Ceilings
from attnbench.run.origin import Origin
from attnbench.spec import Cell, Environment, Failed, Incorrect, Ok, OutOfMemory, Timeout, Unsupported

NotOk = Unsupported | Incorrect | OutOfMemory | Failed | Timeout
Message = TypeVar("Message")
LONGEST = 1 << 28
"""Most bytes of a message; a longer announced length is an error."""
_HEADER, _CHUNK = Layout("!Q"), 1 << 20


class Describe(Struct, tag="describe"):
    """Question for the environment; `path` are the parent's import folders."""

    path: list[str]
    origin: Origin | None = None
    """Git ref whose code the process must run as, if any."""
    name: str = ""
    """Name of an implementation to load from that ref."""


class Load(Struct, tag="load"):
    """Order to load a function or object from outside the registry under a name."""

    name: str
    framework: str
    reference: str | None = None
    pickled: bytes | None = None
    within: list[str] = []
    """Folders in which a reference must be found if the code of a git ref is meant."""
    settings: dict[str, str] = {}
    """Settings of the library in the process that gives a function by value, by name."""


class Refusals(Struct, tag="refusals"):
    """Question for the reason why each cell would not run, if it would not (with that clock)."""

    cells: list[Cell]
    clock: str | None = None


class VerifyOnly(Struct, tag="verify_only"):
    """Question for the reason why an implementation may be checked but not timed here."""

    implementation: str


class Open(Struct, tag="open"):
    """Order to build and verify a cell."""

    cell: Cell
    thorough: bool
    measure: bool
    clock: str | None
    seed: int
    shared: str | None = None
    """Folder in which the workers of a workload share computed truths."""
    again: bool = False
    """Whether the cell was examined before, in another process."""


class WarmUp(Struct, tag="warm_up"):
    """Order to run an open cell until its times are steady and set its clock; `brief` if it is steady already."""

    cell: str
    clock: str | None = None
    brief: bool = False


class TakeSample(Struct, tag="sample"):
    """Order to time a part of an open cell by the clock that the warm-up returned."""

    cell: str
    part: str
    count: int
    calls: int
    clock: str = "wall"


class TakeBlock(Struct, tag="take_block"):
    """Order to time a number of calls of an open cell by every metric at once."""

    cell: str
    calls: int


class SampleOther(Struct, tag="sample_other"):
    """Order to time the main program of an open cell by another clock."""

    cell: str
    clock: str
    count: int


class ExamineAfter(Struct, tag="examine_after"):
    """Order to check an open cell again after its last sample."""

    cell: str


class Trace(Struct, tag="trace"):
    """Order to write a trace of one call of an open cell into a folder."""

    cell: str
    folder: str


class MeasureCeilings(Struct, tag="ceilings"):
    """Order to measure the ceilings of product and copy; `brief` only to confirm stored ones."""

    dtype: str
    brief: bool = False


class Release(Struct, tag="release"):
    """Order to close all cells and forget their arrays and compiled code."""


Turn = WarmUp | TakeSample | TakeBlock | SampleOther | ExamineAfter | Trace
"""Questions about a cell that is open."""
Question = Describe | Load | Refusals | VerifyOnly | Open | Turn | MeasureCeilings | Release


class EnvironmentAnswer(Struct, tag="described"):
    """Environment of the worker."""

    environment: Environment


class Reasons(Struct, tag="reasons"):
    """One entry per cell: None, or the reason."""

    reasons: list[str | None]


class Opened(Struct, tag="opened"):
    """A right cell; its record lacks the times. `timed`: whether it may be timed."""

    record: Ok
    timed: bool


class Warm(Struct, tag="warm"):
    """A steady cell that can be sampled."""

    call_ns: float
    parts: tuple[str, ...]
    slow_clock: bool
    clock: str
    other_clocks: tuple[str, ...]
    spent_ns: int


class Closed(Struct, tag="closed"):
    """Final record of a cell. `poisoned`: the process can no longer be trusted."""

    record: NotOk
    poisoned: bool = False


class Sampled(Struct, tag="sampled"):
    """Nanoseconds per call of each sample; `repeats`: whether all compared calls gave the same bits so far."""

    ns: list[float]
    repeats: bool = True
    clock_ns: int = 0
    """Time that the clock took, without messages and checks."""
    check_ns: int = 0
    """Time that the checks took."""
    began_ns: int = 0
    """Time of the monotonic system clock, which the parent shares, before the first sample."""
    ended_ns: int = 0
    changed: tuple[str, ...] = ()
    """Changes that the cell made in its process, in words; none of them affects the samples."""
    waited: float | None = None
    """Share of the samples that threads may have waited for a core; null if that is not known."""


class BlockTaken(Struct, tag="block_taken"):
    """Times of one side's turn in a comparison."""

    block: Block
    began_ns: int = 0
    """Time of the monotonic system clock before the first call."""
    ended_ns: int = 0


class Traced(Struct, tag="traced"):
    """Path of the written trace."""

    path: str


class MeasuredCeilings(Struct, tag="measured"):
    """Measured ceilings of the device."""

    ceilings: Ceilings


class Done(Struct, tag="done"):
    """Confirmation without a result."""


class Refused(Struct, tag="refused"):
    """A question that could not be answered, with the reason."""

    reason: str
    not_in_ref: bool = False
    """Whether the code to be measured is not that of the expected git ref."""
    not_open: bool = False
    """Whether the cell is not open in this process, because the process that had it open is gone."""


Times = Sampled | BlockTaken
"""Answers that hold times."""
Answer = EnvironmentAnswer | Reasons | Opened | Warm | Closed | Times | Traced | MeasuredCeilings | Done | Refused


ANSWERS: dict[type, tuple[type, ...]] = {
    Describe: (EnvironmentAnswer,),
    Load: (Done,),
    Refusals: (Reasons,),
    VerifyOnly: (Reasons,),
    Open: (Opened, Closed),
    WarmUp: (Warm, Closed),
    TakeSample: (Sampled, Closed),
    TakeBlock: (BlockTaken, Closed),
    SampleOther: (Sampled, Closed),
    ExamineAfter: (Done, Closed),
    Trace: (Traced,),
    MeasureCeilings: (MeasuredCeilings,),
    Release: (Done,),
}
"""Possible kinds of answer by question, besides Refused."""


class Numbered(Struct, Generic[Message], array_like=True):
    """A question or its answer, with a number that both share."""

    number: int
    message: Message


encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Numbered[Question]).decode
decode_answer = msgspec.msgpack.Decoder(Numbered[Answer]).decode


class Garbled(Exception):
    """Bytes from the connection that are no message of this protocol."""


def send(connection: Connection, message: bytes) -> None:
    """Write a message, preceded by its length."""
    rest = memoryview(_HEADER.pack(len(message)) + message)
    while rest:
        rest = rest[write(connection.fileno(), rest) :]


def receive(connection: Connection, wait: Callable[[], object] = lambda: None) -> bytes:
    """Return one message; `wait` is called before each read and may raise. Raises EOFError or Garbled."""
    (length,) = _HEADER.unpack(_exactly(_HEADER.size, connection, wait))
    if length > LONGEST:
        raise Garbled(f"a message of {length} bytes was announced")
    return _exactly(length, connection, wait)


def _exactly(count: int, connection: Connection, wait: Callable[[], object]) -> bytes:
    found = bytearray()
    while len(found) < count:
        wait()
        part = read(connection.fileno(), min(count - len(found), _CHUNK))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def fault(question: Question, answer: Answer, sent_ns: int, received_ns: int) -> str | None:
    """Return why an answer cannot be true, or None; `sent_ns` and `received_ns` are the parent's own clock readings."""
    if not isinstance(answer, (*ANSWERS[type(question)], Refused)):
        return f"the answer to {_tag(question)} was {_tag(answer)}"
    if isinstance(question, Open) and isinstance(answer, Opened | Closed) and answer.record.cell != question.cell:
        return f"the answer about {question.cell.id} was about {answer.record.cell.id}"
    if isinstance(answer, Warm) and not (isfinite(answer.call_ns) and answer.call_ns > 0):
        return f"it reported {answer.call_ns} ns for a call"
    if not isinstance(answer, Times):
        return None
    if not sent_ns <= answer.began_ns <= answer.ended_ns <= received_ns:
        return "its clock disagrees with that of attnbench's main process"
    if isinstance(answer, BlockTaken):
        assert isinstance(question, TakeBlock)
        samples = list(answer.block.ns.values())
        # Without the processor's time it is the median of some of the calls, not the mean of all.
        claimed = answer.block.ns.get("wall", 0.0) * (question.calls if "cpu" in answer.block.ns else 1)
    else:
        assert isinstance(question, TakeSample | SampleOther)
        samples = answer.ns
        if len(samples) != question.count:
            return f"{len(samples)} samples came back, {question.count} were asked for"
        claimed = sum(samples) * (question.calls if isinstance(question, TakeSample) else 1)
        if question.clock in ("kernel", "ranks"):
            claimed = 0.0  # kernels or ranks that run side by side may add up to more than the time that passed
    if not all(isfinite(ns) and ns > 0 for ns in samples):
        return "a sample was not a positive number"
    elapsed = answer.ended_ns - answer.began_ns
    if claimed > elapsed:
        return f"it claims {claimed / 1e6:.3g} ms of calls, {elapsed / 1e6:.3g} ms passed"
    return None


def _tag(message: Struct) -> str:
    return str(type(message).__struct_config__.tag)
