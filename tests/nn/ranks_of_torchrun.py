"""Scripts of this folder on several gloo ranks that torchrun's agent starts, and what each of them wrote.

The ranks are forks of the agent, which has imported torch and the scripts: doing so takes longer than what a rank does.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def told_by_ranks(launches: Sequence[tuple[str, int]], folder: Path) -> dict[tuple[str, int], list]:
    """What each rank of each (script, number of ranks) wrote: it calls `main(folder)` of the script, which writes
    RANK.json there. One process starts all launches, one after the other."""
    folders = {launch: folder / f"{n}" for n, launch in enumerate(launches)}
    for one in folders.values():
        one.mkdir()
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, json.dumps([[*launch, str(one)] for launch, one in folders.items()])],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        launch: [json.loads((one / f"{rank}.json").read_text()) for rank in range(launch[1])]
        for launch, one in folders.items()
    }


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
    for script, world, folder in json.loads(sys.argv[1]):
        start(script, world, Path(folder))
