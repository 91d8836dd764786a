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
    assert all(value > 0 for value in one["ratios"].values())
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


def test_claims_are_judged_at_the_papers_width(benchmark_script):
    met = {f"{name}_{length}_of_dense": least for (name, length), least in benchmark_script.CLAIMS.items()}
    found = {"dims": {"64": {"ratios": met | {"improved_over_standard_forward": 3.0}}}}
    assert all(benchmark_script.claims(found).values())
    found["dims"]["64"]["ratios"]["train_long_of_dense"] = 0.64
    assert list(benchmark_script.claims(found).values()).count(False) == 1
