"""`ab.attention` against the reference: frameworks, layouts, masks, grouped heads, LSE, gradients, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest
from dispatch_problem import FRAMEWORKS, SIZES, assert_close, problem, to_framework, to_numpy, turned

import attnbench as ab
from attnbench import frameworks, reference, registry
from attnbench.dispatch.choice import order_on, refusal
from attnbench.dispatch.demand import environment_of
from attnbench.errors import InvalidWorkload, UnknownName, Unsupported, UsageError


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_every_layout_comes_back_as_it_came(framework, layout, kv_heads):
    mask = ab.masks.causal()
    _, drawn, (out, lse) = problem(kv_heads=kv_heads, kv_len=40, v_head_dim=8, mask=mask)
    arrays = to_framework(framework, *turned(drawn[:3], layout))
    heads = (4, kv_heads) if layout == "packed" else None
    got, got_lse = ab.attention(*arrays, mask=mask, layout=layout, heads=heads, return_lse=True)
    (want,) = turned([out], layout)
    assert tuple(got.shape) == want.shape
    assert_close(to_numpy(framework, got), want)
    assert_close(to_numpy(framework, got_lse), lse)


def test_packed_with_as_many_key_heads_takes_one_number():
    _, drawn, (out, _) = problem()
    got = ab.attention(*turned(drawn[:3], "packed"), layout="packed", heads=4)
    assert_close(got, out.reshape(2, 24, -1))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scale_and_softcap_are_not_swallowed(framework):
    _, drawn, (out, _) = problem(scale=0.9, softcap=1.5)
    arrays = to_framework(framework, *drawn[:3])
    impl = "torch.eager" if framework == "torch" else "auto"  # which would compile FlexAttention for a soft cap
    assert_close(to_numpy(framework, ab.attention(*arrays, scale=0.9, softcap=1.5, impl=impl)), out)


GRADIENTS = [
    {"mask": ab.masks.causal(), "kv_heads": 2},
    {"mask": ab.masks.causal(), "q_len": 40, "kv_len": 24},
    {"mask": ab.masks.dilated([8, 24], [1, 3]), "softcap": 2.0},
]


@pytest.mark.torch
@pytest.mark.parametrize("fields", GRADIENTS, ids=["grouped", "empty rows", "dilated"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_torch_gradients(fields, layout):
    import torch

    workload, drawn, _ = problem(**fields)
    wanted = reference.attention_gradients(workload, *(x.astype(np.float64) for x in drawn))
    arrays = [torch.from_numpy(x) for x in turned(drawn, layout)]
    leaves = [x.requires_grad_() for x in arrays[:3]]
    out = ab.attention(*leaves, mask=workload.mask, softcap=workload.softcap, layout=layout)
    for got, want in zip(torch.autograd.grad(out, leaves, arrays[3]), turned(wanted, layout)):
        assert_close(got, want, 5e-5)


@pytest.mark.jax
@pytest.mark.parametrize(
    "fields, jitted",
    [*((fields, True) for fields in GRADIENTS), (GRADIENTS[0], False)],
    ids=["grouped", "empty rows", "dilated", "not compiled"],
)
def test_jax_gradients(fields, jitted):
    import jax

    workload, drawn, _ = problem(**fields)
    wanted = reference.attention_gradients(workload, *(x.astype(np.float64) for x in drawn))
    *arrays, dout = to_framework("jax", *drawn)

    def loss(q, k, v):
        return (ab.attention(q, k, v, mask=workload.mask, softcap=workload.softcap) * dout).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    for got, want in zip((jax.jit(gradient) if jitted else gradient)(*arrays), wanted):
        assert_close(got, want, 5e-5)


def can_run(name, workload):
    """Whether an implementation runs this on the CPU here."""
    implementation = registry.get(name)
    if not frameworks.installed(implementation.framework):
        return False
    return refusal(implementation, workload, implementation.framework, "cpu") is None


COMPILED = ("torch.flex", "torch.compiled")
INTERPRETED = ("jax.pallas-triton", "jax.splash")
PREFILL = [
    pytest.param(name, marks=pytest.mark.slow(reason="compiles") if name in COMPILED else ())
    for name in registry.names()
    if name not in INTERPRETED
]


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_and_decode_equal_one_full_pass(name):
    """The last rows against all keys are the last rows of the whole, under bottom-right causal."""
    framework = registry.get(name).framework
    parts = [(0, 23), (23, 24)] if name in COMPILED else [(0, 16), (16, 17), (17, 24)]
    mask = ab.masks.causal()
    steps = [ab.Workload(**(SIZES | {"q_len": stop - start, "kv_len": stop, "mask": mask})) for start, stop in parts]
    if not all(can_run(name, step) for step in steps):
        pytest.skip("refuses rectangular causal, or cannot run here")
    _, drawn, (out, _) = problem(mask=mask)
    q, k, v = to_framework(framework, *drawn[:3])
    got = [ab.attention(q[:, a:b], k[:, :b], v[:, :b], mask=mask, impl=name) for a, b in parts]
    assert_close(np.concatenate([to_numpy(framework, x) for x in got], axis=1), out)


def test_a_named_implementation_is_used_or_refused():
    _, drawn, _ = problem()
    with pytest.raises(Unsupported, match=r"numpy.float32 cannot run .*float64.*: takes float32, not float64"):
        ab.attention(*(x.astype(np.float64) for x in drawn[:3]), impl="numpy.float32")
    with pytest.raises(Unsupported, match=r"takes jax arrays, not numpy arrays"):
        ab.attention(*drawn[:3], impl="jax.einsum")
    with pytest.raises(NotImplementedError):
        ab.attention(*drawn[:3], impl="torch.fa3")


@pytest.mark.torch
def test_a_refusal_is_no_reason_to_use_another(monkeypatch):
    _, drawn, _ = problem()
    arrays = to_framework("torch", *drawn[:3])
    eager = registry.get("torch.eager")
    monkeypatch.setattr(eager, "build", lambda workload, config: pytest.fail("fell back"))
    for name in ("torch.sdpa-cudnn", "torch.fa3", "torch.xformers"):
        if can_run(name, problem()[0]):
            continue
        with pytest.raises(Unsupported, match=name):
            ab.attention(*arrays, impl=name)
        with pytest.raises(Unsupported, match=f"{name} cannot run"):
            ab.attention(*arrays, impl=name, return_lse=True)


def test_an_unknown_implementation_names_the_nearest():
    _, drawn, _ = problem()
    with pytest.raises(UnknownName, match=r"numpy.refrence.*Near: numpy.reference"):
        ab.attention(*drawn[:3], impl="numpy.refrence")


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda q, k, v: (q, k[:, :5], v), "shapes do not go together"),
        (lambda q, k, v: (q, k[..., :5], v), "shapes do not go together"),
        (lambda q, k, v: (q[:1], k, v), "shapes do not go together"),
        (lambda q, k, v: (q[0], k, v), "4 axes, not 3"),
        (lambda q, k, v: (q, k[:, :, :3], v[:, :, :3]), "must divide"),
        (lambda q, k, v: (q.astype(np.float64), k, v), "one dtype"),
        (lambda q, k, v: tuple(x.astype(np.int32) for x in (q, k, v)), "dtype int32"),
        (lambda q, k, v: (q.tolist(), k, v), "not list"),
    ],
    ids=["kv lengths", "dims", "batch", "axes", "groups", "dtypes", "integers", "list"],
)
def test_arrays_that_do_not_fit_are_refused_in_words(change, says):
    _, drawn, _ = problem()
    with pytest.raises(UsageError, match=says):
        ab.attention(*change(*drawn[:3]))


def test_wrong_words_are_refused():
    _, drawn, _ = problem()
    with pytest.raises(InvalidWorkload, match="layout must be one of"):
        ab.attention(*drawn[:3], layout="sbhd")
    with pytest.raises(InvalidWorkload, match="heads= given"):
        ab.attention(*turned(drawn[:3], "packed"), layout="packed")
    with pytest.raises(InvalidWorkload, match="heads=5"):
        ab.attention(*turned(drawn[:3], "packed"), layout="packed", heads=5)
    with pytest.raises(InvalidWorkload, match="lengths has 3 batch rows"):
        ab.attention(*drawn[:3], mask=ab.masks.lengths([1, 2, 3]))
    with pytest.raises(UsageError, match=r'such as "torch\.sdpa", not None'):
        ab.attention(*drawn[:3], impl=None)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_bare_array_is_no_mask(framework):
    arrays = to_framework(framework, *problem()[1][:3])
    with pytest.raises(InvalidWorkload, match=r"wrap an array in masks\.dense"):
        ab.attention(*arrays, mask=arrays[0] > 0)


@pytest.mark.jax
def test_a_traced_array_is_no_mask():
    import jax

    q, k, v = to_framework("jax", *problem()[1][:3])
    with pytest.raises(InvalidWorkload, match=r"wrap an array in masks\.dense"):
        jax.jit(lambda mask: ab.attention(q, k, v, mask=mask))(q > 0)
    with pytest.raises(InvalidWorkload, match=r"dense must be concrete .*outside jit\), not \w+Tracer\."):
        jax.jit(lambda bias: ab.attention(q, k, v, mask=ab.masks.dense(bias)))(q[:, 0, 0, 0])
    with pytest.raises(InvalidWorkload, match="kv_lengths must be whole numbers with 1 axes, not float32"):
        jax.jit(lambda lengths: ab.attention(q, k, v, mask=ab.masks.lengths(lengths)))(q[:, 0, 0, 0])


@pytest.mark.torch
def test_frameworks_do_not_mix():
    _, drawn, _ = problem()
    (q,) = to_framework("torch", drawn.q)
    with pytest.raises(InvalidWorkload, match="one framework, not numpy and torch"):
        ab.attention(q, *drawn[1:3])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_explain_names_every_candidate_and_the_pick_that_attention_makes(framework, monkeypatch):
    workload, drawn, _ = problem(mask=ab.masks.causal())
    arrays = to_framework(framework, *drawn[:3])
    told = ab.explain(*arrays, mask=ab.masks.causal())
    order = order_on(framework, "cpu")
    assert tuple(one.name for one in told.candidates)[: len(order)] == order
    every = [registry.get(name) for name in registry.names() if name.startswith(f"{framework}.")]
    known = {one.name for one in every if not one.step}
    assert {one.name for one in told.candidates} == known, "nobody is passed over in silence"
    assert told.workload.id == workload.id
    assert told.device == environment_of(framework, told.device).device
    assert told.pick == next(one.name for one in told.candidates if one.reason is None)
    picked = registry.get(told.pick)
    used = []
    build = type(picked).build
    monkeypatch.setattr(type(picked), "build", lambda self, *a: used.append(self.name) or build(self, *a))
    ab.attention(*arrays, mask=ab.masks.causal(), scale=0.123)  # a new problem, so that it is built now
    assert used == [told.pick]
    assert told.pick in str(told)
    assert all(one.name in str(told) for one in told.candidates)


def test_explain_without_a_pick():
    _, drawn, _ = problem()
    told = ab.explain(*(x.astype(np.float16) for x in drawn[:3]))
    assert told.pick is None
    assert told.why == "all refuse"
    assert all("float16" in one.reason for one in told.candidates)
    with pytest.raises(Unsupported, match=r"no numpy implementation .*numpy.float32: .*numpy.reference: "):
        ab.attention(*(x.astype(np.float16) for x in drawn[:3]))


@pytest.mark.jax
def test_an_lse_that_only_float32_has_is_refused_with_these_words():
    jnp = pytest.importorskip("jax.numpy")
    q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(Unsupported, match=r"jax\.xla .*returns no LSE in bfloat16, only in float32"):
        ab.attention(q, q, q, impl="jax.xla", return_lse=True)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_kernel_that_is_not_ours_gets_dense_arrays(framework):
    """It is verified on such, and may read memory without looking at strides."""
    if framework == "torch":
        pytest.importorskip("torch")
    seen = []

    class Dense(registry.Function):
        def build(self, workload, config):
            inner = registry.get("numpy.reference" if framework == "numpy" else "torch.eager").build(workload, {})

            def call(*arrays):
                dense = lambda x: x.is_contiguous() if framework == "torch" else x.flags.c_contiguous  # noqa: E731
                seen.extend(map(dense, arrays))
                return inner(*arrays)

            return call

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, 6, 8), np.float32).swapaxes(1, 2) for _ in range(3)]
    if framework == "torch":
        import torch

        arrays = [torch.from_numpy(x) for x in arrays]
    with registry.restored():
        registry.register(Dense(None, framework, "mine.dense"))
        ab.attention(*arrays, impl="mine.dense")
    assert seen == [True, True, True]


def test_calls_of_an_implementation_that_writes_into_itself_do_not_disturb_each_other():
    class Keeps(registry.Function):
        def build(self, workload, config):
            self.inner = registry.get("numpy.reference").build(workload, {})
            return lambda *arrays: self.inner(*arrays)

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 6, 2, 8), np.float32) for _ in range(3)]
    with registry.restored():
        registry.register(Keeps(None, "numpy", "mine.keeps"))
        ask = lambda **words: ab.attention(*arrays, impl="mine.keeps", **words)  # noqa: E731
        full, _, again = ask(), ask(mask=ab.masks.causal()), ask()
    assert np.array_equal(full, again)


def test_a_claim_to_take_any_number_of_keys_is_believed_of_ours_alone():
    from attnbench.dispatch.choice import takes_any_length

    claims = registry.Function(lambda q, k, v: q, "torch", "mine.claims")
    claims.any_kv_len = True
    with registry.restored():
        registry.register(claims)
        assert not takes_any_length(claims)
    assert takes_any_length(registry.get("torch.sdpa"))
