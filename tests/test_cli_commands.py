"""The command line without workers: a fake `launch` answers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_lab
import pytest
from fake_lab import NAMES, FakeLab

from attnbench.cli import execute
from attnbench.cli.verify import SPREAD
from attnbench.results.run_file import read_run


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLab:
    return fake_lab.install(monkeypatch, tmp_path)


def test_run_ranks_closes_and_names_the_file(lab: FakeLab, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert execute(["run"]) == 0
    out, err = capsys.readouterr()
    assert "torch.sdpa is " in out
    assert "faster than torch.eager over 6 shapes" in out
    assert "Not run: torch.fa3 (needs cuda" in out
    last = out.strip().splitlines()[-1]
    assert last.startswith("runs/test-cpu-9000/")
    assert len(read_run(tmp_path / last).records) == 6 * (len(NAMES) + 2)
    assert "implementations x 6 workloads" in err
    assert lab.requests[0].implementations == tuple(NAMES)


def test_run_json_is_one_document(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    assert execute(["run", "--seq-len", "64", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert set(document) >= {"run", "records", "ranking", "closing"}
    (rows,) = document["ranking"].values()
    assert next(row["implementation"] for row in rows if row["rank"]) == "torch.sdpa"
    assert next(row for row in rows if row["implementation"] == "torch.fa3")["median_ns"] is None
    assert {record["status"] for record in document["records"]} == {"ok", "unsupported"}
    assert err == ""


def test_shape_options_make_a_grid_of_their_own(lab: FakeLab):
    command = "run --quick --impl torch.sdpa --seq-len 512 1024 --batch 1 4 --heads 32:8 --head-dim 128"
    command += " --dtype bfloat16 --pass train --trials 20"
    assert execute(command.split()) == 0
    (request,) = lab.requests
    assert {(w.q_len, w.batch) for w in request.workloads} == {(512, 1), (512, 4), (1024, 1), (1024, 4)}
    assert {(w.heads, w.kv_heads, w.head_dim, w.dtype, w.pass_) for w in request.workloads} == {
        (32, 8, 128, "bfloat16", "train")
    }
    assert request.implementations == ("torch.sdpa",)
    assert request.trials == 20
    assert request.budget_s == 0.5


def test_whole_numbers_in_other_forms(lab: FakeLab):
    assert execute(["run", "--seq-len", "1e2", "64.0", "0x40", "0128", "--trials", "3.0"]) == 0
    (request,) = lab.requests
    assert [w.q_len for w in request.workloads] == [100, 64, 128]
    assert request.trials == 3
    assert all(type(w.q_len) is int for w in request.workloads)


def test_options_repeat_or_list(lab: FakeLab):
    assert (
        execute(
            ["run", "--seq-len", "64", "--seq-len", "128", "--impl", "torch.sdpa", "torch.eager", "--impl", "jax.xla"]
        )
        == 0
    )
    assert [w.q_len for w in lab.requests[0].workloads] == [64, 128]
    assert lab.requests[0].implementations == ("torch.sdpa", "torch.eager", "jax.xla")


def test_shape_options_replace_axes_of_a_suite(lab: FakeLab):
    assert execute(["run", "square-cpu", "--dtype", "float64", "--impl", "torch.sdpa"]) == 0
    workloads = lab.requests[0].workloads
    assert len(workloads) == 10
    assert {w.dtype for w in workloads} == {"float64"}
    assert {w.inputs for w in workloads} == {"normal", "sincostan"}


def test_causal_adds_to_masks(lab: FakeLab):
    assert execute(["run", "--causal", "--seq-len", "64", "--impl", "torch.sdpa"]) == 0
    assert execute(["run", "--causal", "--mask", "lengths:40", "--seq-len", "64", "--impl", "torch.sdpa"]) == 0
    kinds = [request.workloads[0].visible_mask.kinds for request in lab.requests]
    assert kinds[0] == ("causal",)
    assert sorted(kinds[1]) == ["causal", "lengths"]


def test_a_function_is_ranked_against_the_field_or_those_named(lab: FakeLab):
    assert execute(["run", "--impl", "my.py:mine", "--seq-len", "64"]) == 0
    assert execute(["run", "--impl", "my.py:mine", "--against", "torch", "--seq-len", "64"]) == 0
    everyone, some = (request.implementations for request in lab.requests)
    assert everyone == ("my.py:mine", *NAMES)
    assert some == ("my.py:mine", *(name for name in NAMES if name.startswith("torch.")))


def test_a_wrong_function_is_named_with_the_next_step(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    assert execute(["run", "--impl", "my.py:mine", "--seq-len", "64", "--causal"]) == 0
    out = capsys.readouterr().out
    assert "mine is not ranked: its output is wrong from row 7 on." in out
    assert "attnbench verify --impl my.py:mine --seq-len 64 --causal --explain" in out
    assert execute(["verify", "--impl", "my.py:mine", "--seq-len", "64", "--causal", "--explain"]) == 1
    assert lab.requests[0].workloads == lab.requests[1].workloads
    assert execute(["run", "--quick", "--impl", "my.py:mine"]) == 0
    assert "attnbench verify --impl my.py:mine --suite quick --quick --explain" in capsys.readouterr().out


def test_list_is_a_dry_run_with_reasons(lab: FakeLab, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert execute(["run", "--list", "--seq-len", "64"]) == 0
    out = capsys.readouterr().out
    assert "needs 38 GB, 24 GB here" in out
    assert "5 of 6 cells would run." in out
    assert execute(["run", "--list", "--seq-len", "64", "--json"]) == 0
    assert [row["runs"] for row in json.loads(capsys.readouterr().out)].count(True) == 5
    assert lab.requests == []
    assert not (tmp_path / "runs").exists()


def test_shards_cover_the_suite_once(lab: FakeLab):
    for part in (1, 2, 3):
        assert execute(["run", "grid", "--impl", "torch.sdpa", "--shard", f"{part}/3", "--quiet"]) == 0
    ids = [w.id for request in lab.requests for w in request.workloads]
    assert len(ids) == len(set(ids)) == 80


def test_words_narrow_names_and_shapes(lab: FakeLab):
    assert execute(["run", "--seq-len", "64", "128", "-k", "sdpa t128-"]) == 0
    (request,) = lab.requests
    assert request.implementations == ("torch.sdpa", "torch.sdpa-math")
    assert [w.q_len for w in request.workloads] == [128]


def test_interrupt_keeps_what_is_there_and_resume_goes_on(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    lab.interrupt_after = 2
    assert execute(["run", "--quick"]) == 130
    out, err = capsys.readouterr()
    path = out.strip().splitlines()[-1]
    assert f"attnbench run --resume {path}" in err.replace("\n", "")
    with open(path, "ab") as file:
        file.write(b'{"line":"record","rec')
    lab.interrupt_after = None
    assert execute(["run", "--resume", path]) == 0
    assert "cut off" in capsys.readouterr().err
    first, second = lab.requests
    assert first == second
    assert len(lab.done) == 2 * (len(NAMES) + 2)
    assert len(read_run(Path(path)).records) == 6 * (len(NAMES) + 2)


def test_interrupt_before_anything(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    lab.interrupt_after = 0
    assert execute(["run"]) == 130
    assert "nothing was measured" in capsys.readouterr().err


def test_nothing_measured_is_three(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    assert execute(["run", "--impl", "torch.fa3", "--seq-len", "64"]) == 3
    assert "Nothing could be measured (1 unsupported)." in capsys.readouterr().out


def test_show_prints_tables_detail_and_json(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    assert execute(["run", "--seq-len", "64", "--quiet"]) == 0
    path = capsys.readouterr().out.strip().splitlines()[-1]
    assert execute(["show", path]) == 0
    assert "faster than torch.eager" in capsys.readouterr().out
    assert execute(["show", "latest", "--detail", "-k", "torch.sdpa/"]) == 0
    assert "p99" in capsys.readouterr().out
    assert execute(["show", path, "--against", "torch.sdpa-math", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["baseline"] == "torch.sdpa-math"
    assert document["header"]["suite"] == "own"


def test_resume_refuses_another_version_of_a_function(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    file = Path("my.py")
    file.write_text("first = 1")
    lab.interrupt_after = 1
    assert execute(["run", "--impl", "my.py:mine", "--against", "torch.sdpa", "--seq-len", "64", "128"]) == 130
    path = capsys.readouterr().out.strip().splitlines()[-1]
    lab.interrupt_after = None
    file.write_text("second = 2")
    assert execute(["run", "--resume", path, "--impl", "my.py:mine"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: my.py has changed since {path} began")
    assert "start a new run, or undo the change" in err
    assert len(lab.requests) == 1
    file.write_text("first = 1")
    assert execute(["run", "--resume", path, "--impl", "my.py:mine"]) == 0


def test_show_and_resume_compare_with_what_the_run_did(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    lab.interrupt_after = 1
    against = ["--impl", "torch.sdpa", "torch.eager", "--against", "jax.xla"]
    assert execute(["run", "--seq-len", "64", "128", *against, "--quiet"]) == 130
    out = capsys.readouterr().out
    assert "against jax.xla" in out
    path = out.strip().splitlines()[-1]
    assert execute(["show", path]) == 0
    assert "against jax.xla" in capsys.readouterr().out
    assert execute(["show", path, "--against", "torch.eager"]) == 0
    assert "against torch.eager" in capsys.readouterr().out
    assert execute(["show", path, "-k", "torch.eager"]) == 0
    lab.interrupt_after = None
    assert execute(["run", "--resume", path, "--quiet"]) == 0
    assert "against jax.xla" in capsys.readouterr().out.partition("128 tokens")[2]


def test_verify_says_yes_or_no(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    assert execute(["verify"]) == 0
    assert "All 5 implementations that run here are right" in capsys.readouterr().out
    assert lab.requests[0].thorough
    assert not lab.requests[0].measure
    assert {w.id for w in lab.requests[0].workloads} == set(SPREAD)
    assert execute(["verify", "--impl", "my.py:mine", "--explain"]) == 1
    assert "wrong from row 7 on" in capsys.readouterr().out
    assert [w.visible_mask.id for w in lab.requests[1].workloads] == ["full"]
    assert execute(["verify", "--impl", "torch.fa3"]) == 3
    capsys.readouterr()
    assert execute(["verify", "--family", "sdpa", "--suite", "quick", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["summary"]) == {"torch.sdpa", "torch.sdpa-math"}


def test_doctor(lab: FakeLab, capsys: pytest.CaptureFixture[str]):
    assert execute(["doctor"]) == 0
    assert "needs cuda" in capsys.readouterr().out
    assert execute(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["implementations"][1]["reason"] == "needs cuda"


def test_listings(capsys: pytest.CaptureFixture[str]):
    assert execute(["list", "suites"]) == 0
    assert "quick" in capsys.readouterr().out
    assert execute(["list", "workloads", "quick", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 6
    assert execute(["list", "workloads", "gemma"]) == 0
    assert "b32-t867" in capsys.readouterr().out


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    for command in (
        [],
        ["--help"],
        ["run", "--help"],
        ["list", "--help"],
        ["verify", "--help"],
        ["show", "--help"],
        ["doctor", "--help"],
    ):
        assert execute(command) == 0
    assert "--seq-len" in capsys.readouterr().out
    assert execute(["--version"]) == 0
    assert capsys.readouterr().out.strip()


def test_reader_that_leaves_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "attnbench", "list", "workloads", "edge"],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(write)
    assert done.returncode == 0
    assert done.stderr == b""
