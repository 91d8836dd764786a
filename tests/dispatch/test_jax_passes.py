"""Traced JAX calls: the forward entry of a policy where nothing is differentiated, the training entry where it is."""

from __future__ import annotations

import numpy as np
import pytest
from dispatch_problem import assert_close, here, problem, to_framework

import attnbench as ab
from attnbench import masks, reference, registry
from attnbench.errors import PolicyMiss
from attnbench.policy import Choice, Entry, shape_of
from attnbench.spec import Implementation

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]
jnp = jax.numpy
CAUSAL = masks.causal()


class Spy(Implementation):
    """Notes the passes it is built for and computes as another does."""

    framework = "jax"
    lse_gradient = True

    def __init__(self, name, inner="jax.einsum"):
        self.name, self.inner, self.built = name, registry.get(inner), []

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        self.built.append(workload.pass_)
        return self.inner.build(workload, config)

    def build_lse(self, workload, config):
        self.built.append(workload.pass_)
        return self.inner.build_lse(workload, config)


def entry(name, pass_):
    work = problem(kv_heads=2, mask=CAUSAL, pass_=pass_)[0]
    return Entry(at=shape_of(work), use=Choice(implementation=name, candidates=1, measured=work.id))


@pytest.fixture
def spies():
    """(what a policy chose for forward passes, what it chose for training), active."""
    with registry.restored():
        forward, train = (registry.register(Spy(f"jax.{name}")) for name in ("swift", "trainer"))
        chosen = here(entry("jax.swift", "forward"), entry("jax.trainer", "train"), framework="jax")
        with ab.use_policy(chosen, on_miss="error"):
            yield forward, train


def arrays():
    work, drawn, (out, lse) = problem(kv_heads=2, mask=CAUSAL, pass_="train")
    gradients = reference.attention_gradients(work, *(x.astype(np.float64) for x in drawn))
    return to_framework("jax", *drawn), out, lse, gradients


def call(q, k, v):
    return ab.attention(q, k, v, mask=CAUSAL)


def test_jit_alone_is_a_forward_pass(spies):
    (q, k, v, _), out, _, _ = arrays()
    assert_close(jax.jit(lambda *x: call(*x))(q, k, v), out)
    assert_close(jax.vmap(call)(*(x[None] for x in (q, k, v)))[0], out)
    assert jax.eval_shape(call, q, k, v).shape == q.shape
    assert ([*spies[0].built], spies[1].built) == (["forward"] * len(spies[0].built), [])


@pytest.mark.parametrize(
    "differentiated",
    [
        lambda loss: jax.grad(loss, argnums=(0, 1, 2)),
        lambda loss: jax.jit(jax.grad(loss, argnums=(0, 1, 2))),
        lambda loss: jax.grad(jax.jit(loss), argnums=(0, 1, 2)),
        lambda loss: jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)),
        lambda loss: lambda *x: [g[0] for g in jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(*(y[None] for y in x))],
    ],
    ids=["grad", "jit of grad", "grad of jit", "checkpoint", "jit of vmap of grad"],
)
@pytest.mark.parametrize("inner", ["jax.einsum", "jax.xla", "jax.pair"])
def test_what_is_differentiated_is_what_was_chosen_for_training(spies, differentiated, inner):
    spies[1].inner = registry.get(inner)
    (q, k, v, dout), _, _, wanted = arrays()
    found = differentiated(lambda q, k, v, dout: (call(q, k, v) * dout).sum())(q, k, v, dout)
    for got, want in zip(found, wanted):
        assert_close(got, want, 5e-5)
    assert spies[1].built == ["train"]


def test_a_gradient_alone_never_builds_the_forward_choice(spies):
    (q, k, v, _), _, _, _ = arrays()
    jax.jit(jax.grad(lambda q: call(q, k, v).sum()))(q)
    assert spies[0].built == []


def test_inference_and_training_in_one_program(spies):
    """A frozen model beside one that learns, as in distillation."""
    (q, k, v, _), _, _, _ = arrays()

    def loss(q):
        target = jax.lax.stop_gradient(call(q * 2, k, v))
        return ((call(q, k, v) - target) ** 2).sum()

    assert jnp.isfinite(jax.jit(jax.value_and_grad(loss))(q)[0])
    assert spies[1].built == ["train"]


def test_forward_mode_and_second_derivatives(spies):
    (q, k, v, dout), _, _, (dq, _, _) = arrays()
    step = jnp.ones_like(q)
    _, tangent = jax.jvp(lambda q: (call(q, k, v) * dout).sum(), (q,), (step,))
    np.testing.assert_allclose(tangent, np.sum(dq), rtol=1e-3, atol=1e-3)

    def curve(t):
        return jnp.sin(call(q + t * step, k, v)).sum()

    exact = jax.grad(jax.grad(curve))(0.0)
    mixed = jax.jit(jax.jacfwd(jax.grad(curve)))(0.0)
    np.testing.assert_allclose(exact, mixed, rtol=1e-4)
    slope = jax.grad(curve)
    np.testing.assert_allclose(exact, (slope(1e-2) - slope(-1e-2)) / 2e-2, rtol=2e-2)


def test_the_lse_and_its_gradient(spies):
    (q, k, v, _), out, lse, _ = arrays()
    found = jax.jit(lambda q: ab.attention(q, k, v, mask=CAUSAL, return_lse=True))(q)
    assert_close(found[0], out)
    assert_close(found[1], lse)
    through = jax.grad(lambda q: ab.attention(q, k, v, mask=CAUSAL, return_lse=True)[1].sum())(q)
    assert float(jnp.abs(through).max()) > 1e-3


def test_only_what_is_perturbed_is_differentiated(spies):
    (q, k, v, _), _, _, _ = arrays()
    program = jax.make_jaxpr(jax.grad(lambda q: call(q, k, v).sum()))(q)
    all_three = jax.make_jaxpr(jax.grad(lambda q, k, v: call(q, k, v).sum(), argnums=(0, 1, 2)))(q, k, v)
    products = [str(one).count("dot_general") for one in (program, all_three)]
    assert products[0] < products[1]


def test_where_training_alone_was_measured_jit_takes_that():
    with registry.restored():
        train = registry.register(Spy("jax.trainer"))
        chosen = here(entry("jax.trainer", "train"), framework="jax")
        (q, k, v, _), out, _, _ = arrays()
        with ab.use_policy(chosen, on_miss="error"):
            assert_close(jax.jit(lambda *x: call(*x))(q, k, v), out)
        assert train.built == ["train"]


def test_a_miss_is_told_of_the_pass_that_is_run():
    with registry.restored():
        registry.register(Spy("jax.swift"))
        chosen = here(entry("jax.swift", "forward"), framework="jax")
        (q, k, v, _), out, _, _ = arrays()
        with ab.use_policy(chosen, on_miss="error"):
            assert_close(jax.jit(lambda *x: call(*x))(q, k, v), out)
            with pytest.raises(PolicyMiss, match="train"):
                jax.grad(lambda q: call(q, k, v).sum())(q)


def test_the_policy_is_the_one_in_force_when_it_was_traced(spies):
    (q, k, v, _), _, _, _ = arrays()
    traced = jax.jit(lambda *x: call(*x))  # jax keeps traces by the function
    traced(q, k, v)
    with ab.use_policy(here(framework="jax"), on_miss="error"):
        jax.grad(lambda q: traced(q, k, v).sum())(q)
    assert spies[1].built == ["train"]
