"""The pytest plugin in a user's repository: pytest runs inside pytest, with fake measurements unless it says real."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points, version

import gate_factory
import msgspec
import pytest
import record_factory
from hostile_text import HOSTILE, danger
from record_factory import CPU, incorrect, ok, unsupported, workload

import attnbench as ab
import attnbench.runner  # before any run inside this process, which would unload what it loaded first
from attnbench.comparison import Comparison
from attnbench.errors import UsageError
from attnbench.pytest_plugin import fast_enough
from attnbench.report.pytest_session import Earlier, SessionFile, earlier_lines, read_earlier, source_of
from attnbench.results.run_file import RunWriter, new_header
from attnbench.spec import Failed

pytest_plugins = "pytester"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch):
    """Stands in for verify, measure and compare; remembers what it was asked."""
    lab = FakeLab()
    for name in ("verify", "measure", "compare"):
        monkeypatch.setattr(ab, name, getattr(lab, name), raising=False)
    return lab


class FakeLab:
    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.comparison = gate_factory.comparison("same")
        self.median = 1e6

    def record(self, name, on, samples=None):
        reasons = {"wrong": incorrect, "refused": unsupported}
        if name in reasons:
            return reasons[name](name, f"{name} from row 7 on", on)
        if name == "crash":
            return Failed(implementation=name, workload=on, reason="it raised", detail="Traceback: line 3")
        return ok(name, samples, on)

    def verify(self, what, on, **options):
        self.asked.append(("verify", what, on.id, options))
        return self.record(what, on)

    def measure(self, what, on, **options):
        self.asked.append(("measure", what, on.id, options))
        return self.record(what, on, [self.median * (1 + n / 100) for n in range(9)])

    def compare(self, a, b, on, **options):
        self.asked.append(("compare", a, b, on.id, options))
        return msgspec.structs.replace(self.comparison, workload=on)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run a test file in this process, with this plugin alone."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str, *arguments: str):
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("-p", "attnbench.pytest_plugin", "-p", "no:cacheprovider", *arguments)

    return run


ONE_OF_EACH = """
    import attnbench as ab

    def test_check(attnbench):
        assert attnbench.check("good", q_len=64, causal=True).status == "ok"

    def test_measure(attnbench):
        attnbench.measure("good", {"q_len": 64, "batch": 2})

    def test_compare(attnbench):
        attnbench.compare("old", "new", ab.Workload(batch=1, q_len=8, heads=1, head_dim=8))
"""


def test_one_of_each(run, lab):
    result = run(ONE_OF_EACH)
    result.assert_outcomes(passed=3)
    assert [asked[0] for asked in lab.asked] == ["verify", "measure", "compare"]
    assert lab.asked[0][2:] == ("b1-t64-h8-d64-causal-float32-forward", {})
    result.stdout.fnmatch_lines(
        [
            "*= attnbench =*",
            "good on 2 x 64 tokens*: 1.04 ms ±*",
            "b1-t8-h1-d8-full-float32-forward: torch.sdpa is as fast as torch.eager*",
            "1 checked, 1 measured, 1 compared",
        ]
    )


def test_wrong_fails_refused_skips_and_a_crash_shows_its_traceback(run, lab):
    result = run(
        """
        import pytest

        @pytest.mark.parametrize("name", ["wrong", "refused", "crash"])
        @pytest.mark.parametrize("method", ["check", "measure"])
        def test(attnbench, name, method):
            getattr(attnbench, method)(name, q_len=64)
        """,
        "-rs",
    )
    result.assert_outcomes(failed=4, skipped=2)
    result.stdout.fnmatch_lines(["*Failed: wrong on 1 x 64 tokens*: incorrect: wrong from row 7 on"])
    result.stdout.fnmatch_lines(["*it raised", "*Traceback: line 3"])
    result.stdout.fnmatch_lines(["SKIPPED*refused on 1 x 64 tokens*: unsupported: refused from row 7 on"])
    assert "pytest_plugin.py" not in "".join(line for line in result.outlines if "Error" in line)


@pytest.mark.parametrize(
    ("verdict", "ratio", "arguments", "outcome"),
    [
        ("same", 1.0, "", {"passed": 1}),
        ("faster", 0.7, "", {"passed": 1}),
        ("slower", 1.06, "", {"failed": 1}),
        ("slower", 1.06, "at_most=1.2", {"passed": 1}),
        ("slower", 1.3, "at_most=1.2", {"failed": 1}),
        ("slower", 1.2, "at_most=1.2", {"passed": 1, "warnings": 1}),
        ("same", 1.0, "at_most=0.8", {"failed": 1}),
        ("faster", 0.7, "at_most=0.8", {"passed": 1}),
        ("inconclusive", 1.02, "", {"passed": 1, "warnings": 1}),
        ("inconclusive", 1.02, "at_most=1.5", {"passed": 1, "warnings": 1}),
        ("inconclusive", 1.6, "at_most=1.5", {"failed": 1}),
        ("slower", 0.9, "at_most=1.0", {"failed": 1}),
    ],
)
def test_compare_judges(run, lab, verdict, ratio, arguments, outcome):
    lab.comparison = gate_factory.comparison(verdict, ratio)
    result = run(f"def test(attnbench): attnbench.compare('old', 'new', q_len=64, {arguments})")
    result.assert_outcomes(**outcome)


def test_inconclusive_may_fail(run, lab):
    lab.comparison = gate_factory.comparison("inconclusive", 1.02)
    result = run("def test(attnbench): attnbench.compare('old', 'new', q_len=64)", "--attnbench-inconclusive", "fail")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*inconclusive whether torch.sdpa is slower than torch.eager*"])


def test_what_has_no_interval_is_not_called_fast_enough():
    assert fast_enough(gate_factory.comparison("same", interval=None), 1.2) is None


def test_slower_by_another_metric_is_held_to_the_bound_too():
    by_cpu = gate_factory.comparison("slower", 0.9, cpu=1.3)
    assert fast_enough(by_cpu, 1.2) is False
    assert fast_enough(by_cpu, 1.4) is True
    assert fast_enough(gate_factory.comparison("faster", 0.7, cpu=1.0), 0.8) is True
    contradicting = gate_factory.comparison("inconclusive", 0.7)
    assert fast_enough(contradicting, 0.8) is None


RIGHT, WRONG, REFUSED = ok("one"), incorrect("one", "row 7"), unsupported("one", "needs cuda")


@pytest.mark.parametrize(
    "a, b, outcome",
    [
        (REFUSED, REFUSED, "skipped"),
        (REFUSED, RIGHT, "skipped"),
        (REFUSED, WRONG, "failed"),
        (RIGHT, REFUSED, "failed"),
        (RIGHT, WRONG, "failed"),
        (WRONG, RIGHT, "failed"),
        (REFUSED, Failed(implementation="one", workload=workload(), reason="crashed"), "failed"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--attnbench-disable",)])
def test_only_what_the_first_side_refuses_skips(run, lab, monkeypatch, a, b, outcome, options):
    lab.comparison = gate_factory.comparison(None, reason="not compared", record_a=a, record_b=b)
    monkeypatch.setattr(ab, "verify", lambda what, *given, **named: {"old": a, "new": b}[what])
    result = run("def test(attnbench): attnbench.compare('old', 'new', q_len=64)", *options)
    result.assert_outcomes(**{outcome: 1})
    if not options:
        result.stdout.fnmatch_lines(["1 not compared"])


def test_a_side_that_is_wrong_fails_and_one_that_cannot_run_skips(run, lab):
    source = "def test(attnbench): attnbench.compare('old', 'new', q_len=64)"
    lab.comparison = gate_factory.comparison(None, reason="new is wrong", record_b=incorrect("new", "row 7"))
    result = run(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Failed: torch.sdpa was not compared with torch.eager: new is wrong"])
    lab.comparison = gate_factory.comparison(None, reason="needs cuda", record_a=unsupported("new", "needs cuda"))
    run(source).assert_outcomes(skipped=1)


def test_disabled_times_nothing(run, lab):
    result = run(
        """
        def test_measure(attnbench):
            assert attnbench.measure("good", q_len=64, budget_s=3).time is None

        def test_compare(attnbench):
            assert attnbench.compare("old", "new", q_len=64, at_most=1.1).verdict is None

        def test_compare_wrong(attnbench):
            attnbench.compare("old", "wrong", q_len=64)
        """,
        "--attnbench-disable",
    )
    result.assert_outcomes(passed=2, failed=1)
    assert {asked[0] for asked in lab.asked} == {"verify"}


def test_the_marker_gives_defaults_and_the_call_overrides_them(run, lab):
    result = run(
        """
        import pytest
        pytestmark = pytest.mark.attnbench(framework="jax", device="cpu", budget_s=5)

        def test(attnbench):
            attnbench.check("good", q_len=64)
            attnbench.measure("good", {"q_len": 64}, "numpy", budget_s=2)
            attnbench.compare("a", "b", q_len=64)
        """,
        "--strict-markers",
    )
    result.assert_outcomes(passed=1)
    assert [asked[-1] for asked in lab.asked] == [
        {"framework": "jax", "device": "cpu"},
        {"framework": "numpy", "device": "cpu", "budget_s": 2},
        {"framework": "jax", "device": "cpu", "budget_s": 5},
    ]


def test_mistakes_are_told(run, lab):
    result = run(
        """
        import attnbench as ab
        import pytest

        @pytest.mark.attnbench(frame="jax")
        def test_marker(attnbench): attnbench.check("good", q_len=64)

        def test_word(attnbench): attnbench.check("good", q_length=64)

        def test_twice(attnbench):
            attnbench.check("good", ab.Workload(batch=1, q_len=8, heads=1, head_dim=8), q_len=9)
        """
    )
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["*the marker attnbench takes framework, device, budget_s, threads, not frame."])
    result.stdout.fnmatch_lines(['*no config word called "q_length". Near: q_len*'])
    result.stdout.fnmatch_lines(["*a Workload already defines the whole shape: leave out q_len."])


def test_all_of_them_can_be_left_out(run, lab):
    result = run(ONE_OF_EACH + "\n    def test_other(): pass\n", "-m", "not attnbench")
    result.assert_outcomes(passed=1, deselected=3)
    assert not lab.asked
    assert not any("= attnbench =" in line for line in result.outlines)


def test_the_session_as_json(run, lab, pytester):
    run(ONE_OF_EACH, "--attnbench-json", "deep/out.json").assert_outcomes(passed=3)
    found = json.loads((pytester.path / "deep" / "out.json").read_text())
    assert [record["implementation"] for record in found["records"]] == ["good", "good"]
    assert found["attnbench"] == version("attnbench")
    assert found["tests"]["test_the_session_as_json.py::test_measure"] == ["good/b2-t64-h8-d64-full-float32-forward"]
    msgspec.convert(found["comparisons"], list[Comparison])
    assert len(read_earlier(pytester.path / "deep" / "out.json").records) == 2


@pytest.mark.parametrize("more", [["--collect-only"], ["-k", "nothing_matches"]], ids=str)
def test_a_session_that_measures_nothing_keeps_the_file_of_the_last(run, lab, pytester, more):
    run(ONE_OF_EACH, "--attnbench-json", "out.json")
    before = (pytester.path / "out.json").read_bytes()
    run(ONE_OF_EACH, "--attnbench-json", "out.json", *more)
    assert (pytester.path / "out.json").read_bytes() == before


def test_a_run_file_is_refused_before_anything_is_measured(run, lab, pytester):
    writer = RunWriter.create(pytester.path, "cpu", "quick")
    writer.close()
    result = run(ONE_OF_EACH, "--attnbench-json", str(writer.path))
    assert "is a run file, which is never replaced" in "\n".join([*result.errlines, *result.outlines])
    assert lab.asked == []


def test_two_sessions_are_compared(run, lab):
    run(ONE_OF_EACH, "--attnbench-json", "old.json")
    lab.median = 1.5e6
    result = run(ONE_OF_EACH, "--attnbench-compare", "old.json")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [
            "Against old.json:",
            "good on 2 x 64 tokens*: 1.50x the earlier time (1.56 ms, was 1.04 ms)",
            "*without any change*",
        ]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--attnbench-compare", "none.json"), "*there is no file none.json; --attnbench-json PATH makes one."),
        (("--attnbench-compare", "broken.json"), "*broken.json: neither a run file nor a JSON document with records*"),
        (("--attnbench-json", "folder"), "*--attnbench-json: cannot write folder (Is a directory)."),
    ],
)
def test_a_useless_path_is_refused_before_any_test_runs(run, lab, pytester, arguments, message):
    (pytester.path / "broken.json").write_text('{"records": 3}')
    (pytester.path / "folder").mkdir()
    result = run(ONE_OF_EACH, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert not lab.asked


def session(records, source="", test="test_it.py::test_it"):
    ids = [record.cell.id for record in records]
    return SessionFile(records=[*records], comparisons=[], tests={test: ids}, sources=dict.fromkeys(ids, source))


def test_another_environment_is_named_and_not_compared():
    other = msgspec.structs.replace(CPU, threads=8, packages={"torch": "2.12.0", "triton": "3.0"})
    then = [ok("a", [1e6] * 5, environment=other), ok("b", [1e6] * 5), ok("c")]
    now = [ok(name, [2e6] * 5) for name in "abcd"]
    lines = list(earlier_lines(session(now), Earlier(then)))
    assert lines[0].startswith("b on 1 x 128 tokens")
    assert "2.00x" in lines[0]
    assert lines[1].startswith("not compared (another environment: ")
    assert "torch is 2.12.0 in the baseline and 2.13.0 in the current run" in lines[1]
    assert "threads is 8 in the baseline and 2 in the current run" in lines[1]
    assert lines[1].endswith(f": a/{workload().id}")
    assert lines[2].startswith("not compared (has no time in the earlier file): c/")
    assert lines[3].startswith("not compared (not in the earlier file): d/")


def test_neither_two_clocks_nor_two_functions_of_one_name_are_compared():
    by_kernel = ok("a", time=record_factory.timing([1e6] * 5, clock="kernel"))
    assert "clock is wall, was kernel" in next(earlier_lines(session([ok("a", [1e6] * 5)]), Earlier([by_kernel])))
    one = ok("<lambda>", [1e6] * 5)
    twice = list(earlier_lines(session([one] * 2), Earlier([one])))
    assert twice == [f"not compared (measured more than once in this session): <lambda>/{workload().id}"]


def test_functions_of_one_name_are_compared_only_for_one_test_or_from_one_file(pytester):
    one = ok("attend", [1e6] * 5)
    now = session([one], "tests.kern", "test_it.py::test_slow")

    def told(*then):
        return next(earlier_lines(now, Earlier(*then)))

    asked = [one.cell.id]
    assert "1.00x" in told([one], {"test_it.py::test_slow": asked})
    assert "1.00x" in told([ok("attend"), one, ok("attend")], {"test_it.py::test_slow": asked}), "checks have no time"
    assert "(another test asked for it in the earlier session)" in told([one], {"test_it.py::test_fast": asked})
    both = {"test_it.py::test_fast": asked, "test_it.py::test_slow": asked}
    assert "(measured more than once in the earlier session)" in told([one, one], both)
    assert "1.00x" in told([one], None, {one.cell.id: "kern.py"})
    other = told([one], None, {one.cell.id: "fast.py"})
    assert "(the earlier file measured another function of that name, from fast.py, not tests.kern)" in other


def test_a_run_file_knows_the_files_of_its_functions(pytester):
    path = pytester.path / "old.jsonl"
    writer = RunWriter(path, new_header("0", "s", {"implementations": ["torch.sdpa", "lib/kern.py:attend"]}))
    writer.write([ok("torch.sdpa", [1e6] * 5), ok("attend", [1e6] * 5)])
    writer.close()
    assert list(read_earlier(path).sources.values()) == ["", "lib/kern.py"]


def test_the_source_of_a_function_is_its_module():
    assert source_of("torch.sdpa") == ""
    assert source_of("lib/kern.py:attend") == "lib/kern.py"
    assert source_of(session) == source_of(partial(session, source="a")) == __name__
    assert source_of(ab.Workload) == ab.Workload.__module__


REAL = """
    import numpy as np
    import attnbench as ab

    WORK = ab.Workload(batch=1, q_len=16, heads=2, head_dim=8)

    def mine(q, k, v):
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)

    def unscaled(q, k, v):
        return mine(2 * q, k, v)

    def test_right(attnbench):
        record = attnbench.measure(mine, WORK, "numpy", budget_s=0.05)
        assert record.time.median_ns > 0

    def test_wrong(attnbench):
        attnbench.check(unscaled, WORK, framework="numpy")

    def test_installed(attnbench):
        attnbench.check("numpy.float32", WORK)
"""


def test_for_real_in_a_process_of_its_own(pytester):
    pytester.makepyfile(REAL)
    result = pytester.runpytest_subprocess("-p", "no:xdist", "--attnbench-json", "out.json", timeout=120)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*Failed: unscaled on 1 x 16 tokens*: incorrect: *"])
    result.stdout.fnmatch_lines(["mine on 1 x 16 tokens*: * us *", "2 checked, 1 measured"])
    records = read_earlier(pytester.path / "out.json").records
    assert [record.status for record in records] == ["ok", "incorrect", "ok"]


FAKED = """
    import attnbench
    from record_factory import ok

    attnbench.measure = lambda what, on, **options: ok(what, [1e6] * 5, on)
"""


def test_workers_of_xdist_hand_over_what_they_measured(pytester, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("PYTHONPATH", str(__file__).rpartition("/")[0])
    pytester.makeconftest(FAKED)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("n", range(4))
        def test(attnbench, n): attnbench.measure(f"number-{n}", q_len=64)
        """
    )
    result = pytester.runpytest_subprocess("-n", "2", "--attnbench-json", "out.json", timeout=120)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["4 measured", "*disturbed each other's times*"])
    found = read_earlier(pytester.path / "out.json").records
    assert sorted(record.implementation for record in found) == [f"number-{n}" for n in range(4)]


def test_the_plugin_is_declared():
    [found] = [point for point in entry_points(group="pytest11") if point.name == "attnbench"]
    assert found.value == "attnbench.pytest_plugin"


def test_a_project_that_does_not_use_it_pays_next_to_nothing():
    code = (
        "import sys, pytest; before = set(sys.modules); import attnbench.pytest_plugin;"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["attnbench"]


def test_a_session_that_does_not_use_it_loads_nothing(pytester):
    pytester.makepyfile(
        """
        import sys

        def test():
            loaded = {name for name in sys.modules if name.startswith("attnbench")}
            assert loaded == {"attnbench", "attnbench.pytest_plugin"}
            assert not {"torch", "jax"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "no:xdist", "-p", "no:hypothesispytest", timeout=60).assert_outcomes(passed=1)


def test_nothing_that_a_kernel_says_is_obeyed(run, lab, monkeypatch):
    def record(name, on, samples=None):
        if name == "good":
            return ok(HOSTILE, samples, on)
        return Failed(implementation=HOSTILE, workload=on, reason=HOSTILE, detail=f"Traceback\n{HOSTILE}")

    monkeypatch.setattr(lab, "record", record)
    result = run(
        """
        def test_failed(attnbench):
            attnbench.check("crash", q_len=64)

        def test_measured(attnbench):
            attnbench.measure("good", q_len=64)
        """
    )
    result.assert_outcomes(passed=1, failed=1)
    assert r"\x1b]52;c;QQ" in result.stdout.str()
    assert not danger(result.stdout.str())


@pytest.mark.parametrize("ratio", ["nan", "inf", "0", "-1"])
def test_a_bound_is_a_ratio(run, lab, ratio):
    result = run(f"def test(attnbench): attnbench.compare('old', 'new', q_len=64, at_most=float('{ratio}'))")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*UsageError: at_most is a ratio such as 1.1, not *"])
    assert lab.asked == []


@pytest.mark.parametrize("floor", [float("nan"), float("inf"), -0.1, 1.0])
def test_a_floor_is_a_share(floor):
    with pytest.raises(UsageError, match=r"floor must be a fraction such as 0\.03"):
        ab.compare("numpy.float32", "numpy.reference", workload(8), framework="numpy", floor=floor)
