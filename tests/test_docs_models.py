"""The scripts of "In your model" run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import documented
import pytest

NEEDS = {
    "hugging face": ("torch", "transformers"), "torch": ("torch",), "flax": ("jax", "flax"),
    "capture": ("torch", "transformers"),
}  # fmt: skip
PRINTED = {"hugging face": "torch.Size([1, 16])", "flax": "(2, 16, 32)", "capture": "x as fast"}


@pytest.mark.parametrize("title", NEEDS)
def test_a_script_runs(title, tmp_path):
    for module in NEEDS[title]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    text = "\n".join(block.text for block in documented.titled(documented.DOCS / "models.md")[title])
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTED.get(title, "") in done.stdout
    assert (tmp_path / "mine.toml").exists() == (title == "capture")


def test_every_script_of_the_page_is_run():
    assert set(documented.titled(documented.DOCS / "models.md")) == set(NEEDS)
