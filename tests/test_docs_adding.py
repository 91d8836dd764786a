"""The examples of docs/adding.md, copied out of the page into a copy of the package, really work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import documented
import pytest
from documented import DOCS, ROOT, Block

PAGE = DOCS / "adding.md"
PATIENCE_S = 200


def section(title: str) -> list[str]:
    """Commands between one heading and the next."""
    text = PAGE.read_text()
    start = text.index(f"\n## {title}\n")
    end = text.find("\n## ", start + 1)
    inside = text[start : None if end < 0 else end]
    return [command for command in documented.commands(PAGE) if f"\n{command}\n" in inside]


def apply(block: Block, path: Path) -> None:
    """A diff without line numbers: the lines before and after each change must stand in the file exactly once."""
    text = path.read_text()
    for change in re.split(r"^@@\n", block.text, flags=re.MULTILINE):
        lines = change.splitlines()
        old = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-")) + "\n"
        new = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+")) + "\n"
        assert text.count(old) == 1, f"{block.title} has {text.count(old)} of these lines:\n{old}"
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with what the page adds to it."""
    folder = tmp_path_factory.mktemp("adding")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "results").symlink_to(ROOT / "results")
    for title, found in documented.titled(PAGE).items():
        for block in found if title.startswith(("src/", "tests/")) else ():
            path = folder / title
            if block.language == "diff":
                apply(block, path)
            else:
                assert not path.exists(), f"{title} is already there"
                path.write_text(block.text)
    return folder


def run(folder: Path, *words: str, path: Path) -> subprocess.CompletedProcess[str]:
    caches = {"ATTNBENCH_CACHE": str(folder.parent / "attnbench-cache"), "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=os.environ | caches,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The implementation's package, installed as pip would: its file, and its entry point in a dist-info folder."""
    folder = tmp_path_factory.mktemp("package")
    files = documented.titled(PAGE)
    (folder / "chunked_attention.py").write_text(files["chunked_attention.py"][0].text)
    project = tomllib.loads(files["pyproject.toml"][0].text)["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (group,) = project["entry-points"]
    points = [f"{name} = {target}" for name, target in project["entry-points"][group].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *points, ""]))
    return folder


@pytest.mark.torch
@pytest.mark.parametrize("command", section("An implementation"))
def test_a_command_with_the_new_implementation(package: Path, command: str):
    done = run(package, "attnbench", *documented.words(command), path=package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chunked" in done.stdout.lower()


@pytest.mark.torch
def test_the_new_implementation_is_listed_with_its_package(package: Path):
    done = run(package, "attnbench", "list", "implementations", path=package)
    assert re.search(r"torch\.own-chunked +torch +chunked-attention", done.stdout), done.stdout


@pytest.mark.torch
def test_the_trap_it_names_is_one(package: Path):
    text = (package / "chunked_attention.py").read_text()
    shortcut = text.replace("k, v, rows, scale", "k, v, is_causal=True, scale")
    assert shortcut != text
    (package / "shortcut.py").write_text(shortcut)
    words = ["verify", "--impl", "shortcut.py:CHUNKED", "--seq-len", "300", "--causal"]
    done = run(package, "attnbench", *words, path=package)
    assert done.returncode == 1, done.stdout
    assert "row 128" in done.stdout


@pytest.mark.torch
def test_the_new_mask_is_computed_by_those_that_take_any(copy: Path):
    (command,) = section("A mask")
    done = run(copy, "attnbench", *documented.words(command), "--json", path=copy / "src")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {name: states["ok"] for name, states in found["summary"].items()} == {"numpy.float32": 1, "torch.eager": 1}
    assert {record["workload"]["mask"]["mask"] for record in found["records"]} == {"sinks"}


def test_the_new_format_is_written(copy: Path):
    (command,) = section("An exporter")
    done = run(copy, "attnbench", *documented.words(command), path=copy / "src")
    assert done.returncode == 0, done.stderr
    assert '"median_us"' in done.stdout


@pytest.mark.parametrize("name", ["masks/test_sinks.py", "results/test_medians.py"])
def test_the_tests_of_the_examples_pass(copy: Path, name: str):
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--override-ini=pythonpath=tests"]
    done = run(copy, "pytest", *options, f"--rootdir={copy}", f"tests/{name}", path=copy / "src")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_the_examples_keep_to_our_style(copy: Path):
    titles = [title for title in documented.titled(PAGE) if title.startswith("src/")]
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for words in (["check", *config], ["format", "--check", *config]):
        done = run(copy, "ruff", *words, *titles, path=copy / "src")
        assert done.returncode == 0, done.stdout


def test_the_page_counts_the_workloads_of_the_conformance_suite():
    from attnbench.workloads.catalogue import edge

    assert f"all {len({one.id for one in edge()})} workloads of the conformance suite" in PAGE.read_text()
