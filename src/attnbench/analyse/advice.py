"""What a recommendation is: a sentence, and the figures it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from attnbench.analyse.wording import counted, format_ratio
from attnbench.results.ratios import Ratio

Kind = Literal["overall", "winner", "tie", "mixed", "flash", "threshold", "launch-bound", "memory"]
SIGNIFICANT = 2


class Figure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A number that a sentence rests on."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        bounds = None if self.low is None or self.high is None else (self.low, self.high)
        if self.unit == "x":
            told = f"{self.value:.2f}x" if bounds is None else format_ratio(Ratio(self.value, *bounds))
            return f"{self.name} {told}"
        digits = ",.0f" if self.unit in ("tokens", "ns") else ".3g"
        span = "" if bounds is None else f" ({bounds[0]:{digits}}-{bounds[1]:{digits}})"
        return f"{self.name} {self.value:{digits}} {self.unit}".rstrip() + span


class Pick(Struct, frozen=True, kw_only=True):
    """The answer in a few words, for a table."""

    name: str
    same: tuple[str, ...] = ()
    """Other names of the same kernel."""
    equal: str = ""
    """Another that is as fast."""
    mixed: bool = False
    """Nobody is fastest everywhere: this one is unbeaten most often."""
    over_next: str = ""
    """Against the best of the others."""
    certain: bool = True
    """Whether all of that differs from 1 for certain; else some of what it spans is within the noise."""
    gain: str = ""
    """Over the framework's plain implementation."""
    led: int
    """Workloads on which nobody was faster for certain."""
    of: int


class Recommendation(Struct, frozen=True, kw_only=True):
    """One thing to do, for one family of workloads."""

    kind: Kind
    family: str
    """Title of the family."""
    device: str
    text: str
    workloads: tuple[str, ...]
    """Ids of what was measured for it."""
    figures: tuple[Figure, ...]
    pick: Pick | None = None
    """Where it says which one to use."""

    @property
    def basis(self) -> str:
        """The figures and how many workloads they come from, in one line."""
        return (
            f"{'; '.join(map(str, self.figures))}; from {workloads(len(self.workloads))} on {self.device or 'unknown'}"
        )


def ratio_figure(name: str, ratio: Ratio) -> Figure:
    """A ratio with its interval."""
    return Figure(name=name, value=ratio.value, low=ratio.low, high=ratio.high, unit="x")


def tokens(count: float) -> str:
    """A length that was worked out, with two digits and no pretence of more."""
    return f"{rounded(count):,}"


def rounded(count: float) -> int:
    """A length with two digits."""
    digits = SIGNIFICANT - len(str(int(count)))
    return int(round(count, min(digits, 0)))


def workloads(count: int) -> str:
    """1 workload, 2 workloads."""
    return counted(count, "workload")


def listed(parts: Sequence[str]) -> str:
    """a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
