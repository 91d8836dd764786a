"""Every script in examples/ runs in quick mode and ends with the sentence that answers its question."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cli_in_process import script
from record_factory import ok

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PATIENCE_S = 280
RATIO = r"[\d.]+x \([\d.]+-[\d.]+\)|(more|less) than [\d.]+x"
ANSWERS = {
    "first_measurement": r"torch\.sdpa is right and takes [\d.]+ ms \(95 %: [\d.]+-[\d.]+ ms\) here\.",
    "own_kernel": rf"blockwise is right(, number [1-4] of 4, ({RATIO}) as fast as torch\.sdpa"
    r"| and shares number [1-4] of 4 with [1-3] more: too few samples to tell them apart)\.",
    "hugging_face_model": r'Call hf\.register\(impl="torch\.(eager|sdpa-flash)"\) for this model: .*torch\..*\.',
    "jax_model": r'Call ab\.attention\(\.\.\., impl="jax\.(xla|einsum)"\): .*jax\..*\.',
    "regression_gate": r"May it be merged\? The gate says (no|it cannot tell, \w+) \(exit code [145]\)\.",
}
"""What the last line says. A gate that cannot tell on a noisy machine is right too; one that lets this pass is not."""
NEEDS = {"jax_model": ("jax",), "hugging_face_model": ("torch", "transformers")}

IN_PROCESS = ("first_measurement", "own_kernel", "jax_model")
"""The others change what is shared: they register with a library, or work in git."""


@cache
def run(name: str) -> list[str]:
    """Its lines; run once for all tests."""
    for module in NEEDS.get(name, ("torch",)):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    path, words = EXAMPLES / f"{name}.py", ("--quick",)
    if name in IN_PROCESS:
        return script(path, *words, folder=ROOT)
    done = subprocess.run(
        [sys.executable, path, *words],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_there_is_an_answer_for_every_example():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_example_is_short_and_says_what_it_shows(name: str):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 60
    assert f"python examples/{name}.py --quick" in text.partition('"""')[2].partition('"""')[0]


@pytest.mark.parametrize("name", ["first_measurement", "own_kernel", "jax_model"])
def test_an_example_answers_its_question(name: str):
    assert re.fullmatch(ANSWERS[name], run(name)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hugging_face_model", "regression_gate"])
def test_a_slow_example_answers_its_question(name: str):
    assert re.fullmatch(ANSWERS[name], run(name)[-1])


def test_a_rank_that_is_shared_is_told_as_shared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torch")
    example = runpy.run_path(str(EXAMPLES / "own_kernel.py"))
    names = ("blockwise", "torch.eager", "torch.sdpa", "torch.sdpa-math")
    samples = [1e6, 5e6, 25e6]
    made = {name: ok(name, samples if name != "torch.sdpa-math" else [1e12, 1.1e12, 1.2e12]) for name in names}
    monkeypatch.setattr("attnbench.compare_implementations", lambda *_, **__: list(made.values()))
    example["main"](quick=True)
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "blockwise is right and shares number 1 of 4 with 2 more: too few samples to tell them apart."


def test_the_wrong_kernel_of_the_example_has_no_time():
    (line,) = (line for line in run("own_kernel") if "forgetful" in line)
    assert "error allowed" in line
    assert " ms" not in line
