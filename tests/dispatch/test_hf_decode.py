"""A decode loop through Hugging Face: planned by classes of lengths, not by token; the same tokens as ever."""

from __future__ import annotations

import pytest

import attnbench as ab
from attnbench import registry
from attnbench.errors import InvalidWorkload, PolicyMiss, Unsupported
from attnbench.policy import Policy

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]

from hf_models import batch, model  # noqa: E402

from attnbench.dispatch import decode  # noqa: E402
from attnbench.dispatch.attention import attention  # noqa: E402
from attnbench.dispatch.hf import register  # noqa: E402
from attnbench.dispatch.plan import PLANS  # noqa: E402
from attnbench.spec import Implementation  # noqa: E402

TOKENS = 30


@pytest.fixture(autouse=True)
def _nothing_planned():
    decode._CLASSES.clear()
    yield
    decode._CLASSES.clear()


def generated(name):
    one = model("llama")
    one.set_attn_implementation(name)
    given = {**batch(None), "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
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


class Measured(Implementation):
    """Built for one length alone, and says so by saying nothing."""

    name, framework = "torch.measured", "torch"

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
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
