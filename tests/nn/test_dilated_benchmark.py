"""benchmarks/dilated.py: it runs on a CPU with --smoke, and says what it needs without."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def benchmark_script():
    spec = spec_from_file_location("benchmark_dilated", Path(__file__).parents[2] / "benchmarks" / "dilated.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_smoke_measures_every_case_and_claims_nothing(benchmark_script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark_script.ImprovedDilatedAttention, "how", {})
    arguments = ["--smoke", "--no-diagonal", "--merge", "eager", "-o", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["dilated.py", *arguments])
    benchmark_script.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert found["smoke"]
    assert found["how"] == {"merge": "eager", "diagonal": False}
    assert "claims" not in found
    one = found["dims"]["16"]
    assert set(one["ratios"]) >= {"forward_short_of_dense", "train_long_of_dense", "improved_over_standard_forward"}
    assert "improved_over_eager_forward" in one["ratios"]
    assert "train" not in one["short"]["eager"]
    for name, value in one["ratios"].items():
        low, high = one["ratios_ci95"][name]
        assert 0 < low <= value <= high, name
    assert one["short"]["improved"]["forward"]["samples"] == benchmark_script.SMOKE.rounds
    assert found["environment"]["device"] == "cpu"
    assert one["long"]["improved"]["train"]["peak_gib"] is None
    assert max(one["errors"].values()) < 1e-5


def test_without_a_gpu_it_says_so(benchmark_script, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["dilated.py"])
    with pytest.raises(SystemExit) as caught:
        benchmark_script.main()
    assert caught.value.code == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_a_wrong_module_is_not_timed(benchmark_script, monkeypatch):
    class Halved(torch.nn.Module):
        def forward(self, q, k, v):
            return v / 2

    monkeypatch.setattr(benchmark_script, "create_dilated_attention", lambda *a, **k: Halved())
    with pytest.raises(SystemExit, match="nothing is timed"):
        benchmark_script.check(benchmark_script.SMOKE, "improved", 16)


def test_calls_that_are_compared_take_turns(benchmark_script, monkeypatch):
    """A machine that slows down by the call must not favour what is timed first."""
    order, clock = [], iter(range(1, 1000))
    monkeypatch.setattr(benchmark_script, "milliseconds", lambda run, device: (run(), float(next(clock)))[1])
    rounds = benchmark_script.SMOKE._replace(rounds=9)
    taken = benchmark_script.compared({name: lambda name=name: order.append(name) for name in "abc"}, rounds)
    timed = order[-27:]
    assert all(set(timed[n : n + 3]) == set("abc") for n in range(0, 27, 3))
    assert len({tuple(timed[n : n + 3]) for n in range(0, 27, 3)}) > 1
    assert all(len(one.ms) == 9 for one in taken.values())
    value, (low, high) = benchmark_script.ratio(taken["a"].ms, taken["b"].ms)
    assert low <= value <= high


def test_ratios_are_of_rates_times_and_growth(benchmark_script):
    def taken(**ms):
        return {name.replace("_", " "): benchmark_script.Taken([value] * 5, None) for name, value in ms.items()}

    calls = {"dense": 1.0, "short_improved": 2.0, "short_standard": 8.0, "long_improved": 18.0}
    flops = {"dense": 10.0, "short improved": 15.0, "short standard": 15.0, "long improved": 120.0}
    given = {
        "forward": taken(**calls, short_eager=20.0), "train": taken(**calls),
        "multihead": taken(standard=3.0, improved=2.0),
    }  # fmt: skip
    found = {name: value for name, (value, _) in benchmark_script.ratios(given, flops, 8).items()}
    assert found["forward_short_of_dense"] == pytest.approx(0.75), "1.5 times the work in twice the time"
    assert found["train_long_of_dense"] == pytest.approx(12 / 18)
    assert found["improved_over_standard_train"] == pytest.approx(4)
    assert found["improved_over_eager_forward"] == pytest.approx(10)
    assert found["train_growth_over_linear"] == pytest.approx(9 / 8)
    assert found["improved_over_standard_multihead"] == pytest.approx(1.5)


def test_claims_are_judged_at_the_papers_width(benchmark_script):
    met = {f"{name}_{length}_of_dense": least for (name, length), least in benchmark_script.CLAIMS.items()}
    met |= {"improved_over_eager_forward": 3.0, "improved_over_standard_forward": 3.0, "train_growth_over_linear": 1.1}
    found = {"dims": {"64": {"ratios": met}}}
    assert all(benchmark_script.claims(found).values())
    found["dims"]["64"]["ratios"]["train_long_of_dense"] = 0.64
    assert list(benchmark_script.claims(found).values()).count(False) == 1
    found["dims"]["64"]["ratios"] |= {"train_long_of_dense": 0.65, "train_growth_over_linear": 1.11}
    assert [name for name, held in benchmark_script.claims(found).items() if not held] == ["train_long <= 1.1 x linear"]
