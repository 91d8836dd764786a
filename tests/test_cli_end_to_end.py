"""The command line with real workers: every command, the three frameworks side by side, and what users get wrong."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from cli_in_process import attnbench
from cli_process import finish, start

from attnbench.results.run_file import read_run

TINY = ["--seq-len", "32", "--heads", "4:2", "--head-dim", "16", "--causal", "--budget", "0.05"]
KERNEL = """
import torch

def right(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)

def wrong(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
"""

PLAIN = """
import numpy as np

def attend(q, k, v):
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    return ({factor} * out).astype(q.dtype)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    (tmp_path / "my_kernel.py").write_text(KERNEL)
    return tmp_path


def test_doctor_knows_every_implementation_and_why_it_cannot_run(tmp_path: Path):
    done = attnbench(tmp_path, "doctor", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    states = {state["name"]: state for state in found["implementations"]}
    assert states["numpy.reference"]["reason"] is None
    assert states["torch.flash-attn"]["reason"]
    listed = json.loads(attnbench(tmp_path, "list", "implementations", "--json").stdout)
    assert {row["implementation"] for row in listed} == set(states)


@pytest.mark.torch
@pytest.mark.jax
def test_three_frameworks_are_ranked_in_one_document_and_shown_again(tmp_path: Path):
    names = ("numpy.float32", "torch.eager", "jax.einsum")
    done = attnbench(tmp_path, "run", "--impl", *names, *TINY, "--trace", "traces", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (rows,) = document["ranking"].values()
    assert {row["implementation"]: row["status"] for row in rows} == dict.fromkeys(names, "ok")
    assert all(row["median_ns"] > 0 and row["rank"] for row in rows)
    assert document["baseline"] == "torch.eager"
    assert len(list((tmp_path / "traces").iterdir())) == 3
    run = read_run(tmp_path / document["run"])
    made = {record.implementation: record for record in run.records}
    assert set(made) == {*names, "anchor.matmul", "anchor.copy"}
    assert {record.environment.framework for record in run.records if record.environment} == {"numpy", "torch", "jax"}
    assert all(made[name].memory.peak_bytes is not None or made[name].memory.reason for name in names)
    shown = attnbench(tmp_path, "show", document["run"], "--json")
    assert shown.returncode == 0
    assert json.loads(shown.stdout)["ranking"] == document["ranking"]
    assert json.loads(shown.stdout)["closing"] == document["closing"]
    text = attnbench(tmp_path, "show", "latest", "--detail")
    assert text.returncode == 0
    assert all(name in text.stdout for name in names)
    assert "p99" in text.stdout


@pytest.mark.torch
def test_a_kernel_from_a_file_is_verified_and_ranked(kernel: Path):
    arguments = ["run", "--impl", "my_kernel.py:right", "my_kernel.py:wrong", "--against", "torch.eager", *TINY]
    done = attnbench(kernel, *arguments)
    assert done.returncode == 0, done.stderr
    assert "wrong is not ranked: output: " in done.stdout
    (path,) = kernel.glob("runs/*/*.jsonl")
    assert done.stdout.strip().endswith(str(path.relative_to(kernel)))
    statuses = {record.implementation: record.status for record in read_run(path).records}
    assert statuses["right"] == "ok"
    assert statuses["wrong"] == "incorrect"
    (hint,) = re.findall(r"`attnbench (verify [^`]+)` shows where wrong is wrong", done.stdout)
    explained = attnbench(kernel, *shlex.split(hint))
    assert explained.returncode == 1
    assert "row 0" in explained.stdout


def test_functions_of_one_name_are_told_apart_by_their_files(tmp_path: Path):
    """In a process of its own with workers as users have them; the other commands of this file run in this process."""
    for name, factor in (("mine", "1.01"), ("theirs", "1")):
        (tmp_path / f"{name}.py").write_text(PLAIN.format(factor=factor))
    references = ["--impl", "mine.py:attend", "theirs.py:attend", "--against", "theirs.py:attend"]
    done = finish(start(tmp_path, "run", *references, "--framework", "numpy", "--seq-len", "32", "--trials", "3"))
    assert done.returncode == 0, done.stderr
    assert "against theirs:attend" in done.stdout
    assert "mine:attend is not ranked: output" in done.stdout
    (path,) = tmp_path.glob("runs/*/*.jsonl")
    statuses = {record.implementation: record.status for record in read_run(path).records}
    assert (statuses["mine:attend"], statuses["theirs:attend"]) == ("incorrect", "ok")
    (hint,) = re.findall(r"`attnbench (verify [^`]+)` shows where mine:attend is wrong", done.stdout)
    assert attnbench(tmp_path, *shlex.split(hint)).returncode == 1


def test_verify_checks_what_is_installed(kernel: Path):
    named = attnbench(kernel, "verify", "--impl", "numpy", "--json")
    assert named.returncode == 0
    statuses = {record["status"] for record in json.loads(named.stdout)["records"]}
    assert statuses == {"ok", "unsupported"}


def test_a_dry_run_measures_nothing(tmp_path: Path):
    arguments = ["run", "--list", "--framework", "numpy", "--seq-len", "32", "2000000", "--heads", "64", "--json"]
    done = attnbench(tmp_path, *arguments)
    assert done.returncode == 0
    rows = json.loads(done.stdout)
    assert {row["runs"] for row in rows if "-t32-" in row["workload"]} == {True}
    large = [row for row in rows if "-t2000000-" in row["workload"]]
    assert all(row["reason"].startswith("needs ") and row["reason"].endswith(" GB here") for row in large)
    assert not (tmp_path / "runs").exists()


def test_nothing_measured_is_three(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def attend(q, k, v):\n    raise ValueError('not today')\n")
    asked = ["--impl", "mine.py:attend", "--against", "mine.py:attend", "--framework", "numpy", "--seq-len", "32"]
    done = attnbench(tmp_path, "run", *asked)
    assert done.returncode == 3
    assert "Nothing could be measured (1 failed)." in done.stdout


def test_a_request_that_can_run_in_part_runs_in_part(tmp_path: Path):
    shape = ["--seq-len", "32", "--dtype", "float32", "bfloat16", "--trials", "3"]
    done = attnbench(tmp_path, "run", "--impl", "numpy.float32", *shape)
    assert done.returncode == 0
    (path,) = tmp_path.glob("runs/*/*.jsonl")
    mine = [record for record in read_run(path).records if record.implementation == "numpy.float32"]
    assert sorted(record.status for record in mine) == ["ok", "unsupported"]


def _occupied(folder: Path) -> None:
    (folder / "taken").write_text("a file where run files should go")
    (folder / "broken.toml").write_text("[[workload]]\nbatch = 1\nq_len = = 3\n")
    (folder / "empty.toml").write_text("")
    header = '{"line":"header","schema":1,"attnbench":"0","created":"now"}\n'
    (folder / "broken.jsonl").write_text(f'{header}{{"line":"record"}}\n{header}')


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("run --impl torch.spda", 'no implementation called "torch.spda". Near: torch.sdpa'),
        ("run --seq-len 0", "q_len must be a whole number of at least 1"),
        ("run --heads 12:5", "12 query heads cannot share 5 key/value heads"),
        ("run --dtype float7", 'dtype "float7" is not one of float64'),
        ("run --device tpu --impl numpy.float32", 'nothing can run on device "tpu": numpy has no tpu here, only cpu'),
        (
            "run --impl numpy.float32 --dtype bfloat16 --seq-len 32",
            "no implementation here supports this dtype. numpy.float32: ",
        ),
        ("run --framework numpy --dtype bfloat16 --seq-len 32", "no implementation here supports this dtype."),
        ("run broken.toml", "broken.toml, line 3"),
        ("run empty.toml", "empty.toml"),
        ("run no-such-suite", 'no suite called "no-such-suite"'),
        ("run --impl numpy.float32 --seq-len 32 --out taken", "cannot write taken"),
        ("run --impl nowhere.py:mine", "there is no file nowhere.py"),
        ("show broken.jsonl", "broken.jsonl, line 2"),
        ("run --resume broken.jsonl", "broken.jsonl, line 2"),
        ("verify --impl torch.spda", 'no implementation called "torch.spda"'),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(tmp_path: Path, command: str, told: str):
    _occupied(tmp_path)
    done = attnbench(tmp_path, *command.split())
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert told in done.stderr
    assert not list(tmp_path.glob("runs/**/*.jsonl"))
