"""What a sweep takes when nothing is named."""

from __future__ import annotations

import json

import pytest

from attnbench import registry
from attnbench.cli import execute
from attnbench.cli.options import loadable_names, swept_names


@pytest.mark.torch
@pytest.mark.jax
def test_rings_are_measured_only_when_asked_for():
    left_out = {name for name in set(loadable_names()) - set(swept_names()) if not registry.get(name).step}
    rings = {name for name in registry.names() if "ring" in name or name == "jax.all-gather"}
    assert left_out == {name for name in rings if not registry.get(name).step}
    assert "torch.sdpa" in swept_names()


def test_steps_are_measured_only_where_they_are_asked_for():
    assert not any(registry.get(name).step for name in swept_names())
    stacks = swept_names({"gemma-stack"})
    assert {"torch.gemma-stack", "jax.gemma-stack-flash"} <= set(stacks)
    assert all(registry.get(name).step == "gemma-stack" for name in stacks)


@pytest.mark.torch
def test_the_list_says_so(capsys: pytest.CaptureFixture[str]):
    assert execute(["list", "implementations", "--json"]) == 0
    rows = {row["implementation"]: row["what"] for row in json.loads(capsys.readouterr().out)}
    assert rows["torch.ring"].endswith("(by name only)")
    assert "by name" not in rows["torch.sdpa"]
