"""A suite that is written is the suite that is read."""

from __future__ import annotations

import numpy as np
import pytest

import attnbench as ab
from attnbench.errors import UsageError
from attnbench.workloads import suites
from attnbench.workloads.suite_file import write_suite

masks = ab.masks
MASKS = [
    masks.full(),
    masks.causal(),
    masks.causal("top-left"),
    masks.window(3, 1),
    masks.window(None, 2, "top-left"),
    masks.prefix(4),
    masks.block_causal([0, 0, 1, 1, 2, 2, 2, 3]),
    masks.documents([[0] * 5 + [1] * 3, [0] * 8], [[0] * 8, [0] * 8]),
    masks.lengths([8, 3]),
    masks.valid([[True] * 8, [False] * 3 + [True] * 5]),
    masks.dilated([4, 8], [1, 2], "group"),
    masks.alibi([0.5, 0.25, 0.0, 3.0]),
    masks.alibi([0.5, 0.25, 0.0, 3.0], "top-left"),
    masks.causal() & masks.alibi(4),
    masks.blocks(np.tri(2, dtype=bool), 4),
    masks.dense(np.eye(8, dtype=bool)),
    masks.dense(np.where(np.tri(8, dtype=bool), 0.5, -np.inf)),
    masks.dense(np.where(np.tri(8, dtype=bool), np.float32(0.1), -np.inf).astype(np.float32)),
    masks.causal() & masks.lengths([8, 3]),
    masks.causal() & masks.valid([[True] * 8, [False] * 3 + [True] * 5]),
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.id)
def test_every_mask(mask, tmp_path):
    work = ab.Workload(batch=2, q_len=8, heads=4, head_dim=16, mask=mask)
    write_suite(tmp_path / "mine.toml", "mine", "one", [work])
    suite = suites.load(str(tmp_path / "mine.toml"))
    assert [one.id for one in suite.workloads] == [work.id]


def test_every_field(tmp_path):
    work = ab.Workload(
        batch=1, q_len=8, kv_len=16, heads=4, kv_heads=2, head_dim=16, v_head_dim=8, dtype="bfloat16", pass_="train",
        scale=0.25, softcap=30.0, inputs="structured", source='a "quoted" \\ source', tags=("a", "b"),
    )  # fmt: skip
    write_suite(tmp_path / "mine.toml", 'it\'s "mine"', "two\nlines", [work])
    suite = suites.load(str(tmp_path / "mine.toml"))
    assert (suite.name, suite.description, suite.workloads) == ('it\'s "mine"', "two\nlines", (work,))


def test_a_mask_that_no_file_should_hold(tmp_path):
    work = ab.Workload(batch=1, q_len=2048, heads=1, head_dim=8, mask=masks.dense(np.zeros((2048, 2048), bool)))
    with pytest.raises(UsageError, match="4194304 values, more than the 1048576 of a suite file"):
        write_suite(tmp_path / "mine.toml", "mine", "", [work])
    assert not (tmp_path / "mine.toml").exists()
