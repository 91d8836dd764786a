"""pi0-FAST whole: logits, loss, gradients and decode with the flash path on and off; positions; holes in the prefix."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from gemma_cases import CHOICES, error, random_params  # noqa: E402

from attnbench.errors import UsageError  # noqa: E402
from attnbench.models import pi0_fast  # noqa: E402

pytestmark = pytest.mark.jax
BATCH, IMAGES, TEXT, STEPS, WORDS = 2, 6, 5, 4, 40
VALID_IMAGES = np.ones((BATCH, IMAGES), bool)
VALID_IMAGES[0, 2:4] = False
VALID_TEXT = np.arange(TEXT) < np.array([[3], [5]])
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
    return random_params(model(), prompt, method="logits"), prompt


def lesson(prompt):
    """The prompt's second half is to be predicted, token by token."""
    later = jnp.asarray(np.arange(TEXT) >= 2) & prompt.token_mask
    return prompt.replace(token_ar_mask=later, token_loss_mask=later)


def everything(model, params, prompt):
    def loss(params):
        return model.apply({"params": params}, lesson(prompt), method="compute_loss").mean()

    value, gradients = jax.value_and_grad(loss)(params)
    logits, cache, _ = model.apply({"params": params}, prompt, STEPS, method="prefill")
    decoded = pi0_fast.sample_tokens(model, params, jax.random.key(5), prompt, max_decoding_steps=STEPS)
    return {"loss": value, "gradients": gradients, "logits": logits, "decoded": decoded, "slots": cache[0]}


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
    np.testing.assert_array_equal(found["decoded"], wanted["decoded"])


def test_bfloat16_is_as_good_as_the_standard_path():
    module = model(dtype="bfloat16", use_flash_attention=True, flash_attention_impl="jax")
    found, plain, truth = jax.jit(lambda *a: everything(module, *a))(*case()), standard("bfloat16"), standard()
    for name, times in {"loss": 2, "logits": 2, "gradients": 3}.items():
        assert error(found[name], truth[name]) <= times * error(plain[name], truth[name]) + 4 * 2**-8, name


@cache
def reference(rule):
    """Greedy decode without cache, alignment or masks: each row alone, only the tokens that are there, one whole pass
    for every token."""
    params, prompt = case()
    llm, names = model(), {"params": params}
    rows = []
    for b in range(BATCH):
        images = prompt.image_tokens[b : b + 1, VALID_IMAGES[b]]
        text = prompt.tokens[b : b + 1, VALID_TEXT[b]]
        begun = images.shape[1] + text.shape[1]
        for i in range(STEPS):
            length = images.shape[1] + text.shape[1]
            at = jnp.arange(length)
            at = (at + (at >= begun) * pi0_fast.RULES[rule])[None]
            seen = np.tril(np.ones((length, length), bool))
            seen[:begun, :begun] = True

            def logits(module, images=images, text=text, at=at, seen=seen):
                return module.PaliGemma(text, embedded_prefix=images, positions=at, mask=jnp.asarray(seen)[None])[0]

            token = jnp.argmax(llm.apply(names, method=logits)[:, -1:], axis=-1)
            text = jnp.concatenate([text, token], axis=1)
            del i
        rows.append(np.asarray(text[0, -STEPS:]))
    return np.stack(rows)


@pytest.mark.parametrize("rule", ["contiguous", "openpi"])
def test_decode_equals_whole_passes_without_cache(rule):
    """Also with a camera missing in the middle and with prompts of different lengths."""
    params, prompt = case()
    found = jax.jit(
        lambda *a: pi0_fast.sample_tokens(
            model(), a[0], jax.random.key(0), a[1], max_decoding_steps=STEPS, position_rule=rule
        )
    )(params, prompt)
    wanted = reference(rule)
    for row, mine in zip(wanted, np.asarray(found)):
        ends = np.flatnonzero(row == pi0_fast.EOS)
        until = ends[0] + 1 if ends.size else STEPS
        np.testing.assert_array_equal(mine[:until], row[:until])
        assert not mine[until:].any()


def test_the_first_generated_token_stands_right_behind_the_prompt(monkeypatch):
    params, prompt = case()
    used = VALID_IMAGES.sum(1) + VALID_TEXT.sum(1)
    for rule, first in (("contiguous", used), ("openpi", used + 1)):
        seen = []
        real = pi0_fast.Pi0Fast.apply

        def apply(self, variables, *args, real=real, seen=seen, **words):
            if words["method"] == "decode":
                seen.append(args[1])
            return real(self, variables, *args, **words)

        monkeypatch.setattr(pi0_fast.Pi0Fast, "apply", apply)
        with jax.disable_jit():
            pi0_fast.sample_tokens(model(), params, jax.random.key(0), prompt, max_decoding_steps=2, position_rule=rule)
        monkeypatch.undo()
        np.testing.assert_array_equal(np.concatenate(seen, axis=1)[:, 0], first)
        if len(seen) > 1:
            np.testing.assert_array_equal(seen[1][:, 0], first + 1)
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
    logits = np.asarray(model().apply({"params": params}, given, method="logits"), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    told = np.asarray(given.token_loss_mask)[:, 1:]
    picked = np.take_along_axis(logp, np.asarray(prompt.tokens)[:, 1:, None], -1)[..., 0]
    wanted = -(picked * told).sum(1) / told.sum(1)
    np.testing.assert_allclose(model().apply({"params": params}, given, method="compute_loss"), wanted, rtol=1e-5)
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
