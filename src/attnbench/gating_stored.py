"""`attnbench gate` on what was measured before: two run files, or a run file and the folder of saved baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from attnbench.analyse.comparable import check_comparable
from attnbench.analyse.gate import OnInconclusive, geomean, judge, with_holm
from attnbench.analyse.gate_runs import cases_of_runs
from attnbench.analyse.ranking import ANCHOR
from attnbench.comparison import Case, GateReport
from attnbench.spec import Environment, Record
from attnbench.store import baselines
from attnbench.store.runfile import Run, read_run

Floors = Callable[[str, str], float]
NO_CONTROLS = (
    "stored times have no controls: a verdict between refs (`--baseline REF --current REF`) can be believed more"
)


def gate_stored(baseline: Path, current: Path, floors: Floors, on_inconclusive: OnInconclusive) -> GateReport:
    """A run file against another one, or against a folder of baselines; UsageError where machines differ."""
    run = read_run(current)
    cases = _against_folder(baseline, run) if baseline.is_dir() else _against_run(read_run(baseline), run, floors)
    judgement = judge(cases, (), on_inconclusive)
    return GateReport(
        baseline=baseline.name,
        current=current.name,
        suite=run.header.suite,
        outcome=judgement.outcome,
        cases=tuple(cases),
        geomean=geomean(cases),
        warnings=(*judgement.warnings, NO_CONTROLS),
    )


def _against_run(old: Run, new: Run, floors: Floors) -> list[Case]:
    check_comparable(_environments(old.records), _environments(new.records))
    return cases_of_runs(old.records, new.records, floors)


def _environments(records: Sequence[Record]) -> list[Environment]:
    """Of what was timed: refused cells of a framework that is not there do not count."""
    timed = [one.environment for one in records if one.time is not None and one.environment is not None]
    return list({one.fingerprint: one for one in timed}.values())


def _against_folder(folder: Path, run: Run) -> list[Case]:
    cases: list[Case] = []
    for record in run.records:
        if record.implementation.startswith(ANCHOR) or record.environment is None or record.status == "unsupported":
            continue
        anchors = [
            one for one in run.records if one.implementation.startswith(ANCHOR) and one.workload == record.workload
        ]
        found = baselines.find(folder, record.environment, record.implementation, record.workload)
        [case] = cases_of_runs(() if found is None else found.records, [record, *anchors])
        if found is None:
            why = baselines.why_missing(folder, record.environment, record.implementation, record.workload)
            case = replace(case, status="no_baseline", reason=why)
        cases.append(case)
    timed = {place: one.first for place, one in enumerate(cases) if one.first is not None and one.first.verdict}
    p_values = {place: max(e.p_slower for e in one.estimates.values()) for place, one in timed.items()}
    return with_holm(cases, p_values)
