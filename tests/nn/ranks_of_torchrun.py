"""A script of this folder on several gloo ranks that torchrun starts, and what each of them wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def told_by_ranks(script: str, world: int, folder: Path) -> list:
    """Each rank writes RANK.json in the folder it is given."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*command, HERE / script, folder],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
