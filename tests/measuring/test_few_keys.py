"""Gradients of rows that see few keys: what a rounded output does to them is no fault; what a kernel does wrong is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from attnbench import reference
from attnbench.frameworks.torch_plain import TorchNamespace
from attnbench.measuring.tolerance import BACKWARD_FACTOR, compare
from attnbench.spec import Workload
from attnbench.workloads import masks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
HEADS, ROWS, DIM = 1500, 8, 128
WORKLOAD = Workload(batch=1, q_len=ROWS, heads=1, head_dim=DIM, dtype="bfloat16", mask=masks.causal(), pass_="train")
FOUND = {1: 185, 2: 195, 7: 200}
"""Of 200 heads, in how many a wrong row of that number is found at least; where a row is all but 0, it cannot be."""


def narrow(x):
    return x.to(torch.bfloat16)


def flash(q, k, v, dout):
    """dQ as flash kernels compute it: wide logits, an output in 16 bits, dO * out from that."""
    scale, seen = DIM**-0.5, torch.ones(ROWS, ROWS).tril().bool()
    q, k, v, dout = (x.float() for x in (q, k, v, dout))
    logits = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    out = narrow((narrow(weights).float() @ v) / weights.sum(-1, keepdim=True)).float()
    dlogits = logits.softmax(-1) * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return narrow(narrow(dlogits).float() @ k * scale)


@pytest.fixture(scope="module")
def heads():
    """(exact, plain, flash's) of many heads."""
    torch.manual_seed(0)
    drawn = [narrow(torch.randn(HEADS, ROWS, DIM)) for _ in range(4)]
    found, rows = [], np.arange(ROWS)
    for q, k, v, dout in zip(*drawn):
        wide = [x.double() for x in (q, k, v, dout)]
        results = []
        for (a, b, c, d), dtype in ((wide, torch.float64), ((q, k, v, dout), torch.float32)):
            head = reference.Head(a[None], b, c, 0, 0)
            results.append(reference.backward_rows(WORKLOAD, head, d[None], rows, TorchNamespace("cpu"), dtype, True))
        found.append((*results, flash(q, k, v, dout)))
    return found


def judged(exact, plain, got, cancelling=True):
    arrays = [[x.double().numpy()] for x in (got[None], exact.dq, plain.dq)]
    terms = [exact.cancelling.numpy()] if cancelling else None
    return compare("gradient of Q", *arrays, "bfloat16", BACKWARD_FACTOR, cancelling=terms)


def test_a_right_flash_kernel_is_right_in_every_head(heads):
    assert not [one for one in heads if judged(*one).fault]


def test_without_the_terms_that_cancel_it_would_not_be(heads):
    assert [one for one in heads if judged(*one, cancelling=False).fault]


@pytest.mark.parametrize("row", FOUND)
def test_a_wrong_row_is_still_found(heads, row):
    """A row that is missing, twice as long, or of the wrong sign."""
    for share in (0.0, 2.0, -1.0):
        faults = 0
        for exact, plain, got in heads[:200]:
            wrong = got.clone()
            wrong[row] *= share
            faults += bool(judged(exact, plain, wrong).fault)
        assert faults >= FOUND[row], share


@pytest.mark.parametrize("softcap", [1.0, 2.0])
def test_a_softcap_shrinks_what_cancels(softcap):
    """By its slope, which is small where logits are large: else wrong rows would pass there."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, ROWS, DIM)) for _ in range(4))
    terms = []
    for cap in (None, softcap):
        workload = msgspec.structs.replace(WORKLOAD, softcap=cap, dtype="float64")
        head = reference.Head(8 * q, k[0], v[0], 0, 0)
        found = reference.backward_rows(workload, head, dout, np.arange(ROWS), np, np.float64, True)
        terms.append(found.cancelling)
    assert terms[1][0, 2:].max() < terms[0][0, 2:].max() / 3


def test_it_is_asked_for():
    """The plain gradients do without."""
    arrays = np.random.default_rng(0).standard_normal((4, 1, ROWS, DIM))
    head = reference.Head(arrays[0], arrays[1][0], arrays[2][0], 0, 0)
    assert reference.backward_rows(WORKLOAD, head, arrays[3], np.arange(ROWS), np, np.float64).cancelling is None
