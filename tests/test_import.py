"""What importing costs: neither framework is loaded, and imports point one way."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnbench as ab

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "jax", "jaxlib", "transformers", "scipy", "altair", "duckdb")
LOADED = f"import sys; sys.exit(', '.join(n for n in {HEAVY} if n in sys.modules) or 0)"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "code",
    [
        "import attnbench",
        "import attnbench as ab; [getattr(ab, name) for name in ab.__all__]; ab.implementations()",
        "import attnbench as ab; ab.Workload(batch=1, q_len=8, heads=2, head_dim=8, mask=ab.masks.causal()).id",
        "from attnbench import registry; [registry.get(name) for name in registry.names()]",
        "import attnbench.run.launch, attnbench.results.run_file, attnbench.analyse.summary, attnbench.report.terminal",
    ],
    ids=["import", "every public name", "a workload", "every implementation", "every layer"],
)
def test_no_framework_is_loaded_by(code):
    done = run(f"{code}\n{LOADED}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list", "implementations"]], ids=" ".join)
def test_no_framework_is_loaded_by_the_command(arguments):
    code = f"""
import atexit, os, sys
from attnbench.cli import main
def check():
    loaded = [n for n in {HEAVY} if n in sys.modules]
    if loaded:
        print('LOADED', loaded, file=sys.stderr, flush=True)
        os._exit(77)
atexit.register(check)
sys.argv = ['attnbench', *{arguments}]
main()
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.torch
def test_these_tests_would_notice():
    done = run(f"import attnbench, torch\n{LOADED}")
    assert done.returncode == 1
    assert "torch" in done.stderr


def test_the_public_names_are_all_there_and_no_others():
    assert sorted(ab.__all__) == dir(ab)
    for name in ab.__all__:
        assert getattr(ab, name) is not None
    promised = {
        "attention", "explain", "masks", "Workload", "implementations", "register", "verify", "measure",
        "BenchmarkRunner", "MemoryProfiler", "compare_implementations",
    }  # fmt: skip
    assert promised <= set(ab.__all__)
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = ab.atention


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    import attnbench

    assert attnbench.__version__ == version("attnbench")


def test_what_type_checkers_see_is_what_is_exported():
    """The imports under TYPE_CHECKING and the table of homes are written twice; they must not drift apart."""
    import ast

    tree = ast.parse(Path(ab.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(guarded)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen.pop("masks") == ("attnbench", "masks")
    assert seen == ab._HOME


def test_imports_point_one_way():
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if command is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
