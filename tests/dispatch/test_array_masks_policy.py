"""Masks that are arrays ask the policies and `on_miss` as every other call does."""

from __future__ import annotations

import numpy as np
import pytest
from dispatch_problem import assert_close, here, problem, to_framework

import attnbench as ab
from attnbench.dispatch import array_masks
from attnbench.dispatch.array_masks import attention_with_array
from attnbench.errors import PolicyMiss, PolicyWarning
from attnbench.policy import Alternative, Choice, Entry, shape_of

SEEN = np.tri(24, dtype=bool)
SEEN[:, 0] = True
MASK = ab.masks.dense(SEEN)


def entry(name, pass_="forward", rivals=()):
    work = problem(kv_heads=2, mask=MASK, pass_=pass_)[0]
    alternatives = tuple(Alternative(implementation=other, ratio=1.2) for other in rivals)
    use = Choice(implementation=name, candidates=1 + len(rivals), alternatives=alternatives, measured=work.id)
    return Entry(at=shape_of(work), use=use)


def case(framework):
    _, drawn, (out, _) = problem(kv_heads=2, mask=MASK)
    return *to_framework(framework, *drawn[:3]), out


def visible(framework):
    if framework == "torch":
        import torch

        return torch.from_numpy(SEEN)
    import jax.numpy as jnp

    return jnp.asarray(SEEN)


@pytest.fixture
def plain_calls(monkeypatch):
    """How often torch.eager's own code ran."""
    from attnbench.frameworks.torch import plain

    calls, attend = [], plain.attend
    monkeypatch.setattr(plain, "attend", lambda *a: calls.append(1) or attend(*a))
    return calls


@pytest.mark.torch
@pytest.mark.parametrize(
    "name, rivals, eager", [("torch.eager", (), 1), ("torch.flex", ("torch.eager",), 1), ("torch.sdpa", (), 0)]
)
def test_torch_takes_what_was_measured_or_the_next_that_takes_arrays(name, rivals, eager, plain_calls):
    q, k, v, out = case("torch")
    with ab.use_policy(here(entry(name, rivals=rivals)), on_miss="error"):
        for _ in range(2):
            assert_close(attention_with_array(q, k, v, visible=visible("torch")), out)
    assert len(plain_calls) == 2 * eager


@pytest.mark.torch
def test_torch_compiled(plain_calls):
    import torch

    q, k, v, out = case("torch")
    seen = visible("torch")
    torch.compiler.reset()
    run = torch.compile(lambda q, k, v: attention_with_array(q, k, v, visible=seen), backend="eager", fullgraph=True)
    with ab.use_policy(here(entry("torch.eager")), on_miss="error"):
        assert_close(run(q, k, v), out)
        torch.compiler.reset()
        with pytest.raises(Exception, match="no measured policy covers"):
            torch.compile(
                lambda q, k, v: attention_with_array(q, k, v, visible=seen[:12, :12]), backend="eager", fullgraph=True
            )(*(x[:, :12].half() for x in (q, k, v)))


@pytest.mark.parametrize("framework", [pytest.param(n, marks=getattr(pytest.mark, n)) for n in ("torch", "jax")])
def test_a_miss_is_an_error_or_told_once(framework):
    q, k, v, out = case(framework)
    with ab.use_policy(here(framework=framework), on_miss="error"), pytest.raises(PolicyMiss, match="dense"):
        attention_with_array(q, k, v, visible=visible(framework))
    with pytest.warns(PolicyWarning, match=r"(torch\.sdpa|jax\.xla) is used") as told:
        found = [attention_with_array(q, k, v, visible=visible(framework)) for _ in range(3)]
    assert_close(found[2], out)
    assert len([one for one in told if issubclass(one.category, PolicyWarning)]) == 1


@pytest.mark.jax
def test_jax_by_pass(monkeypatch):
    import jax

    ran, run = [], array_masks._with_backend
    monkeypatch.setattr(array_masks, "_with_backend", lambda name, *a: ran.append(name) or run(name, *a))
    q, k, v, out = case("jax")
    chosen = here(entry("jax.einsum"), entry("jax.xla", "train"), framework="jax")

    def call(q, k, v, seen):
        return attention_with_array(q, k, v, visible=seen)

    with ab.use_policy(chosen, on_miss="error"):
        assert_close(call(q, k, v, visible("jax")), out)
        assert_close(jax.jit(call)(q, k, v, visible("jax")), out)
        assert set(ran) == {"einsum"}
        ran.clear()
        jax.jit(jax.grad(lambda *a: call(*a).sum(), argnums=(0, 1, 2)))(q, k, v, visible("jax"))
        assert set(ran) == {"xla"}


@pytest.mark.jax
def test_a_learned_bias_alone_is_training():
    import jax
    import jax.numpy as jnp

    q, k, v, _ = case("jax")
    bias = jnp.zeros((24, 24))
    with ab.use_policy(here(entry("jax.einsum", "train"), framework="jax"), on_miss="error"):
        found = jax.grad(lambda bias: (attention_with_array(q, k, v, bias=bias) ** 2).sum())(bias)
    assert float(jnp.abs(found).max()) > 1e-3
