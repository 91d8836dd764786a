"""The whole pi0 and its sampler against float64, and that a wrong attention in any of pi0's steps is caught."""

from __future__ import annotations

import pytest
from pi0_cases import opened, require_right

from attnbench.run import protocol as p
from attnbench.steps import jax_steps
from attnbench.workloads import steps

pytest.importorskip("torch")
pytest.importorskip("flax")
import jax
import jax.numpy as jnp

from attnbench.models import attention, gemma, gemma_fast, masks, pi0, pi0_fast

pytestmark = [pytest.mark.torch, pytest.mark.jax]


@pytest.mark.parametrize("end", ["", "-flash"])
@pytest.mark.parametrize(("pass_", "dtype"), [("forward", "bfloat16"), ("train", "float32")])
def test_loss_and_gradients_are_right(end: str, pass_: str, dtype: str):
    """Gradients in float32: XLA takes a minute to compile them in bfloat16 for a CPU."""
    require_right(opened("pi0-model", end, dtype=dtype, pass_=pass_))


@pytest.mark.parametrize(("end", "dtype"), [("", "float32"), ("-flash", "bfloat16")])
def test_the_sampler_is_right(end: str, dtype: str):
    require_right(opened("pi0-sampler", end, dtype=dtype))


def test_so_is_a_deep_one_whose_layers_repeat(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(steps, "WHOLE_WIDTH", 64)
    answer = opened("pi0-sampler", dtype="bfloat16")
    require_right(answer)
    assert steps.depth(answer.record.workload) == 18


IN_BLOCKS, ROPE, STANDARD = masks.in_blocks, gemma.apply_rope, attention.standard_attention
SUFFIX, DECODE = pi0.Pi0._suffix_positions, pi0_fast.Pi0Fast.decode


def one_block(sizes, *args, **words):
    """All tokens see each other."""
    return IN_BLOCKS((sum(sizes),), *args, **words)


def doubled(x, positions):
    return ROPE(x, 2 * positions)


def next_head(*args):
    """Every head has its neighbour's result."""
    return jnp.roll(STANDARD(*args), 1, axis=2)


def late_suffix(self, *args):
    return SUFFIX(self, *args) + 1


def late_token(self, token, position, cache, valid):
    return DECODE(self, token, position + 1, cache, valid)


def forgetful(self, token, position, cache, valid):
    """The first token of the prompt is gone."""
    return DECODE(self, token, position, cache, valid.at[:, 0].set(False))


def other_expert(arrays, suffixes):
    """The actions' keys are made as their values are."""
    swapped = arrays["kv_einsum_1"][::-1]
    return TREE({**arrays, "kv_einsum_1": swapped}, suffixes)


def turned_layers(arrays, suffixes):
    return MODEL_TREE({name: one[::-1] if "einsum" in name else one for name, one in arrays.items()}, suffixes)


TREE, MODEL_TREE = jax_steps.attention_tree, jax_steps.model_tree
WRONG = {
    "attention without its blocks": ("pi0-attention", masks, "in_blocks", one_block),
    "attention, heads mixed up": ("pi0-attention", attention, "standard_attention", next_head),
    "attention, the second expert's keys for its values": (
        "pi0-attention",
        jax_steps,
        "attention_tree",
        other_expert,
    ),
    "block, positions too far apart": ("pi0-block", gemma, "apply_rope", doubled),
    "model without its blocks": ("pi0-model", pi0, "in_blocks", one_block),
    "model, actions one place too late": ("pi0-model", pi0.Pi0, "_suffix_positions", late_suffix),
    "model, layers in the wrong order": ("pi0-model", jax_steps, "model_tree", turned_layers),
    "sampler, actions one place too late": ("pi0-sampler", pi0.Pi0, "_suffix_positions", late_suffix),
    "prefill, positions too far apart": ("pi0-fast-prefill", gemma_fast, "apply_rope", doubled),
    "decode, tokens one place too late": ("pi0-fast-decode", pi0_fast.Pi0Fast, "decode", late_token),
    "decode, one token forgotten": ("pi0-fast-decode", pi0_fast.Pi0Fast, "decode", forgetful),
}


@jax.custom_vjp
def crooked(*args):
    """Right forward; the values' gradient is a tenth too long."""
    return STANDARD(*args[:4], args[2].dtype)


def crooked_forward(q, k, v, mask, dtype):
    return jax.vjp(lambda *arrays: STANDARD(*arrays, mask, v.dtype), q, k, v)


def crooked_back(pull, dout):
    dq, dk, dv = pull(dout)
    return dq, dk, 1.1 * dv, None, None


crooked.defvjp(crooked_forward, crooked_back)


def with_crooked_gradients(q, k, v, mask, dtype):
    return crooked(q, k, v, mask, jnp.zeros((), dtype))


@pytest.mark.parametrize("step", ["pi0-attention", "pi0-block"])
def test_a_wrong_gradient_alone_is_caught(step: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "standard_attention", with_crooked_gradients)
    answer = opened(step, dtype="bfloat16", pass_="train")
    assert isinstance(answer, p.Closed), answer
    assert answer.record.status == "incorrect"
    assert answer.record.reason.startswith("dx: ")


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_caught(case: str, monkeypatch: pytest.MonkeyPatch):
    step, place, name, broken = WRONG[case]
    monkeypatch.setattr(place, name, broken)
    answer = opened(step, dtype="bfloat16", pass_="forward")
    assert isinstance(answer, p.Closed), answer
    assert answer.record.status == "incorrect"
    assert "error allowed" in answer.record.reason
