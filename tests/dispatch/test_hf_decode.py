"""A decode loop through Hugging Face: planned by classes of lengths, not by token; the same tokens as ever."""

from __future__ import annotations

from typing import ClassVar

import pytest
from dispatch_problem import here

import attnbench as ab
from attnbench import registry
from attnbench.errors import InvalidWorkload, PolicyMiss, Unsupported
from attnbench.policy import Choice, Entry, Policy, shape_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]

from hf_models import batch, model

from attnbench.dispatch import hf_decode as decode
from attnbench.dispatch.attention import attention
from attnbench.dispatch.hf import register
from attnbench.dispatch.plan import PLANS
from attnbench.spec import Implementation

TOKENS = 30


@pytest.fixture(autouse=True)
def _nothing_planned():
    decode._CLASSES.clear()
    Measured.built.clear()
    torch._dynamo.reset()
    yield
    decode._CLASSES.clear()


def generated(name, family="llama", side=None):
    one = model(family)
    one.set_attn_implementation(name)
    given = {**batch(side), "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    with torch.no_grad():
        return one.generate(**given)


def test_a_token_costs_no_plan(monkeypatch):
    wanted = generated("eager")
    planned, plan = [], decode._planned
    monkeypatch.setattr(decode, "_planned", lambda q, k, *a: planned.append(k.shape[2]) or plan(q, k, *a))
    found = generated(register())
    assert torch.equal(found, wanted)
    assert planned == [14, 16, 32], "13 tokens were given and 30 made: three powers of two"
    assert len(PLANS) == 1, "the prompt"


@pytest.mark.parametrize(("family", "masks"), [("llama", 1), ("gemma2", 2)])
def test_nor_does_one_of_a_padded_batch(monkeypatch, family, masks):
    """Left padding is another array at each token, and for windows and for all keys; `planned` is of the first."""
    wanted = generated("eager", family, "left")
    planned, plan = [], decode._planned_padded
    monkeypatch.setattr(decode, "_planned_padded", lambda q, k, *a: planned.append(k.shape[2]) or plan(q, k, *a))
    PLANS.clear()
    found = generated(register(), family, "left")
    assert torch.equal(found, wanted)
    assert planned == [14, 16, 32], "three powers of two; in the window of 5 tokens no padding is left"
    assert len(PLANS) == masks, "the prompt"


def padded(keys, hidden):
    real = torch.ones(2, keys, dtype=torch.bool)
    real[0, :hidden] = False
    return {"mask": ab.masks.valid(real.numpy()), "real": real[:, None, None]}


def test_padding_is_the_same_attention_and_the_same_refusals():
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
    how = {"scale": 0.3, "softcap": None, "impl": "auto"}
    for softcap in (None, 2.0):
        for keys, hidden in ((9, 3), (8, 2), (9, 1), (3, 1)):
            part, seen = k[:, :, :keys], padded(keys, hidden)
            found = decode.attend(q, part, part, **{**how, "softcap": softcap}, **seen)
            named = {**how, "softcap": softcap, "impl": "torch.eager"}
            torch.testing.assert_close(found, attention(q, part, part, mask=seen["mask"], layout="bhsd", **named))
    assert len(decode._CLASSES) == 4, "two soft caps, two powers of two"
    with pytest.raises(Unsupported, match=r"torch\.fa3"):
        decode.attend(q, k, k, **{**how, "impl": "torch.fa3"}, **padded(9, 3))
    with ab.use_policy(Policy(), on_miss="error"), pytest.raises(PolicyMiss):
        decode.attend(q, k, k, **how, **padded(9, 3))


def test_what_was_measured_for_padding_is_taken():
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
    seen = padded(9, 3)
    asked = ab.Workload(batch=2, q_len=1, kv_len=9, heads=4, kv_heads=2, head_dim=8, mask=seen["mask"])
    measured = Entry(at=shape_of(asked), use=Choice(implementation="torch.measured", candidates=1, measured=asked.id))
    with registry.restored():
        registry.register(Measured())
        with ab.use_policy(here(measured)):
            found = decode.attend(q, k, k, scale=None, softcap=None, impl="auto", **seen)
    torch.testing.assert_close(found, attention(q, k, k, mask=seen["mask"], layout="bhsd", impl="torch.eager"))
    assert Measured.built == [9]


def test_a_sequence_without_a_real_token_sees_nothing():
    one = model("llama")
    one.set_attn_implementation(register())
    given = batch("left")
    with torch.no_grad():
        cache = one(**given, use_cache=True).past_key_values
        mask = torch.cat([given["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)
        mask[0] = 0
        out = one(input_ids=torch.ones(2, 1, dtype=torch.long), attention_mask=mask, past_key_values=cache)
    assert torch.isfinite(out.logits).all()
    assert len(decode._CLASSES) == 0, "planned as any other mask"


@pytest.mark.parametrize("side", [None, "left"])
def test_every_token_is_captured(side):
    """Gemma-2's soft cap leaves no call of torch's function to be seen instead."""
    with ab.capture() as calls:
        generated(register(), "gemma2", side)
    assert sum(one.count for one in calls) == TOKENS * 2
    assert {one.via for one in calls} == {"ab.attention"}
    assert {one.workload.softcap for one in calls} == {2.0}


class Measured(Implementation):
    """Built for one length alone, and says so by saying nothing."""

    name, framework = "torch.measured", "torch"
    built: ClassVar[list[int]] = []

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        self.built.append(workload.kv_len)
        call = registry.get("torch.eager").build(workload, {})

        def run(q, k, v):
            assert k.shape[1] == workload.kv_len
            return call(q, k, v)

        return run


def test_what_is_built_for_one_length_is_built_for_each():
    with registry.restored():
        registry.register(Measured())
        assert torch.equal(generated(register("attnbench-measured", impl="torch.measured")), generated("eager"))


def test_it_is_the_same_attention_and_the_same_refusals():
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
    for keys in (8, 9, 1):
        part = k[:, :, :keys]
        found = decode.attend(q, part, part, scale=0.3, softcap=None, impl="auto")
        torch.testing.assert_close(found, attention(q, part, part, scale=0.3, layout="bhsd", impl="torch.eager"))
    with pytest.raises(Unsupported, match=r"torch\.fa3"):
        decode.attend(q, k, k, scale=None, softcap=None, impl="torch.fa3")
    with pytest.raises(InvalidWorkload, match="do not go together"):
        decode.attend(q, k, k[:, :, :5], scale=None, softcap=None, impl="auto")
    with ab.use_policy(Policy(), on_miss="error"), pytest.raises(PolicyMiss):
        decode.attend(q, k, k, scale=None, softcap=None, impl="auto")


def test_a_step_that_is_differentiated_is_planned_for_training():
    one = model("llama")
    one.set_attn_implementation(register())
    with torch.no_grad():
        cache = one(**batch(None), use_cache=True).past_key_values
    out = one(input_ids=torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
    out.logits.sum().backward()
    assert all(weight.grad is not None for weight in one.parameters())
    assert len(decode._CLASSES) == 0
