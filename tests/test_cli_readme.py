"""Every `attnbench` command that the README shows is one that the command line understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import fake_lab
import pytest

from attnbench.cli import execute

README = Path(__file__).parents[1] / "README.md"


def commands() -> list[str]:
    """In the order of the page; what is announced as planned is left out."""
    lines = [line for line in README.read_text().splitlines() if "planned: `" not in line]
    found = re.findall(r"`(attnbench [^`]+)`", "\n".join(lines))
    return list(dict.fromkeys(found))


def test_readme_shows_commands():
    assert len(commands()) > 15


def test_every_command_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake_lab.install(monkeypatch, tmp_path)
    assert execute(["run", "--seq-len", "64", "--quiet"]) == 0
    (path,) = tmp_path.glob("runs/*/*.jsonl")
    for command in commands():
        arguments = [str(path) if word == "RUN" else word for word in shlex.split(command)[1:]]
        assert execute(arguments) in (0, 1), command
