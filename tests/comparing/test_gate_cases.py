"""What becomes of a case of the gate: regression, improvement, confirmation, and the controls."""

from __future__ import annotations

from functools import partial
from io import StringIO
from pathlib import Path

import gate_factory
import msgspec
import numpy as np
import pytest
from launch_factory import by_metric, comparison, launch, sequence
from msgspec.structs import replace
from record_factory import incorrect, ok, unsupported, workload
from rich.console import Console

from attnbench.comparing.gate_cases import case_of, confirm, geomean, holm, judge, load_thresholds, p_slower, with_holm
from attnbench.comparing.gate_text import markdown, print_gate
from attnbench.comparing.statistics import decide
from attnbench.comparison import FLOOR, Case, Comparison, Control, Estimate, Verdict
from attnbench.errors import BrokenFile
from attnbench.spec import Failed, Memory, OutOfMemory, Record, Timeout

ON = workload()
PEAK = 10_000_000


def compared(verdict: Verdict | None, ratio: float = 1.0, p: float = 1.0, **fields: object) -> Comparison:
    made = {
        "a": "torch.x",
        "b": "torch.x",
        "workload": ON,
        "verdict": verdict,
        "ratio": ratio,
        "interval": (ratio * 0.99, ratio * 1.01),
        "smallest_slowdown": 0.026,
        "estimates": {name: estimated(name, ratio, p) for name in ("wall", "cpu")},
        "record_a": weighed(PEAK),
        "record_b": weighed(PEAK),
    }
    return Comparison(**(made | fields))  # type: ignore[arg-type]


def estimated(metric: str, ratio: float, p: float) -> Estimate:
    bounds = (ratio * 0.99, ratio * 1.01)
    return Estimate(
        metric=metric,
        ratio=ratio,
        interval=bounds,
        t_interval=bounds,
        detectable=0.026,
        p_slower=p,
        p_faster=1 - p,
        launches=6,
        pairs=60,
    )


def weighed(peak: int | None) -> Record:
    return ok("torch.x", memory=Memory(peak_bytes=peak))


def case(first: Comparison | None, second: Comparison | None = None) -> Case:
    return case_of("torch.x", ON, first, second)


SLOWER = compared("slower", 1.03, p=1e-4)
SAME = compared("same")
AA = Control(name="a/a", passed=True, comparison=SAME)
FOUND = Control(name="+5 %", passed=True, comparison=SLOWER)
CONTROLS = (AA, FOUND)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.5, 0.9]) == [1, 1, 1]
    assert holm([0.3]) == [0.3]
    assert holm([]) == []


def test_p_value_pays_for_the_number_of_metrics():
    mixed = compared("slower", estimates={"wall": estimated("wall", 1.0, 0.5), "cpu": estimated("cpu", 1.03, 0.002)})
    assert p_slower(mixed) == pytest.approx(0.004)
    assert p_slower(replace(mixed, estimates={})) == 1


@pytest.mark.parametrize(
    "first, second, status, reason",
    [
        (SAME, None, "pass", ""),
        (compared("faster", 0.85), None, "improved", ""),
        (compared("inconclusive"), None, "inconclusive", "could have seen 2.6%"),
        (SLOWER, SLOWER, "regression", "slower twice (1.03, then 1.03 on fresh launches)"),
        (SLOWER, SAME, "pass", "slower once (1.03), not confirmed on fresh launches"),
        (SLOWER, compared("faster", 0.9), "pass", "slower once (1.03), not confirmed on fresh launches"),
        (SLOWER, compared("inconclusive"), "inconclusive", "slower once (1.03), inconclusive on fresh launches"),
        (SLOWER, None, "inconclusive", "slower once (1.03), not measured on fresh launches"),
        (SLOWER, compared(None, record_a=None), "inconclusive", "not measured on fresh launches"),
        (None, None, "not_measured", "not measured"),
        (compared(None, reason="time was up"), None, "not_measured", "time was up"),
    ],
)
def test_status_by_time(first: Comparison | None, second: Comparison | None, status: str, reason: str):
    found = case(first, second)
    assert found.status == status
    assert reason in found.reason


def test_the_metric_that_made_it_slower_is_named():
    cpu_only = compared(
        "slower", 1.0, estimates={"wall": estimated("wall", 1.0, 0.9), "cpu": estimated("cpu", 1.04, 1e-5)}
    )
    assert case(cpu_only, SAME).reason.startswith("slower once (1.04 by cpu time)")


def lost(kind: type[Failed | OutOfMemory | Timeout], reason: str) -> Record:
    return kind(implementation="torch.x", workload=ON, reason=reason)


@pytest.mark.parametrize(
    "broken",
    [
        incorrect("torch.x", "gradient of K is off"),
        lost(Failed, "crashed"),
        lost(OutOfMemory, "did not fit"),
        lost(Timeout, "hung"),
        unsupported("torch.x", "causal is gone"),
    ],
)
def test_no_right_answer_where_there_was_one_is_wrong(broken: Record):
    found = case(compared(None, record_b=broken))
    assert found.status == "wrong"
    assert str(broken.reason) in found.reason
    assert judge([found], CONTROLS).outcome == "fail"


def test_faster_but_wrong_is_refused():
    faster = compared("faster", 0.7, record_b=incorrect("torch.x", "off"))
    assert case(faster).status == "wrong"


def test_wrong_on_fresh_launches_is_wrong():
    assert case(SLOWER, compared(None, record_b=incorrect("torch.x", "off"))).status == "wrong"


def test_a_baseline_that_cannot_do_the_case():
    found = case(compared(None, record_a=unsupported("torch.x", "no window")))
    assert found.status == "no_baseline"
    assert "no window" in found.reason
    both = case(compared(None, record_a=unsupported("torch.x", "no"), record_b=unsupported("torch.x", "no")))
    assert both.status == "not_measured"


@pytest.mark.parametrize(
    "a, b, heavier",
    [
        (PEAK, int(1.02 * PEAK), True),
        (PEAK, int(1.009 * PEAK), False),
        (PEAK, int(0.5 * PEAK), False),
        (1_000_000, 1_050_000, False),  # 5 %, but less than allocators round by
        (None, PEAK, False),
        (PEAK, None, False),
    ],
)
def test_memory_is_gated_at_one_percent(a: int | None, b: int | None, heavier: bool):
    found = case(compared("faster", 0.9, record_a=weighed(a), record_b=weighed(b)))
    assert found.memory == (a, b)
    assert found.status == ("memory" if heavier else "improved")
    assert judge([found], CONTROLS).outcome == ("fail" if heavier else "pass")


def test_memory_must_grow_in_both_stages_and_never_hides_a_regression():
    heavy = compared("slower", 1.03, p=1e-4, record_b=weighed(2 * PEAK))
    assert case(heavy, SAME).status == "pass"
    assert case(heavy, heavy).status == "regression"
    assert case(heavy, replace(heavy, verdict="same")).status == "memory"


def test_confirm_corrects_over_all_second_stages():
    weak = compared("slower", 1.03, p=0.002)
    alone = confirm([case(SAME), case(weak, weak)])
    assert alone[0].p_holm is None
    assert (alone[1].status, alone[1].p_holm) == ("regression", pytest.approx(0.004))
    among = confirm([case(weak, weak)] * 4)
    assert {one.status for one in among} == {"inconclusive"}
    assert all(one.p_holm == pytest.approx(0.016) for one in among)
    assert "may be due to chance among 4 cases" in among[0].reason


@pytest.mark.parametrize(
    "cases, outcome",
    [
        ([case(SAME), case(compared("faster", 0.85))], "pass"),
        ([case(SAME), case(SLOWER, SLOWER), case(compared("inconclusive"))], "fail"),
        ([case(SAME), case(compared("inconclusive"))], "inconclusive"),
        ([case(SLOWER, SAME)], "pass"),
        ([case(compared(None, record_a=unsupported("torch.x", "no")))], "nothing"),
        ([], "nothing"),
        ([case(SAME), case(compared(None, record_a=unsupported("torch.x", "no")))], "pass"),
    ],
)
def test_outcome(cases: list[Case], outcome: str):
    assert judge(cases, CONTROLS).outcome == outcome


@pytest.mark.parametrize("wanted", ["pass", "fail", "inconclusive"])
def test_inconclusive_may_be_mapped(wanted: str):
    judgement = judge([case(compared("inconclusive"))], CONTROLS, on_inconclusive=wanted)  # type: ignore[arg-type]
    assert judgement.outcome == wanted
    assert any("counted as passed" in one for one in judgement.warnings) == (wanted == "pass")


@pytest.mark.parametrize("cases", [[case(SAME)], [case(SLOWER, SLOWER)], [case(compared("inconclusive"))], []])
def test_a_failed_control_makes_everything_untrusted(cases: list[Case]):
    judgement = judge(cases, [Control(name="a/a", passed=False, comparison=SLOWER), FOUND])
    assert judgement.outcome == "untrusted"
    assert judgement.warnings[0].startswith("untrusted: the A/A control failed (slower)")


def test_wrong_numbers_and_memory_do_not_depend_on_time():
    untrusted = [Control(name="a/a", passed=False, comparison=SLOWER), FOUND]
    wrong = case(compared(None, record_b=incorrect("torch.x", "zeros")))
    assert wrong.status == "wrong"
    assert judge([wrong], untrusted).outcome == "fail"


def test_memory_that_grew_outlives_a_slowdown_that_chance_explains():
    heavy = compared("slower", 1.05, record_a=weighed(1_000_000), record_b=weighed(2_000_000))
    (judged,) = with_holm([case(heavy, heavy)], {0: 0.5})
    assert judged.status == "memory"


def test_a_slowdown_not_found_is_only_a_warning():
    judgement = judge([case(SAME)], [AA, Control(name="+5 %", passed=False, comparison=SAME)])
    assert judgement.outcome == "pass"
    assert [one for one in judgement.warnings if one.startswith("underpowered")]


SILENT_AA = Control(name="a/a", passed=False, comparison=compared("inconclusive"))
SILENT_FIVE = Control(name="+5 %", passed=False, comparison=compared("inconclusive"))


@pytest.mark.parametrize(
    "controls, outcome",
    [
        ([SILENT_AA, SILENT_FIVE], "inconclusive"),
        ([SILENT_AA], "inconclusive"),
        ([SILENT_AA, FOUND], "pass"),
        ([AA, SILENT_FIVE], "pass"),
        ([SILENT_AA, Control(name="+5 %", passed=False, comparison=SAME)], "pass"),
    ],
)
def test_a_pass_needs_a_control_that_says_something(controls: list[Control], outcome: str):
    judgement = judge([case(SAME)], controls)
    assert judgement.outcome == outcome
    assert ("all controls were inconclusive" in " ".join(judgement.warnings)) == (outcome == "inconclusive")
    assert judge([case(SAME)], controls, on_inconclusive="pass").outcome == "pass"
    assert judge([case(SLOWER, SLOWER)], controls).outcome == "fail"


def test_missing_baselines_name_the_command():
    missing = case(compared(None, record_a=unsupported("torch.x", "no")))
    (warning,) = judge([case(SAME), missing, missing], CONTROLS).warnings
    assert warning.startswith("2 cases without a baseline: ")
    assert "`attnbench baseline save RUN`" in warning


def test_geometric_mean_over_timed_cases():
    wrong = case(compared(None, record_b=incorrect("torch.x", "off")))
    assert geomean([wrong]) is None
    found = geomean([case(compared("slower", 1.1), compared("same", 1.0)), case(compared("faster", 0.81)), wrong])
    assert found is not None
    assert found[0] == pytest.approx(0.9)
    assert 0.9 * 0.99 < found[1] < 0.9 < found[2] < 0.9 * 1.01


def test_twenty_unchanged_cases_rarely_alarm_and_one_slower_among_them_is_found():
    """The whole rule: looks, a second stage on fresh launches for what seemed slower, Holm over those."""
    fails = 0
    for job in range(6):
        rng = np.random.default_rng(100 + job)
        unchanged = [two_stages(rng, effect=0.0) for _ in range(20)]
        fails += judge(confirm(unchanged), CONTROLS).outcome == "fail"
        cases = confirm([*unchanged, two_stages(rng, effect=0.06)])
        assert cases[-1].status == "regression"
    assert fails == 0


def two_stages(rng: np.random.Generator, effect: float) -> Case:
    make = partial(launch, rng, effect=effect, pairs=12)
    named = {"a": "torch.x", "b": "torch.x", "workload": ON}
    first = comparison(sequence(make), **named)
    second = comparison(sequence(make, looks=(16,)), **named) if first.verdict == "slower" else None
    return case(first, second)


def test_clocks_that_contradict_each_other_are_told_in_the_case():
    decision = decide(by_metric(wall=0.796, cpu=1.27), ("wall", "cpu"))
    case = case_of("torch.x", ON, comparison(decision, a="a", b="b", workload=ON, notes=decision.notes))
    assert case.status == "inconclusive"
    assert case.reason == (
        "the metrics contradict each other: faster by wall time, slower by cpu time (wall 0.796, cpu 1.270)"
    )
    assert judge([case], []).outcome == "inconclusive"
    report = gate_factory.report(case, outcome="inconclusive")
    for text in (markdown(report), text_of(report), msgspec.json.encode(report).decode()):
        assert "the metrics contradict each other" in text


def text_of(report):
    console = Console(file=StringIO(), width=300)
    print_gate(console, report)
    return console.file.getvalue()


CRASHED = Failed(implementation="torch.x", workload=ON, reason="crashed with SIGABRT")
FULL = OutOfMemory(implementation="torch.x", workload=ON, reason="no room")
LATE = Timeout(implementation="torch.x", workload=ON, reason="no answer within 120 s")


@pytest.mark.parametrize(
    "a,b,died,status",
    [
        (CRASHED, weighed(PEAK), ("a",), "inconclusive"),
        (FULL, weighed(PEAK), (), "inconclusive"),
        (LATE, weighed(PEAK), ("a",), "inconclusive"),
        (unsupported("torch.x", "needs cuda"), weighed(PEAK), (), "no_baseline"),
        (incorrect("torch.x", "zeros"), weighed(PEAK), (), "no_baseline"),
        (CRASHED, CRASHED, ("a", "b"), "inconclusive"),
        (FULL, FULL, (), "not_measured"),
        (FULL, CRASHED, (), "inconclusive"),
        (CRASHED, unsupported("torch.x", "needs cuda"), (), "inconclusive"),
        (weighed(PEAK), CRASHED, ("b",), "wrong"),
        *((a, incorrect("torch.x", "zeros"), (), "wrong") for a in (CRASHED, FULL, unsupported("torch.x", "no"))),
        (incorrect("torch.x", "zeros"), incorrect("torch.x", "zeros"), (), "wrong"),
    ],
)
def test_a_lost_baseline_is_not_a_missing_one(a: Record, b: Record, died: tuple, status: str):
    lost = case(compared(None, record_a=a, record_b=b, died=died))
    assert lost.status == status
    if status == "inconclusive":
        assert lost.reason.startswith("the baseline was lost")
        assert judge([case(SAME), lost], []).outcome == "inconclusive"


TEXT = """
[[case]]
implementation = "torch.sdpa"
workload = "*causal*"
floor = 0.03
reason = "two thread pools"

[[case]]
workload = "b1-*"
floor = 0.02
reason = "small shapes start slowly"
"""


def test_the_highest_floor_that_covers_a_case(tmp_path: Path):
    (tmp_path / "floors.toml").write_text(TEXT)
    floor = load_thresholds(tmp_path / "floors.toml")
    assert floor("torch.sdpa", "b1-t64-causal-float32") == 0.03
    assert floor("torch.sdpa-math", "b1-t64-causal-float32") == 0.02
    assert floor("torch.sdpa", "b2-t64-full-float32") == FLOOR


def test_without_a_file_the_floor_is_everywhere_the_same():
    assert load_thresholds(None)("torch.sdpa", "any") == FLOOR


WRONG = [
    ('[[case]]\nfloor = 0.005\nreason = "quiet"\n', 2, "below 0.01: a floor can only be raised"),
    ('[[case]]\nreason = "percent"\nfloor = 3.0\n', 3, "write 0.03 for 3 %"),
    ("[[case]]\nfloor = 0.03\n", 1, "missing required field `reason`"),
    ('[[case]]\nfloor = 0.03\nreason = " "\n', 3, "reason is empty"),
    ('[[case]]\nfloor = 0.03\nreason = "a"\n\n[[case]]\nfloor = "x"\nreason = "a"\n', 6, "Expected `float`, got `str`"),
    ('[[case]]\nfloor = 0.03\nreason = "a"\nworklod = "*"\n', 4, "unknown field `worklod`"),
    ("[[cases]]\nfloor = 0.03\n", 1, "write [[case]] tables"),
    ('[case]\nfloor = 0.03\nreason = "a"\n', 1, "two brackets"),
    ("[[case]]\nfloor = = 1\n", 2, "not valid TOML"),
]


@pytest.mark.parametrize("text,line,words", WRONG, ids=[words for *_, words in WRONG])
def test_wrong_files_name_the_line(tmp_path: Path, text: str, line: int, words: str):
    path = tmp_path / "floors.toml"
    path.write_text(text)
    with pytest.raises(BrokenFile) as caught:
        load_thresholds(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert words in str(caught.value)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(BrokenFile, match="cannot be read"):
        load_thresholds(tmp_path / "none.toml")
