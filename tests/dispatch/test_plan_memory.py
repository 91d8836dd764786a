"""Plans and counts keep masks within a bound of bytes, in every framework."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from dispatch_problem import FRAMEWORKS, to_framework

import attnbench as ab
from attnbench.dispatch import attention as dispatch
from attnbench.dispatch.demand import Words, demand_of
from attnbench.dispatch.plan import Plans, bytes_kept, data_bytes
from attnbench.masks import base

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
TOKENS = 64
BIAS_BYTES = 2 * TOKENS * TOKENS * 4


def bias(seed: int) -> ab.masks.Mask:
    return ab.masks.dense(np.random.default_rng(seed).standard_normal((2, TOKENS, TOKENS)).astype(np.float32))


def arrays(framework: str):
    values = [np.random.default_rng(n).standard_normal((1, TOKENS, 2, 8)).astype(np.float32) for n in range(3)]
    return to_framework(framework, *values)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_new_mask_at_every_call_does_not_fill_the_memory(framework, monkeypatch):
    plans = Plans(most_bytes=40 * BIAS_BYTES)
    monkeypatch.setattr(dispatch, "PLANS", plans)
    q, k, v = arrays(framework)
    for seed in range(50):
        ab.attention(q, k, v, mask=bias(seed))
        assert plans._total <= 40 * BIAS_BYTES
        assert plans._total == sum(plans._sizes.values())
    a_plan = max(plans._sizes.values())
    assert a_plan >= BIAS_BYTES
    assert len(plans) <= 40 * BIAS_BYTES // a_plan


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_plan_that_is_forgotten_lets_its_mask_go(framework, monkeypatch):
    plans = Plans(most_bytes=1)
    monkeypatch.setattr(dispatch, "PLANS", plans)
    q, k, v = arrays(framework)
    kept = []
    for seed in range(4):
        mask = bias(seed)
        ab.attention(q, k, v, mask=mask)
        kept.append(weakref.ref(plans.get(next(iter(plans._sizes)))))
        del mask
    gc.collect()
    assert [one() is not None for one in kept] == [False, False, False, True]


def test_what_is_counted():
    q, k, v = arrays("numpy")
    sizes = {}
    for name, mask in {
        "full": None, "causal": ab.masks.causal(), "lengths": ab.masks.lengths([9]), "bias": bias(0),
        "both": bias(0) & ab.masks.documents(np.zeros(TOKENS, int)),
    }.items():  # fmt: skip
        demand = demand_of(q, k, v, Words(mask, None, None, "auto", "bshd", None, False), False)
        sizes[name] = bytes_kept(demand)
    assert sizes["full"] == sizes["causal"] == 0
    assert sizes["bias"] == BIAS_BYTES
    assert sizes["both"] == BIAS_BYTES + 4 * TOKENS
    assert data_bytes(ab.masks.causal() & ab.masks.window(3)) == 0


@pytest.mark.torch
def test_arrays_that_torch_makes_of_a_mask_count():
    q, k, v = arrays("torch")
    words = Words(bias(0), None, None, "auto", "bshd", None, False)
    assert bytes_kept(demand_of(q, k, v, words, False)) == BIAS_BYTES + 9 * 2 * TOKENS * TOKENS


def test_counts_of_pairs_keep_no_masks():
    shape = ab.Workload(batch=1, q_len=TOKENS, heads=2, head_dim=8).mask_shape
    for count in (base.pairs, base.seen_keys):
        mask = bias(3)
        expected = count(mask, shape)
        references = len(gc.get_referrers(mask.values))
        assert count(bias(3), shape) == expected
        assert references == len(gc.get_referrers(mask.values)) <= 1


def test_counts_stay_few(monkeypatch):
    monkeypatch.setattr(base, "MOST_COUNTS", 3)
    shape = ab.Workload(batch=1, q_len=8, heads=1, head_dim=8).mask_shape
    for width in (1, 2, 3, 4, 5, 1):
        mask = ab.masks.window(width)
        assert base.pairs(mask, shape) == mask.pairs(shape)
