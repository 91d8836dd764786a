"""`attnbench gate` on what was measured before: two run files, or a run file and the folder of saved baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from attnbench.comparing import baselines
from attnbench.comparing.gate_verdict import OnInconclusive, geomean, judge, with_holm
from attnbench.comparing.same_machine import check_comparable, one_source
from attnbench.comparing.stored_cases import MISSING, cases_of_runs
from attnbench.comparison import Case, GateReport
from attnbench.errors import UsageError
from attnbench.results.records import ANCHOR
from attnbench.results.run_file import Run, read_run
from attnbench.run.user_functions import sources_of
from attnbench.spec import Ok, Record

Floors = Callable[[str, str], float]
NO_CONTROLS = (
    "stored times have no controls: a verdict between refs (`--baseline REF --current REF`) can be believed more"
)


def gate_stored(baseline: Path, current: Path, floors: Floors, on_inconclusive: OnInconclusive) -> GateReport:
    """A run file against another one, or against a folder of baselines; UsageError where machines differ."""
    run = read_run(current)
    if baseline.is_dir():
        old, cases = None, _against_folder(baseline, run, floors)
    else:
        old = read_run(baseline)
        cases = _against_run(old, run, floors)
    judgement = judge(cases, (), on_inconclusive)
    return GateReport(
        baseline=baseline.name,
        current=current.name,
        suite=run.header.suite,
        outcome=judgement.outcome,
        cases=tuple(cases),
        geomean=geomean(cases),
        warnings=(*(() if old is None else old.warnings), *run.warnings, *judgement.warnings, NO_CONTROLS),
    )


def _against_run(old: Run, new: Run, floors: Floors) -> list[Case]:
    before, now = sources_of(old), sources_of(new)
    apart = {name for name in before.keys() & now.keys() if not one_source(before[name], now[name])}
    kept = [one for one in old.records if one.implementation not in apart]
    check_comparable(kept, new.records)
    cases = cases_of_runs(kept, new.records, floors)
    return [
        replace(case, reason=_other_function(before[case.implementation], now[case.implementation]))
        if case.status == "no_baseline" and case.implementation in apart
        else case
        for case in cases
    ]


def _other_function(before: str, now: str) -> str:
    return f"the baseline is of another function by that name: of {before}, this one is of {now}"


def _against_folder(folder: Path, run: Run, floors: Floors) -> list[Case]:
    cases: list[Case] = []
    cells = [one for one in run.records if not one.implementation.startswith(ANCHOR)]
    records = [one for one in cells if one.environment is not None]
    homeless = next((one for one in cells if one.environment is None and isinstance(one, Ok)), None)
    if homeless is not None:
        raise UsageError(
            f"the environment of {homeless.cell.id} in the current run is not known, so it has no baseline: "
            "measure it again with `attnbench run`."
        )
    sources = sources_of(run)
    for record in records:
        assert record.environment is not None
        where = (folder, record.environment, record.implementation, record.workload)
        found, other = baselines.find(*where, config=record.config), ""
        source = sources.get(record.implementation, "")
        if found is not None and not one_source(found.source, source):
            found, other = None, _other_function(found.source, source)
        if found is None and record.status == "unsupported":
            continue
        beside = [one for one in run.records if one.workload == record.workload]
        anchors = [one for one in beside if one.implementation.startswith(ANCHOR)]
        if found is not None:
            check_comparable(found.records, [record, *anchors])
        [case] = cases_of_runs(() if found is None else found.records, [record, *anchors], floors)
        if found is None and case.status != "wrong":
            case = replace(case, status="no_baseline", reason=other or baselines.why_missing(*where))
        cases.append(case)
    timed = {place: one.first for place, one in enumerate(cases) if one.first is not None and one.first.verdict}
    p_values = {place: max(e.p_slower for e in one.estimates.values()) for place, one in timed.items()}
    return [*with_holm(cases, p_values), *_not_run(folder, records)]


def _not_run(folder: Path, records: Sequence[Record]) -> list[Case]:
    """Baselines of this machine that the run does not hold: missing where it has their workload, else listed only."""
    here = {one.environment.fingerprint for one in records if one.environment is not None}
    measured, asked = {one.cell.id for one in records}, {one.workload.id for one in records}
    kept = [one for one in baselines.list_baselines(folder) if one.environment.fingerprint in here]
    return [
        Case(
            implementation=one.record.implementation,
            workload=one.record.workload,
            status="missing" if one.record.workload.id in asked else "not_measured",
            reason=MISSING if one.record.workload.id in asked else "has a baseline, but its workload was not run",
        )
        for one in kept
        if one.record.cell.id not in measured
    ]
