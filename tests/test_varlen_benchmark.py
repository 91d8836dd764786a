"""The benchmark of packed sequences runs, draws the lengths that it says, and refuses to time what differs."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]


def test_it_runs_and_writes_where_it_ran(tmp_path, monkeypatch, capsys):
    import varlen

    monkeypatch.setattr("sys.argv", ["x", "--quick", "--budget", "1", "-o", str(tmp_path / "found.json")])
    varlen.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert [case["pass"] for case in found["cases"]] == ["forward", "train"]
    assert found["environment"]["packages"]["torch"]
    for case in found["cases"]:
        assert case["padding"] == 0.5
        assert set(case["padded / packed"]) == {"padded, lengths", "padded, causal alone"}
        assert all(
            low <= one["ratio"] <= high for one in case["padded / packed"].values() for low, high in [one["ci95"]]
        )
    assert "padded / packed" in capsys.readouterr().out


@pytest.mark.parametrize("padding", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("sequences", [2, 8, 33])
def test_lengths_leave_the_padding_asked_for(sequences, padding):
    from varlen import drawn_lengths

    lengths = drawn_lengths(sequences, 512, padding)
    assert lengths.max() == 512
    assert lengths.min() >= 1
    assert lengths.sum() == max(round((1 - padding) * 512 * sequences), 512 + sequences - 1)


def test_outputs_that_differ_are_not_timed(monkeypatch):
    import varlen

    monkeypatch.setattr("sys.argv", ["x", "--quick"])
    monkeypatch.setattr(varlen.Problem, "check", lambda self, ways: np.inf)
    with pytest.raises(SystemExit, match="nothing is timed"):
        varlen.main()
