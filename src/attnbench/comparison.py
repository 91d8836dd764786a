"""Data of a comparison of two sides and of a gate: plain structures without behaviour, written and read as JSON."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from attnbench.spec import Record, Workload

Verdict = Literal["faster", "slower", "same", "inconclusive"]
"""Verdict on b, the second side."""
FLOOR = 0.01
"""Least share by which two times must differ: memory layout and the order of start alone make this much."""
LOOKS = (6, 10, 16, 24)
"""Numbers of launches after which the evidence is judged; the risk of a false alarm is split over the looks."""
ALPHA = 0.01
"""Risk of a false alarm."""


class Block(Struct, frozen=True, array_like=True):
    """One side's turn: nanoseconds per call by each metric ("wall", and "cpu" or "device")."""

    ns: dict[str, float]
    switches: int = 0
    """Involuntary context switches during the turn."""
    sm_mhz: float | None = None
    """Clock of the GPU at the end, if the driver reports it."""
    throttled: bool = False
    """Whether heat or the power supply held that clock down."""


class Launch(Struct, frozen=True, kw_only=True):
    """A fresh process of each side (on an accelerator a fresh warm-up): a[i] and b[i] are neighbours in time."""

    a: tuple[Block, ...]
    b: tuple[Block, ...]
    first: Literal["a", "b"] = "a"
    """Side that was started first."""


class Estimate(Struct, frozen=True, kw_only=True):
    """Time of b / time of a by one metric."""

    metric: str
    ratio: float
    interval: tuple[float, float]
    """Interval from launches resampled as wholes, at the confidence of the look it was made at."""
    t_interval: tuple[float, float]
    """Student's t over the launches' medians, of 8 launches or more without the extremes: the cautious cross-check."""
    detectable: float
    """Smallest slowdown that would have been found, such as 0.026."""
    p_slower: float
    """Probability of such data if b were not slower than the floor allows."""
    p_faster: float
    launches: int
    pairs: int


class Comparison(Struct, frozen=True, kw_only=True):
    """The answer to "is b slower than a?" on one workload."""

    a: str
    b: str
    workload: Workload
    verdict: Verdict | None
    """Verdict on b; None if a side could not be timed, and `reason` says why."""
    reason: str = ""
    ratio: float | None = None
    """Wall time of b / of a (device time on an accelerator)."""
    interval: tuple[float, float] | None = None
    smallest_slowdown: float | None = None
    """Smallest slowdown that would have been seen by the published metric."""
    estimates: dict[str, Estimate] = {}
    launches: tuple[Launch, ...] = ()
    elapsed_s: float = 0.0
    timing_s: float = 0.0
    """Part of `elapsed_s` after both sides had been built and verified for the first time."""
    record_a: Record | None = None
    """Verification and memory of the side; `time` is null, since the times are in `launches`."""
    record_b: Record | None = None
    died: tuple[Literal["a", "b"], ...] = ()
    """Sides whose process was lost (crashed, killed, without an answer), if that ended the comparison."""
    commit_a: str = ""
    commit_b: str = ""
    dirty_a: bool = False
    """Whether the side was a working tree with changes that its commit does not have."""
    dirty_b: bool = False
    floor: float = FLOOR
    notes: tuple[str, ...] = ()


CaseStatus = Literal[
    "pass", "regression", "wrong", "memory", "improved", "inconclusive", "missing", "no_baseline", "not_measured"
]  # fmt: skip
"""Status of a case.

pass: same, or slower once but not confirmed. wrong: b gives wrong results, or no result if a was right. memory: b needs
over 1 % more at its peak. missing: right in the stored baseline, but not in the current run at all. no_baseline: a
refuses this case, or does not have it. inconclusive: cannot be decided, or a was lost (failed, no answer, no memory).
not_measured: neither gave a time.
"""
FAILING: tuple[CaseStatus, ...] = ("regression", "wrong", "memory")
OPEN: tuple[CaseStatus, ...] = ("inconclusive", "missing")
"""Statuses that neither pass nor fail: the job is inconclusive."""
Outcome = Literal["pass", "fail", "inconclusive", "untrusted", "nothing", "interrupted"]
EXIT_CODES: dict[str, int] = {
    "pass": 0, "fail": 1, "nothing": 3, "inconclusive": 4, "untrusted": 5, "interrupted": 130,
}  # fmt: skip


class Case(Struct, frozen=True, kw_only=True):
    """One implementation on one workload, baseline against current."""

    implementation: str
    workload: Workload
    status: CaseStatus
    reason: str = ""
    first: Comparison | None = None
    second: Comparison | None = None
    """Stage two: fresh launches for a case that the first comparison called slower."""
    p_holm: float | None = None
    """p-value of stage two after Holm's correction over cases."""
    memory: tuple[int | None, int | None] = (None, None)
    """Peak bytes of baseline and current."""
    culprit: str = ""

    @property
    def id(self) -> str:
        """Implementation and workload, separated by a slash."""
        return f"{self.implementation}/{self.workload.id}"

    @property
    def comparison(self) -> Comparison | None:
        """The comparison that counts: that of the last stage."""
        return self.second or self.first


class Control(Struct, frozen=True, kw_only=True):
    """A comparison whose right answer is known: A/A must not be slower, +5 % of real work must be."""

    name: Literal["a/a", "+5 %"]
    passed: bool
    comparison: Comparison

    @property
    def silent(self) -> bool:
        """Whether the control is inconclusive: neither passed nor failed."""
        return self.comparison.verdict == "inconclusive"


class GateReport(Struct, frozen=True, kw_only=True):
    """Outcome of a gate, with its cases and controls."""

    baseline: str
    current: str
    suite: str
    outcome: Outcome
    cases: tuple[Case, ...]
    controls: tuple[Control, ...] = ()
    geomean: tuple[float, float, float] | None = None
    """Ratio over all timed cases, with its interval."""
    elapsed_s: float = 0.0
    warnings: tuple[str, ...] = ()
    attnbench: str = ""
    schema: int = 1
