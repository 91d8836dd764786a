"""Recommendations: a sentence about a family of workloads, and the figures that support it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from attnbench.results.families import Family
from attnbench.results.ratios import Ratio
from attnbench.results.sentences import counted, format_ratio

Kind = Literal["overall", "winner", "tie", "mixed", "flash", "threshold", "launch-bound", "memory"]
SIGNIFICANT = 2


class Figure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A number that supports a sentence."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        bounds = None if self.low is None or self.high is None else (self.low, self.high)
        if self.unit == "x":
            text = f"{self.value:.2f}x" if bounds is None else format_ratio(Ratio(self.value, *bounds))
            return f"{self.name} {text}"
        digits = ",.0f" if self.unit in ("tokens", "ns") else ".3g"
        span = "" if bounds is None else f" ({bounds[0]:{digits}}-{bounds[1]:{digits}})"
        return f"{self.name} {self.value:{digits}} {self.unit}".rstrip() + span


class Pick(Struct, frozen=True, kw_only=True):
    """The recommended implementation in a few words, for a table."""

    name: str
    same: tuple[str, ...] = ()
    """Other names of the same kernel."""
    equal: str = ""
    """Another implementation that is as fast."""
    mixed: bool = False
    """Whether no implementation is fastest everywhere: this one is unbeaten most often."""
    over_next: str = ""
    """Speed against the best of the others."""
    certain: bool = True
    """Whether the whole of `over_next` is significant; else a part of its span is noise."""
    gain: str = ""
    """Speed against the framework's plain implementation."""
    led: int
    """Number of workloads on which no other implementation was significantly faster."""
    of: int


class Recommendation(Struct, frozen=True, kw_only=True):
    """One piece of advice for one family of workloads."""

    kind: Kind
    family: str
    """Title of the family."""
    device: str
    text: str
    workloads: tuple[str, ...]
    """Ids of the workloads that were measured for it."""
    figures: tuple[Figure, ...]
    pick: Pick | None = None
    """Implementation to use, if the advice names one."""

    @property
    def basis(self) -> str:
        """Figures and the number of workloads they come from, in one line."""
        measured = f"from {counted(len(self.workloads), 'workload')} on {self.device or 'unknown'}"
        return f"{'; '.join(map(str, self.figures))}; {measured}"


def advise_family(
    kind: Kind, family: Family, text: str, workloads: Iterable[str], figures: Iterable[Figure], pick: Pick | None = None
) -> Recommendation:
    """Return a recommendation for a family, with the family's title before the text."""
    return Recommendation(
        kind=kind,
        family=family.title,
        device=family.device,
        text=f"{family.title}{text}.",
        workloads=tuple(dict.fromkeys(workloads)),
        figures=tuple(figures),
        pick=pick,
    )


def ratio_figure(name: str, ratio: Ratio) -> Figure:
    """Return a ratio with its interval as a figure."""
    return Figure(name=name, value=ratio.value, low=ratio.low, high=ratio.high, unit="x")


def tokens(count: float) -> str:
    """Return an estimated length as text, with the two digits that are known."""
    return f"{rounded(count):,}"


def rounded(count: float) -> int:
    """Return a length rounded to two digits."""
    digits = SIGNIFICANT - len(str(int(count)))
    return int(round(count, min(digits, 0)))


def listed(parts: Sequence[str]) -> str:
    """Return parts as a list in a sentence: a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
