"""Gradients of rows that see few keys: what a rounded output does to them is no fault; what a kernel does wrong is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from attnbench import frameworks, masks, reference, registry
from attnbench.frameworks.torch.plain import TorchNamespace
from attnbench.spec import Workload
from attnbench.verifying.checks import examine
from attnbench.verifying.draws import Draws
from attnbench.verifying.subject import Subject
from attnbench.verifying.tolerance import BACKWARD_FACTOR, compare

torch = pytest.importorskip("torch")
mutations = pytest.importorskip("mutations")
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


FEW_QUERIES = {"batch": 2, "heads": 6, "kv_heads": 3, "head_dim": 72, "scale": 1.0}


@pytest.mark.parametrize(
    "fields, seed",
    [({"q_len": 2, "kv_len": 100}, 137), ({"q_len": 3, "kv_len": 100, "kv_heads": 6}, 29),
     ({"q_len": 1, "kv_len": 64, "v_head_dim": 8}, 18), ({"q_len": 3, "kv_len": 64, "v_head_dim": 8}, 1)],
)  # fmt: skip
def test_few_queries_and_large_logits_pass_in_float32(fields, seed):
    """The plain gradient of a key may be exact by chance: it says nothing of what rounding does to others."""
    workload = Workload(**(FEW_QUERIES | fields), dtype="float32", pass_="train")
    bench, right = mutations.Bench("cpu"), mutations.Mutant("right", mutations.Kernel(workload))
    for implementation in (right, registry.get("torch.sdpa"), registry.get("torch.eager")):
        assert bench.verdict(implementation, workload, seed) == ("ok", ""), implementation.name


ONE_KEY = Workload(
    batch=3, q_len=1, kv_len=1024, heads=12, kv_heads=3, head_dim=64, v_head_dim=8, mask=masks.window(0, 0),
    dtype="float32", pass_="backward",
)  # fmt: skip


@pytest.mark.parametrize("scale", [0.01, None])
@pytest.mark.parametrize("pass_", ["backward", "train"])
def test_a_flash_kernel_passes_if_every_row_sees_one_key(scale, pass_):
    """dQ and dK are 0 there; what it returns is the rounding of dO V and dO out, which cancel."""
    workload = mutations.changed(ONE_KEY, scale=scale, pass_=pass_)
    for seed in (0, 2, 3):
        right = mutations.Mutant("right", mutations.Kernel(workload))
        assert mutations.Bench("cpu").verdict(right, workload, seed) == ("ok", "")
        wrong = mutations.Mutant("wrong", mutations.Kernel(workload, delta=False))
        assert mutations.Bench("cpu").verdict(wrong, workload, seed)[0] == "incorrect"


def test_an_error_of_what_should_be_0_is_a_share_of_what_cancels():
    torch_framework = frameworks.get("torch")
    draws = Draws(torch_framework, "cpu", ONE_KEY, 0)
    programs = torch_framework.programs(mutations.Kernel(ONE_KEY), "backward", draws.inputs("bshd")[0])
    found = examine(Subject(torch_framework, "cpu", ONE_KEY, "bshd", programs, draws), False)
    assert found.errors.backward is not None
    assert found.errors.backward < 1e-5
    assert found.errors.backward_allowed is not None
    assert found.errors.backward_allowed < 1e-3


def test_what_one_gradient_is_allowed_is_not_what_another_is():
    torch_framework = frameworks.get("torch")
    draws = Draws(torch_framework, "cpu", ONE_KEY, 0)
    programs = torch_framework.programs(mutations.Kernel(ONE_KEY), "backward", draws.inputs("bshd")[0])
    found = examine(Subject(torch_framework, "cpu", ONE_KEY, "bshd", programs, draws), False)
    assert found.limits("dq", "float32").relative > 1
    assert found.limits("dv", "float32").relative < 1e-4
