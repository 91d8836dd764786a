"""Attention sinks: logits per head that join every row's softmax and have no value."""

from __future__ import annotations

import numpy as np
import pytest
from dispatch_problem import FRAMEWORKS, assert_close, problem, to_framework, to_numpy, turned
from hypothesis import given, settings
from hypothesis import strategies as st

import attnbench as ab
from attnbench import reference, registry
from attnbench.dispatch.plan import PLANS
from attnbench.errors import InvalidWorkload, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
SINKS = np.array([-1.5, 0.0, 2.0, 6.0])
MASKS = {
    "full": None,
    "causal": ab.masks.causal(),
    "window": ab.masks.window(5),
    "a row without keys": ab.masks.lengths([0, 17]),
    "large bias": ab.masks.dense(np.where(np.arange(24) % 3 == 0, -1e4, 1e4)[None, :, None] + np.zeros((1, 24, 24))),
}


def appended(workload, q, k, v, sinks):
    """The definition: one more key of each head, whose logit is the sink and whose value is 0."""
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.zeros((q.shape[0], q.shape[2], q.shape[1]))
    bias = np.broadcast_to(workload.mask.bias(workload.mask_shape), tuple(workload.mask_shape))
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        logits = q[b, :, h] @ k[b, :, h // workload.group].T * workload.softmax_scale
        if workload.softcap is not None:
            logits = workload.softcap * np.tanh(logits / workload.softcap)
        logits = np.concatenate([logits + bias[b, h], np.full((len(logits), 1), sinks[h])], axis=1)
        top = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - top)
        lse[b, h] = (top + np.log(weights.sum(axis=1, keepdims=True)))[:, 0]
        out[b, :, h] = weights[:, :-1] / weights.sum(axis=1, keepdims=True) @ v[b, :, h // workload.group]
    return out, lse


def sunk(seed=0, sinks=SINKS, **fields):
    workload, drawn, _ = problem(seed, kv_heads=2, **fields)
    wide = [x.astype(np.float64) for x in drawn]
    return workload, drawn, reference.attention(workload, *wide[:3], sinks)


@pytest.mark.parametrize("mask", MASKS)
def test_the_reference_appends_a_key_without_a_value(mask):
    workload, drawn, (out, lse) = sunk(mask=MASKS[mask], softcap=2.0, v_head_dim=8)
    want, want_lse = appended(workload, *(x.astype(np.float64) for x in drawn[:3]), SINKS)
    np.testing.assert_allclose(out, want, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-13)
    assert np.abs(out - problem(kv_heads=2, mask=MASKS[mask], softcap=2.0, v_head_dim=8)[2][0]).max() > 1e-2 or (
        mask == "large bias"
    )


def test_the_reference_has_the_gradients_of_its_own_differences():
    workload, drawn, _ = sunk(mask=MASKS["a row without keys"])
    *arrays, dout = (x.astype(np.float64) for x in drawn)
    grads = reference.attention_gradients(workload, *arrays, dout, SINKS)
    rng, step = np.random.default_rng(0), 1e-5
    for at, given_ in enumerate([*arrays, SINKS]):
        direction = rng.standard_normal(given_.shape)
        values = []
        for sign in (1, -1):
            moved = [*arrays, SINKS]
            moved[at] = given_ + sign * step * direction
            values.append((reference.attention(workload, *moved)[0] * dout).sum())
        assert abs((values[0] - values[1]) / (2 * step) - (grads[at] * direction).sum()) < 1e-7


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_output_and_lse_in_every_layout(framework, layout, mask):
    workload, drawn, (out, lse) = sunk(mask=MASKS[mask], v_head_dim=8)
    arrays = to_framework(framework, *turned(drawn[:3], layout), SINKS.astype("f4"))
    words = {"mask": workload.mask, "layout": layout, "heads": (4, 2) if layout == "packed" else None}
    got = ab.attention(*arrays[:3], **words, sinks=arrays[3])
    both = ab.attention(*arrays[:3], **words, sinks=arrays[3], return_lse=True)
    for found in (got, both[0]):
        assert_close(to_numpy(framework, found), turned([out], layout)[0])
    assert both[1].dtype == (arrays[0].dtype if framework != "torch" else __import__("torch").float32)
    np.testing.assert_allclose(to_numpy(framework, both[1]), lse, rtol=2e-6, atol=2e-5)


def test_float64_loses_nothing():
    workload, drawn, (out, lse) = sunk(mask=MASKS["causal"])
    wide = [x.astype(np.float64) for x in drawn[:3]]
    got, got_lse = ab.attention(*wide, mask=workload.mask, sinks=SINKS, return_lse=True)
    np.testing.assert_allclose(got, out, atol=1e-14)
    assert got_lse.dtype == np.float32
    np.testing.assert_allclose(got_lse, lse, rtol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["auto", "torch.eager", "torch.sdpa-flash", "torch.pair"])
def test_torch_in_float64(impl):
    import torch

    workload, drawn, (out, _) = sunk(mask=MASKS["a row without keys"])
    *leaves, dout = (torch.from_numpy(x).double().requires_grad_() for x in drawn)
    leaves.append(torch.from_numpy(SINKS).requires_grad_())
    got = ab.attention(*leaves[:3], mask=workload.mask, sinks=leaves[3], impl=impl)
    assert_close(got.detach(), out, 1e-12)
    wanted = reference.attention_gradients(workload, *(x.astype(np.float64) for x in drawn), SINKS)
    for found, want in zip(torch.autograd.grad(got, leaves, dout.detach()), wanted, strict=True):
        assert_close(found, want, 1e-11)


@pytest.mark.torch
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("impl", ["auto", "torch.eager", "torch.sdpa-flash", "torch.pair"])
def test_torch_gradients(impl, mask, compiled):
    import torch

    if mask == "large bias" and impl == "torch.pair":
        pytest.skip("a pair refuses it")
    workload, drawn, _ = sunk(mask=MASKS[mask])
    wide = [x.astype(np.float64) for x in drawn]
    *leaves, dout = (torch.from_numpy(x).requires_grad_() for x in drawn)
    leaves.append(torch.from_numpy(SINKS).float().requires_grad_())

    def call(q, k, v, sinks):
        return ab.attention(q, k, v, mask=workload.mask, sinks=sinks, impl=impl)

    torch.compiler.reset()
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    wanted = reference.attention_gradients(workload, *wide, SINKS)
    for got, want in zip(torch.autograd.grad(run(*leaves), leaves, dout.detach()), wanted, strict=True):
        assert np.abs(want).max() > 1e-3 or mask == "large bias"
        assert_close(got, want, 5e-5)


@pytest.mark.torch
def test_the_lse_of_rows_with_sinks_has_a_gradient():
    import torch

    leaves = [torch.from_numpy(x).double().requires_grad_() for x in (*sunk()[1][:3], SINKS)]
    mask = MASKS["a row without keys"]

    def both(impl):
        out, lse = ab.attention(*leaves[:3], mask=mask, sinks=leaves[3], impl=impl, return_lse=True)
        return torch.autograd.grad((out**2).sum() + (lse**2).sum(), leaves)

    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    hidden = torch.from_numpy(~np.broadcast_to(mask.array(ab.Workload(**SHAPE).mask_shape), (2, 1, 24, 24)).copy())
    logits = (q @ k.transpose(2, 3) / 4).masked_fill(hidden, -1e30)
    logits = torch.cat([logits, leaves[3][:, None, None].expand(2, 4, 24, 1)], dim=-1)
    out = (logits.softmax(-1)[..., :-1] @ v) ** 2
    wanted = torch.autograd.grad(out.sum() + (logits.logsumexp(-1).float() ** 2).sum(), leaves)
    for impl in ("torch.eager", "torch.sdpa-flash"):
        for got, want in zip(both(impl), wanted, strict=True):
            assert_close(got, want, 1e-5)


SHAPE = {"batch": 2, "q_len": 24, "heads": 4, "head_dim": 16}


@pytest.mark.torch
def test_second_derivatives_as_without_sinks():
    import torch

    leaves = [torch.from_numpy(x[:1, :5]).double().requires_grad_() for x in sunk()[1][:3]]
    leaves.append(torch.from_numpy(SINKS).requires_grad_())
    causal = ab.masks.causal() & ab.masks.window(2)

    def call(impl):
        return lambda q, k, v, sinks: ab.attention(q, k, v, mask=causal, sinks=sinks, impl=impl)

    torch.autograd.gradgradcheck(call("torch.eager"), leaves)
    torch.autograd.gradcheck(call("torch.eager"), leaves, check_forward_ad=True)
    first = torch.autograd.grad(call("torch.sdpa-flash")(*leaves).sum(), leaves, create_graph=True)
    with pytest.raises(Unsupported, match="second derivatives"):
        sum(x.sum() for x in first).backward()


@pytest.mark.torch
def test_transforms_of_torch_and_sinks_of_each_problem():
    import torch

    q, k, v = (torch.from_numpy(x) for x in sunk()[1][:3])
    sinks = torch.stack([torch.from_numpy(SINKS).float(), torch.zeros(4)])

    def one(q, k, v, sinks):
        return ab.attention(q[None], k[None], v[None], sinks=sinks, impl="torch.eager")[0]

    wanted = torch.stack([one(*x) for x in zip(q, k, v, sinks)])
    assert_close(torch.func.vmap(one)(q, k, v, sinks), wanted)
    jacobian = torch.func.jacrev(lambda s: one(q[0], k[0], v[0], s).sum((0, 2)))(sinks[0])
    assert_close(jacobian - torch.diag(torch.diagonal(jacobian)), 0 * jacobian)
    assert float(torch.diagonal(jacobian).abs().min()) > 1e-3


@pytest.mark.torch
def test_under_autocast_sinks_stay_as_wide_as_they_are():
    import torch

    *drawn, sinks = (torch.from_numpy(x).float().requires_grad_() for x in (*sunk()[1][:3], SINKS))
    with torch.autocast("cpu", torch.bfloat16):
        got = ab.attention(*drawn, sinks=sinks)
        got.float().sum().backward()
    assert (got.dtype, sinks.grad.dtype) == (torch.bfloat16, torch.float32)
    narrow = [x.detach().bfloat16().float() for x in drawn]
    exact = ab.attention(*narrow, sinks=sinks.detach(), impl="torch.eager")
    assert_close(got.detach().float(), exact, 0.03)


@pytest.mark.torch
def test_half_precision_inputs_are_rounded_once_more_and_no_further():
    import torch

    _, drawn, _ = sunk()
    half = [torch.from_numpy(x).bfloat16() for x in drawn[:3]]
    workload, wide = problem(kv_heads=2)[0], [x.double().numpy() for x in half]
    want = reference.attention(workload, *wide, SINKS)[0]
    for impl in ("torch.eager", "torch.sdpa-flash"):
        got = ab.attention(*half, sinks=torch.from_numpy(SINKS), impl=impl)
        assert got.dtype == torch.bfloat16
        assert np.linalg.norm(got.double().numpy() - want) < 6e-3 * np.linalg.norm(want)


@pytest.mark.jax
@pytest.mark.parametrize("impl", ["auto", "jax.xla", "jax.einsum"])
@pytest.mark.parametrize("mask", MASKS)
def test_jax_gradients(mask, impl):
    import jax

    workload, drawn, _ = sunk(mask=MASKS[mask])
    wanted = reference.attention_gradients(workload, *(x.astype(np.float64) for x in drawn), SINKS)
    *arrays, dout, sinks = to_framework("jax", *drawn, SINKS.astype("f4"))

    def loss(q, k, v, sinks):
        return (ab.attention(q, k, v, mask=workload.mask, sinks=sinks, impl=impl) * dout).sum()

    for got, want in zip(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays, sinks), wanted, strict=True):
        assert_close(got, want, 5e-5)


@pytest.mark.jax
def test_jax_transforms_and_strict_promotion():
    import jax

    *arrays, sinks = to_framework("jax", *sunk()[1][:3], SINKS.astype("f4"))
    many = jax.numpy.stack([sinks, 0 * sinks])

    def one(q, k, v, sinks):
        return ab.attention(q[None], k[None], v[None], sinks=sinks)[0]

    wanted = jax.numpy.stack([one(*(x[n] for x in (*arrays, many))) for n in range(2)])
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert_close(jax.jit(jax.vmap(one))(*arrays, many), wanted)
    gradient = jax.grad(lambda s: ab.attention(*arrays, sinks=s).sum())(sinks)  # of the sinks alone
    assert float(abs(gradient).min()) > 1e-3
    hessian = jax.hessian(lambda s: ab.attention(*(x[:1, :5] for x in arrays), sinks=s, impl="jax.einsum").sum())(sinks)
    assert float(abs(hessian).max()) > 1e-4


def test_a_sink_of_minus_infinity_changes_nothing():
    workload, drawn, (out, lse) = problem(mask=MASKS["a row without keys"])
    none = np.full(4, -np.inf, np.float32)
    got, got_lse = ab.attention(*drawn[:3], mask=workload.mask, sinks=none, return_lse=True)
    assert_close(got, out)
    assert_close(got_lse, lse)


@pytest.mark.torch
def test_nothing_is_nan_where_neither_key_nor_sink_is_seen():
    import torch

    leaves = [torch.from_numpy(x).requires_grad_() for x in problem()[1][:3]]
    sinks = torch.tensor([-float("inf"), 0.0, 1.0, 2.0], requires_grad=True)
    out, lse = ab.attention(*leaves, mask=ab.masks.lengths([0, 24]), sinks=sinks, return_lse=True)
    (out.sum() + lse[lse > -1e30].sum()).backward()
    assert all(bool(x.grad.isfinite().all()) for x in (*leaves, sinks))


@given(
    st.integers(1, 9), st.integers(1, 9), st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.integers(0, 2**31),
    st.floats(-60, 60), st.sampled_from(["causal", "window", "lengths", "full"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_problem(q_len, kv_len, heads, seed, size, kind):
    rng = np.random.default_rng(seed)
    mask = {
        "causal": ab.masks.causal(),
        "window": ab.masks.window(int(rng.integers(4)), int(rng.integers(3))),
        "lengths": ab.masks.lengths(rng.integers(0, kv_len + 1, 2)),
        "full": ab.masks.full(),
    }[kind]
    workload = ab.Workload(
        batch=2, q_len=q_len, kv_len=kv_len, heads=heads[0], kv_heads=heads[1], head_dim=4, v_head_dim=3,
        dtype="float64", mask=mask,
    )  # fmt: skip
    q, k, v = (
        rng.standard_normal((2, length, n, dim))
        for length, n, dim in ((q_len, heads[0], 4), (kv_len, heads[1], 4), (kv_len, heads[1], 3))
    )
    sinks = rng.standard_normal(heads[0]) + size
    out, lse = appended(workload, q, k, v, sinks)
    got, got_lse = ab.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    np.testing.assert_allclose(got, out, rtol=1e-10, atol=1e-290)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-6)


WRONG = [
    (np.zeros((4, 1), "f4"), r"one number per query head, \[4\], not \[4, 1\]"),
    (np.zeros(2, "f4"), r"one number per query head, \[4\], not \[2\]"),
    (np.zeros(4, np.int64), "floating-point numbers, not int64"),
    ([0.0] * 4, "framework of q, k and v, not of type list"),
]


@pytest.mark.parametrize("sinks, message", WRONG)
def test_what_are_no_sinks_is_refused(sinks, message):
    with pytest.raises(InvalidWorkload, match=message):
        ab.attention(*problem()[1][:3], sinks=sinks)


@pytest.mark.torch
def test_another_framework_is_refused():
    import torch

    arrays = problem()[1][:3]
    with pytest.raises(InvalidWorkload, match="framework of q, k and v, not of type Tensor"):
        ab.attention(*arrays, sinks=torch.zeros(4))
    with pytest.raises(InvalidWorkload, match="framework of q, k and v, not of type ndarray"):
        ab.attention(*map(torch.from_numpy, arrays), sinks=np.zeros(4, "f4"))


@pytest.mark.torch
def test_only_what_has_a_gradient_through_its_lse_trains():
    """Else the LSE would be a constant, and the sinks would not move the weights."""
    import torch

    leaves = [torch.from_numpy(x).requires_grad_() for x in problem()[1][:3]]
    sinks = torch.from_numpy(SINKS).float()
    told = ab.explain(*leaves, sinks=sinks)
    reasons = {one.name: one.reason for one in told.candidates}
    assert told.pick == "torch.sdpa-flash"
    assert reasons["torch.chunked"] == "has no gradient through its LSE, which attention sinks need"
    assert reasons["torch.sdpa"] == "returns no LSE, which attention sinks need"
    with pytest.raises(Unsupported, match=r"torch.chunked\[chunk=8\] cannot run .* which attention sinks need"):
        ab.attention(*leaves, sinks=sinks, impl="torch.chunked[chunk=8]")
    without = [x.detach() for x in leaves]
    wanted = ab.attention(*without, sinks=sinks, impl="torch.eager")
    assert_close(ab.attention(*without, sinks=sinks, impl="torch.chunked[chunk=8]"), wanted)


@pytest.mark.torch
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
def test_a_partial_form_gives_the_gradient_that_an_lse_lacks(layout, monkeypatch):
    """As flash-attention's: its LSE has none, its backward pass takes what a gradient of the LSE needs."""
    import torch

    workload, drawn, _ = sunk(mask=MASKS["causal"])
    wanted = reference.attention_gradients(workload, *(x.astype(np.float64) for x in drawn), SINKS)
    *leaves, dout = (torch.from_numpy(x).requires_grad_() for x in turned(drawn, layout))
    leaves.append(torch.from_numpy(SINKS).float().requires_grad_())
    flash = registry.get("torch.sdpa-flash")
    monkeypatch.setattr(type(flash), "lse_gradient", False)
    monkeypatch.setattr(type(flash), "build_lse", lambda self, workload, config: self.build)
    PLANS.clear()
    words = {"mask": workload.mask, "layout": layout, "heads": (4, 2) if layout == "packed" else None}
    got = ab.attention(*leaves[:3], **words, sinks=leaves[3], impl="torch.sdpa-flash")
    PLANS.clear()
    grads = torch.autograd.grad(got, leaves, dout.detach())
    for found, want in zip(grads, [*turned(wanted[:3], layout), wanted[3]], strict=True):
        assert_close(found, want, 5e-5)


@pytest.mark.torch
def test_dynamic_lengths_and_meta_tensors():
    import torch

    sinks = torch.from_numpy(SINKS).float()
    call = torch.compile(
        lambda q, k, v: ab.attention(q, k, v, mask=ab.masks.causal(), sinks=sinks), backend="aot_eager", dynamic=True,
        fullgraph=True,
    )  # fmt: skip
    for tokens in (9, 14, 23):
        _, drawn, (out, _) = sunk(mask=ab.masks.causal(), q_len=tokens)
        assert_close(call(*map(torch.from_numpy, drawn[:3])), out)
    meta = [torch.empty(x.shape, device="meta") for x in drawn[:3]]
    assert ab.attention(*meta, sinks=torch.empty(4, device="meta")).shape == out.shape


@pytest.mark.torch
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
def test_every_implementation_that_takes_them(device, train):
    """By name, against float64: whatever returns an LSE serves sinks, and says why not if it does not."""
    import torch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    fields = {"heads": 4, "q_len": 128, "head_dim": 64, "mask": ab.masks.causal()}
    workload, drawn, _ = problem(**fields)
    arrays = [torch.from_numpy(x).to(device, dtype).requires_grad_(train) for x in drawn[:3]]
    sinks = torch.from_numpy(SINKS).to(device).float().requires_grad_(train)
    wide, dout = [x.detach().double().cpu().numpy() for x in arrays], torch.from_numpy(drawn[3]).to(device, dtype)
    wanted = [reference.attention(workload, *wide, SINKS)[0]]
    wanted += reference.attention_gradients(workload, *wide, dout.double().cpu().numpy(), SINKS) if train else []
    compiles = ("torch.flex", "torch.compiled") if device == "cpu" else ()
    reasons = {one.name: one.reason for one in ab.explain(*arrays, mask=workload.mask, sinks=sinks).candidates}
    able = [name for name, why in reasons.items() if why is None or why.startswith("can run")]
    served = [name for name in able if name not in compiles and "[" not in name]
    assert {"torch.eager", "torch.sdpa-flash"} <= set(served)
    for name in served:
        if registry.get(name).approximate:
            continue
        got = ab.attention(*arrays, mask=workload.mask, sinks=sinks, impl=name)
        found = [got, *(torch.autograd.grad(got, [*arrays, sinks], dout) if train else ())]
        for one, want in zip(found, wanted, strict=True):
            off = np.linalg.norm(one.detach().double().cpu().numpy() - want) / np.linalg.norm(want)
            assert off < (1e-5 if device == "cpu" else 2e-2), name
