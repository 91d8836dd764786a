"""The `regression` suite: nothing that runs on a CPU is left without a case, and none takes long."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from attnbench import frameworks, registry
from attnbench.run.environment import describe
from attnbench.spec import Environment, Implementation, Workload
from attnbench.workloads import cost, suites
from attnbench.workloads.steps import STEPS

WORKLOADS = suites.load("regression").workloads
ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "jax.cudnn", "jax.cudnn-split", "jax.flash-attn", "jax.kvax", "jax.tokamax-cudnn", "jax.tokamax-mosaic",
    "jax.tokamax-triton", "torch.block-sparse-triton", "torch.fa3", "torch.fa4", "torch.flash-attn",
    "torch.flashinfer", "torch.sageattention", "torch.sdpa-cudnn",
    "torch.sdpa-cudnn-split", "torch.sdpa-efficient", "torch.transformer-engine", "torch.triton-decode",
    "torch.xformers",
}  # fmt: skip
"""What needs an accelerator: each says so itself."""
OURS = [name for name in registry.names() if registry.origin(name) == registry.origin("torch.sdpa")]


def here(framework: str) -> Environment:
    """A CPU as its framework sees it; JAX may be told to make several devices of one."""
    return replace(describe(frameworks.get(framework), "cpu"), devices=2 if framework == "jax" else 1)


def cases(found: Implementation, environment: Environment) -> list[Workload]:
    return [w for w in WORKLOADS if w.step == found.step and found.supports(w, environment) is None]


@pytest.mark.parametrize("name", OURS)
def test_every_implementation_has_a_case_or_a_reason(name: str):
    found = registry.get(name)
    if not frameworks.installed(found.framework):
        pytest.skip(f"{found.framework} is not installed")
    environment = here(found.framework)
    if name in ELSEWHERE:
        reason = found.available(environment)
        assert reason
        assert any(word in reason for word in ("needs cuda", "CUDA kernels only", "not installed"))
    else:
        assert cases(found, environment), f"no workload of the suite is for {name}"


def test_every_kind_of_problem_is_there():
    kinds = {kind for w in WORKLOADS for kind in w.visible_mask.kinds}
    assert {"full", "causal", "window", "dilated", "blocks"} <= kinds
    assert {w.pass_ for w in WORKLOADS} == {"forward", "train"}
    assert {w.step for w in WORKLOADS} == {"", *STEPS}
    assert any(w.group > 1 for w in WORKLOADS)
    for kind in ("dilated", "blocks"):
        assert {w.pass_ for w in WORKLOADS if kind in w.visible_mask.kinds and not w.step} == {"forward", "train"}


def test_it_is_light():
    assert len(WORKLOADS) <= 24
    assert max(cost.demand(w).flops for w in WORKLOADS) < 1e9


def test_our_own_gate_has_a_case_for_each_of_its_implementations():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["attnbench"]
    assert {"torch.dilated", "torch.block-sparse", "torch.chunked", "jax.dilated"} <= set(settings["implementations"])
    assert not set(settings["implementations"]) & ELSEWHERE
    assert set(settings["implementations"]) <= set(OURS)
