"""What a parent may ask of a worker, and what it answers: msgpack messages over a socket pair.

The kernel under test lives in the worker's process and may write to the socket too, by accident or on purpose. So every
question has a number that cannot be guessed, its answer carries the same one, and `fault` says what is wrong with an
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
"""Bytes of a message; whoever announces more is not speaking this protocol."""
_HEADER, _CHUNK = Layout("!Q"), 1 << 20


class Describe(Struct, tag="describe"):
    """Tell the environment. `path` are the parent's import folders."""

    path: list[str]
    origin: Origin | None = None
    """The git ref whose code this process stands for."""
    name: str = ""
    """An implementation of that ref, to be loaded and found in it."""


class Enlist(Struct, tag="enlist"):
    """Make a function or object from outside the registry known under a name."""

    name: str
    framework: str
    reference: str | None = None
    pickled: bytes | None = None
    within: list[str] = []
    """Folders in which a reference must be found, where a git ref's code is meant and no other."""


class Refusals(Struct, tag="refusals"):
    """Say for each cell why it would not run (with that clock)."""

    cells: list[Cell]
    clock: str | None = None


class VerifyOnly(Struct, tag="verify_only"):
    """Say why an implementation may be checked but not timed here."""

    implementation: str


class Open(Struct, tag="open"):
    """Build and verify a cell."""

    cell: Cell
    thorough: bool
    measure: bool
    clock: str | None
    seed: int
    shared: str | None = None
    """Folder in which the workers of a workload find each other's truths."""
    again: bool = False
    """Examined before, in another process."""


class WarmUp(Struct, tag="warm_up"):
    """Run an open cell until it is steady, and choose its clock or take the one named; brief: it is steady already."""

    cell: str
    clock: str | None = None
    brief: bool = False


class Sample(Struct, tag="sample"):
    """Time a part of an open cell by its clock, which the warm-up told."""

    cell: str
    part: str
    count: int
    calls: int
    clock: str = "wall"


class TakeBlock(Struct, tag="take_block"):
    """Time so many calls of an open cell by every metric at once."""

    cell: str
    calls: int


class SampleOther(Struct, tag="sample_other"):
    """Time the main part of an open cell by another clock."""

    cell: str
    clock: str
    count: int


class ExamineAfter(Struct, tag="examine_after"):
    """Check an open cell once more when its sampling is over: is it still what was verified?"""

    cell: str


class Trace(Struct, tag="trace"):
    """Profile one call of an open cell into a folder."""

    cell: str
    folder: str


class MeasureCeilings(Struct, tag="ceilings"):
    """Measure matmul and copy ceilings; `brief`: only well enough to tell whether stored ones can be true."""

    dtype: str
    brief: bool = False


class Release(Struct, tag="release"):
    """Close all cells and forget their arrays and compiled code."""


Question = (
    Describe
    | Enlist
    | Refusals
    | VerifyOnly
    | Open
    | WarmUp
    | Sample
    | TakeBlock
    | SampleOther
    | ExamineAfter
    | Trace
    | MeasureCeilings
    | Release
)


class Described(Struct, tag="described"):
    """The environment of this worker."""

    environment: Environment


class Reasons(Struct, tag="reasons"):
    """One entry per cell: None, or why not."""

    reasons: list[str | None]


class Opened(Struct, tag="opened"):
    """The cell is right; `record` lacks its times."""

    record: Ok
    timed: bool


class Warm(Struct, tag="warm"):
    """The cell is steady and can be sampled."""

    call_ns: float
    parts: tuple[str, ...]
    slow_clock: bool
    clock: str
    other_clocks: tuple[str, ...]
    spent_ns: int


class Closed(Struct, tag="closed"):
    """The cell is over. `poisoned`: this process can no longer be trusted."""

    record: NotOk
    poisoned: bool = False


class Sampled(Struct, tag="sampled"):
    """ns per call of each sample, and whether the cell has given the same bits so far."""

    ns: list[float]
    repeats: bool = True
    clock_ns: int = 0
    """What the clock itself took, without messages and checks."""
    check_ns: int = 0
    """What the checks took."""
    began_ns: int = 0
    """Reading of the system's monotonic clock before the first sample; the parent reads the same clock."""
    ended_ns: int = 0
    changed: tuple[str, ...] = ()
    """What the cell changed in its process, in words; nothing of it spoils the samples."""


class BlockTaken(Struct, tag="block_taken"):
    """One side's turn in a comparison."""

    block: Block
    began_ns: int = 0
    """See Sampled."""
    ended_ns: int = 0


class Traced(Struct, tag="traced"):
    """Where the trace was written."""

    path: str


class Measured(Struct, tag="measured"):
    """Ceilings of the device."""

    ceilings: Ceilings


class Done(Struct, tag="done"):
    """Nothing to tell."""


class Refused(Struct, tag="refused"):
    """The question itself could not be answered."""

    reason: str
    not_in_ref: bool = False
    """Because what would be measured is not the code of the git ref that was asked for."""
    not_open: bool = False
    """Because the cell is not open in this process: the one that had it open is gone."""


Answer = Described | Reasons | Opened | Warm | Closed | Sampled | BlockTaken | Traced | Measured | Done | Refused


ANSWERS: dict[type, tuple[type, ...]] = {
    Describe: (Described,),
    Enlist: (Done,),
    Refusals: (Reasons,),
    VerifyOnly: (Reasons,),
    Open: (Opened, Closed),
    WarmUp: (Warm, Closed),
    Sample: (Sampled, Closed),
    TakeBlock: (BlockTaken, Closed),
    SampleOther: (Sampled, Closed),
    ExamineAfter: (Done, Closed),
    Trace: (Traced,),
    MeasureCeilings: (Measured,),
    Release: (Done,),
}
"""The kinds of answer that each question can have, beside Refused."""


class Numbered(Struct, Generic[Message], array_like=True):
    """A question or an answer with the number that makes them a pair."""

    number: int
    message: Message


encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Numbered[Question]).decode
decode_answer = msgspec.msgpack.Decoder(Numbered[Answer]).decode


class Garbled(Exception):
    """What came over the connection is no message of this protocol."""


def send(connection: Connection, message: bytes) -> None:
    """Write a message with its length before it."""
    rest = memoryview(_HEADER.pack(len(message)) + message)
    while rest:
        rest = rest[write(connection.fileno(), rest) :]


def receive(connection: Connection, wait: Callable[[], object] = lambda: None) -> bytes:
    """Read one message; `wait` is called before each read and may raise. Raises EOFError, Garbled."""
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
    """Say why an answer cannot be true; `sent_ns` and `received_ns` are the parent's own readings of the clock."""
    if not isinstance(answer, (*ANSWERS[type(question)], Refused)):
        return f"the answer to {_tag(question)} was {_tag(answer)}"
    if isinstance(question, Open) and isinstance(answer, Opened | Closed) and answer.record.cell != question.cell:
        return f"the answer about {question.cell.id} was about {answer.record.cell.id}"
    if isinstance(answer, Warm) and not (isfinite(answer.call_ns) and answer.call_ns > 0):
        return f"it told a call of {answer.call_ns} ns"
    if not isinstance(answer, Sampled | BlockTaken):
        return None
    if not sent_ns <= answer.began_ns <= answer.ended_ns <= received_ns:
        return "its clock does not agree with the one of attnbench's own process"
    if isinstance(answer, BlockTaken):
        assert isinstance(question, TakeBlock)
        samples = list(answer.block.ns.values())
        # Without the processor's time it is the median of some of the calls, not the mean of all.
        claimed = answer.block.ns.get("wall", 0.0) * (question.calls if "cpu" in answer.block.ns else 1)
    else:
        assert isinstance(question, Sample | SampleOther)
        samples = answer.ns
        if len(samples) != question.count:
            return f"{len(samples)} samples came back, {question.count} were asked for"
        claimed = sum(samples) * (question.calls if isinstance(question, Sample) else 1)
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
