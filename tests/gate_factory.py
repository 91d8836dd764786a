"""Comparisons and gate reports made by hand, for the tests of everything that shows them."""

from __future__ import annotations

from typing import Any

from record_factory import ok, workload

from attnbench.comparison import Case, CaseStatus, Comparison, Control, Estimate, GateReport


def estimate(metric: str = "wall", ratio: float = 1.0, half: float = 0.01, **fields: Any) -> Estimate:
    interval = (ratio - half, ratio + half)
    made: dict[str, Any] = {
        "metric": metric,
        "ratio": ratio,
        "interval": interval,
        "t_interval": interval,
        "detectable": 0.026,
        "p_slower": 0.5,
        "p_faster": 0.5,
        "launches": 8,
        "pairs": 400,
    }
    return Estimate(**(made | fields))


def comparison(verdict: str | None = "same", ratio: float = 1.0, cpu: float | None = None, **fields: Any) -> Comparison:
    wall = estimate("wall", ratio)
    made: dict[str, Any] = {
        "a": "torch.eager",
        "b": "torch.sdpa",
        "workload": workload(),
        "verdict": verdict,
        "ratio": wall.ratio,
        "interval": wall.interval,
        "smallest_slowdown": 0.026,
        "estimates": {"wall": wall, "cpu": estimate("cpu", ratio if cpu is None else cpu)},
        "elapsed_s": 14.0,
        "record_b": ok("torch.sdpa"),
    }
    if verdict is None:
        made |= {"ratio": None, "interval": None, "smallest_slowdown": None, "estimates": {}}
    return Comparison(**(made | fields))


VERDICTS = {"regression": ("slower", 1.063), "improved": ("faster", 0.85), "inconclusive": ("inconclusive", 1.02)}


def case(status: CaseStatus = "pass", implementation: str = "torch.sdpa", **fields: Any) -> Case:
    verdict, ratio = VERDICTS.get(status, ("same", 1.0))
    made: dict[str, Any] = {"implementation": implementation, "workload": workload(), "status": status}
    if status in ("pass", "regression", "improved", "inconclusive", "memory"):
        made["first"] = comparison(verdict, ratio)
    if status == "regression":
        made |= {"second": comparison("slower", 1.063), "p_holm": 0.0004}
    if status == "memory":
        made["memory"] = (97_000_000, 112_000_000)
    return Case(**(made | fields))


def controls(aa: bool = True, found: bool = True) -> tuple[Control, ...]:
    return (
        Control(name="a/a", passed=aa, comparison=comparison("same" if aa else "slower", 1.0 if aa else 1.04)),
        Control(name="+5 %", passed=found, comparison=comparison("slower" if found else "inconclusive", 1.052)),
    )


def report(*cases: Case, outcome: str = "pass", **fields: Any) -> GateReport:
    made: dict[str, Any] = {
        "baseline": "main",
        "current": "HEAD",
        "suite": "ci",
        "outcome": outcome,
        "cases": cases,
        "controls": controls(),
        "geomean": (1.004, 0.998, 1.010),
        "elapsed_s": 93.0,
        "attnbench": "0.1.0",
    }
    return GateReport(**(made | fields))
