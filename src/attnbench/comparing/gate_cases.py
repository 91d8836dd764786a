"""Cases of a gate: how much slower each may be, the status of each by its comparisons, and the outcome of the gate.

A noisy case may get a higher floor than the usual 1 %, never a lower one, from a TOML file that is reviewed like code:

    [[case]]
    implementation = "torch.sdpa"
    workload = "*causal*"
    floor = 0.03
    reason = "thread pool of the library: 2 % between launches"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from attnbench.comparing.statistics import CONTRADICTION, launches_text
from attnbench.comparison import ALPHA, FAILING, FLOOR, OPEN, Case, CaseStatus, Comparison, Control, Outcome
from attnbench.errors import BrokenFile
from attnbench.files import convert, line_of, lines_of, read_toml
from attnbench.results.ratios import LEAST_DIFFERENCE, Ratio, geometric_mean
from attnbench.results.records import outcome_text
from attnbench.results.sentences import counted
from attnbench.spec import Failed, Incorrect, Ok, OutOfMemory, Timeout, Workload

Floors = Callable[[str, str], float]
"""Function of (implementation, workload id): share that a case must be slower by before it counts."""
LEAST_BYTES = 64 * 1024
"""Least growth of a peak in bytes; allocators round, so that fewer bytes do not count as growth."""
TOO_WIDE = "the stored times vary too much for a verdict: measure both again with a larger --budget, or compare refs"
OnInconclusive = Literal["inconclusive", "pass", "fail"]
"""Outcome of a job in which cases are inconclusive and nothing fails."""
CONTROL_FAILED = {
    "a/a": "untrusted: the A/A control failed ({}), so no verdict of this job can be trusted; run it again",
    "+5 %": "underpowered: the +5 % control was not detected ({}), so passes may hide slowdowns of that size",
}
SILENT_CONTROLS = (
    "all controls were inconclusive, so it is unknown which slowdowns would be found: raise --budget, or use a quieter "
    "machine"
)
UNMEASURED: dict[CaseStatus, str] = {
    "missing": "of the baseline missing in the current run",
    "no_baseline": "without a baseline: new since then, or never saved (`attnbench baseline save RUN`)",
    "not_measured": "not measured",
}
"""Words of the warning that counts the cases of a status."""


class Threshold(Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the file; both names are patterns as in a shell."""

    floor: float
    reason: str
    implementation: str = "*"
    workload: str = "*"

    def __post_init__(self) -> None:
        if self.floor < FLOOR:
            raise ValueError(f"floor = {self.floor:g} is below {FLOOR:g}: a floor can only be raised")
        if not self.floor < 1:
            raise ValueError(f"floor = {self.floor:g} is not below 1: write 0.03 for 3 %")
        if not self.reason.strip():
            raise ValueError("reason is empty: say why this case needs a higher floor")


def load_thresholds(path: Path | str | None) -> Floors:
    """Return the floor of each case: the highest of the entries that cover it, else the usual one."""
    entries = [] if path is None else read_thresholds(Path(path))

    def floor(implementation: str, workload: str) -> float:
        names = [one for one in entries if fnmatchcase(implementation, one.implementation)]
        return max([FLOOR, *(one.floor for one in names if fnmatchcase(workload, one.workload))])

    return floor


def read_thresholds(path: Path) -> list[Threshold]:
    """Read the entries of a file; raises BrokenFile with the line of a wrong one."""
    table, text = read_toml(path)
    for key in table:
        if key != "case":
            raise BrokenFile(path, line_of(text, key), f'unknown key "{key}": write [[case]] tables.')
    cases = table.get("case", [])
    if not isinstance(cases, list):
        raise BrokenFile(path, line_of(text, "case"), "write [[case]] with two brackets.")
    headers = list(lines_of(text, "case")) or [0]
    entries: list[Threshold] = []
    for place, case in enumerate(cases):
        try:
            entries.append(convert(case, Threshold))
        except msgspec.ValidationError as error:
            header, keys = headers[min(place, len(headers) - 1)], case if isinstance(case, dict) else ()
            named = min((key for key in keys if key in str(error)), key=str(error).index, default="")
            line = line_of(text, named, after=header) if named else None
            raise BrokenFile(path, line or header, f"{str(error).partition(' - at')[0]}.") from error
    return entries


def case_of(
    implementation: str, workload: Workload, first: Comparison | None, second: Comparison | None = None
) -> Case:
    """Return a case with its status by both stages: numbers decide first, then memory, then time. `confirm` corrects
    regressions for the number of cases afterwards."""
    stages = [stage for stage in (first, second) if stage is not None]
    status, reason = _by_numbers(stages) or _by_time(first, second)
    peaks = _peaks(stages[-1]) if stages else (None, None)
    if status not in ("wrong", "regression") and stages and all(map(grew, stages)):
        reason = "peak memory grew from {:,} to {:,} bytes".format(*peaks) + (f"; {reason}" if reason else "")
        status = "memory"
    return Case(
        implementation=implementation,
        workload=workload,
        status=status,
        reason=reason,
        first=first,
        second=second,
        memory=peaks,
    )


def _by_numbers(stages: Sequence[Comparison]) -> tuple[CaseStatus, str] | None:
    """Return the status if one of the sides lacks right results; None if times may decide."""
    for stage in stages:
        if isinstance(stage.record_b, Incorrect):
            return "wrong", outcome_text(stage.record_b)  # even if the baseline is wrong, was lost or refuses the case
        if isinstance(stage.record_a, Ok) and stage.record_b is not None and not isinstance(stage.record_b, Ok):
            return "wrong", outcome_text(stage.record_b)
    a, b = (stages[0].record_a, stages[0].record_b) if stages else (None, None)
    if a is None or isinstance(a, Ok):
        return None
    if isinstance(a, Failed | Timeout | OutOfMemory):
        # The baseline did not refuse the case: it was lost, so there is nothing to compare the current result with.
        if b is not None and (b.status, b.reason) == (a.status, a.reason) and not stages[0].died:
            return "not_measured", f"neither side gave a result: {outcome_text(a)}"
        return "inconclusive", f"the baseline was lost: {outcome_text(a)}"
    if isinstance(b, Ok):
        return "no_baseline", f"the baseline: {outcome_text(a)}"
    return "not_measured", outcome_text(a)


def _by_time(first: Comparison | None, second: Comparison | None) -> tuple[CaseStatus, str]:
    if first is None or first.verdict is None:
        return "not_measured", (first.reason if first else "") or "not measured"
    if first.verdict != "slower":
        statuses: dict[str, CaseStatus] = {"faster": "improved", "same": "pass", "inconclusive": "inconclusive"}
        return statuses[first.verdict], _open_reason(first)
    once = f"slower once ({_ratio_text(first)})"
    if second is None or second.verdict is None:
        return "inconclusive", f"{once}, not measured on fresh launches"
    if second.verdict == "slower":
        return "regression", f"slower twice ({_ratio_text(first)}, then {_ratio_text(second)} on fresh launches)"
    if second.verdict == "inconclusive":
        return "inconclusive", f"{once}, inconclusive on fresh launches"
    return "pass", f"{once}, not confirmed on fresh launches"


def _open_reason(comparison: Comparison) -> str:
    seen = comparison.smallest_slowdown
    if comparison.verdict != "inconclusive" or seen is None:
        return comparison.reason
    if contradiction := next((note for note in comparison.notes if note.startswith(CONTRADICTION)), ""):
        ratios = ", ".join(f"{one.metric} {one.ratio:.3f}" for one in comparison.estimates.values())
        return f"{contradiction} ({ratios})"
    count = len(comparison.launches)
    too_wide = "too few for a verdict, raise --budget" if count else TOO_WIDE
    why = comparison.reason or (f"could have seen {seen:.1%}" if seen <= 1 else too_wide)
    return f"after {launches_text(count)}: {why}" if count else why


def _ratio_text(comparison: Comparison) -> str:
    """Return the ratio that made it slower, with its metric if that is not the published one."""
    worst = min(comparison.estimates.values(), key=lambda one: one.p_slower, default=None)
    if worst is None or worst.ratio == comparison.ratio:
        return "?" if comparison.ratio is None else f"{comparison.ratio:.2f}"
    return f"{worst.ratio:.2f} by {worst.metric} time"


def _peaks(comparison: Comparison) -> tuple[int | None, int | None]:
    a, b = comparison.record_a, comparison.record_b
    return a.memory.peak_bytes if isinstance(a, Ok) else None, b.memory.peak_bytes if isinstance(b, Ok) else None


def grew(comparison: Comparison) -> bool:
    """Return whether b's peak is over 1 % (and 64 kB) above a's."""
    a, b = _peaks(comparison)
    return a is not None and b is not None and b > LEAST_DIFFERENCE * a and b - a > LEAST_BYTES


class Judgement(NamedTuple):
    """Outcome of a gate, with warnings."""

    outcome: Outcome
    warnings: tuple[str, ...]


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust each p-value for being one of many (Holm's step-down procedure); returned in the order given."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - place) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def p_slower(comparison: Comparison) -> float:
    """Return the p-value of "b is slower": the probability of such data on any metric if b were not (Bonferroni)."""
    found = comparison.estimates.values()
    return min([1.0, *(len(found) * one.p_slower for one in found)])


def confirm(cases: Sequence[Case]) -> list[Case]:
    """Apply Holm's correction to the second stages of all cases that had one."""
    return with_holm(cases, {place: p_slower(one.second) for place, one in enumerate(cases) if one.second is not None})


def with_holm(cases: Sequence[Case], p_values: Mapping[int, float]) -> list[Case]:
    """Return the cases with adjusted p-values at those places; a regression that may be chance becomes inconclusive."""
    judged = list(cases)
    for place, p in zip(p_values, holm(list(p_values.values()))):
        case = judged[place] = replace(judged[place], p_holm=p)
        if case.status == "regression" and p > ALPHA:
            stages = [stage for stage in (case.first, case.second) if stage is not None]
            status = "memory" if stages and all(map(grew, stages)) else "inconclusive"
            doubt = f"may be due to chance among {counted(len(p_values), 'case')} (p {p:.2g} after Holm)"
            judged[place] = replace(case, status=status, reason=f"{case.reason}, but {doubt}")
    return judged


def judge(
    cases: Sequence[Case], controls: Sequence[Control], on_inconclusive: OnInconclusive = "inconclusive"
) -> Judgement:
    """Return the outcome: wrong results and memory first, then a failed A/A control, slowdowns, and open cases."""
    still_open = sum(case.status in OPEN for case in cases)
    timed = any(case.comparison is not None and case.comparison.verdict is not None for case in cases)
    outcome: Outcome = "pass"
    if any(case.status in ("wrong", "memory") for case in cases):
        outcome = "fail"  # neither depends on time
    elif any(control.name == "a/a" and not (control.passed or control.silent) for control in controls):
        outcome = "untrusted"
    elif any(case.status in FAILING for case in cases):
        outcome = "fail"
    elif not timed:
        outcome = "nothing"
    elif still_open or (controls and all(control.silent for control in controls)):
        outcome = on_inconclusive
    counts = Counter(case.status for case in cases)
    if controls and all(control.silent for control in controls):
        warnings = [SILENT_CONTROLS]
    else:
        warnings = [
            CONTROL_FAILED[one.name].format(one.comparison.verdict or one.comparison.reason or "not measured")
            for one in controls
            if not one.passed and not (one.silent and one.name == "a/a")
        ]
    warnings += [f"{counted(counts[status], 'case')} {what}" for status, what in UNMEASURED.items() if counts[status]]
    if still_open and on_inconclusive == "pass":
        warnings.append(f"{counted(still_open, 'case')} inconclusive, counted as passed because that was asked for")
    return Judgement(outcome=outcome, warnings=tuple(warnings))


def geomean(cases: Sequence[Case]) -> tuple[float, float, float] | None:
    """Return the geometric mean of all timed cases' ratios with its interval, at the confidence of the cases; None if
    there is none."""
    ratios = [
        Ratio(one.ratio, *one.interval)
        for one in (case.comparison for case in cases)
        if one is not None and one.verdict is not None and one.ratio is not None and one.interval is not None
    ]
    if not ratios:
        return None
    mean = geometric_mean(ratios)
    return mean.value, mean.low, mean.high
