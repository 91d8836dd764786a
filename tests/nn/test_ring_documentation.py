"""The program in docs/ring.md is whole: two ranks run it and end well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "ring.md"


def test_the_program_runs_under_torchrun(tmp_path):
    text = PAGE.read_text()
    (program,) = re.findall(r"```python\n(# ring\.py.*?)```", text, re.DOTALL)
    (tmp_path / "ring.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "ring.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "(2, 500, 8, 64) (2, 500, 8, 64) (2, 1000, 8, 64)"
    assert f"prints `{done.stdout.strip()}`" in text
    assert program.splitlines()[-1].startswith("dist.destroy_process_group()")
