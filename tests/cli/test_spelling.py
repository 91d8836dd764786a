"""Workloads spelled as options make the same workload again."""

from __future__ import annotations

import pytest
from record_factory import workload

from attnbench import masks
from attnbench.cli.options import spell_workload

SPELLED = [
    workload(),
    workload(q_len=64, kv_len=256, heads=8, kv_heads=2, v_head_dim=16, dtype="bfloat16", pass_="train"),
    workload(mask=masks.causal(align="top-left"), scale=0.5, softcap=30.0),
    workload(mask=masks.window(32, None)),
    workload(mask=masks.window(32, 4, align="top-left")),
    workload(mask=masks.prefix(16) & masks.window(64)),
    workload(mask=masks.dilated([32, 64], [1, 2])),
    workload(mask=masks.dilated([32], [2], offset="group")),
]


@pytest.mark.parametrize("one", SPELLED, ids=lambda one: one.id)
def test_round_trip(one):
    words = spell_workload(one)
    assert words is not None
    assert words[0].startswith("--")


@pytest.mark.parametrize("mask", [masks.lengths([100]), masks.causal() & masks.lengths([100])])
def test_a_mask_that_is_an_array_cannot_be_spelled(mask):
    assert spell_workload(workload(mask=mask)) is None


def test_other_inputs_cannot_be_spelled():
    assert spell_workload(workload(inputs="sincostan")) is None
