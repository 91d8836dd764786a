"""`attnbench tune` without workers: which rounds there are, when it stops, what it keeps."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import fake_lab
import pytest
from length_factory import steady
from record_factory import ok

from attnbench.cli import execute
from attnbench.policy import load_policy
from attnbench.results.run_file import read_run

module = import_module("attnbench.cli.tune")
FEW = ["--impl", "torch.eager", "torch.sdpa", "--seq-len", "128", "2048", "--quiet"]
CURVES = {"torch.eager": lambda n: 10.0 * n, "torch.sdpa": lambda n: 4000.0 + 2 * n}


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> fake_lab.FakeLab:
    made = fake_lab.install(monkeypatch, tmp_path)

    def answer(name, workload, measure):
        return ok(name, steady(CURVES[name](workload.kv_len), workload.kv_len + len(name)), workload)

    monkeypatch.setattr(made, "answer", answer)
    return made


def lengths(lab: fake_lab.FakeLab) -> list[list[int]]:
    return [[w.q_len for w in request.workloads] for request in lab.requests]


def test_it_closes_in_on_the_crossing(lab: fake_lab.FakeLab, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert execute(["tune", *FEW, "-o", "mine.json"]) == 0
    asked = lengths(lab)
    assert asked[:2] == [[128, 2048], [512]]
    assert len(asked) >= 3
    out, err = capsys.readouterr()
    assert "torch.sdpa instead of torch.eager" in out
    assert f"{len(asked)} rounds" in err
    assert "no further measurement would improve the policy." in err
    assert "not measured" not in err
    assert "wrote mine.json" in err
    files = sorted((tmp_path / "runs").rglob("*.jsonl"))
    assert len(files) == len(asked)
    assert all("-tune-" in path.name for path in files)
    found = load_policy("mine.json")
    assert {entry.at.q_len for entry in found.entries} == {n for part in asked for n in part}
    assert len(found.places[0].runs) == len(asked)


def test_a_policy_that_is_written_over_is_told(lab: fake_lab.FakeLab, capsys: pytest.CaptureFixture[str]):
    few = ["tune", "--impl", "torch.sdpa", "--seq-len", "128", "256", "--quiet"]
    assert execute(few) == 0
    assert "wrote policy.json\n" in capsys.readouterr().err
    assert execute(few) == 0
    assert "wrote policy.json, replacing a policy of 2 entries\n" in capsys.readouterr().err


def test_the_time_is_kept_to(
    lab: fake_lab.FakeLab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now = iter(range(0, 100000, 40))  # every look at the clock is 40 s later
    monkeypatch.setattr(module, "monotonic", lambda: next(now))
    assert execute(["tune", *FEW, "--minutes", "1.6"]) == 0
    assert lengths(lab) == [[128, 2048]]
    assert "1.3 of 1.6 minutes: the time is up." in capsys.readouterr().err
    assert load_policy("policy.json").entries


def test_an_interrupt_keeps_what_there_is(lab: fake_lab.FakeLab, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    lab.interrupt_after = 1
    assert execute(["tune", *FEW]) == 130
    assert "interrupted." in capsys.readouterr().err
    assert [entry.at.q_len for entry in load_policy("policy.json").entries] == [128]
    (path,) = (tmp_path / "runs").rglob("*.jsonl")
    assert {record.workload.q_len for record in read_run(path).records} == {128}


def test_interrupted_before_anything(lab: fake_lab.FakeLab, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    lab.interrupt_after = 0
    assert execute(["tune", *FEW]) == 130
    assert "interrupted; nothing was measured." in capsys.readouterr().err
    assert not (tmp_path / "policy.json").exists()


def test_configs_of_the_leaders_come_last(lab: fake_lab.FakeLab, monkeypatch: pytest.MonkeyPatch):
    curves = {"torch.sdpa": lambda n: 5.0 * n, "torch.eager": lambda n: 20.0 * n, "torch.sdpa[x=2]": lambda n: 4.0 * n}
    monkeypatch.setattr(module, "variants", lambda name, workload: ["torch.sdpa[x=2]"] * (name == "torch.sdpa"))

    def answer(name, workload, measure):
        bare, _, rest = name.partition("[")
        samples = steady(curves[name](workload.kv_len), workload.kv_len + len(name))
        return ok(bare, samples, workload, config={"x": 2} if rest else {})

    monkeypatch.setattr(lab, "answer", answer)
    assert execute(["tune", *FEW]) == 0
    assert [set(request.implementations) for request in lab.requests] == [
        {"torch.eager", "torch.sdpa"},
        {"torch.eager", "torch.sdpa", "torch.sdpa[x=2]"},
    ]
    assert {entry.use.label for entry in load_policy("policy.json").entries} == {"torch.sdpa[x=2]"}


def test_real_configs_can_be_asked_for_by_name():
    from attnbench import registry
    from attnbench.spec import Workload

    on = Workload(batch=1, q_len=1024, heads=8, head_dim=128, dtype="bfloat16")
    for name in ("torch.flex", "jax.kvax", "jax.pallas-triton", "torch.block-sparse-triton"):
        labels = module.variants(name, on)
        assert labels
        for label in labels:
            assert registry.asked(label)[1] in [dict(config) for config in registry.get(name).configs(on)]
    decode = Workload(batch=1, q_len=1, kv_len=1024, heads=8, head_dim=128, dtype="bfloat16")
    assert module.variants("torch.fa3", decode) == ["torch.fa3[num_splits=0]"]


def test_json_is_one_document(lab: fake_lab.FakeLab, capsys: pytest.CaptureFixture[str]):
    assert execute(["tune", *FEW, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["end"] == "no further measurement would improve the policy"
    assert len(document["runs"]) == len(lab.requests)
    assert err == ""


def test_constraints_hold_in_every_round(lab: fake_lab.FakeLab):
    assert execute(["tune", *FEW, "--forbid", "torch.eager"]) == 0
    assert {entry.use.label for entry in load_policy("policy.json").entries} == {"torch.sdpa"}
    assert lengths(lab) == [[128, 2048]]


def test_no_length_between_is_left_out_of_reach(lab: fake_lab.FakeLab):
    few = ["--impl", "torch.sdpa", "--seq-len", "16", "1024", "--quiet"]
    assert execute(["tune", *few]) == 0
    assert lengths(lab) == [[16, 1024], [128]]
    reached = [entry.at.q_len for entry in load_policy("policy.json").entries]
    assert all(min(max(n / m, m / n) for m in reached) <= 4 for n in range(16, 1025))


@pytest.mark.parametrize("options", [["--max-error", "0.5"], ["--only", "torch"], ["--deterministic"]])
def test_constraints_that_leave_all_sharpen_as_none_do(lab: fake_lab.FakeLab, options: list[str]):
    assert execute(["tune", *FEW]) == 0
    free, lab.requests[:] = lengths(lab), []
    assert len(free) > 1
    assert execute(["tune", *FEW, *options]) == 0
    assert lengths(lab) == free


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        (["--only", "torch.sdpa"], {"torch.sdpa"}),
        (["--forbid", "torch.sdpa"], {"torch.eager"}),
        (["--only", "torch.sdpa[x=2]"], {"torch.sdpa[x=2]"}),
    ],
)
def test_only_what_may_be_chosen_is_measured(
    lab: fake_lab.FakeLab, monkeypatch: pytest.MonkeyPatch, options: list[str], measured: set[str]
):
    def answer(name, workload, measure):
        bare, _, rest = name.partition("[")
        return ok(bare, steady(5.0 * workload.kv_len, 1), workload, config={"x": 2} if rest else {})

    monkeypatch.setattr(lab, "answer", answer)
    assert execute(["tune", *FEW, *options]) == 0
    assert {name for request in lab.requests for name in request.implementations} == measured


def test_configs_that_may_not_be_chosen_are_not_measured(lab: fake_lab.FakeLab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "variants", lambda name, workload: [f"{name}[x=2]"])
    assert execute(["tune", *FEW, "--only", "torch.sdpa", "--forbid", "torch.sdpa[x=2]"]) == 0
    assert {name for request in lab.requests for name in request.implementations} == {"torch.sdpa"}


def test_nothing_that_may_be_chosen(lab: fake_lab.FakeLab, capsys: pytest.CaptureFixture[str]):
    assert execute(["tune", *FEW, "--only", "torch.sdpa", "jax.xla"]) == 2
    assert "--only jax.xla matches nothing that would be measured" in capsys.readouterr().err
    assert execute(["tune", *FEW, "--forbid", "torch"]) == 2
    assert "the constraints leave nothing to choose from (without torch)." in capsys.readouterr().err
    assert lab.requests == []


@pytest.mark.parametrize("as_json", [False, True])
def test_shapes_that_were_not_reached_are_named(
    lab: fake_lab.FakeLab, capsys: pytest.CaptureFixture[str], as_json: bool
):
    lab.interrupt_after = 1
    assert execute(["tune", *FEW, *(["--json"] if as_json else [])]) == 130
    out, err = capsys.readouterr()
    missing = lab.requests[0].workloads[1].id
    if as_json:
        assert json.loads(out)["not_measured"] == [missing]
    else:
        assert f"not measured: {missing}\n" in err


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_time_must_be_some(lab: fake_lab.FakeLab, capsys: pytest.CaptureFixture[str], minutes: str):
    assert execute(["tune", *FEW, "--minutes", minutes]) == 2
    assert "--minutes must be more than 0" in capsys.readouterr().err
    assert lab.requests == []
