"""Every `attnbench` command that the README shows is one that the command line understands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import documented
import pytest
from cli_in_process import attnbench, script
from documented import README


def test_readme_shows_commands():
    assert len(documented.commands(README)) > 15


def test_every_command_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    lab = documented.Lab(monkeypatch, tmp_path)
    (suite,) = (one for one in documented.blocks(README, "toml") if one.text.startswith("description"))
    Path("mine.toml").write_text(suite.text)
    for command in documented.commands(README):
        lab.must_run(command)


def python_blocks() -> list[str]:
    return [block.text for block in documented.blocks(README, "python")]


@pytest.mark.torch
def test_the_python_of_the_readme_runs(tmp_path: Path):
    (block,) = (block for block in python_blocks() if "def mine" in block)
    (tmp_path / "script.py").write_text(block)
    status, median = " ".join(script(tmp_path / "script.py")).split()
    assert status == "ok"
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
