"""Figures in sentences: ratios with their intervals, counts with their nouns."""

from __future__ import annotations

from attnbench.results.ratios import LEAST_DIFFERENCE, TOO_WIDE, Ratio

CANNOT_TELL = "cannot tell"


def format_ratio(ratio: Ratio) -> str:
    """1.96x (1.94-1.98), with as many digits as the size deserves; of a hopeless interval its nearer edge."""
    if vague(ratio):
        return CANNOT_TELL
    if hopeless(ratio):
        return f"more than {_times(ratio.low)}" if ratio.low > 1 else f"less than {_times(ratio.high)}"
    digits = _digits(ratio.value)
    return f"{_times(ratio.value)} ({ratio.low:.{digits}f}-{ratio.high:.{digits}f})"


def format_span(least: float, most: float) -> str:
    """1.13x to 1.42x; one figure where both read the same."""
    low, high = f"{least:.2f}x", f"{most:.2f}x"
    return low if low == high else f"{low} to {high}"


def vague(ratio: Ratio) -> bool:
    """Whether the interval is hopeless and on both sides of 1: too few rounds, or times that vary too much."""
    return ratio.low <= 1 <= ratio.high and hopeless(ratio)


def hopeless(ratio: Ratio) -> bool:
    """Whether the interval is too wide for a figure."""
    return ratio.high > TOO_WIDE * ratio.low


def slightly_apart(ratio: Ratio) -> str:
    """Words for a ratio that is not 1 for certain, yet too near to it to rank by; empty for any other."""
    if ratio.low <= 1 <= ratio.high or ratio.sign:
        return ""
    sure = ratio.low >= 1 / LEAST_DIFFERENCE and ratio.high <= LEAST_DIFFERENCE
    return f"{'certainly' if sure else 'perhaps'} less than {100 * (LEAST_DIFFERENCE - 1):.0f} % apart"


def counted(count: int, noun: str) -> str:
    """1 shape, 2 shapes."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def all_of(count: int, noun: str) -> str:
    """The one shape, both shapes, all 3 shapes."""
    return f"the one {noun}" if count == 1 else f"both {noun}s" if count == 2 else f"all {counted(count, noun)}"


def _times(value: float) -> str:
    return f"{value:.{_digits(value)}f}x"


def _digits(value: float) -> int:
    return 3 if value < 0.1 else 2 if value < 10 else 1 if value < 100 else 0
