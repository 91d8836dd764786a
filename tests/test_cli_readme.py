"""Every `attnbench` command that the README shows is one that the command line understands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import fake_lab
import gate_factory
import pytest
from cli_process import attnbench
from git_repository import Repository

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
    repository = Repository(tmp_path)
    repository.commit("first")
    repository.git("checkout", "--quiet", "-b", "feature")
    repository.commit("second")
    found = gate_factory.comparison("slower", 1.1)
    for place in ("comparing.compare", "comparing.compare_refs"):
        monkeypatch.setattr(f"attnbench.{place}", lambda *given, **named: found)
    monkeypatch.setattr("attnbench.gating.gate_refs", lambda *given: gate_factory.report(gate_factory.case()))
    assert execute(["run", "--seq-len", "64", "--quiet"]) == 0
    (path,) = tmp_path.glob("runs/*/*.jsonl")
    (suite,) = re.findall(r"```toml\n(description.*?)```", README.read_text(), re.DOTALL)
    Path("mine.toml").write_text(suite)
    Path("baselines").mkdir()
    for command in commands():
        arguments = [str(path) if word == "RUN" else word for word in shlex.split(command)[1:]]
        # The fake lab has no anchors, so that the gate finds no baseline to hold a run against.
        assert execute(arguments) in ((0, 1, 3) if arguments[0] == "gate" else (0, 1)), command


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.torch
def test_the_python_of_the_readme_runs(tmp_path: Path):
    (block,) = (block for block in python_blocks() if "def mine" in block)
    (tmp_path / "script.py").write_text(block)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    status, median = done.stdout.split()
    assert status == "ok", done.stderr
    assert float(median) > 0


@pytest.mark.torch
def test_the_pytest_of_the_readme_passes(tmp_path: Path):
    (block,) = (block for block in python_blocks() if "def test_my_attention" in block)
    own = "from torch.nn.functional import scaled_dot_product_attention as sdpa\n\n\ndef my_attention(q, k, v):\n"
    own += "    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n    return sdpa(q, k, v).transpose(1, 2)\n\n\n"
    (tmp_path / "test_mine.py").write_text(own + block)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--attnbench-disable", "test_mine.py"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


KERNEL = """
def my_kernel(q, k, v, scale):
    import torch
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
"""


@pytest.mark.torch
def test_the_implementation_of_the_readme_is_one(tmp_path: Path):
    (block,) = (block for block in python_blocks() if "class Mine" in block)
    (tmp_path / "mine.py").write_text(block + KERNEL)
    done = attnbench(tmp_path, "verify", "--impl", "mine.py:MINE", "--causal", "--seq-len", "32")
    assert done.returncode == 0, done.stderr
    refused = attnbench(tmp_path, "run", "--impl", "mine.py:MINE", "--against", "mine.py:MINE", "--seq-len", "32")
    assert refused.returncode == 3
    assert "takes a causal mask only" in refused.stdout
