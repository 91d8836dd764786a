"""Plausibility of the times in a file: readers take logarithms, so that impossible times must be refused first."""

from __future__ import annotations

from math import inf, isfinite
from statistics import median

from attnbench.spec import Ok, Record, Time

POSITIVE = ("median_ns", "min_ns", "max_ns", "p50_ns", "p95_ns", "p99_ns", "mean_ns")


ROUNDING_NS = 0.06
"""Largest error of rounding: files keep tenths of nanoseconds of a sample."""


def impossible_times(record: Record, trimmed: bool = False) -> str:
    """Return the first time of a record that no clock can have given, in words; empty if there is none.

    With `trimmed` the samples are the medians of rounds, as a baseline keeps them.
    """
    if not isinstance(record, Ok):
        return ""
    times = {"time": record.time} | {f"also.{name}": time for name, time in record.also.items()}
    for name, time in times.items():
        problem = "" if time is None else _problem(time) or _not_of_samples(time, trimmed)
        if problem:
            return f"{name}.{problem} in the record of {record.cell.id}"
    return ""


def _problem(time: Time) -> str:
    if not time.samples_ns:
        return "samples_ns is empty"
    for name, value in [("samples_ns", one) for one in time.samples_ns] + [(n, getattr(time, n)) for n in POSITIVE]:
        if not (isfinite(value) and value > 0):
            return f"{name} holds {value:g}, which is not a positive number of nanoseconds"
    if not (isfinite(time.std_ns) and time.std_ns >= 0):
        return f"std_ns is {time.std_ns:g}, which is not a spread"
    if not time.min_ns <= time.median_ns <= time.max_ns:
        return f"median_ns {time.median_ns:g} is not between min_ns {time.min_ns:g} and max_ns {time.max_ns:g}"
    if time.ci95_ns is not None and not time.ci95_ns[0] <= time.median_ns <= time.ci95_ns[1]:
        return f"ci95_ns does not hold median_ns {time.median_ns:g}"
    if time.calls_per_sample < 1:
        return f"calls_per_sample is {time.calls_per_sample}"
    if time.rounds and (min(time.rounds) < 0 or sum(time.rounds) != len(time.samples_ns)):
        return f"rounds has {sum(time.rounds)} samples, but samples_ns {len(time.samples_ns)}"
    return ""


def _not_of_samples(time: Time, trimmed: bool) -> str:
    """Return which summary does not fit the samples; rankings read the summaries, intervals the samples."""
    least, most = min(time.samples_ns), max(time.samples_ns)
    if trimmed:
        # The median of all samples lies between the medians of the rounds.
        bounds = {"median_ns": (least, most), "min_ns": (0.0, least), "max_ns": (most, inf)}
    else:
        middle = median(time.samples_ns)
        exact = {"median_ns": middle, "p50_ns": middle, "min_ns": least, "max_ns": most}
        bounds = {name: (value, value) for name, value in exact.items()}
    for name, (low, high) in bounds.items():
        value = getattr(time, name)
        slack = ROUNDING_NS + 1e-6 * value
        if not low - slack <= value <= high + slack:
            return f"{name} {value:g} is not that of samples_ns"
    return ""
