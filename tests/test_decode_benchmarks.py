"""The benchmarks of decoding run anywhere, check what they time, and write what they have after each case."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]
SMALL = ["--device", "cpu", "--rounds", "3", "--batch", "2", "--keys", "64", "--heads", "4:2", "--head-dim", "16"]


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run(module, *arguments):
        out = tmp_path / "found.json"
        monkeypatch.setattr("sys.argv", ["x", *arguments, "-o", str(out)])
        module.main()
        return json.loads(out.read_text())

    return run


@pytest.mark.parametrize("unequal", [False, True])
def test_pages_and_pieces_take_turns(run, unequal, capsys):
    import decode

    found = run(decode, *SMALL, "--pages", "16", "48", *(["--unequal"] if unequal else []))
    (case,) = found["cases"]
    assert found["environment"]["packages"]["torch"]
    assert set(case["not_run"]) == {"torch.sdpa-flash, pages of 48", "torch.eager, pages of 48"}
    assert {"torch.sdpa-flash", "torch.sdpa-flash, pages of 16", "torch.eager", "torch.eager, pages of 16"} <= set(
        case["ways"]
    )
    assert (decode.WHOLE in case["ways"]) is not unequal
    assert "torch.eager, pages of 16 / torch.eager" in case["ratios"]
    for way in case["ways"].values():
        assert way["ci95"][0] <= way["us"] <= way["ci95"][1]
        assert way["rounds"] == 3
    assert "torch.sdpa-flash" in capsys.readouterr().out


def test_a_way_that_is_wrong_is_not_timed(run, monkeypatch):
    import decode

    import attnbench as ab

    right = ab.decode

    def wrong(q, cache, *, impl):
        return right(q, cache, impl=impl) * (1.0 if impl == "torch.eager" else 1.01)

    monkeypatch.setattr(ab, "decode", wrong)
    (case,) = run(decode, *SMALL, "--pages", "16")["cases"]
    assert "is wrong" in case["not_run"]["torch.sdpa-flash"]
    assert "torch.sdpa-flash" not in case["ways"]
    assert "torch.eager" in case["ways"]


def test_a_spent_budget_says_what_was_not_reached(run):
    import decode

    found = run(decode, *SMALL, "--budget", "0")
    assert found["cases"] == []
    assert [case["keys"] for case in found["not_reached"]] == [64]


@pytest.mark.slow(reason="generates with a model")
def test_generation_compares_implementations(run):
    pytest.importorskip("transformers")
    import generation

    found = run(generation, "--device", "cpu", "--quick", "--rounds", "2", "--impl", "attnbench", "sdpa", "no_such")
    assert len(found["cases"]) == 4
    assert found["not_reached"] == []
    for case in found["cases"]:
        assert set(case["implementations"]) == {"attnbench", "sdpa"}
        assert set(case["not_run"]) == {"no_such"}
        assert case["implementations"]["attnbench"]["tokens_as_sdpa"] == 1.0
        assert "attnbench / sdpa" in case["ratios"]
