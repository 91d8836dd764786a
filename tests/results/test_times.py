"""Times that no clock can have given: refused where a file is read, with the line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from record_factory import incorrect, ok, timing

from attnbench.cli import execute
from attnbench.comparing.baselines import read_baseline, save
from attnbench.errors import BrokenFile
from attnbench.report.pytest_session import read_earlier
from attnbench.results.run_file import RunWriter, impossible_times, new_header, read_run
from attnbench.spec import Ok, Time

GOOD = timing([3e6, 4e6, 5e6], rounds=[2, 1])
ZERO = timing([0.0, 0.0, 0.0])


def record(time: Time, **fields: Any) -> Ok:
    return ok("torch.x", None, time=time, **fields)


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"samples_ns": (3e6, 0.0, 5e6)}, "samples_ns holds 0"),
        ({"samples_ns": (3e6, -4.0, 5e6)}, "samples_ns holds -4"),
        ({"samples_ns": (3e6, 1e-20, 5e6)}, "samples_ns holds 1e-20, which is no time of a call"),
        ({"max_ns": 1e295}, "max_ns holds 1e+295, which is no time of a call"),
        ({"samples_ns": (), "rounds": ()}, "samples_ns is empty"),
        ({"median_ns": float("nan")}, "median_ns holds nan"),
        ({"p99_ns": float("inf")}, "p99_ns holds inf"),
        ({"mean_ns": -1.0}, "mean_ns holds -1"),
        ({"std_ns": -1.0}, "std_ns is -1"),
        ({"median_ns": 9e6}, "median_ns 9e+06 is not between"),
        ({"ci95_ns": (4.1e6, 4.2e6)}, "ci95_ns does not hold median_ns"),
        ({"ci95_ns": (float("nan"), 5e6)}, "ci95_ns does not hold median_ns"),
        ({"calls_per_sample": 0}, "calls_per_sample is 0"),
        ({"rounds": (2, 2)}, "rounds has 4 samples, but samples_ns 3"),
        ({"rounds": (4, -1)}, "rounds"),
        ({"median_ns": 3.1e6, "ci95_ns": None}, "median_ns 3.1e+06 is not that of samples_ns"),
        ({"p50_ns": 3.1e6}, "p50_ns 3.1e+06 is not that of samples_ns"),
        ({"min_ns": 1e5, "median_ns": 4e5, "ci95_ns": (4e5, 4e5)}, "median_ns 400000 is not that of samples_ns"),
        ({"min_ns": 1e5}, "min_ns 100000 is not that of samples_ns"),
        ({"max_ns": 9e6}, "max_ns 9e+06 is not that of samples_ns"),
    ],
)
def test_each_impossible_time_is_named(changed: dict[str, Any], told: str):
    bad = replace(GOOD, **changed)
    assert impossible_times(record(bad)).startswith(f"time.{told}")
    assert impossible_times(record(GOOD, also={"forward": bad})).startswith(f"also.forward.{told}")


def test_a_baseline_keeps_the_median_of_samples_that_it_does_not_hold():
    kept = replace(timing([1.0, 2.0, 30.0, 4.0, 5.0, 6.0, 7.0]), samples_ns=(2.0, 5.5), rounds=(1, 1))
    assert impossible_times(record(kept), trimmed=True) == ""
    assert "median_ns 5 is not that of samples_ns" in impossible_times(record(kept))
    for changed in ({"median_ns": 6.5}, {"min_ns": 3.0}, {"max_ns": 5.0}):
        assert "is not that of samples_ns" in impossible_times(record(replace(kept, **changed)), trimmed=True)


@pytest.mark.parametrize(
    "time", [GOOD, replace(GOOD, ci95_ns=None), replace(GOOD, ci95_ns=(-1e6, 9e6)), replace(GOOD, rounds=())]
)
def test_what_sampling_gives_is_possible(time: Time):
    assert impossible_times(record(time)) == ""
    assert impossible_times(incorrect("torch.x", "off")) == ""
    assert impossible_times(ok("torch.x")) == ""


def test_a_run_file_names_the_line_and_a_baseline_the_file(tmp_path: Path):
    writer = RunWriter(tmp_path / "r.jsonl", new_header("0", "s"))
    writer.write([ok("torch.fine", [1.0, 2.0]), record(ZERO)])
    with pytest.raises(BrokenFile, match=r"r\.jsonl, line 4: time\.samples_ns holds 0.*torch\.x"):
        read_run(writer.path)
    save([record(ZERO), *(ok(f"anchor.{name}", [1e5, 1e5]) for name in ("matmul", "copy"))], tmp_path / "kept")
    (path,) = (tmp_path / "kept").rglob("*.json")
    with pytest.raises(BrokenFile, match=r"holds 0.*attnbench baseline update"):
        read_baseline(path)


def test_what_a_test_session_is_held_against_is_checked_too(tmp_path: Path):
    path = tmp_path / "earlier.json"
    path.write_bytes(msgspec.json.encode({"records": [record(GOOD)]}))
    assert len(read_earlier(path).records) == 1
    path.write_bytes(msgspec.json.encode({"records": [record(GOOD), record(ZERO)]}))
    with pytest.raises(BrokenFile, match=r"earlier\.json: time\.samples_ns holds 0"):
        read_earlier(path)


@pytest.mark.parametrize(
    "command",
    [
        lambda path: ["gate", "--baseline", path, "--current", path],
        lambda path: ["show", path],
        lambda path: ["report", path, "--out", "page.html"],
        lambda path: ["history", path],
    ],
)
def test_every_reader_says_so_in_one_sentence(
    command: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    RunWriter(tmp_path / "bad.jsonl", new_header("0", "s")).write([record(timing([-3.0, -4.0]))])
    assert execute(command("bad.jsonl")) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert told.startswith("error: bad.jsonl, line 3: time.samples_ns holds -3")
    assert told.count("\n") == 1
