"""`attnbench gate` on stored times: two run files, or a run file and a folder of baselines.

Times of different runs are never compared bare. Each is taken relative to the two anchor kernels that were interleaved
with it. As the anchors drift too, both must agree, and the floor is higher than for launches in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import erfc, exp, log, log1p, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import cast

import numpy as np
from msgspec.structs import replace

from attnbench.comparing.baselines import find as find_baseline
from attnbench.comparing.baselines import list_baselines, why_missing
from attnbench.comparing.gate_cases import Floors, OnInconclusive, case_of, geomean, judge, with_holm
from attnbench.comparing.statistics import SES_TO_DETECT, clears
from attnbench.comparison import ALPHA, Case, Comparison, Estimate, GateReport, Verdict
from attnbench.errors import UsageError
from attnbench.measuring.anchors import NAMES, anchors_beside, lacks_anchors
from attnbench.measuring.sampling import round_medians
from attnbench.results.ratios import STORED_FLOOR, STORED_SAME, Ratio, combine, geometric_mean, paired_ratio
from attnbench.results.records import is_anchor, label, machine_differences, on_one_clock, outcome_text, sitting_of
from attnbench.results.run_file import Run, read_run
from attnbench.run.user_functions import one_source, sources_of
from attnbench.spec import DIRTY, Environment, Incorrect, Ok, Record

NO_CONTROLS = "stored times have no controls: a verdict between refs (`--baseline REF --current REF`) is more reliable"
MEASURE_BOTH = (
    "Measure both on one machine with the same packages and the same attnbench, "
    "or make a new baseline here with `attnbench baseline save RUN`."
)
SHAKY = 0.1
"""Half-width of a stored time's interval above which the time cannot show that nothing changed."""
SAME_MEASUREMENT = "both sides are the same measurement"
NOTHING_NEW = "every case is the measurement that its baseline was made of: nothing new was judged"
MISSING = "ok in the baseline, but not in the current run: measure it, or remove it from the baseline"
ROUNDING_NS = 0.06
"""Largest error of rounding: files keep tenths of nanoseconds."""
Z = NormalDist().inv_cdf(1 - ALPHA)


def gate_stored(baseline: Path, current: Path, floors: Floors, on_inconclusive: OnInconclusive) -> GateReport:
    """Compare a run file with another one, or with a folder of baselines; raises UsageError if the machines differ."""
    run = read_run(current)
    old = None if baseline.is_dir() else read_run(baseline)
    cases = _against_folder(baseline, run, floors) if old is None else _against_run(old, run, floors)
    judgement = judge(cases, (), on_inconclusive)
    reasons = {case.first.reason for case in cases if case.first is not None}
    itself = (NOTHING_NEW,) if reasons == {SAME_MEASUREMENT} else ()
    return GateReport(
        baseline=baseline.name,
        current=current.name,
        suite=run.header.suite,
        outcome=judgement.outcome,
        cases=tuple(cases),
        geomean=geomean(cases),
        warnings=(*(() if old is None else old.warnings), *run.warnings, *judgement.warnings, *itself, NO_CONTROLS),
    )


def _against_run(old: Run, new: Run, floors: Floors) -> list[Case]:
    before, now = sources_of(old), sources_of(new)
    apart = {name for name in before.keys() & now.keys() if not one_source(before[name], now[name])}
    kept = [one for one in old.records if one.implementation not in apart]
    check_comparable(kept, new.records)
    cases = cases_of_runs(kept, new.records, floors)
    return [
        replace(case, reason=_other_function_text(before[case.implementation], now[case.implementation]))
        if case.status == "no_baseline" and case.implementation in apart
        else case
        for case in cases
    ]


def _other_function_text(before: str, now: str) -> str:
    return f"the baseline measured another function of that name, from {before}: this one is from {now}"


def _against_folder(folder: Path, run: Run, floors: Floors) -> list[Case]:
    cases: list[Case] = []
    records = [one for one in run.records if not is_anchor(one)]
    homeless = next((one for one in records if one.environment is None and isinstance(one, Ok)), None)
    if homeless is not None:
        raise UsageError(
            f"the environment of {homeless.cell.id} in the current run is unknown, so its baseline cannot be found: "
            "measure it again with `attnbench run`."
        )
    sources, known = sources_of(run), [one.environment for one in run.records if one.environment is not None]
    kept = {  # the baselines of the run's machine, with any software; all if the machine is not known
        one.record.cell.id: one
        for one in list_baselines(folder)
        if not known or not all(machine_differences(one.environment, here) for here in known)
    }
    for record in records:
        here, name, other = record.environment, record.implementation, ""
        if here is None:  # its worker was lost before it named its environment
            found = kept.get(record.cell.id)
        else:
            found = find_baseline(folder, here, name, record.workload, config=record.config)
        if found is not None and not one_source(found.source, source := sources.get(name, "")):
            found, other = None, _other_function_text(found.source, source)
        if found is None and record.status == "unsupported":
            continue
        anchors = [one for one in run.records if one.workload == record.workload and is_anchor(one)]
        if found is not None and here is not None:
            check_comparable(found.records, [record, *anchors])
        [case] = cases_of_runs(() if found is None else found.records, [record, *anchors], floors)
        if found is None and case.status != "wrong":
            why = other or why_missing(folder, here, name, record.workload)
            case = replace(case, status="no_baseline", reason=why)
        cases.append(case)
    return [*_corrected(cases), *_not_run([one.record for one in kept.values()], records)]


def _not_run(kept: Sequence[Record], records: Sequence[Record]) -> list[Case]:
    """Return cases for baselines that the run lacks: missing if the run has their workload, else not measured."""
    measured, asked = {one.cell.id for one in records}, {one.workload.id for one in records}
    cases: list[Case] = []
    for one in kept:
        if one.cell.id not in measured:
            case = Case(implementation=one.implementation, workload=one.workload, status="missing", reason=MISSING)
            why = "has a baseline, but its workload was not run"
            cases.append(case if one.workload.id in asked else replace(case, status="not_measured", reason=why))
    return cases


def check_comparable(baseline: Sequence[Record], current: Sequence[Record]) -> None:
    """Raise UsageError if the machines of two runs, or of their anchors, differ in a hard fact or are not known."""
    for old, new in _judged_pairs(baseline, current):
        here, there = _known_environment(old, "baseline", baseline), new.environment
        if isinstance(new, Ok):
            there = _known_environment(new, "current", current)
        if there is None or (is_anchor(old) and here.framework != there.framework):
            continue  # a worker that never started; anchors of two frameworks are not compared anyway
        if found := differences(here, there):
            raise UsageError(f"the two runs are not comparable: for {new.cell.id}, {'; '.join(found)}. {MEASURE_BOTH}")


def _judged_pairs(baseline: Sequence[Record], current: Sequence[Record]) -> Iterator[tuple[Ok, Record]]:
    """Yield each cell of both runs, then its anchors; a cell that the current run refused is left out."""
    old = {one.cell.id: one for one in baseline if isinstance(one, Ok) and not is_anchor(one)}
    for new in current:
        if new.cell.id not in old or new.status == "unsupported":
            continue
        yield old[new.cell.id], new
        judges = {one.implementation: one for one in anchors_beside(old[new.cell.id], baseline)}
        judged = anchors_beside(new, current)
        yield from ((judges[one.implementation], one) for one in judged if one.implementation in judges)


def _known_environment(record: Ok, run: str, records: Sequence[Record]) -> Environment:
    """Return the environment of a record; raises UsageError if it is unknown, or if anchors beside it have another."""
    here = record.environment
    if here is None or not here.device_name:
        field = "environment" if here is None else "device_name"
        raise UsageError(
            f"the two runs are not comparable: the {field} of {record.cell.id} in the {run} run is unknown. "
            f"{MEASURE_BOTH}"
        )
    for anchor in anchors_beside(record, records):
        there = anchor.environment
        if there is not None and here.device == there.device and (names := machine_differences(here, there)):
            ours, theirs = (_value_text(getattr(one, names[0])) for one in (here, there))
            raise UsageError(
                f"the {run} run mixes machines: {names[0]} of {record.cell.id} is {ours}, but that of "
                f"{anchor.implementation} beside it is {theirs}. {MEASURE_BOTH}"
            )
    return here


def differences(a: Environment, b: Environment) -> list[str]:
    """Return the facts that keep b, the current one, from being compared with a, each with both values."""
    names = [name for name in a.differing(b) if name != "packages"]
    values = [(name, *(_value_text(getattr(one, name)) for one in (a, b))) for name in names]
    found = [f"{name} is {old} in the baseline and {new} in the current run" for name, old, new in values]
    return found + [
        f"package {name} is {a.packages.get(name, 'absent')} in the baseline and "
        f"{b.packages.get(name, 'absent')} in the current run"
        for name in sorted({*a.packages, *b.packages})
        if a.packages.get(name) != b.packages.get(name)
    ]


def _value_text(value: object) -> str:
    if isinstance(value, tuple):
        return ".".join(str(part) for part in value)
    return "unknown" if value in ("", None) else str(value)


def cases_of_runs(baseline: Sequence[Record], current: Sequence[Record], floor_of: Floors | None = None) -> list[Case]:
    """Return every cell of two runs as a case, with Holm's correction over the timed ones; no floor is below 5 %."""
    old, new = ({one.cell.id: one for one in records if not is_anchor(one)} for records in (baseline, current))
    cases: list[Case] = []
    for cell, record in {**old, **new}.items():
        asked = floor_of(record.implementation, record.workload.id) if floor_of else STORED_FLOOR
        cases.append(_case(old.get(cell), new.get(cell), baseline, current, max(asked, STORED_FLOOR)))
    return _corrected(cases)


def _corrected(cases: Sequence[Case]) -> list[Case]:
    timed = {place: one.first for place, one in enumerate(cases) if one.first is not None and one.first.verdict}
    # Both anchors must show a slowdown, hence the larger p-value.
    p_values = {place: max(one.p_slower for one in first.estimates.values()) for place, first in timed.items()}
    return with_holm(cases, p_values)


def compare_records(
    a: Ok, b: Ok, run_a: Sequence[Record], run_b: Sequence[Record], floor: float = STORED_FLOOR
) -> Comparison:
    """Compare the times of two runs, each relative to the anchors of its own sitting. Slower or faster only if both
    anchors agree. A measurement is the same as itself, whatever its anchors. Times by different clocks are compared by
    a clock that both records hold, if there is one."""
    pairs: list[tuple[Ok, Ok]] = []  # the cell in both runs, then each anchor beside it
    problem = _missing_times(a, b, run_a, run_b)
    if not problem:
        anchors_a, anchors_b = ({r.implementation: r for r in anchors_beside(*at)} for at in ((a, run_a), (b, run_b)))
        bare = [(a, b), *((anchors_a[name], anchors_b[name]) for name in NAMES)]
        pairs = [cast(tuple[Ok, Ok], tuple(on_one_clock(pair))) for pair in bare]
        a, b = pairs[0]
        problem = _why_unlike(pairs)
    same = _is_one_measurement(a, b)
    if same and not sitting_of(a):  # short times of a coarse clock may agree by chance: the anchors must agree as well
        same = not problem and all(_is_one_measurement(*pair) for pair in pairs)
    if problem and not same:
        return replace(_untimed(a, b, problem), floor=floor)
    if same:
        ratios, verdict, reason = dict.fromkeys(NAMES, Ratio(1.0, 1.0, 1.0)), "same", SAME_MEASUREMENT
    else:
        level = 1 - 2 * ALPHA
        ratios = {
            name: combine([paired_ratio(anchor_b, b, level), paired_ratio(anchor_a, a, level)], [1, -1])
            for name, (anchor_a, anchor_b) in zip(NAMES, pairs[1:])
        }
        verdict, reason = _verdict(list(ratios.values()), floor), ""
        shaky = _why_imprecise([record for pair in pairs for record in pair])
        if shaky and verdict in ("same", "inconclusive"):
            verdict, reason = "inconclusive", shaky
    estimates = {name: _estimate(name, ratio, a, b, floor) for name, ratio in ratios.items()}
    return replace(
        _untimed(a, b, reason),
        verdict=verdict,
        ratio=geometric_mean(list(ratios.values())).value,
        interval=(min(one.low for one in ratios.values()), max(one.high for one in ratios.values())),
        smallest_slowdown=max(one.detectable for one in estimates.values()),
        estimates=estimates,
        floor=floor,
    )


def _is_one_measurement(a: Ok, b: Ok) -> bool:
    """Return whether b's rounds are a's: a file against itself, or against the baseline saved from it."""
    if a.time is None or b.time is None or (a.time.sitting, a.time.clock) != (b.time.sitting, b.time.clock):
        return False
    first, second = (round_medians(time) if time.rounds else np.asarray(time.samples_ns) for time in (a.time, b.time))
    return len(first) == len(second) and bool(np.all(np.abs(first - second) <= ROUNDING_NS))


def _why_imprecise(records: Sequence[Ok]) -> str:
    """Return why these times cannot show that nothing changed; empty if they can."""
    for record in records:
        assert record.time is not None
        half = record.time.half_width
        if half is None or half > SHAKY:
            known = "comes from one round" if half is None else f"is known only to ±{half:.0%}"
            remedy = "measure both again with a larger --budget, or compare refs"
            return f"the time of {record.implementation} {known}: {remedy}"
    return ""


def _case(a: Record | None, b: Record | None, run_a: Sequence[Record], run_b: Sequence[Record], floor: float) -> Case:
    """Return the case of a cell that both runs, or one of them, hold."""
    if a is None or b is None:
        record = a or b
        assert record is not None
        case = case_of(label(record), record.workload, None)
        if isinstance(b, Incorrect):
            return replace(case, status="wrong", reason=outcome_text(b))
        if isinstance(b, Ok):
            return replace(case, status="no_baseline", reason="not in the baseline run")
        if isinstance(a, Ok):
            return replace(case, status="missing", reason=MISSING)
        return replace(case, reason="not in the current run" if b is None else b.reason)
    if not (isinstance(a, Ok) and isinstance(b, Ok)):
        return case_of(label(b), b.workload, _untimed(a, b, b.reason or a.reason or ""))
    comparison = compare_records(a, b, run_a, run_b, floor)
    case = case_of(label(b), b.workload, comparison)
    if comparison.verdict is None and case.status == "not_measured" and (a.time or b.time):
        # A gate must not pass over what the baseline timed, whatever keeps the two from being compared.
        return replace(case, status="no_baseline" if a.time is None else "inconclusive")
    if comparison.verdict != "slower":
        return case
    ratios = " and ".join(f"{one.ratio:.2f} by {name}" for name, one in comparison.estimates.items())
    return replace(case, status="regression", reason=f"slower than the stored run: {ratios}")


def _missing_times(a: Ok, b: Ok, run_a: Sequence[Record], run_b: Sequence[Record]) -> str:
    """Return which time is missing for a comparison; empty if all are there."""
    for record, run, name in ((a, run_a, "baseline"), (b, run_b, "current")):
        if record.time is None:
            return f"verified but not timed in the {name} run"
        found = {one.implementation for one in anchors_beside(record, run)}
        if missing := [one for one in NAMES if one not in found]:
            lacks = lacks_anchors(record, run, f"no times of {' and '.join(missing)} for this workload")
            return f"the {name} run has {lacks}: measure it again"
    return ""


def _why_unlike(pairs: Sequence[tuple[Ok, Ok]]) -> str:
    """Return which times are not of the same thing; empty if all are."""
    for old, new in pairs:
        if _kind(old) != _kind(new):
            kinds = " and ".join(" ".join(str(part) for part in _kind(one)) for one in (old, new))
            return (
                f"{old.implementation} was measured differently in the two runs ({kinds}): measure the baseline again"
            )
    return ""


def _kind(record: Ok) -> tuple[str, ...]:
    """Return what two times of the same thing share: the clock, and for an anchor its framework and size."""
    assert record.time is not None
    if not is_anchor(record):
        return (record.time.clock,)
    framework = record.environment.framework if record.environment else ""
    return record.time.clock, framework, *(f"{name} {size}" for name, size in record.verified_at.shape.items())


def _verdict(ratios: Sequence[Ratio], floor: float) -> Verdict:
    for verdict in ("slower", "faster"):
        if all(clears((one.low, one.high), verdict, floor) for one in ratios):
            return verdict
    widest = 1 + STORED_SAME + max(0.0, floor - STORED_FLOOR)
    return "same" if all(1 / widest < one.low and one.high < widest for one in ratios) else "inconclusive"


def _estimate(name: str, ratio: Ratio, a: Ok, b: Ok, floor: float) -> Estimate:
    """Return the estimate by one anchor; a stored run is one launch, so both intervals come from its rounds."""
    assert a.time is not None
    assert b.time is not None
    below, above = log(ratio.value / ratio.low) / Z, log(ratio.high / ratio.value) / Z  # standard errors
    return Estimate(
        metric=name,
        ratio=ratio.value,
        interval=(ratio.low, ratio.high),
        t_interval=(ratio.low, ratio.high),
        detectable=exp(log1p(floor) + SES_TO_DETECT * below) - 1,
        p_slower=_p_above(log(ratio.value) - log1p(floor), below),
        p_faster=_p_above(-log(ratio.value) - log1p(floor), above),
        launches=1,
        pairs=min(len(round_medians(a.time)), len(round_medians(b.time))),
    )


def _p_above(excess: float, se: float) -> float:
    return erfc(excess / se / sqrt(2)) / 2 if se > 0 else float(excess <= 0)


def _untimed(a: Record, b: Record, reason: str) -> Comparison:
    """Return the comparison of two stored records without a verdict, and without their times."""
    bare = [replace(one, time=None, also={}, throughput=None) if isinstance(one, Ok) else one for one in (a, b)]
    return Comparison(
        a=label(a),
        b=label(b),
        workload=b.workload,
        verdict=None,
        reason=reason,
        record_a=bare[0],
        record_b=bare[1],
        commit_a=a.environment.commit.removesuffix(DIRTY) if a.environment else "",
        commit_b=b.environment.commit.removesuffix(DIRTY) if b.environment else "",
        dirty_a=a.environment is not None and a.environment.is_dirty,
        dirty_b=b.environment is not None and b.environment.is_dirty,
    )
