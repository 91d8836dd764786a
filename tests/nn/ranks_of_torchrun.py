"""A script of this folder on several gloo ranks that torchrun's agent starts, and what each of them wrote.

The ranks are forks of the agent, which has imported torch and the script: doing so takes longer than what a rank does.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def told_by_ranks(script: str, world: int, folder: Path) -> list:
    """Each rank calls `main(folder)` of the script, which writes RANK.json there."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, script, str(world), folder],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def start(script: str, world: int, folder: Path) -> None:
    """Do what `torchrun --standalone --nproc-per-node WORLD` does, but fork the ranks."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=script,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, importlib.import_module(script).main)(folder)


if __name__ == "__main__":
    start(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
