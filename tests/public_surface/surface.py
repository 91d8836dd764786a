"""Collect the surface that users rely on: each function here makes one of the stored JSON files."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import fake_lab
import msgspec
import pytest
from git_repository import Repository
from public_surface import names
from public_surface.places import ROOT, WRITTEN, command_line, defined, document, home, project, run, sources, target

import attnbench

RUN, OUTCOMES, EARLIER = (WRITTEN / f"{name}.jsonl" for name in ("run", "outcomes", "earlier"))
BASELINES = WRITTEN / "baselines"
BY_DATA = ("estimates", "frameworks", "ranking", "tried")
"""Mappings of documents whose keys are data."""
BETWEEN_PROCESSES = {"ATTNBENCH_WORKER"}
"""Variables that only our own processes set."""
IN_SCHEMAS = (
    "anchors", "environment", "environments", "header", "launches", "policy", "record", "record_a", "record_b",
    "records", "workload",
)  # fmt: skip
"""Parts of documents that the schemas describe already."""
DATA = re.compile(r"[^\w-]")
"""What is in names of implementations, devices and workloads, and in no key of ours."""


def python_names() -> dict[str, Any]:
    """Return every public name of Python, by what must be installed to see it."""
    modules = {"core": names.CORE, "torch": names.TORCH, "jax": names.JAX}
    return {need: names.describe(which) for need, which in modules.items()}


@cache
def commands() -> dict[str, Any]:
    """Return command -> its options and arguments."""
    return dict(_commands(command_line().app, ()))


def _commands(app: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if app.default_command is not None and words:
        yield " ".join(words), {"help": _plain(app.help), "options": dict(_options(app))}
    for name in app:
        if not name.startswith("-"):
            yield from _commands(app[name], (*words, name))


def _options(app: Any) -> Iterator[tuple[str, Any]]:
    place = 0
    for one in app.assemble_argument_collection():
        if one.names == ("*",):
            continue
        default = one.field_info.default
        option = {
            "names": list(one.names),
            "type": re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", inspect.formatannotation(one.hint)),
            "default": None if default is inspect.Parameter.empty else msgspec.to_builtins(default, enc_hook=str),
            "required": bool(one.required),
            "choices": list(one.get_choices() or ()),
            "help": _plain(one.parameter.help or ""),
        }
        if not one.names[0].startswith("-"):
            option["place"], place = place, place + 1
        yield one.names[0], option


def _plain(text: str) -> str:
    return " ".join(text.split())


def entry_points() -> dict[str, list[str]]:
    """Return group -> names of the entry points that the distribution declares."""
    groups = {"console_scripts": project()["scripts"], **project()["entry-points"]}
    return {group: sorted(points) for group, points in groups.items()}


def pytest_plugin() -> dict[str, Any]:
    """Return the options, the marker's arguments and the fixture's methods of the pytest plugin."""
    plugin = target(project()["entry-points"]["pytest11"]["attnbench"])
    options = _Options()
    plugin.pytest_addoption(options)
    text = inspect.getsource(plugin)
    [(fixture, given)] = re.findall(r"@pytest\.fixture\(name=\"(\w+)\"\)\ndef .*-> (\w+):", text)
    bench = getattr(plugin, given)
    marker = inspect.getattr_static(plugin, "OPTIONS")
    return {
        "options": options.found,
        "fixture": {fixture: names.entry(bench)["members"]},
        "marker": list(marker),
    }


class _Options:
    """Stand in for pytest's parser and its group."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def getgroup(self, *given: str) -> _Options:
        return self

    def addoption(self, name: str, **given: Any) -> None:
        self.found[name] = {"default": given.get("default"), "choices": list(given.get("choices", ()))}


def schemas() -> dict[str, Any]:
    """Return the JSON schemas of everything that is written to files or printed by `--json`, and what they share."""
    run_file = get_type_hints(defined("read_run"))["return"]
    types = {
        "header of a run file": get_type_hints(run_file)["header"],
        "record": get_type_hints(attnbench.verify)["return"],
        "environment": attnbench.Environment,
        "policy": get_type_hints(attnbench.load_policy)["return"],
        "baseline": get_type_hints(defined("read_baseline"))["return"],
        "comparison": get_type_hints(attnbench.compare)["return"],
        "gate": get_type_hints(defined("gate_stored"))["return"],
        "doctor": get_type_hints(defined("diagnose"))["return"],
        "pytest session": get_type_hints(defined("write_session"))["session"],
        "settings": get_type_hints(defined("load_settings"))["return"],
    }
    found, shared = msgspec.json.schema_components(list(types.values()), ref_template="#/$defs/{name}")
    return {**{name: _bare(one) for name, one in zip(types, found)}, "$defs": _bare(shared)}


def _bare(schema: Any) -> Any:
    """Return a schema without names of classes and docstrings, which may change."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in ("description", "discriminator")}
    if isinstance(kept.get("title"), str):
        del kept["title"]
    return {key: _bare(value) for key, value in kept.items()}


def settings() -> dict[str, Any]:
    """Return the settings by name, and every environment variable."""
    fields = msgspec.structs.fields(get_type_hints(defined("load_settings"))["return"])
    named = {field.name: f"ATTNBENCH_{field.name.upper()}" for field in fields}
    others = {word for text in sources().values() for word in re.findall(r"[\"'](ATTNBENCH_[A-Z_]+[A-Z])[\"']", text)}
    return {"settings": named, "variables": sorted({*named.values(), *others} - BETWEEN_PROCESSES)}


def action() -> dict[str, Any]:
    """Return the inputs and outputs of the GitHub Action, with the defaults."""
    found: dict[str, Any] = {}
    section = name = ""
    for line in (ROOT / "action.yml").read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"(\w+):", line):
            section = match[1]
        elif section in ("inputs", "outputs") and (match := re.fullmatch(r"  ([\w-]+):", line)):
            name = match[1]
            found.setdefault(section, {})[name] = None
        elif section == "inputs" and (match := re.fullmatch(r"    default: (.*)", line)):
            found[section][name] = match[1].strip('"')
    return found


def suites() -> list[str]:
    """Return the names of all suites."""
    return sorted(one["suite"] for one in document("list", "suites"))


def workload_ids() -> list[str]:
    """Return the ids of the workloads of the stored suite: old run files and baselines are found by them."""
    return [one["id"] for one in document("list", "workloads", WRITTEN / "suite.toml")]


def documents() -> dict[str, list[str]]:
    """Return command -> paths of all keys that its `--json` document has."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        return {name: sorted(set(_paths(value))) for name, value in _documents(patch, Path(folder)).items()}


def _documents(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    fake_lab.install(patch, folder)
    for name in ("ATTNBENCH_POLICY", "ATTNBENCH_RUNS_DIR", "ATTNBENCH_BASELINES_DIR"):
        patch.delenv(name, raising=False)
    found = {
        "show": document("show", RUN),
        "run": document("run", "--seq-len", 64, "--quiet"),
        "run --list": document("run", "--seq-len", 64, "--list"),
        "verify": document("verify", "--seq-len", 64, "--quiet", codes=(0, 1)),
        "gate": document("gate", "--baseline", RUN, "--current", RUN),
        "choose": document("choose", RUN),
        "choose --judge": document("choose", RUN, "--judge", WRITTEN / "policy.json", codes=(0, 3)),
        "list implementations": document("list", "implementations"),
        "list suites": document("list", "suites"),
        "list workloads": document("list", "workloads", WRITTEN / "suite.toml"),
        "baseline save": document("baseline", "save", RUN, "--dir", folder / "kept"),
        "baseline save again": document("baseline", "save", RUN, "--dir", folder / "kept", codes=(1,)),
        "baseline list": document("baseline", "list", "--dir", BASELINES),
        "baseline show": document("baseline", "show", "numpy.float32 t64-", "--dir", BASELINES),
        "history": document("history", RUN, codes=(0, 3)),
    }
    for form in ("pytest-benchmark", "google-benchmark", "bencher", "github-action-benchmark"):
        found[f"export {form}"] = msgspec.json.decode(run("export", RUN, "--format", form)[1])
    found["export csv"] = dict.fromkeys(run("export", RUN, "--format", "csv")[1].splitlines()[0].split(","), "")
    return found | _not_measured_again(patch, folder)


def _not_measured_again(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Return the documents of commands that measure, for the stored comparison and the stored diagnosis."""
    made = get_type_hints(attnbench.compare)["return"], get_type_hints(defined("diagnose"))["return"]
    files = WRITTEN / "comparison.json", WRITTEN / "doctor.json"
    comparison, diagnosis = (msgspec.json.decode(file.read_bytes(), type=one) for file, one in zip(files, made))
    slower = msgspec.structs.replace(comparison, verdict="slower")
    comparing = importlib.import_module(attnbench.compare.__module__)  # a test of plugins may have unloaded it
    patch.setattr(comparing, "compare", lambda *given, **named: comparison)
    patch.setattr(comparing, "compare_refs", lambda *given, **named: slower)
    patch.setattr(home("diagnose"), "diagnose", lambda *given: diagnosis)
    repository = Repository(folder)
    repository.commit("good")
    repository.git("tag", "good")
    repository.commit("bad")
    return {
        "compare": document("compare", "numpy.reference", "numpy.float32", "--seq-len", 64),
        "bisect": document("bisect", "numpy.float32", "--good", "good"),
        "doctor": document("doctor"),
        "tune": document("tune", "quick", "--quick", "--quiet", "-o", folder / "policy.json"),
    }


def report() -> dict[str, list[str]]:
    """Return the keys of the document of `report`, and of the summaries that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        told = document("report", RUN, "-o", Path(folder) / "report.html", "--markdown")
        written = [Path(path) for path in told["summaries"]]
        summaries = {path.name: json.loads(path.read_text()) for path in written if path.suffix == ".json"}
    return {name: sorted(set(_paths(value))) for name, value in {"report": told, **summaries}.items()}


def _paths(value: Any, at: str = "") -> Iterator[str]:
    """Yield the path of every key: `ranking.*[].rank`. Parts that the schemas describe are not entered."""
    if isinstance(value, list):
        for one in value:
            yield from _paths(one, f"{at}[]")
    elif isinstance(value, dict):
        by_data = at.rpartition(".")[2] in BY_DATA
        for key, one in value.items():
            path = f"{at}.{'*' if by_data or DATA.search(key) else key}".removeprefix(".")
            yield path
            if key not in IN_SCHEMAS:
                yield from _paths(one, path)


STORED = {
    "names": python_names,
    "commands": commands,
    "entry_points": entry_points,
    "pytest_plugin": pytest_plugin,
    "schemas": schemas,
    "settings": settings,
    "action": action,
    "suites": suites,
    "workload_ids": workload_ids,
    "documents": documents,
    "report": report,
}
"""Name of a stored file -> what makes it."""
