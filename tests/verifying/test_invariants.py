"""Relations that hold for any attention: other places, one value in all of V, keys that nobody sees."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from attnbench import frameworks, masks
from attnbench.spec import Workload
from attnbench.verifying import invariants
from attnbench.verifying.draws import Draws
from attnbench.verifying.invariants import check_places
from attnbench.verifying.subject import Subject, Wrong, run

SHAPE = {"batch": 6, "q_len": 12, "heads": 8, "kv_heads": 4, "head_dim": 8}
ALLOWED = {"out": 1e-6}


def attention(q, k, v, spoil=lambda out: None):
    """bshd, grouped heads, causal."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v).astype(q.dtype)
    spoil(out)
    return out


def subject(call, seed=0, declared_error=None, mask=None):
    framework = frameworks.get("numpy")
    work = Workload(**SHAPE, mask=masks.causal() if mask is None else mask)
    draws = Draws(framework, "cpu", work, seed)
    programs = framework.programs(call, "forward", draws.inputs("bshd")[0])
    return Subject(framework, "cpu", work, "bshd", programs, draws, None, declared_error)


def checked(one):
    good = {"out": run(one.programs.main, one.draws.inputs("bshd")[0])[0].copy()}
    return check_places(one, good, ALLOWED)


def scaled(index):
    def spoil(out):
        out[index] *= 1.01

    return lambda q, k, v: attention(q, k, v, spoil)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_right_everywhere_passes(seed):
    assert checked(subject(attention, seed)) == ("permuted batch", "permuted heads")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("index", [5, (slice(None), slice(None), 3), (2, slice(None), 6)], ids=["row", "head", "both"])
def test_one_batch_row_or_head_that_is_wrong_is_found_whatever_the_seed(index, seed):
    with pytest.raises(Wrong, match="the output depends on its place: batch"):
        checked(subject(scaled(index), seed))


def test_rows_whose_masks_differ_stay_where_they_are():
    lengths = masks.lengths(list(range(7, 13)))
    assert checked(subject(scaled(5), mask=lengths)) == ("permuted heads",)


def test_heads_of_what_may_choose_by_head_stay_where_they_are():
    assert checked(subject(scaled((slice(None), slice(None), 3)), declared_error=0.1)) == ("permuted batch",)


def test_every_sampled_head_is_of_another_batch_row():
    one = subject(attention)
    assert len({batch for batch, _ in Draws(one.framework, "cpu", one.workload, 3).gradient_heads}) > 1
    from attnbench.verifying.draws import _choose_heads

    for seed in range(20):
        chosen = _choose_heads(one.workload, np.random.default_rng(seed), 4)
        assert len({batch for batch, _ in chosen}) == 4
    assert len(set(_choose_heads(one.workload, np.random.default_rng(0), 20))) == 20


SPARSE = masks.dilated([8, 16], [2, 4])
MASKS = {
    "dilated": SPARSE,
    "causal and dilated": masks.causal() & SPARSE,
    "dilated, keys hidden": SPARSE & masks.lengths([20, 7]),
    "document by document": masks.documents(np.repeat([0, 1, 2], 8)) & masks.causal() & masks.lengths([20, 7]),
    "strided blocks": masks.causal() & masks.dilated([24], [3]),
}


def sees(mask, **sizes):
    usual = {"batch": 2, "q_len": 24, "heads": 4, "head_dim": 8, "mask": mask}
    subject = SimpleNamespace(workload=Workload(**(usual | sizes)))
    return subject.workload, invariants._rows_see(subject)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", MASKS)
def test_rows_that_see_a_key(name):
    workload, found = sees(MASKS[name])
    truth = MASKS[name].array(workload.mask_shape).any(axis=-1).transpose(0, 2, 1)
    assert np.array_equal(np.broadcast_to(found, truth.shape), truth)


def test_rows_that_do_not_see_their_own_place_are_looked_up_as_far_as_the_budget_goes(monkeypatch):
    monkeypatch.setattr(invariants, "PAIRS_LOOKED_AT", 1)
    monkeypatch.setattr(invariants, "ROWS_LOOKED_AT", 3)
    mask = masks.dilated([8], [2])
    workload, found = sees(mask)
    truth = mask.array(workload.mask_shape).any(axis=-1).transpose(0, 2, 1)
    known = ~np.isnan(found)
    assert np.array_equal(found[known], np.broadcast_to(truth, found.shape)[known])
    assert (found == 1).sum() == truth.sum()
    assert 0 < (found == 0).sum() < (truth == 0).sum()


def test_a_million_tokens_take_a_moment():
    _, found = sees(masks.causal() & masks.dilated([2048, 8192], [1, 4]), batch=1, q_len=1 << 20)
    assert (found == 1).all()
