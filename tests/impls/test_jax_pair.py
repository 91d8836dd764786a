"""jax.pair: both passes and the LSE's gradient against float64, refusals, and cuDNN's private rule by its shapes."""

import msgspec
import numpy as np
import pytest
from jax_oracle import CPU, HOPPER, draw, oracle

from attnbench import masks, registry
from attnbench.errors import Unsupported
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Workload

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("quick_to_compile")]

from attnbench.impls.jax import nn as jax_nn
from attnbench.impls.pair import JAX_PAIR as PAIR
from attnbench.impls.partial import jax_passes

XLA_EINSUM = {"forward": "jax.xla", "backward": "jax.einsum"}
BASE = {"batch": 2, "q_len": 7, "kv_len": 9, "heads": 4, "kv_heads": 2, "head_dim": 8, "pass_": "train"}
CASES = {
    "full": {},
    "causal": {"mask": masks.causal()},
    "causal_dead_rows": {"q_len": 9, "kv_len": 7, "mask": masks.causal()},
    "window": {"mask": masks.window(2, 1), "kv_heads": 4},
    "empty_length": {"mask": masks.lengths([0, 9]), "kv_heads": 1},
    "blocks": {"mask": masks.blocks(np.array([[True, False, True], [False, True, True]]), 4)},
    "scale": {"scale": 0.9},
}


def workload(case, **changes):
    return Workload(**{**BASE, **CASES[case], **changes})


def close(got, want, allowed=2e-6):
    got = np.asarray(got, dtype=np.float64)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= allowed * max(np.linalg.norm(want), 1.0)


@pytest.mark.parametrize("case", CASES)
def test_output_lse_and_gradients(case):
    w = workload(case)
    assert PAIR.configured(XLA_EINSUM).supports(w, CPU) is None
    *inputs, dout = (jax.numpy.asarray(x, "float32") for x in draw(w))
    truth = oracle(w, *(np.asarray(x, dtype=np.float64) for x in (*inputs, dout)))
    out, pull = jax.vjp(PAIR.build(w, XLA_EINSUM), *inputs)
    close(out, truth["out"])
    for got, name in zip(pull(dout), ("dq", "dk", "dv")):
        close(got, truth[name])
    (out, lse), pull = jax.vjp(PAIR.build_lse(w, XLA_EINSUM), *inputs)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(truth["lse"]))
    seen = np.isfinite(truth["lse"])
    np.testing.assert_allclose(np.asarray(lse)[seen], truth["lse"][seen], rtol=2e-6, atol=2e-6)
    for got, name in zip(pull((dout, jax.numpy.zeros_like(lse))), ("dq", "dk", "dv")):
        close(got, truth[name])


@pytest.mark.parametrize("dtype, allowed", [("float32", 2e-6), ("bfloat16", 3e-2)])
def test_the_lse_has_a_gradient(dtype, allowed):
    """Of the plain passes, which any dtype has an exact LSE with."""
    w = workload("causal", dtype=dtype)
    *inputs, dout = (jax.numpy.asarray(x, dtype) for x in draw(w))
    dlse = jax.numpy.linspace(-30.1, 41.7, w.batch * w.heads * w.q_len).reshape(w.batch, w.heads, w.q_len)
    call = jax_passes.differentiable(jax_passes.plain_passes(w), with_lse=True)
    found = jax.vjp(call, *inputs)[1]((dout, dlse.astype("float32")))
    wide = [x.astype("float32") for x in inputs]
    plain = registry.get("jax.einsum").build_lse(msgspec.structs.replace(w, dtype="float32"), {})
    want = jax.vjp(plain, *wide)[1]((dout.astype("float32"), dlse.astype("float32")))
    for got, expected in zip(found, want):
        assert got.dtype == dtype
        close(got, np.asarray(expected, dtype=np.float64), allowed)


def test_under_jit_and_vmap():
    w = workload("causal")
    *inputs, dout = (jax.numpy.asarray(x, "float32") for x in draw(w))
    call = PAIR.build(w, XLA_EINSUM)
    want = jax.vjp(call, *inputs)[1](dout)
    found = jax.jit(lambda *x: jax.vjp(call, *x[:3])[1](x[3]))(*inputs, dout)
    stacked = jax.vmap(lambda *x: jax.vjp(call, *x[:3])[1](x[3]))(*(jax.numpy.stack([x, -x]) for x in (*inputs, dout)))
    for got, many, expected in zip(found, stacked, want):
        close(got, np.asarray(expected))
        close(many[0], np.asarray(expected))


def test_refusals():
    w = workload("causal")
    assert "is for training" in PAIR.supports(workload("causal", pass_="forward"), CPU)
    told = PAIR.configured({"forward": "jax.einsum", "backward": "jax.xla"}).supports(w, CPU)
    assert "jax.xla as the backward pass: has no backward pass that can be called alone" in told
    told = PAIR.configured({"forward": "jax.cudnn", "backward": "jax.einsum"}).supports(w, CPU)
    assert "jax.cudnn as the forward pass: needs cuda, this is cpu" in told
    assert "is not a jax implementation" in PAIR.configured({"forward": "torch.eager"}).supports(w, CPU)
    assert list(PAIR.configs_here(w, CPU)) == [XLA_EINSUM]
    inputs = [jax.numpy.asarray(x, "bfloat16") for x in draw(w)[:3]]
    with pytest.raises(Unsupported, match=r"jax\.xla as the forward pass: returns no LSE"):
        PAIR.build(workload("causal", dtype="bfloat16"), XLA_EINSUM)(*inputs)


def test_pairs_on_a_gpu():
    wide = Workload(batch=1, q_len=64, heads=2, head_dim=64, dtype="bfloat16", mask=masks.causal(), pass_="train")
    found = [tuple(config.values()) for config in PAIR.configs_here(wide, HOPPER)]
    assert ("jax.cudnn", "jax.einsum") in found
    assert ("jax.xla", "jax.cudnn") in found


def test_cudnn_passes_by_their_shapes(monkeypatch):
    """What JAX itself infers of the two private calls; their numbers need a GPU."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(fused, "check_is_flash_attention", lambda *_: None)
    w = Workload(batch=2, q_len=64, heads=4, kv_heads=2, head_dim=64, dtype="bfloat16", mask=masks.causal())
    forward, backward = jax_nn.CUDNN.passes(w, {})
    q, k, v, dout = (jax.ShapeDtypeStruct(x.shape, "bfloat16") for x in draw(w))
    out, lse = jax.eval_shape(forward, q, k, v)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, "bfloat16", (2, 4, 64), "float32")
    assert [x.shape for x in jax.eval_shape(backward, q, k, v, out, lse, dout)] == [q.shape, k.shape, v.shape]
    assert jax_nn.CUDNN.passes(msgspec.structs.replace(w, mask=masks.window(3)), {}) == (None, None)
    monkeypatch.setattr(fused, "_dot_product_attention_bwd_rule", lambda scale, res, grad: None)
    assert jax_nn.CUDNN.passes(w, {}) == (None, None), "a rule of another JAX is left alone"


@pytest.mark.parametrize("pass_", ["train", "backward"])
def test_verified_as_any_other(pass_):
    w = Workload(batch=2, q_len=64, heads=4, kv_heads=2, head_dim=32, mask=masks.causal(), pass_=pass_)
    worker = Local("jax", "cpu")
    question = p.Open(Cell("jax.pair", w, XLA_EINSUM), thorough=True, measure=False, clock=None, seed=3)
    record = worker.ask(question, 120).record
    worker.kill()
    assert record.status == "ok", record.reason
    assert (record.errors.lse is not None) == (pass_ == "train")


def test_a_second_derivative_is_refused():
    """The LSE that jax.xla returns has no gradient, so it would be wrong."""
    import jax.numpy as jnp

    w = Workload(batch=1, q_len=6, heads=2, head_dim=4, mask=masks.causal(), pass_="train")
    call = PAIR.build(w, {"forward": "jax.xla", "backward": "jax.einsum"})
    q, k, v = (jnp.asarray(np.random.default_rng(n).standard_normal((1, 6, 2, 4)), "float32") for n in range(3))

    def first(q):
        return jax.grad(lambda x: (call(x, k, v) ** 2).sum())(q).sum()

    assert np.isfinite(first(q))
    with pytest.raises(Unsupported, match="second derivative"):
        jax.grad(first)(q)
    with pytest.raises(Unsupported, match="second derivative"):
        jax.jit(jax.grad(first))(q)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.id)
@pytest.mark.parametrize("names", ["jax.tokamax-mosaic/jax.cudnn", "jax.cudnn/jax.einsum", "jax.einsum/jax.cudnn"])
def test_on_a_gpu(names, mask):
    w = Workload(batch=2, q_len=256, heads=4, kv_heads=2, head_dim=128, dtype="bfloat16", mask=mask, pass_="train")
    config = dict(zip(("forward", "backward"), names.split("/")))
    from attnbench.frameworks import environment_of

    reason = PAIR.configured(config).supports(w, environment_of("jax", "cuda"))
    if reason is not None:
        pytest.skip(reason)
    *inputs, dout = (jax.numpy.asarray(x, "bfloat16") for x in draw(w))
    truth = oracle(w, *(np.asarray(x, dtype=np.float64) for x in (*inputs, dout)))
    (out, lse), pull = jax.jit(lambda *x: jax.vjp(PAIR.build_lse(w, config), *x))(*inputs)
    np.testing.assert_allclose(np.asarray(lse), truth["lse"], atol=3e-3)
    for got, name in zip((out, *pull((dout, jax.numpy.zeros_like(lse)))), ("out", "dq", "dk", "dv")):
        close(got, truth[name], 3e-2)
