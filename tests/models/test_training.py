"""Two hundred steps of training, flash on and off, on a task with a known answer: one loss curve."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytest.importorskip("flax")

import jax.numpy as jnp

from attnbench.models import pi0

pytestmark = [pytest.mark.jax, pytest.mark.slow]
STEPS, BATCH, IMAGES, TEXT = 200, 8, 12, 4


def model(flash):
    config = pi0.Pi0Config(
        dtype="float32", paligemma_variant="dummy", action_expert_variant="dummy", action_dim=3, action_horizon=4,
        vocab_size=16, use_flash_attention=flash, flash_attention_impl="jax",
    )  # fmt: skip
    return pi0.Pi0(config)


def batch(key):
    """Actions that are a fixed linear map of the state and of one image token."""
    there = jnp.ones((BATCH, IMAGES), bool).at[::2, 4:8].set(False)
    to_actions = jax.random.normal(jax.random.key(4), (64, 3)) / 8
    observation = pi0.random_observation(model(False).config, key, BATCH, IMAGES, TEXT).replace(image_mask=there)
    target = observation.image_tokens[:, 0] @ to_actions + observation.state
    return observation, jnp.broadcast_to(target[:, None], (BATCH, 4, 3))


@jax.jit
def start():
    """The weights from which both curves begin."""
    return model(False).init(jax.random.key(0), jax.random.key(1), *batch(jax.random.key(2)), method="compute_loss")


def curve(flash, params):
    """Losses of AdamW."""
    optimizer = optax.adamw(1e-3)

    def loss(params, key):
        data, noise = jax.random.split(key)
        return model(flash).apply({"params": params}, noise, *batch(data), method="compute_loss").mean()

    def step(carry, key):
        params, state = carry
        value, gradients = jax.value_and_grad(loss)(params, key)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def train(params):
        keys = jax.random.split(jax.random.key(3), STEPS)
        return jax.lax.scan(step, (params, optimizer.init(params)), keys)[1]

    return np.asarray(train(params))


def test_the_loss_curve_is_the_same_with_flash_on_and_off():
    params = start()["params"]
    off, on = curve(False, params), curve(True, params)
    assert off[-20:].mean() < 0.6 * off[:20].mean(), "something is learned"
    np.testing.assert_allclose(on[:20], off[:20], rtol=1e-4)
    smooth = np.ones(20) / 20
    np.testing.assert_allclose(np.convolve(on, smooth, "valid"), np.convolve(off, smooth, "valid"), rtol=2e-2)
