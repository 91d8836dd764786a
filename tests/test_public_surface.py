"""Pin what users rely on: names, commands, entry points, formats of files and documents, settings, exit codes.

The stored surface is under public_surface/. Nothing of it may be removed or changed; additions pass. A change that is
meant is accepted by `python tests/public_surface/write.py`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tomllib
import warnings
from collections.abc import Iterable
from typing import Any, get_type_hints

import fake_lab
import gate_factory
import msgspec
import pytest
from public_surface import names, surface
from public_surface.compatible import Schemas, broken_call, broken_names, lost
from public_surface.places import HERE, ROOT, WRITTEN, defined, document, home, project, run, target
from public_surface.surface import BASELINES, EARLIER, OUTCOMES, RUN

import attnbench

PUBLISHED = ROOT / "results" / "h200" / "earlier"
STATUSES = {"ok", "unsupported", "incorrect", "out_of_memory", "failed", "timeout"}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Work where no settings file and no variable of the developer is found."""
    monkeypatch.chdir(tmp_path)
    for field in msgspec.structs.fields(get_type_hints(defined("load_settings"))["return"]):
        monkeypatch.delenv(f"ATTNBENCH_{field.name.upper()}", raising=False)


def stored(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def plain(value: Any) -> Any:
    """Return a value as it is found in a JSON file."""
    return json.loads(msgspec.json.encode(value))


def must_hold(problems: Iterable[str], name: str) -> None:
    """Fail with everything that users of the stored surface would miss, and how to accept it."""
    found = list(dict.fromkeys(problems))
    accept = f"If this is meant, run `python tests/public_surface/write.py {name}` and commit the difference."
    assert not found, "\n".join(["the public surface changed:", *found, accept])


# Names of Python


def check_names(need: str, modules: dict[str, tuple[str, ...] | None]) -> None:
    present = {module: given for module, given in modules.items() if importable(module)}
    must_hold(broken_names(stored("names")[need], names.describe(present)), "names")


def importable(module: str) -> bool:
    """Whether the module exists; one that is there and cannot be imported is an error of its own."""
    if module == "attnbench.masks":
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_public_names_keep_their_kind_and_signature():
    check_names("core", names.CORE)


@pytest.mark.torch
def test_names_that_need_torch_keep_their_kind_and_signature():
    check_names("torch", names.TORCH)


@pytest.mark.jax
def test_names_that_need_jax_keep_their_kind_and_signature():
    pytest.importorskip("flax")
    check_names("jax", names.JAX)


def test_everything_that_is_listed_as_public_exists():
    assert [name for name in attnbench.__all__ if not hasattr(attnbench, name)] == []
    assert set(attnbench.__all__) <= set(dir(attnbench))


@pytest.mark.parametrize("module", names.RUNNABLE)
def test_modules_that_pages_run_can_be_run(module):
    name = f"{module}.__main__" if module == "attnbench" else module
    assert importlib.util.find_spec(name) is not None


# Commands


def option_problems(*parts: str) -> Iterable[str]:
    """Yield what differs in these parts of the options, and what would break a call of before."""
    now = plain(surface.commands())
    for command, old in stored("commands").items():
        if command not in now:
            yield f"attnbench {command} was removed"
            continue
        new = now[command]["options"]
        for name, option in old["options"].items():
            if name not in new:
                yield f"attnbench {command}: {name} was removed"
                continue
            for part in parts:
                yield from lost(option.get(part), new[name].get(part), f"attnbench {command} {name}: {part}: ")
        added = (name for name in new if name not in old["options"] and new[name]["required"])
        yield from (f"attnbench {command}: the new {name} is required" for name in added)


def test_commands_keep_their_options_and_defaults():
    must_hold(option_problems("names", "type", "default", "required", "choices", "place"), "commands")


def test_help_texts_are_as_stored():
    now = plain(surface.commands())
    texts = [
        f"attnbench {command}: help was {old['help']!r}, is {now[command]['help']!r}"
        for command, old in stored("commands").items()
        if command in now and old["help"] != now[command]["help"]
    ]
    must_hold([*texts, *option_problems("help")], "commands")


def test_help_of_every_command_names_its_options(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    for command, told in stored("commands").items():
        code, text, _ = run(*command.split(), "--help")
        missing = [name for name in told["options"] if name.startswith("--") and name not in text]
        assert (code, missing) == (0, []), command


def test_version_and_help_are_options_of_the_program():
    assert run("--help")[0] == 0
    code, text, _ = run("--version")
    assert code == 0
    assert text.strip()


# Entry points, plugin, action


def test_entry_points_are_declared():
    must_hold(lost(stored("entry_points"), surface.entry_points()), "entry_points")


def test_every_entry_point_leads_somewhere():
    """Metadata of an installed package may be older than the files: these are the ones that the next build declares."""
    for name, declared in project()["entry-points"]["attnbench.implementations"].items():
        found = target(declared)
        assert isinstance(found, attnbench.Implementation), name
        assert found.name == name
    assert callable(target(project()["scripts"]["attnbench"]))


def test_the_pytest_plugin_keeps_its_options_fixture_and_marker():
    old, now = stored("pytest_plugin"), surface.pytest_plugin()
    [(fixture, methods)] = old.pop("fixture").items()
    problems = [*lost(old, now)]
    for name, call in methods.items():
        problems += broken_call(call, now["fixture"].get(fixture, {}).get(name, ""), f"fixture {fixture}.{name}")
    must_hold(problems, "pytest_plugin")


def test_the_action_keeps_its_inputs_and_outputs():
    must_hold(lost(stored("action"), surface.action()), "action")


# Formats


def test_schemas_stay_compatible():
    old, now = stored("schemas"), plain(surface.schemas())
    both = Schemas(old, now)
    problems = [problem for name in old if name != "$defs" for problem in both.broken(name)]
    must_hold(problems, "schemas")


def test_json_documents_keep_their_keys():
    must_hold(lost(stored("documents"), surface.documents()), "documents")


def test_the_report_keeps_the_keys_of_its_documents():
    for needed in ("altair", "jinja2", "vl_convert"):
        pytest.importorskip(needed)
    must_hold(lost(stored("report"), surface.report()), "report")


def test_suites_keep_their_names():
    must_hold(lost(stored("suites"), surface.suites()), "suites")


def test_a_suite_file_gives_the_same_workloads():
    assert surface.workload_ids() == stored("workload_ids")


def differing(written: Any, read: Any, at: str = "") -> Iterable[str]:
    """Yield the values of a file that are not found again."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            if key in read:
                yield from differing(value, read[key], f"{at}.{key}")
            else:
                yield f"{at}.{key} was {value!r}, is not there"
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for place, (one, other) in enumerate(zip(written, read)):
            yield from differing(one, other, f"{at}[{place}]")
    elif written != read:
        yield f"{at} was {written!r}, is {read!r}"


READ_AS = {
    "earlier": ["[0].time.clock was 'kernel', is 'kernels only'", "[1].workload.pass was 'forward', is not there"]
}
"""What is meant to differ in the records of older versions: what JAX's clock was called, and a default spelled out."""


@pytest.mark.parametrize("path", [RUN, OUTCOMES, EARLIER], ids=lambda path: path.stem)
def test_run_files_of_before_are_read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = defined("read_run")(path)
    records = [line["record"] for line in lines if line["line"] == "record"]
    environments = {line["key"]: line["environment"] for line in lines if line["line"] == "environment"}
    assert found.warnings == ()
    assert list(differing(lines[0], plain(found.header))) == []
    assert list(differing(environments, plain(found.environments))) == []
    assert list(differing(records, plain(list(found.records)))) == READ_AS.get(path.stem, [])
    fingerprints = {line["key"]: line["fingerprint"] for line in lines if line["line"] == "environment"}
    if path != EARLIER:  # made of fewer facts then
        assert {key: one.fingerprint for key, one in found.environments.items()} == fingerprints
    shown = document("show", path)
    assert [one["status"] for one in shown["records"]] == [one["status"] for one in records]
    medians = {one["implementation"]: one["median_ns"] for rows in shown["ranking"].values() for one in rows}
    timed = {one["implementation"]: one["time"]["median_ns"] for one in records if "time" in one}
    assert {name: ns for name, ns in medians.items() if ns} == {
        name: ns for name, ns in timed.items() if not name.startswith("anchor.")
    }


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.jsonl")), ids=lambda path: path.stem)
def test_published_runs_of_earlier_versions_are_read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = defined("read_run")(path)
    written = {
        (line["record"]["implementation"], line["record"]["status"]) for line in lines if line["line"] == "record"
    }
    assert found.warnings == ()
    assert {(record.implementation, record.status) for record in found.records} == written


def test_a_run_of_before_can_be_resumed(tmp_path, monkeypatch):
    fake_lab.install(monkeypatch, tmp_path)
    monkeypatch.setattr(
        sys.modules[attnbench.register.__module__], "names", lambda: ["numpy.float32", "numpy.reference"]
    )
    shutil.copy(RUN, tmp_path / "run.jsonl")
    rows = document("run", "--resume", "run.jsonl", "--list")
    assert [row["reason"] for row in rows] == ["already in the run file"] * 4


def test_the_stored_runs_hold_every_outcome():
    assert {record.status for record in defined("read_run")(OUTCOMES).records} == STATUSES


def test_cells_of_before_keep_their_ids():
    ids = [record.cell.id for record in defined("read_run")(OUTCOMES).records]
    assert ids[0] == "numpy.float32/b1-t16-h2:1-d8-window4:0-float32-forward"


def test_a_policy_of_before_is_read():
    path = WRITTEN / "policy.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = attnbench.load_policy(path)
    assert list(differing(json.loads(path.read_text()), plain(policy) | {"schema": policy.schema})) == []
    assert [entry.use.implementation for entry in policy.entries] == ["numpy.float32", "numpy.float32"]
    judged = document("choose", RUN, "--judge", path)
    assert judged["judged"]
    [record, *_] = defined("read_run")(RUN).records
    assert policy.choice(record.workload, "numpy", record.environment).implementation == "numpy.float32"
    with attnbench.use_policy(policy):
        pass


def test_baselines_of_before_are_read():
    written = {path.name: json.loads(path.read_text()) for path in BASELINES.glob("*/*.json")}
    listed = document("baseline", "list", "--dir", BASELINES)
    medians = sorted(one["record"]["time"]["median_ns"] for one in written.values())
    assert sorted(one["median_ns"] for one in listed) == medians
    assert [one["id"] for one in listed] == [
        "62d4c64aecf6/numpy.float32/b1-t256-h2:1-d8-causal-float32-forward",
        "62d4c64aecf6/numpy.float32/b1-t64-h2:1-d8-causal-float32-forward",
        "62d4c64aecf6/numpy.reference/b1-t64-h2:1-d8-causal-float32-forward",
    ]
    for one in listed:
        shown = document("baseline", "show", one["id"], "--dir", BASELINES)
        [same] = [
            old
            for old in written.values()
            if old["record"]["time"]["samples_ns"] == shown["record"]["time"]["samples_ns"]
        ]
        assert list(differing(same, shown)) == []


def test_baselines_of_before_are_found_by_a_run_of_the_same_machine():
    report = document("gate", "--baseline", BASELINES, "--current", RUN, codes=(0, 1, 4))
    lacking = {case["implementation"] for case in report["cases"] if case["status"] == "no_baseline"}
    assert len(report["cases"]) == 4
    assert lacking == {"numpy.reference"}
    code, _, _ = run("baseline", "save", RUN, "--dir", BASELINES, "-k", "t64- float32/")
    assert code == 1, "the baseline that is there must be found, not written again"


def test_thresholds_of_before_are_read():
    floors = defined("load_thresholds")(WRITTEN / "thresholds.toml")
    cases = [("numpy.float32", "b1-causal"), ("numpy.reference", "b1-causal"), ("torch.sdpa", "b1-causal")]
    assert [floors(*case) for case in cases] == [0.03, 0.05, 0.01]


def test_a_pytest_session_of_before_is_read():
    path = WRITTEN / "session.json"
    written = json.loads(path.read_text())
    made = get_type_hints(defined("write_session"))["session"]
    read = plain(msgspec.json.decode(path.read_bytes(), type=made))
    assert list(differing(written, read)) == []
    assert [record.implementation for record in defined("read_earlier")(path).records] == ["numpy.float32"]


# Settings, variables, exit codes


def test_settings_and_variables_keep_their_names():
    must_hold(lost(stored("settings"), surface.settings()), "settings")


def test_every_setting_is_read_from_a_file_of_before():
    table = tomllib.loads((WRITTEN / "attnbench.toml").read_text())
    assert set(table) <= set(stored("settings")["settings"])
    found = plain(defined("load_settings")(cwd=WRITTEN, environ={}))
    paths = ("runs_dir", "thresholds", "baselines_dir", "policy")
    expected = table | {name: str(WRITTEN / table[name]) for name in paths}
    assert list(differing(expected, found)) == []


def test_pyproject_holds_the_same_settings(tmp_path):
    text = (WRITTEN / "attnbench.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(f"[tool.attnbench]\n{text}")
    found = defined("load_settings")(cwd=tmp_path, environ={})
    assert (found.threads, found.seed, found.on_miss) == (1, 7, "quiet")


def test_every_setting_is_read_from_its_variable(tmp_path):
    table = tomllib.loads((WRITTEN / "attnbench.toml").read_text())
    separators = {"implementations": " ", "pythonpath": ":"}
    variables = stored("settings")["settings"]
    environ = {
        variables[name]: separators[name].join(value) if isinstance(value, list) else str(value)
        for name, value in table.items()
    }
    assert list(differing(table, plain(defined("load_settings")(cwd=tmp_path, environ=environ)))) == []


class Refusing:
    """A stdout on which printing ends in an error."""

    encoding = "utf-8"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def write(self, text: str) -> int:
        raise self._error

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(
    "words, code",
    [
        (("show", RUN), 0),
        (("show", "--no-such-option"), 2),
        (("show", "no-such-run"), 2),
        (("no-such-command",), 2),
        (("gate", "--baseline", RUN, "--current", RUN), 0),
    ],
)
def test_exit_codes_of_commands(words, code):
    assert run(*words)[0] == code


def test_exit_code_of_a_check_that_says_no(tmp_path):
    saved = ("baseline", "save", RUN, "--dir", tmp_path / "kept")
    assert [run(*saved)[0] for _ in range(2)] == [0, 1]


def test_exit_code_if_nothing_was_measured(tmp_path):
    path = tmp_path / "unsupported.jsonl"
    lines = OUTCOMES.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"status":"ok"' not in line))
    assert run("choose", path)[0] == 3


@pytest.mark.parametrize(
    "outcome, code", [("pass", 0), ("fail", 1), ("nothing", 3), ("inconclusive", 4), ("untrusted", 5)]
)
def test_exit_codes_of_a_gate(outcome, code, monkeypatch):
    report = msgspec.structs.replace(gate_factory.report(gate_factory.case()), outcome=outcome)
    monkeypatch.setattr(home("gate_refs"), "gate_refs", lambda *given: report)
    assert run("gate", "--baseline", "main", "--impl", "numpy.float32", "--quiet")[0] == code


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (RuntimeError("a bug"), 70)])
def test_exit_codes_of_an_interruption_and_a_bug(error, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Refusing(error))
    with pytest.raises(SystemExit) as end:
        target(project()["scripts"]["attnbench"])(["show", str(RUN), "--json"])
    assert end.value.code == code


# What the comparisons above would notice


@pytest.mark.parametrize(
    "now, told",
    [
        ("(q, *, scale: float | None = None) -> _", ""),
        ("(q, *, scale: float | str | None = None, more=1) -> _", ""),
        ("(q, more=1, *, scale: float | None = None, **rest) -> _", ""),
        ("(q, scale: float | None = None) -> _", ""),
        ("(q) -> _", "parameter scale was removed"),
        ("(k, *, scale: float | None = None) -> _", "parameter q was removed"),
        ("(k, q, *, scale: float | None = None) -> _", "parameter q was at place 0, is at 1"),
        ("(*, q, scale: float | None = None) -> _", "parameter q was either, is keyword"),
        ("(q, *, scale: float | None) -> _", "default of scale was None, is required"),
        ("(q, *, scale: float | None = 1.0) -> _", "default of scale was None, is 1.0"),
        ("(q, *, scale: float = None) -> _", "type of scale was float | None, is float"),
        ("(q, *, scale: float | None = None, more) -> _", "the new parameter more has no default"),
        ("(q, *, scale: float | None = None) -> None", "type of return was Result, is None"),
    ],
)
def test_a_call_that_would_break_is_told(now, told):
    found = list(broken_call("(q, *, scale: float | None = None) -> Result", now, "f"))
    assert found[0].endswith(told) if told else not found


def schema(**fields: Any) -> dict[str, Any]:
    """Return a schema of one object, whose fields are given by their types or by (type, default)."""
    shapes = {
        name: {"type": one} if isinstance(one, str) else {"type": one[0], "default": one[1]}
        for name, one in fields.items()
    }
    needed = [name for name, one in fields.items() if isinstance(one, str)]
    return {"file": {"$ref": "#/$defs/X"}, "$defs": {"X": {"type": "object", "properties": shapes, "required": needed}}}


@pytest.mark.parametrize(
    "now, told",
    [
        (schema(a="integer", b=("string", "")), ""),
        (schema(a="integer", b=("string", ""), c=("string", "")), ""),
        (schema(a="integer"), "file.b was removed or renamed"),
        (schema(a="string", b=("string", "")), "file.a: was integer, is string"),
        (schema(a="integer", b=("string", "new")), "file.b: default was '', is 'new'"),
        (schema(a="integer", b=("string", ""), c="string"), "file.c: files of before do not have it"),
        (schema(a=("integer", None), b=("string", "")), "file.a: was in every document, may be missing"),
    ],
)
def test_a_schema_that_would_break_is_told(now, told):
    found = list(Schemas(schema(a="integer", b=("string", "")), now).broken("file"))
    assert any(one.startswith(told) for one in found) if told else not found


def test_a_name_that_is_gone_is_told_with_the_way_to_accept_it():
    with pytest.raises(AssertionError, match=r"(?s)attnbench\.compare was removed.*write\.py names"):
        must_hold(broken_names({"attnbench.compare": {"kind": "function"}}, {}), "names")
