"""pi0-FAST whole: logits, loss, gradients and decode with the flash path on and off; positions; holes in the prefix."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from gemma_cases import CHOICES, error, random_params

from attnbench.errors import UsageError
from attnbench.models import pi0_fast

pytestmark = pytest.mark.jax
BATCH, IMAGES, TEXT, STEPS, WORDS, TOKEN = 2, 6, 5, 6, 40, 7
VALID_IMAGES = np.ones((BATCH, IMAGES), bool)
VALID_IMAGES[0, 2:4] = False
VALID_TEXT = np.arange(TEXT) < np.array([[5], [3]])
USED = 9
"""Valid tokens in either row."""
MODEL = {"dtype": "float32", "paligemma_variant": "dummy", "vocab_size": WORDS}


def model(**words):
    return pi0_fast.Pi0Fast(pi0_fast.Pi0FastConfig(**(MODEL | words)))


@cache
def case():
    prompt = pi0_fast.Observation(
        image_tokens=jax.random.normal(jax.random.key(1), (BATCH, IMAGES, 64)),
        tokens=jax.random.randint(jax.random.key(2), (BATCH, TEXT), 2, WORDS),
        image_mask=jnp.asarray(VALID_IMAGES),
        token_mask=jnp.asarray(VALID_TEXT),
    )
    params = random_params(model(), prompt, method="logits")
    llm = params["PaliGemma"]["llm"]
    llm["embedder"]["input_embedding"] *= 0.05  # else a token's own embedding decides what follows it
    llm["layers"]["attn"]["q_einsum"]["w"] *= 3  # sharp attention, so that positions matter
    return params, prompt


def lesson(prompt):
    """The prompt's second half is to be predicted, token by token."""
    later = jnp.asarray(np.arange(TEXT) >= 2) & prompt.token_mask
    return prompt.replace(token_ar_mask=later, token_loss_mask=later)


def everything(model, params, prompt):
    def loss(params):
        return model.apply({"params": params}, lesson(prompt), method="compute_loss").mean()

    value, gradients = jax.value_and_grad(loss)(params)
    logits, cache, valid = model.apply({"params": params}, prompt, STEPS, method="prefill")
    forced, at = jnp.full((BATCH, 1), TOKEN), jnp.full((BATCH, 1), USED)
    valid = valid.at[:, IMAGES + TEXT].set(True)
    later, _ = model.apply({"params": params}, forced, at, cache, valid, method="decode")
    return {"loss": value, "gradients": gradients, "logits": logits, "next": later}


@cache
def standard(dtype="float32"):
    return jax.jit(lambda *a: everything(model(dtype=dtype), *a))(*case())


@pytest.mark.parametrize("choice", CHOICES)
def test_flash_on_equals_flash_off(choice):
    module = model(use_flash_attention=True, flash_attention_impl=choice)
    found, wanted = jax.jit(lambda *a: everything(module, *a))(*case()), standard()
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
    assert error(found["gradients"], wanted["gradients"]) < 3e-5
    assert error(found["logits"], wanted["logits"]) < 1e-5
    assert error(found["next"], wanted["next"]) < 1e-5
    flash = {"use_flash_attention": True, "flash_attention_impl": choice}
    np.testing.assert_array_equal(greedy("contiguous", **flash), greedy("contiguous"))


def test_bfloat16_is_as_good_as_the_standard_path():
    module = model(dtype="bfloat16", use_flash_attention=True, flash_attention_impl="jax")
    found, plain, truth = jax.jit(lambda *a: everything(module, *a))(*case()), standard("bfloat16"), standard()
    for name, times in {"loss": 2, "logits": 2, "next": 2, "gradients": 3}.items():
        assert error(found[name], truth[name]) <= times * error(plain[name], truth[name]) + 4 * 2**-8, name


def whole_pass(rule, found):
    """Logits of each generated token in one pass without cache or alignment, over the tokens that are there alone."""
    params, prompt = case()
    valid = np.concatenate([VALID_IMAGES, VALID_TEXT], axis=1)
    assert set(valid.sum(1)) == {USED}
    order = np.argsort(~valid, axis=1, kind="stable")[:, :USED, None]
    after = np.arange(USED + STEPS) >= USED
    seen = np.tril(np.ones((USED + STEPS, USED + STEPS), bool)) | ~after[:, None] & ~after[None]

    def logits(module, prompt, found):
        prefix = jnp.take_along_axis(module.embed_inputs(prompt)[0], order, axis=1)
        at = jnp.arange(USED + STEPS) + after * pi0_fast.RULES[rule]
        mask = jnp.broadcast_to(seen, (BATCH, *seen.shape))
        return module.PaliGemma(found, embedded_prefix=prefix, positions=at[None], mask=mask)[0][:, USED - 1 : -1]

    return np.asarray(jax.jit(lambda *a: model().apply({"params": a[0]}, *a[1:], method=logits))(params, prompt, found))


@cache
def greedy(rule, **words):
    params, prompt = case()
    run = lambda *a: pi0_fast.sample_tokens(  # noqa: E731
        model(**words), a[0], jax.random.key(0), a[1], max_decoding_steps=STEPS, position_rule=rule
    )
    return np.asarray(jax.jit(run)(params, prompt))


def up_to_the_end(tokens):
    return np.cumsum(np.cumsum(tokens == pi0_fast.EOS, axis=1), axis=1) <= 1


def test_decode_is_greedy_on_the_logits_of_a_whole_pass_in_either_rule_of_positions():
    """With a camera missing in the middle of one prompt and padding behind the other."""
    found = {rule: greedy(rule) for rule in pi0_fast.RULES}
    for rule, tokens in found.items():
        counted = up_to_the_end(tokens)
        assert counted.sum() > 4
        best = whole_pass(rule, jnp.asarray(tokens)).argmax(-1)
        np.testing.assert_array_equal(best[counted], tokens[counted])
        assert not tokens[~counted].any()
    assert (found["contiguous"] != found["openpi"]).any(), "the rules can be told apart"


def test_the_first_generated_token_stands_right_behind_the_prompt():
    """Its logits are those of position `USED`, and not of the next one."""
    wanted = {rule: whole_pass(rule, jnp.full((BATCH, STEPS), TOKEN))[:, :2] for rule in pi0_fast.RULES}
    found = np.concatenate([standard()["logits"], standard()["next"]], axis=1)
    assert error(found, wanted["contiguous"]) < 1e-5
    assert error(found, wanted["openpi"]) > 1e-3
    params, prompt = case()
    with pytest.raises(UsageError, match="contiguous or openpi"):
        pi0_fast.sample_tokens(model(), params, jax.random.key(0), prompt, position_rule="off by one")


def test_rows_are_moved_to_the_right_end():
    valid = jnp.asarray([[True, False, True, False], [True, True, True, True], [False] * 4])
    x = jnp.arange(12.0).reshape(3, 4, 1)
    moved, there, ids = pi0_fast.right_aligned(x, valid, jnp.arange(12).reshape(3, 4))
    assert there.tolist() == [[False, True, False, True], [True] * 4, [False] * 4]
    assert moved[0, :, 0].tolist() == [3, 0, 1, 2]
    assert ids[0].tolist() == [3, 0, 1, 2]


def test_the_loss_is_the_mean_cross_entropy_of_the_named_tokens():
    params, prompt = case()
    given = lesson(prompt)
    both = jax.jit(lambda *a: [model().apply({"params": a[0]}, a[1], method=m) for m in ("logits", "compute_loss")])
    logits, found = (np.asarray(x, np.float64) for x in both(params, given))
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    told = np.asarray(given.token_loss_mask)[:, 1:]
    picked = np.take_along_axis(logp, np.asarray(prompt.tokens)[:, 1:, None], -1)[..., 0]
    wanted = -(picked * told).sum(1) / told.sum(1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    with pytest.raises(UsageError, match="token_loss_mask"):
        model().apply({"params": params}, prompt, method="compute_loss")


def test_sampling_at_a_temperature_differs_by_seed():
    params, prompt = case()
    draw = jax.jit(
        lambda key: pi0_fast.sample_tokens(model(), params, key, prompt, max_decoding_steps=STEPS, temperature=5.0)
    )
    drawn = [np.asarray(draw(jax.random.key(seed))) for seed in range(3)]
    np.testing.assert_array_equal(drawn[0], draw(jax.random.key(0)))
    assert any((drawn[0] != other).any() for other in drawn[1:])


def test_a_traced_temperature_is_the_same_as_a_known_one():
    params, prompt = case()

    def sample(temperature):
        return pi0_fast.sample_tokens(
            model(), params, jax.random.key(0), prompt, max_decoding_steps=STEPS, temperature=temperature
        )

    traced = jax.jit(sample)
    np.testing.assert_array_equal(traced(0.0), greedy("contiguous"))
    np.testing.assert_array_equal(traced(5.0), jax.jit(lambda: sample(5.0))())
    with pytest.raises(UsageError, match="temperature must be a number"):
        traced(jnp.ones(BATCH))


@pytest.mark.parametrize(
    "words",
    [
        *({"temperature": one} for one in (-0.5, float("nan"), "warm", None, jnp.ones(BATCH))),
        *({"max_decoding_steps": one} for one in (0, -1, 2.5, True, None)),
    ],
    ids=str,
)
def test_settings_of_the_sampler_are_checked(words):
    with pytest.raises(UsageError, match=next(iter(words))):
        pi0_fast.sample_tokens(model(), {}, jax.random.key(0), None, **words)


@pytest.mark.parametrize(
    "fields,words",
    [
        (
            {"image_mask": jnp.ones((BATCH, 3), bool)},
            "image_mask must have a value for every token, .* of a camera for all",
        ),
        ({"token_mask": jnp.ones((BATCH, 3), bool)}, "token_mask must have a value for every token"),
        ({"token_ar_mask": jnp.ones((BATCH, 3), bool)}, "token_ar_mask must have a value for every token"),
        ({"image_mask": jnp.ones((BATCH, IMAGES))}, "image_mask must be an array of booleans, or of 0 and 1"),
        ({"tokens": jnp.ones((1, TEXT), int)}, "tokens must be"),
        ({"image_tokens": jnp.ones((BATCH, IMAGES, 63))}, "image_tokens must be"),
        ({"token_loss_mask": jnp.ones((BATCH, 3), bool)}, "token_loss_mask must be .batch, length., here"),
    ],
)
@pytest.mark.parametrize("flash", [False, True])
def test_an_observation_agrees_with_itself_and_the_model(fields, words, flash):
    params, prompt = case()
    with pytest.raises(UsageError, match=words):
        model(use_flash_attention=flash).apply(
            {"params": params}, lesson(prompt).replace(**fields), method="compute_loss"
        )
    if "token_loss_mask" not in fields:
        with pytest.raises(UsageError, match=words):
            pi0_fast.sample_tokens(model(), params, jax.random.key(0), prompt.replace(**fields))


@pytest.mark.parametrize("flash", [False, True])
def test_masks_of_zeros_and_ones_are_masks(flash):
    params, prompt = case()
    numbers = prompt.replace(image_mask=prompt.image_mask.astype(int), token_mask=prompt.token_mask.astype(int))
    logits = jax.jit(lambda o: model(use_flash_attention=flash).apply({"params": params}, o, method="logits"))
    np.testing.assert_array_equal(logits(numbers), logits(prompt))
