"""Which rows see a key, found without looking at every pair."""

from types import SimpleNamespace

import numpy as np
import pytest

from attnbench import masks
from attnbench.spec import Workload
from attnbench.verifying import properties

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
    return subject.workload, properties._rows_see(subject)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", MASKS)
def test_rows_that_see_a_key(name):
    workload, found = sees(MASKS[name])
    truth = MASKS[name].array(workload.mask_shape).any(axis=-1).transpose(0, 2, 1)
    assert np.array_equal(np.broadcast_to(found, truth.shape), truth)


def test_rows_that_do_not_see_their_own_place_are_looked_up_as_far_as_the_budget_goes(monkeypatch):
    monkeypatch.setattr(properties, "PAIRS_LOOKED_AT", 1)
    monkeypatch.setattr(properties, "ROWS_LOOKED_AT", 3)
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
