"""The PyTorch stack is the JAX one: outputs and gradients with the same weights."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("flax")

import jax.numpy as jnp
from gemma_cases import error, positions, random_params, tokens

import attnbench as ab
from attnbench.models import gemma, gemma_torch
from attnbench.models.masks import in_blocks, known

pytestmark = [pytest.mark.jax, pytest.mark.torch]
CONFIG = gemma.Config(width=32, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=1, head_dim=8)


@pytest.mark.parametrize("causal", [True, False])
def test_the_same_numbers(causal):
    model = gemma.Module([CONFIG], "float32", vocab_size=3, use_flash_attention=True)
    mask = known(ab.masks.causal(), 10) if causal else in_blocks((10,))
    x, at = tokens(2, 10, 32), positions(2, 10)
    params = random_params(model, [x], at, mask)

    def loss(params, x):
        return jnp.sin(model.apply({"params": params}, [x], at, mask)[0][0]).sum()

    wanted = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    for impl in ("standard", "sdpa", "auto"):
        stack = gemma_torch.Stack(CONFIG, causal=causal, impl=impl)
        stack.load(params)
        given = torch.from_numpy(np.array(x)).requires_grad_()
        stack(given, torch.from_numpy(np.array(at))).sin().sum().backward()
        assert error(given.grad.numpy(), wanted[1]) < 1e-5
        q = torch.stack([layer.q_einsum.grad for layer in stack.layers]).numpy()
        linear = torch.stack([layer.linear.grad for layer in stack.layers]).numpy()
        layers = wanted[0]["layers"]
        assert error([q, linear], [layers["attn"]["q_einsum"]["w"], layers["mlp"]["linear"]]) < 1e-5
