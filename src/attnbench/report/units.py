"""Numbers for people. A figure that was not measured prints as an en dash, never as 0."""

from __future__ import annotations

from math import floor, log10

DASH = "–"
SMALL, TINY = 0.01, 1e-6
"""Values below which three decimals are too few, and below which an exponent is needed."""
MANY_TIMES = 10


def duration(ns: float | None) -> str:
    """Return nanoseconds with three significant digits and a unit."""
    if ns is None:
        return DASH
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{significant(ns / size)} {unit}"
    return f"{significant(ns)} ns"


def size(count: int | None) -> str:
    """Return bytes in decimal units."""
    if count is None:
        return DASH
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{significant(count / least)} {unit}"
    return f"{count} B"


def significant(value: float | None) -> str:
    """Return three significant digits without an exponent; two digits of a very small value."""
    if value is None:
        return DASH
    magnitude = abs(value)
    if 0 < magnitude < SMALL:
        return f"{value:.{1 - floor(log10(magnitude))}f}" if magnitude >= TINY else f"{value:.1e}"
    digits = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2 if magnitude >= 0.1 or not magnitude else 3
    return f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share of 1 in percent; beyond 1000 % as a multiple."""
    if share is None:
        return DASH
    if abs(share) >= MANY_TIMES:
        return f"{significant(share)}x"
    return f"{100 * share:.{1 if abs(share) < 0.1 else 0}f} %".replace("-0.0 %", "0.0 %")


def error(value: float | None) -> str:
    """Return a relative error as text."""
    return DASH if value is None else "inf" if value > 1e300 else f"{value:.1e}"


def half_interval(share: float | None) -> str:
    """Return half the width of an interval, as a share of its median, in percent."""
    if share is None:
        return DASH
    return ">100 %" if share > 1 else f"±{100 * share:.{1 if 100 * share < 9.95 else 0}f} %"
