"""What a parent may ask of a worker, and what it answers: msgpack messages over a socket pair."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from attnbench.comparison import Block
from attnbench.measuring.rates import Ceilings
from attnbench.run.origin import Origin
from attnbench.spec import Cell, Environment, Failed, Incorrect, Ok, OutOfMemory, Timeout, Unsupported

NotOk = Unsupported | Incorrect | OutOfMemory | Failed | Timeout


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
    """Time a part of an open cell."""

    cell: str
    part: str
    count: int
    calls: int


class TakeBlock(Struct, tag="take_block"):
    """Time so many calls of an open cell by every metric at once."""

    cell: str
    calls: int


class SampleOther(Struct, tag="sample_other"):
    """Time the main part of an open cell by another clock."""

    cell: str
    clock: str
    count: int


class Trace(Struct, tag="trace"):
    """Profile one call of an open cell into a folder."""

    cell: str
    folder: str


class MeasureCeilings(Struct, tag="ceilings"):
    """Measure matmul and copy ceilings."""

    dtype: str


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


class BlockTaken(Struct, tag="block_taken"):
    """One arm's turn in a comparison."""

    block: Block


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


Answer = Described | Reasons | Opened | Warm | Closed | Sampled | BlockTaken | Traced | Measured | Done | Refused

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
