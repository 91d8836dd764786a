"""The benchmark of pairs end to end, small; and its arithmetic on times that are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.results.run_file import read_run

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "pairs.py"


def test_it_runs_and_predicts(tmp_path):
    out = tmp_path / "pairs.json"
    kept = tmp_path / "steps.jsonl"
    command = [sys.executable, SCRIPT, "--smoke", "--budget", "0.05", "-o", out, "--records", kept]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    (shape,) = found["shapes"]
    pairs = {"torch.sdpa-flash + torch.eager", "torch.eager + torch.sdpa-flash"}
    assert set(shape["train_ms"]) == {"torch.sdpa-flash", "torch.eager", *pairs}
    assert set(shape["predicted_ms"]) == set(shape["train_ms"])
    for name, predicted in shape["predicted_ms"].items():
        forward, _, backward = name.partition(" + ")
        parts = shape["forward_ms"][forward], shape["backward_ms"][backward or forward]
        assert predicted == pytest.approx(sum(parts))
    assert shape["errors"]["torch.eager + torch.sdpa-flash"]["backward"] > 0
    run = read_run(kept)
    assert len(run.records) == 4
    assert sum(record.implementation == "torch.pair" for record in run.records) == 2
    chosen = [sys.executable, "-m", "attnbench", "choose", kept, "-o", tmp_path / "policy.json"]
    assert subprocess.run(chosen, capture_output=True, timeout=60).returncode == 0
    assert found["environment"]["device"] == "cpu"
    assert found["summary"]["shapes"] == 1
    assert "claims" not in found
    assert json.loads(done.stdout[done.stdout.index("{") :]) == found["summary"]

    again = [sys.executable, SCRIPT, "--smoke", "--budget", "0.05", "-o", tmp_path / "again.json", "--parts", out]
    assert subprocess.run(again, capture_output=True, timeout=200).returncode == 0
    (second,) = json.loads((tmp_path / "again.json").read_text())["shapes"]
    for name in ("forward_ms", "backward_ms"):
        assert second[name] == pytest.approx(shape[name]), "the parts of the earlier run"
    assert set(second["train_ms"]) == set(shape["train_ms"])
    assert second["train_ms"] != shape["train_ms"], "steps of its own"


def test_parts_of_a_file_count_only_where_it_tells_of_every_library(tmp_path):
    from pairs import parts_known, smoke_shapes

    (shape,) = smoke_shapes()
    few, more = tmp_path / "few.json", tmp_path / "more.json"
    told = {"workload": shape.id, "forward_ms": {"a": 1.0}, "backward_ms": {"a": 2.0}, "not_run": {}}
    few.write_text(json.dumps({"shapes": [told]}))
    assert parts_known(shape, ["a"], [few]) == ({"a": 1e6}, {"a": 2e6})
    assert parts_known(shape, ["a", "b"], [few]) is None, "b is to be measured"
    told |= {"forward_ms": {"a": 3.0, "b": 4.0}, "not_run": {"c": "unsupported: needs cuda"}}
    more.write_text(json.dumps({"shapes": [told]}))
    assert parts_known(shape, ["a", "b"], [few, more]) == ({"a": 3e6, "b": 4e6}, {"a": 2e6}), "b runs forward only"
    assert parts_known(shape, ["a", "c"], [few, more]) == ({"a": 3e6}, {"a": 2e6})
    assert parts_known(shape, ["a"], [few, more]) == ({"a": 1e6}, {"a": 2e6})


def test_means_and_claims():
    from pairs import claims, summary

    shapes = [
        {"over_best": 1.1, "over_each": {"a": 1.1, "b": 1.3}, "train_ms": {"a": 11.0}, "predicted_ms": {"a": 10.0}}
        | {"best_alone": "a"},
        {"over_best": 1.0, "over_each": {"a": 1.21}, "train_ms": {"a": 9.0, "c": 1.0}, "predicted_ms": {"a": 10.0}}
        | {"best_alone": "a"},
        {"over_best": None, "over_each": {}, "train_ms": {}, "predicted_ms": {}},
    ]
    total = summary(shapes)
    assert total["shapes"] == 2
    assert total["over_best"] == pytest.approx(1.1**0.5)
    assert total["worst"] == 1.0
    assert total["over_fixed"] == {"a": pytest.approx((1.1 * 1.21) ** 0.5)}
    assert total["over_some_shapes"] == {"b": pytest.approx(1.3)}
    assert total["measured_over_predicted"] == pytest.approx({"mean": 0.0, "least": -0.1, "most": 0.1})
    assert list(claims(total).values()) == [True, True, True]
    assert list(claims(total | {"worst": 0.98, "over_fixed": {"a": 1.2, "b": 1.01}}).values()) == [True, False, False]


def test_the_steps_of_an_earlier_run_decide_where_there_are_some():
    from pairs import judged, summary

    took = {"a": 10.0, "b": 12.0, "a + b": 9.0, "b + a": 8.0}
    one = {"workload": "w", "train_ms": took, "predicted_ms": {"a": 10.0, "b": 12.0, "a + b": 9.99}}
    by_parts = judged(one, {})
    assert (by_parts["chosen"], by_parts["chosen_by"]) == ("a", "parts"), "0.1 % is less than the margin"
    by_steps = judged(one, {"w": {"a": 10.1, "a + b": 9.1, "gone": 1.0}})
    assert (by_steps["chosen"], by_steps["chosen_by"]) == ("a + b", "an earlier run")
    assert by_steps["over_best"] == pytest.approx(10 / 9)
    assert judged(one, {"other": {"b": 1.0}})["chosen"] == "a"
    unforeseen = judged(one, {"w": {"b + a": 1.0}})
    assert (unforeseen["chosen"], unforeseen["predicted_over_best"]) == ("b + a", None)
    total = summary([by_steps])
    assert total["over_best"] == pytest.approx(10 / 9)
    assert total["over_best_if_all_were_known"] == pytest.approx(10 / 8)
