"""`untested`, which `attnbench doctor` prints: what the published runs measured on a GPU has been run on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbench import registry
from attnbench.results.run_file import read_run

H200 = Path(__file__).parents[1] / "results" / "h200"


def measured() -> set[str]:
    """Names of everything that was timed there; a pair stands in pairs.json by its two parts."""
    found = set()
    for path in sorted(H200.glob("*.jsonl")):
        found |= {record.implementation for record in read_run(path).records if record.status == "ok"}
    shapes = json.loads((H200 / "pairs.json").read_text())["shapes"]
    timed = {name for shape in shapes for name in shape["train_ms"]}
    return found | {name for name in timed if " + " not in name} | {"torch.pair" for name in timed if " + " in name}


@pytest.mark.torch
@pytest.mark.jax
def test_what_was_measured_on_a_gpu_is_not_called_untested_there():
    names = measured() & set(registry.loadable()[0])
    assert {"torch.pair", "jax.pair", "torch.fa4", "jax.cudnn", "jax.pi0-sampler"} <= names
    assert [name for name in sorted(names) if "cuda" in registry.get(name).untested] == []


@pytest.mark.jax
def test_what_was_not_is_called_so():
    assert "jax.gemma-stack" not in measured()
    assert "cuda" in registry.get("jax.gemma-stack").untested
