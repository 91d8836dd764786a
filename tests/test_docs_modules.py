"""The scripts of "Modules" run, and the page names every module and kind there is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import documented
import pytest

PAGE = documented.DOCS / "modules.md"
SCRIPTS = {"torch": ("dilated", "multihead", "block-sparse"), "jax": ("jax",)}
PRINTED = {
    "torch": [
        "torch.Size([2, 1000, 12, 64]) torch.Size([2, 12, 1000])",
        "torch.Size([1, 500, 768]) True",
        "torch.Size([1, 512, 2, 32]) True",
    ],
    "jax": ["(1, 40, 6, 16)"],
}


@pytest.mark.parametrize("framework", SCRIPTS)
def test_the_scripts_run(framework, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    blocks = documented.titled(PAGE)
    text = "\n".join(block.text for title in SCRIPTS[framework] for block in blocks[title])
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout.splitlines() for line in PRINTED[framework]), done.stdout


def test_every_script_of_the_page_is_run():
    assert set(documented.titled(PAGE)) == {title for titles in SCRIPTS.values() for title in titles}
    assert len(documented.blocks(PAGE)) == 4


@pytest.mark.torch
def test_every_module_and_kind_is_named():
    pytest.importorskip("torch")
    from attnbench.nn import KINDS

    text = PAGE.read_text()
    for kind, classes in KINDS.items():
        (row,) = (line for line in text.splitlines() if line.startswith("| ") and f'`"{kind}"`' in line)
        assert all(f"`{one.__name__}`" in row for one in classes)
