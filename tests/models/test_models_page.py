"""The page about these models runs, and `attnbench.models` is there without loading a framework."""

from __future__ import annotations

import os
import subprocess
import sys

import documented
import pytest

import attnbench as ab

pytest.importorskip("flax")
pytestmark = pytest.mark.jax


def python(code):
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile
    return subprocess.run([sys.executable, "-c", code], env=quick, capture_output=True, text=True, timeout=240)


def test_the_script_of_the_page_runs():
    text = "\n".join(block.text for block in documented.blocks(documented.DOCS / "gemma.md", "python"))
    done = python(text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["loss True", "actions (2, 8, 32)"]


def test_modules_are_reached_lazily():
    done = python(
        "import sys, attnbench as ab; ab.models; assert not {'jax', 'flax', 'torch'} & set(sys.modules);"
        "print(ab.models.gemma.Attention.__name__, ab.models.gemma_fast.Attention.__name__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Attention", "Attention"]


def test_no_such_model():
    with pytest.raises(AttributeError, match="no attribute 'llama'"):
        _ = ab.models.llama
