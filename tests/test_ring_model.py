"""The model of larger rings: what it must say in cases that can be worked out by hand."""

from __future__ import annotations

import msgspec
import pytest
from ring_model import Link, idle_share, model

from attnbench import masks
from attnbench.kernels.ring.schedule import RingProblem
from attnbench.spec import Workload

TOKENS = 4096
WORK = Workload(batch=1, q_len=TOKENS, heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", mask=masks.causal())
FAST = Link(1e30)


def per_pair(tile):
    """A kernel that takes 1 ns for each visible pair, and 2.5 going backward."""
    return tile.pairs * 1e-9, tile.pairs * 2.5e-9


def ring(world, layout="zigzag", pass_="forward", link=FAST):
    work = msgspec.structs.replace(WORK, pass_=pass_)
    return model(work, RingProblem(TOKENS, TOKENS, world, layout, True), per_pair, link)


def test_without_links_the_speed_is_the_balance():
    for layout in ("zigzag", "striped", "contiguous"):
        found = ring(8, layout)
        busy = 1 - idle_share(RingProblem(TOKENS, TOKENS, 8, layout, True))
        assert found.efficiency == pytest.approx(busy)
        assert found.exposed_s == pytest.approx(0.0)
    assert ring(1).speedup == 1.0
    assert ring(8, "zigzag").seconds < 0.6 * ring(8, "contiguous").seconds


def test_train_is_both_passes():
    assert ring(4, pass_="train").compute_s == pytest.approx(3.5 * ring(4).compute_s)
    assert ring(4, pass_="backward").compute_s == pytest.approx(2.5 * ring(4).compute_s)


def test_bytes_on_the_link():
    keys = TOKENS // 4 * 2 * (64 + 64)
    slow = ring(4, link=Link(1e6))
    assert slow.communication_s == pytest.approx(3 * keys * 2 / 1e6), "K and V, three times, two bytes a number"
    back = ring(4, pass_="backward", link=Link(1e6))
    assert back.communication_s == pytest.approx((3 * keys * 2 + 4 * keys * 4) / 1e6), "and sums of float32 each turn"
    assert slow.exposed_s == pytest.approx(slow.seconds - slow.compute_s)
    assert slow.exposed_s > 0


def test_a_transfer_shorter_than_the_computation_costs_nothing():
    step = ring(4).seconds / 4
    keys = TOKENS // 4 * 2 * (64 + 64) * 2
    hidden = ring(4, link=Link(keys / (0.9 * step)))
    assert hidden.seconds == pytest.approx(ring(4).seconds)
    seen = ring(4, link=Link(keys / (1.1 * step)))
    assert seen.seconds == pytest.approx(ring(4).seconds + 3 * 0.1 * step, rel=1e-3)


def test_it_says_that_it_is_a_model():
    assert ring(2).modelled is True
