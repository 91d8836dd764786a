"""pi0 and pi0.5 whole: forward, loss, gradients and sampling with the flash path on and off."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from gemma_cases import CHOICES, error, random_params, run

from attnbench.errors import UsageError
from attnbench.models import pi0

pytestmark = pytest.mark.jax
BATCH, IMAGES, TEXT, HORIZON, WIDE = 2, 12, 6, 4, 3
MISSING = np.ones((BATCH, IMAGES), bool)
MISSING[0, 4:8] = False  # the second of three cameras
PADDED = np.arange(TEXT) < np.array([[3], [6]])


def config(pi05=False, dtype="float32", **flash):
    return pi0.Pi0Config(
        dtype=dtype, paligemma_variant="dummy", action_expert_variant="dummy", action_dim=WIDE, action_horizon=HORIZON,
        pi05=pi05, vocab_size=40, **flash,
    )  # fmt: skip


def flash(choice, pi05=False, dtype="float32"):
    return pi0.Pi0(config(pi05, dtype, use_flash_attention=True, flash_attention_impl=choice))


@cache
def case(pi05, padded=True):
    observation = pi0.random_observation(config(pi05), jax.random.key(1), BATCH, IMAGES, TEXT)
    if padded:
        observation = observation.replace(image_mask=jnp.asarray(MISSING), token_mask=jnp.asarray(PADDED))
    actions = jax.random.normal(jax.random.key(2), (BATCH, HORIZON, WIDE))
    words = (jax.random.key(1), observation, actions)
    return random_params(pi0.Pi0(config(pi05)), *words, method="compute_loss"), observation, actions


def everything(model, params, observation, actions):
    """Velocity, loss, gradients and sampled actions, in one program."""

    def loss(params):
        return model.apply({"params": params}, jax.random.key(7), observation, actions, method="compute_loss").mean()

    time = jnp.array([0.3, 0.8])
    velocity = model.apply({"params": params}, observation, actions, time, method="velocity")
    value, gradients = jax.value_and_grad(loss)(params)
    sampled = pi0.sample_actions(model, params, jax.random.key(3), observation)
    return {"velocity": velocity, "loss": value, "gradients": gradients, "sampled": sampled}


@cache
def standard(pi05, dtype="float32"):
    return jax.jit(lambda *a: everything(pi0.Pi0(config(pi05, dtype)), *a))(*case(pi05))


@pytest.mark.parametrize("pi05", [False, True], ids=["pi0", "pi0.5"])
@pytest.mark.parametrize("choice", CHOICES)
def test_flash_on_equals_flash_off(pi05, choice):
    found = jax.jit(lambda *a: everything(flash(choice, pi05), *a))(*case(pi05))
    wanted = standard(pi05)
    assert error(found["velocity"], wanted["velocity"]) < 1e-5
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
    assert error(found["gradients"], wanted["gradients"]) < 3e-5
    assert error(found["sampled"], wanted["sampled"]) < 3e-5


def test_without_padding_no_kernel_gets_a_mask(monkeypatch):
    from attnbench.models import attention as calls

    forms = []
    real = calls.pick
    monkeypatch.setattr(calls, "pick", lambda *given: forms.append(given[3]) or real(*given))
    params, observation, actions = case(False, padded=False)
    time = jnp.array([0.3, 0.8])
    found, wanted = (
        run(model, params, observation, actions, time, method="velocity") for model in (flash("jax"), pi0.Pi0(config()))
    )
    assert set(forms) == {"none"}
    assert error(found, wanted) < 1e-5


def test_bfloat16_is_as_good_as_the_standard_path():
    truth, plain = standard(False), standard(False, dtype="bfloat16")
    found = jax.jit(lambda *a: everything(flash("jax", dtype="bfloat16"), *a))(*case(False))
    for name, times in {"velocity": 2, "loss": 2, "sampled": 2, "gradients": 3}.items():
        assert error(found[name], truth[name]) <= times * error(plain[name], truth[name]) + 4 * 2**-8, name


@pytest.mark.parametrize("pi05", [False, True], ids=["pi0", "pi0.5"])
def test_a_cached_step_equals_the_whole_pass(pi05):
    params, observation, actions = case(pi05)
    model, time = pi0.Pi0(config(pi05)), jnp.array([0.3, 0.8])

    @jax.jit
    def from_cache(params):
        cache, valid = model.apply({"params": params}, observation, method="prefill")
        one, two = (
            model.apply({"params": params}, observation, cache, valid, actions, time, method="denoise")
            for _ in range(2)
        )
        return one, two, cache

    one, two, (k, _) = from_cache(params)
    assert k.shape == (4, BATCH, IMAGES + TEXT, 1, 16)
    np.testing.assert_array_equal(one, two)
    assert error(one, standard(pi05)["velocity"]) < 1e-5


def test_sampling_is_ten_euler_steps_of_the_whole_pass():
    params, observation, _ = case(False)
    model = pi0.Pi0(config())
    velocity = jax.jit(lambda *a: model.apply({"params": params}, *a, method="velocity"))
    actions = jax.random.normal(jax.random.key(3), (BATCH, HORIZON, WIDE))
    for i in range(10):
        actions = actions - 0.1 * velocity(observation, actions, jnp.full(BATCH, 1 - 0.1 * i))
    assert error(standard(False)["sampled"], actions) < 1e-4  # a rounded time turns the shortest period by 1e-4


def test_missing_tokens_change_nothing():
    params, observation, actions = case(False)
    noise = jax.random.normal(jax.random.key(9), observation.image_tokens.shape)
    other = observation.replace(
        image_tokens=jnp.where(MISSING[..., None], observation.image_tokens, noise),
        tokens=jnp.where(PADDED, observation.tokens, 7),
    )
    for model in (pi0.Pi0(config()), flash("jax")):
        apply = jax.jit(
            lambda o, model=model: model.apply({"params": params}, o, actions, jnp.ones(BATCH), method="velocity")
        )
        assert error(apply(other), apply(observation)) < 1e-6
        moved = apply(observation.replace(image_tokens=observation.image_tokens.at[0, 9].add(1.0)))
        assert error(moved, apply(observation)) > 1e-4


def test_positions_count_valid_tokens_and_the_suffix_goes_on():
    """Leaving the missing tokens out altogether is the same as masking them."""
    params, observation, actions = case(False)
    model = pi0.Pi0(config())
    row = jax.tree.map(lambda x: x[:1], observation)
    masked = run(model, params, row, actions[:1], jnp.ones(1), method="velocity")
    there, told = MISSING[0], PADDED[0]
    short = row.replace(
        image_tokens=row.image_tokens[:, there], tokens=row.tokens[:, told], image_mask=None, token_mask=None
    )
    found = run(model, params, short, actions[:1], jnp.ones(1), method="velocity")
    assert error(found, masked) < 1e-5


def test_pi0_needs_a_state():
    params, observation, actions = case(False)
    with pytest.raises(UsageError, match=r"needs Observation\(state="):
        pi0.Pi0(config()).apply(
            {"params": params}, observation.replace(state=None), actions, jnp.ones(BATCH), method="velocity"
        )


def test_time_is_told_apart():
    width = 16
    at = np.array([0.0, 0.25, 1.0])
    found = pi0.time_embedding(jnp.asarray(at), width)
    periods = np.geomspace(4e-3, 4.0, width // 2)
    angles = at[:, None] * 2 * np.pi / periods
    np.testing.assert_allclose(found, np.concatenate([np.sin(angles), np.cos(angles)], axis=-1), atol=2e-3)


@pytest.mark.parametrize("through", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_time_is_rounded_as_in_openpi(through):
    """Bit for bit: the reciprocal of a period, twice that, times pi, times the time, each rounded to float32."""
    width, (shortest, longest) = 1024, (4e-3, 4.0)

    def transcribed(time):
        steps = jnp.linspace(0.0, 1.0, width // 2)
        frequencies = jnp.divide(1.0, shortest * (longest / shortest) ** steps)
        angles = jnp.outer(time, frequencies * 2 * jnp.pi)
        return jnp.concatenate((jnp.sin(angles), jnp.cos(angles)), 1)

    at = jax.random.beta(jax.random.key(0), 1.5, 1, (64,)) * 0.999 + 0.001
    found = through(lambda time: pi0.time_embedding(time, width))(at)
    assert found.dtype == jnp.float32
    assert np.array_equal(found, through(transcribed)(at))
    periods = np.asarray(shortest * (longest / shortest) ** jnp.linspace(0.0, 1.0, width // 2))
    angles = np.asarray(at)[:, None] * (np.float32(1) / periods * np.float32(2) * np.float32(np.pi))
    assert angles.dtype == np.float32
    np.testing.assert_allclose(found, np.concatenate([np.sin(angles), np.cos(angles)], 1), rtol=0, atol=5e-7)


@pytest.mark.parametrize("num_steps", [0, -1, 2.5, True])
def test_steps_are_counted(num_steps):
    with pytest.raises(UsageError, match="num_steps"):
        pi0.sample_actions(pi0.Pi0(config()), {}, jax.random.key(0), None, num_steps=num_steps)


@pytest.mark.parametrize("shape", [(2, 3, 32), (1, 8, 32), (2, 8, 31)])
def test_actions_are_of_the_horizon(shape):
    sizes = pi0.Pi0Config(
        paligemma_variant="dummy", action_expert_variant="dummy", dtype="float32", action_horizon=8, vocab_size=50
    )
    observation = pi0.random_observation(sizes, jax.random.key(0), 2, 4, 2)
    with pytest.raises(UsageError, match="action_horizon"):
        pi0.Pi0(sizes).init(jax.random.key(0), jax.random.key(1), observation, jnp.zeros(shape), method="compute_loss")


@pytest.mark.parametrize(
    "field",
    [
        {"flash_attention_impl": None},
        {"flash_attention_impl": ["auto"]},
        {"use_flash_attention": "yes"},
        {"fallback": "yes"},
    ],
)
def test_fields_of_another_type_are_refused(field):
    from attnbench.models.attention import Path

    with pytest.raises(UsageError):
        Path(**field)


def loss_of(model, params, observation, actions):
    return model.apply({"params": params}, jax.random.key(7), observation, actions, method="compute_loss")


BOTH = (pi0.Pi0(config()), flash("auto"))


@pytest.mark.parametrize(
    "field,shape,words",
    [
        (
            "image_mask",
            (BATCH, 3),
            "image_mask must have a value for every token, here .* repeat the value of a camera",
        ),
        ("image_mask", (BATCH, IMAGES + 2), "image_mask must have a value for every token"),
        ("image_mask", (1, IMAGES), "image_mask must have a value for every token"),
        ("token_mask", (BATCH, TEXT - 1), "token_mask must have a value for every token"),
    ],
)
def test_a_mask_has_a_value_for_every_token(field, shape, words):
    params, observation, actions = case(False)
    for model in BOTH:
        with pytest.raises(UsageError, match=words):
            loss_of(model, params, observation.replace(**{field: jnp.ones(shape, bool)}), actions)


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"image_tokens": jnp.zeros((BATCH, IMAGES, 63))}, "image_tokens must be .*, 64], not"),
        (
            {"tokens": jnp.zeros((1, TEXT), int), "token_mask": None},
            "tokens must be .batch, length., here .2, length.",
        ),
        ({"tokens": jnp.zeros((BATCH, TEXT))}, "tokens must be whole numbers, not float32"),
        ({"state": jnp.zeros((1, WIDE))}, r"state must be \[batch, action_dim\], here \[2, 3\], not \[1, 3\]"),
        ({"state": jnp.zeros((BATCH, WIDE + 1))}, "state must be"),
    ],
)
def test_an_observation_agrees_with_itself_and_the_model(fields, words):
    params, observation, actions = case(False)
    with pytest.raises(UsageError, match=words):
        loss_of(BOTH[0], params, observation.replace(**fields), actions)


def test_masks_of_zeros_and_ones_are_masks_on_both_paths():
    params, observation, actions = case(False)
    numbers = observation.replace(
        image_mask=observation.image_mask.astype(jnp.int32), token_mask=observation.token_mask.astype(jnp.uint8)
    )
    for model in BOTH:
        found, wanted = (
            jax.jit(lambda o, model=model: loss_of(model, params, o, actions))(o) for o in (numbers, observation)
        )
        np.testing.assert_array_equal(found, wanted)
        with pytest.raises(UsageError, match="image_mask must be an array of booleans, or of 0 and 1, not of float32"):
            loss_of(model, params, observation.replace(image_mask=jnp.ones((BATCH, IMAGES))), actions)


@pytest.mark.parametrize(
    "noise,words",
    [
        (jnp.zeros((1, HORIZON, WIDE)), "noise must be .batch, action_horizon, action_dim., here"),
        (jnp.zeros((BATCH, HORIZON + 1, WIDE)), "noise must be"),
        (jnp.zeros((BATCH, HORIZON, WIDE - 1)), "noise must be"),
        (jnp.zeros((HORIZON, WIDE)), "noise must be"),
        (jnp.zeros((BATCH, HORIZON, WIDE), int), "noise must be an array of floating-point numbers, not of int32"),
    ],
)
def test_noise_has_the_shape_of_actions(noise, words):
    params, observation, _ = case(False)
    with pytest.raises(UsageError, match=words):
        pi0.sample_actions(BOTH[0], params, jax.random.key(3), observation, noise=noise)


def test_noise_of_few_bits_is_taken():
    params, observation, actions = case(False)
    rounded = actions.astype(jnp.bfloat16)
    sample = jax.jit(
        lambda noise: pi0.sample_actions(BOTH[0], params, jax.random.key(3), observation, num_steps=1, noise=noise)
    )
    np.testing.assert_array_equal(sample(rounded), sample(rounded.astype(jnp.float32)))
