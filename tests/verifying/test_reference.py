"""The reference against an oracle that goes pair by pair, its gradients against autograd and differences, its ports."""

from __future__ import annotations

import dense_oracle
import numpy as np
import pytest

from attnbench import frameworks, masks, reference
from attnbench.spec import Workload
from attnbench.verifying.draws import Draws, by_head
from attnbench.workloads.inputs import draw

SQUARE = {"batch": 2, "q_len": 14, "heads": 4, "head_dim": 8, "dtype": "float64"}
RECTANGLES = [(14, 14), (5, 14), (14, 5), (1, 14)]
VARIANTS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "v_head_dim": 5},
    "narrow values": {"v_head_dim": 3},
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 0.7, "kv_heads": 2},
}


def assert_matches(workload, rule):
    q, k, v, _ = draw(workload, seed=1)
    out, lse = reference.attention(workload, q, k, v)
    want_out, want_lse = dense_oracle.attention(workload, rule, q, k, v)
    np.testing.assert_allclose(out, want_out, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-13)
    return lse


@pytest.mark.parametrize("case", dense_oracle.square_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("variant", ["plain", "grouped"])
def test_every_mask_equals_the_pairwise_oracle(case, variant):
    assert_matches(Workload(**SQUARE, **VARIANTS[variant], mask=case.mask), case.rule)


@pytest.mark.parametrize("case", dense_oracle.aligned_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("tokens", RECTANGLES, ids=str)
def test_both_alignments_equal_the_pairwise_oracle(case, tokens):
    q_len, kv_len = tokens
    assert_matches(Workload(**(SQUARE | {"q_len": q_len, "kv_len": kv_len}), mask=case.mask), case.rule)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_field_of_a_workload_counts(variant):
    case = dense_oracle.square_cases()[6]
    assert_matches(Workload(**SQUARE, **VARIANTS[variant], mask=case.mask), case.rule)


def test_a_row_that_sees_no_key_gives_zero_and_minus_infinity():
    workload = Workload(**(SQUARE | {"q_len": 14, "kv_len": 5}), mask=masks.causal())
    q, k, v, dout = draw(workload, seed=1)
    out, lse = reference.attention(workload, q, k, v)
    assert (out[:, :9] == 0).all()
    assert (lse[:, :, :9] == -np.inf).all()
    assert np.isfinite(lse[:, :, 9:]).all()
    assert all(np.isfinite(g).all() for g in reference.attention_gradients(workload, q, k, v, dout))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_the_mask_hides_does_no_harm(poison):
    workload = Workload(**SQUARE, mask=masks.causal())
    q, k, v, _ = draw(workload, seed=1)
    clean, _ = reference.attention(workload, q, k, v)
    k[1, 9], v[1, 9] = poison, poison
    with np.errstate(invalid="ignore"):
        out, lse = reference.attention(workload, q, k, v)
    np.testing.assert_array_equal(out[0], clean[0])
    np.testing.assert_allclose(out[1, :9], clean[1, :9], rtol=0, atol=1e-15)
    assert np.isfinite(lse[1, :, :9]).all()
    assert np.isnan(out[1, 9:]).all(), "rows that see the poison must show it"


def test_blocks_of_rows_do_not_change_the_result(monkeypatch):
    workload = Workload(**SQUARE, kv_heads=2, mask=masks.causal() & masks.dilated([4, 14], [1, 3]))
    arrays = draw(workload, seed=2)
    whole = (*reference.attention(workload, *arrays[:3]), *reference.attention_gradients(workload, *arrays))
    blocks = reference.row_blocks(workload, np.arange(14), 3 * workload.group * workload.kv_len)
    assert [len(block) for block in blocks] == [3, 3, 3, 3, 2]
    monkeypatch.setattr(reference, "row_blocks", lambda workload, rows: blocks)
    parts = (*reference.attention(workload, *arrays[:3]), *reference.attention_gradients(workload, *arrays))
    for a, b in zip(whole, parts):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


GRADIENT_CASES = [
    *((case, {"kv_heads": 2}) for case in dense_oracle.square_cases()),
    (dense_oracle.aligned_cases()[0], {"q_len": 14, "kv_len": 5}),
    (dense_oracle.aligned_cases()[3], {"q_len": 5, "kv_len": 14, "softcap": 0.7, "v_head_dim": 3}),
    (dense_oracle.aligned_cases()[0], {"scale": 0.8, "softcap": 1.5, "kv_heads": 1}),
]


@pytest.mark.torch
@pytest.mark.parametrize("case, fields", GRADIENT_CASES, ids=lambda x: x.name if hasattr(x, "name") else "")
def test_gradients_equal_autograd_through_the_oracles_weights(case, fields):
    import torch

    workload = Workload(**(SQUARE | fields), mask=case.mask, pass_="train")
    q, k, v, dout = (torch.from_numpy(x) for x in draw(workload, seed=3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = torch.from_numpy(dense_oracle.log_weights(workload, case.rule))
    keys, values = (x.repeat_interleave(workload.group, dim=2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, keys) * workload.softmax_scale
    if workload.softcap is not None:
        logits = workload.softcap * torch.tanh(logits / workload.softcap)
    weights = torch.nan_to_num(torch.softmax(torch.where(bias == -np.inf, -1e300, logits + bias), -1))
    weights = torch.where(bias == -np.inf, 0.0, weights)
    out = torch.einsum("bhij,bjhd->bihd", weights, values)
    wanted = torch.autograd.grad(out, leaves, dout)
    got = reference.attention_gradients(workload, *(x.detach().numpy() for x in (q, k, v, dout)))
    for name, a, b in zip("qkv", got, wanted):
        np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=1e-12, err_msg=f"d{name}")


def test_gradients_equal_finite_differences():
    workload = Workload(batch=1, q_len=6, heads=4, kv_heads=2, head_dim=4, v_head_dim=3, dtype="float64",
                        softcap=1.2, mask=masks.causal() & masks.dilated([3, 6], [1, 2]), pass_="train")  # fmt: skip
    *arrays, dout = draw(workload, seed=4)
    gradients = reference.attention_gradients(workload, *arrays, dout)
    rng, step = np.random.default_rng(0), 1e-5
    for which, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step * direction if n == which else x for n, x in enumerate(arrays)]
            ends.append(float((reference.attention(workload, *moved)[0] * dout).sum()))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-7)


PORTED = [
    {"mask": masks.causal() & masks.dilated([4, 14], [1, 3]), "kv_heads": 2},
    {"mask": dense_oracle.square_cases()[6].mask, "softcap": 0.7},
    {"mask": masks.causal(), "q_len": 14, "kv_len": 5, "v_head_dim": 3},
    {"mask": masks.lengths([5, 0]), "kv_heads": 1},
]


@pytest.mark.parametrize("fields", PORTED, ids=["dilated", "bias", "empty rows", "ragged"])
@pytest.mark.parametrize(
    "framework, dtype",
    [
        pytest.param("torch", "bfloat16", marks=pytest.mark.torch),
        pytest.param("jax", "bfloat16", marks=pytest.mark.jax),
        pytest.param("jax", "float32", marks=pytest.mark.jax),
    ],
)
def test_the_float64_port_equals_numpy(framework, dtype, fields):
    """The port is what judges on an accelerator, where NumPy would take too long."""
    workload = Workload(**(SQUARE | {"dtype": dtype} | fields), pass_="train")
    draws, group = Draws(frameworks.get(framework), "cpu", workload, seed=6), workload.group
    ported = draws._compiled(np.arange(workload.q_len), True, "exact", workload, "float64")
    inputs, heads = draws.inputs("bshd")[0], draws.gradient_heads
    own = [by_head(x, "bshd", n, heads) for x, n in zip(inputs, (group, 1, 1, group))]
    place = frameworks.get(framework).namespace("cpu").asarray
    results = ported(*map(place, np.array(heads).T), *own)
    assert {str(x.dtype).removeprefix("torch.") for x in results} == {"float64"}
    for n, truth in enumerate(draws.truths(0, gradients=True)):
        for got, want in zip((*results[:2], *results[3:]), (truth.out, truth.lse, *truth.grads)):
            np.testing.assert_allclose(np.asarray(got)[n], want, rtol=0, atol=1e-13)
