"""The benchmark of what `ab.attention` adds runs, and compares what it says it compares."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]


def test_it_runs_and_writes_where_it_ran(tmp_path, monkeypatch, capsys):
    import dispatch_overhead
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["x", "--rounds", "3", "--calls", "2", "-o", str(tmp_path / "found.json")])
    try:
        dispatch_overhead.main()
    finally:
        torch.set_num_threads(threads)
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["cases"]) == ["full", "causal", "causal train"]
    assert found["environment"]["packages"]["torch"]
    for case in found["cases"].values():
        assert len(case["added"]) == 5
        assert all(added["ci95"][0] <= added["us"] <= added["ci95"][1] for added in case["added"].values())
    assert "us" in capsys.readouterr().out
