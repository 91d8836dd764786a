"""Options that several commands share, and their exit codes; `inputs.py` finds what they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from cyclopts import Group, Parameter, Token

from attnbench.errors import UsageError

NOTHING, INCONCLUSIVE, INTERRUPTED = 3, 4, 130
"""Exit codes that several commands have."""
DEFAULT_SUITE = "quick"
SHAPE = Group(
    "Shape",
    help="Without SUITE, these options make a grid of workloads; with SUITE, each replaces that axis of the suite.",
)
CHOICE = Group("What to run")
SAMPLING = Group("How to measure")

Many = Parameter(consume_multiple=1, negative="")
"""`--batch 1 4` and `--batch 1 --batch 4` mean the same; `--batch` alone means nothing."""
Names = Annotated[tuple[str, ...], Many]


def read_whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert words such as 64, 0x40, 64.0 or 1e3 to whole numbers without rounding."""

    def whole(token: Token) -> int:
        for read in (int, lambda text: int(text, 0), float):
            with suppress(ValueError, OverflowError):
                number = read(token.value)
                if number == int(number):
                    return int(number)
        raise UsageError(f'{token.keyword} takes whole numbers, not "{token.value}".')

    numbers = tuple(whole(token) for token in tokens)
    return numbers if get_origin(kind) is tuple else numbers[0]


Whole = Parameter(converter=read_whole)
Ints = Annotated[tuple[int, ...], Many, Whole]
Switch = Annotated[bool, Parameter(negative="")]
Runs = Annotated[str, Parameter(help="Run files, parts of their names, or `latest` (when none is given).")]
Suite = Annotated[str | None, Parameter(help="A suite by name or a TOML file; `quick` when no shape is given.")]
Words = Annotated[str, Parameter(name=["--filter", "-k"], help="Only cells whose id contains all these words.")]
Device = Annotated[str | None, Parameter(help="cpu, cuda, ...")]
Threads = Annotated[int | None, Whole, Parameter(help="CPU threads.")]
Budget = Annotated[float, Parameter(help="Seconds that one comparison may take at most.")]
Quick = Annotated[Switch, Parameter(help="Cap shapes and sampling time of the suite.")]
RunsFolder = Annotated[Path | None, Parameter(help="Folder of run files.")]
Json = Annotated[Switch, Parameter(name="--json", help="One JSON document on stdout and nothing else.")]
Quiet = Annotated[Switch, Parameter(name="--quiet", help="Print no progress on stderr.")]


@Parameter(name="*", group=SHAPE)
@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Axes of workloads; an empty one was not given."""

    seq_len: Annotated[Ints, Parameter(help="Query tokens.")] = ()
    kv_len: Annotated[Ints, Parameter(help="Key tokens, if they are not as many as query tokens.")] = ()
    batch: Annotated[Ints, Parameter(help="Sequences.")] = ()
    heads: Annotated[Names, Parameter(help="Query heads, or query:key/value heads such as 32:8.")] = ()
    head_dim: Annotated[Ints, Parameter(help="Width of a head.")] = ()
    v_head_dim: Annotated[Ints, Parameter(help="Width of the values, if it differs.")] = ()
    dtype: Annotated[Names, Parameter(help="float32, bfloat16, float16 or float64.")] = ()
    mask: Annotated[Names, Parameter(help="full, causal, window:128:0, prefix:816, lengths:512,300, A&B ...")] = ()
    causal: Annotated[Switch, Parameter(help="Short for --mask causal; with --mask, both.")] = False
    pass_: Annotated[
        tuple[Literal["forward", "backward", "train"], ...], Many, Parameter(name="--pass", help="Which pass is timed.")
    ] = ()
    scale: Annotated[tuple[float, ...], Many, Parameter(help="Softmax scale, if it is not head_dim ** -0.5.")] = ()
    softcap: Annotated[tuple[float, ...], Many, Parameter(help="Soft cap on the logits.")] = ()


OWN_SHAPE = ShapeOptions(seq_len=(512,))
"""Shape that a bare function is checked on if no other is given."""


@Parameter(name="*", group=CHOICE)
@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which implementations and which of the workloads."""

    impl: Annotated[Names, Parameter(help="Names, a framework, file.py:function or package.module:function.")] = ()
    against: Annotated[Names, Parameter(help="What --impl is compared with: names or a framework.")] = ()
    framework: Annotated[
        str | None, Parameter(help="Framework of bare functions (torch); without --impl, only this framework runs.")
    ] = None
    device: Annotated[str | None, Parameter(help="cpu, cuda, ...; the best of each framework when not given.")] = None
    words: Annotated[
        str, Parameter(name=["--filter", "-k"], help="Words that implementation names or workload ids must contain.")
    ] = ""
    tag: Annotated[Names, Parameter(help="Only workloads that have one of these tags.")] = ()
    shard: Annotated[str | None, Parameter(help="i/n: the i-th of n parts of the workloads (from 1).")] = None


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How long and how; None leaves it to the settings (attnbench.toml, ATTNBENCH_*)."""

    trials: Annotated[int | None, Whole, Parameter(help="Exactly this many samples instead of the stop rule.")] = None
    budget: Annotated[float | None, Parameter(help="Seconds of sampling per cell.")] = None
    precision: Annotated[
        float | None, Parameter(help="Stop when the 95 % interval is within this share of the median.")
    ] = None
    timeout: Annotated[float | None, Parameter(help="Seconds that a stage of a cell may take.")] = None
    threads: Threads = None
    seed: Annotated[int | None, Whole, Parameter(help="Seed of the order and the inputs.")] = None
    clock: Annotated[str | None, Parameter(help="Another clock of the device, such as graph.")] = None
    trace: Annotated[Path | None, Parameter(help="Folder for a profiler trace of one call per cell.")] = None
