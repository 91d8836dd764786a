"""`attnbench choose`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from length_factory import along
from msgspec import structs
from record_factory import CPU, incorrect, ok, unsupported, workload

from attnbench.cli import execute
from attnbench.cli.choose import read_size
from attnbench.errors import PolicyWarning, UsageError
from attnbench.policy import Constraints, load_policy
from attnbench.results.run_file import RunWriter, new_header
from attnbench.spec import Failed, Memory, Record

LENGTHS = (128, 256, 512, 1024)


def write_run(path: Path, *records: Record, created: str = "") -> None:
    header = new_header("0", "quick")
    writer = RunWriter(path, structs.replace(header, created=created or header.created))
    writer.write(records)
    writer.close()


@pytest.fixture(autouse=True)
def _project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    memory = {"peak": lambda n: 1000.0 * n * n, "environment": CPU}
    eager = along("torch.eager", lambda n: 10.0 * n, LENGTHS, **memory)
    sdpa = along("torch.sdpa", lambda n: 4000.0 + 2 * n, LENGTHS, seed=1, environment=CPU, peak=lambda n: 100.0 * n)
    refused = unsupported("torch.fa3", "needs cuda", workload(64))
    write_run(tmp_path / "runs" / "one.jsonl", *eager, *sdpa, refused, ok("anchor.matmul", [1e3]))


def test_a_table_the_crossing_and_one_closing_sentence(capsys: pytest.CaptureFixture[str]):
    assert execute(["choose", "one", "-o", "policy.json"]) == 0
    out, err = capsys.readouterr()
    assert "PyTorch · Test CPU 9000 · forward · float32 · causal · MHA heads of 32" in out
    assert "torch.sdpa instead of torch.eager from" in out
    assert "not chosen: torch, b1-t64-h4-d32-causal-float32-forward: torch.fa3: unsupported: needs cuda" in out
    last = out.strip().splitlines()[-1]
    assert last.startswith("torch.eager from 128 tokens, torch.sdpa from 512 tokens; regret 1.000 on the grid, 1.0")
    assert " held out (worst " in last
    assert err == "wrote policy.json\n"
    found = load_policy("policy.json")
    assert [entry.use.label for entry in found.entries] == ["torch.eager"] * 2 + ["torch.sdpa"] * 2
    assert found.places[0].runs == ("one.jsonl",)


def test_what_is_written_over_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "keep.json"
    for told in ("", ", replacing a policy of 4 entries", ", replacing a policy of 4 entries"):
        assert execute(["choose", "one", "-o", "keep.json"]) == 0
        assert capsys.readouterr().err == f"wrote keep.json{told}\n"
    path.write_text("notes of mine")
    assert execute(["choose", "one", "-o", "keep.json"]) == 0
    assert capsys.readouterr().err == "wrote keep.json, replacing a file that was not a policy\n"


@pytest.mark.parametrize("words", ["choose one -o {}", "tune --seq-len 16 --minutes 1 -o {}"])
def test_a_run_file_is_never_replaced(words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    run = tmp_path / "runs" / "one.jsonl"
    before = run.read_bytes()
    assert execute(words.format(run).split()) == 2
    assert "one.jsonl is a run file, which is never replaced: choose another path" in capsys.readouterr().err
    assert run.read_bytes() == before


@pytest.mark.parametrize(("marked", "count"), [(["torch.sdpa"], 2), (["torch.sdpa", "torch.eager"], 2), ([], 0)])
def test_choices_on_unstable_samples_are_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, marked: list[str], count: int
):
    """torch.eager is fastest of two at each length and torch.sdpa next; torch.flex is far behind."""
    curves = {"torch.eager": 10.0, "torch.sdpa": 20.0, "torch.flex": 90.0}
    notes = dict.fromkeys((*marked, "torch.flex"), ("unstable samples: a single round does not show the spread",))
    records = [
        one
        for seed, (name, slope) in enumerate(curves.items())
        for one in along(name, lambda n, s=slope: s * n, (128, 256), seed=seed, notes=notes.get(name, ()))
    ]
    write_run(tmp_path / "runs" / "shaky.jsonl", *records)
    assert execute(["choose", "shaky"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.endswith(f" {count} of 2 choices rest on unstable samples.") == bool(count)


def test_constraints_are_written_and_told_by_whoever_reads_them(capsys: pytest.CaptureFixture[str]):
    words = [
        "--max-memory",
        "2GB",
        "--deterministic",
        "--max-error",
        "0.01",
        "--only",
        "torch",
        "--forbid",
        "torch.sdpa",
    ]
    assert execute(["choose", "one", "-o", "policy.json", *words]) == 0
    told = "at most 2,000,000,000 extra bytes; deterministic; error up to 0.01; only torch; without torch.sdpa"
    assert capsys.readouterr().out.strip().endswith(f"Chosen within: {told}.")
    with pytest.warns(PolicyWarning, match="made under constraints") as warned:
        found = load_policy("policy.json")
    assert told in str(warned[0].message)
    assert found.within == told
    assert found.places[0].within == Constraints(
        max_memory=2 * 10**9, deterministic=True, max_error=0.01, only=("torch",), forbid=("torch.sdpa",)
    )
    choice = found.choice(workload(128), "torch", CPU)
    assert choice is not None
    assert str(choice).endswith(f"chosen within: {told}")


def test_without_constraints_nothing_is_told(recwarn: pytest.WarningsRecorder):
    assert execute(["choose", "one", "-o", "policy.json"]) == 0
    assert load_policy("policy.json").within == ""
    assert "within" not in Path("policy.json").read_text()
    assert [one for one in recwarn if issubclass(one.category, PolicyWarning)] == []


def test_latest_is_the_default_and_nothing_is_written_unasked(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert execute(["choose"]) == 0
    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]):
    assert execute(["choose", "one", "-o", "policy.json", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert set(document) == {"policy", "on_grid", "fixed", "unchosen", "host_limited", "written", "closing"}
    assert document["policy"] == {"kind": "policy", **document["policy"]}
    assert document["written"] == "policy.json"
    assert len(document["unchosen"]) == 1
    assert err == ""


def test_constraints_reach_the_choice(capsys: pytest.CaptureFixture[str]):
    assert execute(["choose", "one", "--max-memory", "2MB", "--json"]) == 0
    names = [
        entry["use"]["implementation"]
        for entry in json.loads(capsys.readouterr().out)["policy"]["places"][0]["entries"]
    ]
    assert names == ["torch.sdpa"] * 4
    assert execute(["choose", "one", "--only", "torch.eager", "--deterministic", "--max-error", "1e-3"]) == 0
    assert "torch.eager from 128 tokens; regret" in capsys.readouterr().out


def test_runs_of_several_files_come_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "two.jsonl", ok("torch.eager", [1e6] * 9, workload(64)))
    assert execute(["choose", "one", "two.jsonl", "one", "-o", "policy.json"]) == 0
    assert [entry.at.q_len for entry in load_policy("policy.json").entries] == [64, *LENGTHS]
    assert "not chosen" not in capsys.readouterr().out


def test_nothing_to_choose_is_said_and_not_written(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert execute(["choose", "one", "--max-error", "1e-12", "-o", "policy.json"]) == 3
    out = capsys.readouterr().out
    assert "No implementation could be chosen for any workload." in out
    assert "has an error of" in out
    assert not (tmp_path / "policy.json").exists()


def test_a_policy_is_judged_on_other_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert execute(["choose", "one", "-o", "policy.json"]) == 0
    between = (180, 360, 720)
    eager = along("torch.eager", lambda n: 10.0 * n, between, environment=CPU)
    sdpa = along("torch.sdpa", lambda n: 4000.0 + 2 * n, between, seed=1, environment=CPU)
    write_run(tmp_path / "between.jsonl", *eager, *sdpa)
    capsys.readouterr()
    assert execute(["choose", "between.jsonl", "--judge", "policy.json"]) == 0
    out = capsys.readouterr().out
    assert "regret of the policy, and of one for everything" in out
    assert out.splitlines()[-1].startswith("policy.json: regret 1.")
    assert " over 3 shapes (worst 1." in out
    assert execute(["choose", "between.jsonl", "--judge", "policy.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["regret"]["Test CPU 9000/torch"]["shapes"] == 3
    assert {one["name"] for one in document["fixed"]["Test CPU 9000/torch"]} == {"torch.eager", "torch.sdpa"}


def test_constraints_of_a_judged_policy_are_a_warning_like_others(capsys: pytest.CaptureFixture[str]):
    assert execute(["choose", "one", "--forbid", "torch.eager", "-o", "policy.json"]) == 0
    capsys.readouterr()
    assert execute(["choose", "one", "--judge", "policy.json"]) == 0
    assert capsys.readouterr().err == "warning: policy.json was made under constraints (without torch.eager).\n"


def test_a_foreign_policy_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "gpu.jsonl", *along("torch.fa3", lambda n: 1.0 * n))
    assert execute(["choose", "gpu.jsonl", "-o", "gpu.json"]) == 0
    assert execute(["choose", "one", "--judge", "gpu.json"]) == 3
    out, err = capsys.readouterr()
    assert "not evaluated: gpu.json does not hold here: measured on Test GPU (cuda), this is Test CPU 9000 (cpu)" in err
    assert "gpu.json has no choice for any shape in these runs." in out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere"], 'there is no run file "nowhere"'),
        (["one", "--max-memory", "much"], 'takes a size such as 2GB or 512MiB, not "much"'),
        (["one", "--max-error", "0"], "--max-error must be more than 0"),
        (["one", "--only", "torch.spda"], 'no implementation in these runs called "torch.spda". Near: torch.sdpa'),
        (["one", "--forbid", "triton"], 'called "triton"'),
        (["one", "-o", "runs"], "cannot write runs"),
        (["policy.txt"], "not an attnbench run file"),
        (["one", "--judge", "policy.txt"], "this is not a policy file"),
        (["one", "--judge", "policy.txt", "-o", "x.json"], "cannot be combined with -o"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]):
    Path("policy.txt").write_text("{}\n")
    assert execute(["choose", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_sizes():
    assert [read_size(text) for text in ("2GB", "512MiB", "1.5k", "7", "1 TiB", "3b")] == [
        2 * 10**9, 512 * 2**20, 1500, 7, 2**40, 3,
    ]  # fmt: skip
    for wrong in ("", "GB", "-2GB", "2XB", "1.2.3MB", "0"):
        with pytest.raises(UsageError, match="--max-memory"):
            read_size(wrong)


def test_a_record_without_memory_is_not_within_a_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    write_run(tmp_path / "bare.jsonl", ok("torch.eager", [1e6] * 9, memory=Memory(peak_bytes=None, reason="unknown")))
    assert execute(["choose", "bare.jsonl", "--max-memory", "1TB"]) == 3
    assert "its peak memory is unknown" in capsys.readouterr().out


class TestOlderTimes:
    NEWER = "2999-01-01T00:00:00+00:00"

    def test_what_a_newer_run_found_incorrect_is_not_chosen(self, capsys: pytest.CaptureFixture[str], tmp_path: Path):
        wrong = [incorrect("torch.sdpa", "row 3 is wrong", workload(n)) for n in LENGTHS]
        write_run(tmp_path / "runs" / "two.jsonl", *wrong, created=self.NEWER)
        told = "torch.sdpa is left out on 4 shapes: a newer run found it incorrect."
        for runs in (["one", "two"], ["two", "one"]):
            assert execute(["choose", *runs, "-o", "policy.json"]) == 0
            assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"{told} torch.eager from 128 tokens; ")
            assert {entry.use.label for entry in load_policy("policy.json").entries} == {"torch.eager"}
        assert execute(["choose", "one", "two", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["closing"].startswith(told)
        assert execute(["choose", "one", "two", "--judge", "policy.json"]) == 0
        assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"{told} policy.json: regret 1.000 over")
        assert execute(["choose", "one", "two", "--forbid", "torch.sdpa"]) == 0
        assert "left out" not in capsys.readouterr().out

    def test_nor_is_it_with_the_library_of_the_older_run(self, capsys: pytest.CaptureFixture[str], tmp_path: Path):
        here = structs.replace(CPU, packages={"torch": "9.0"})
        wrong = [structs.replace(incorrect("torch.sdpa", "wrong", workload(n)), environment=here) for n in LENGTHS]
        eager = along("torch.eager", lambda n: 10.0 * n, LENGTHS, environment=here)
        write_run(tmp_path / "runs" / "two.jsonl", *wrong, *eager, created=self.NEWER)
        assert execute(["choose", "one", "two", "-o", "policy.json"]) == 0
        assert "torch.sdpa is left out on 4 shapes" in capsys.readouterr().out
        found = load_policy("policy.json")
        assert len(found.places) == 2
        assert {entry.use.label for entry in found.entries} == {"torch.eager"}

    def test_if_nothing_else_is_left_there_is_no_choice(self, capsys: pytest.CaptureFixture[str], tmp_path: Path):
        wrong = [incorrect("torch.sdpa", "row 3 is wrong", workload(n)) for n in LENGTHS]
        write_run(tmp_path / "runs" / "two.jsonl", *wrong, created=self.NEWER)
        assert execute(["choose", "one", "two", "--only", "torch.sdpa", "-o", "policy.json"]) == 3
        out = capsys.readouterr().out
        assert "torch.sdpa is left out on 4 shapes: a newer run found it incorrect. No implementation could be" in out
        assert "torch.sdpa: incorrect: row 3 is wrong" in out
        assert not (tmp_path / "policy.json").exists()

    def test_what_a_newer_run_lost_is_chosen_and_told(self, capsys: pytest.CaptureFixture[str], tmp_path: Path):
        lost = Failed(implementation="torch.sdpa", workload=workload(1024), reason="boom", environment=CPU)
        write_run(tmp_path / "runs" / "two.jsonl", lost, created=self.NEWER)
        assert execute(["choose", "one", "two"]) == 0
        last = capsys.readouterr().out.strip().splitlines()[-1]
        told = "torch.sdpa is compared by older times on 1 shape: a newer run has none (failed: boom)."
        assert last.startswith(f"{told} torch.eager from 128 tokens, torch.sdpa from 512 tokens; ")
