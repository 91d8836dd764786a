"""Predicted picks in `ab.attention`: after every measured choice, before the fixed order, and never in silence."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from dispatch_problem import entry, here
from msgspec import structs

import attnbench as ab
from attnbench.dispatch import choice, demand
from attnbench.dispatch.choice import decide
from attnbench.dispatch.demand import Demand, environment_of
from attnbench.errors import PolicyMiss, PolicyWarning
from attnbench.impls.torch import _compile as torch_compile
from attnbench.policy import HeldOutCheck, Prediction, Regret, TimeModel
from attnbench.spec import Environment

pytestmark = pytest.mark.torch
CAUSAL = ab.masks.causal()
LOST = Regret(mean=1.04, worst=1.5, worst_at="somewhere", shapes=20)
FIXED = Regret(mean=1.3, worst=3.0, worst_at="somewhere", shapes=20)


def model(name, launch, pass_="forward", **fields):
    factors = {
        "mask": {"causal": 1.0}, "softcap": {"no": 1.0}, "head_dim": {"16": 1.0}, "queries": {"few": 1.0, "many": 1.0},
    }  # fmt: skip
    return TimeModel(
        implementation=name, pass_=pass_, dtypes=("float32",), shapes=9, rates={"launch": float(launch)},
        factors=factors, ranges={"rows": (1, 64), "group": (1, 4), "q_len": (1, 8192), "kv_len": (1, 8192)}, **fields,
    )  # fmt: skip


def predicting(*models, entries=None, passed=True, **fields):
    check = HeldOutCheck(predicted=LOST, fixed=FIXED) if passed else HeldOutCheck(predicted=FIXED, fixed=LOST)
    made = Prediction(units=2, models=models, checks=dict.fromkeys(("shape", "class", "head_dim", "mask"), check))
    return here(*(entries or [entry("torch.sdpa")]), prediction=made, **fields)


EAGER_FIRST = (model("torch.eager", 10), model("torch.sdpa-flash", 15), model("torch.flex", 5, compile_s=4.0))


def arrays(tokens=32, dim=16, heads=4, gradients=False):
    import torch

    values = (np.random.default_rng(n).standard_normal((1, tokens, heads, dim), np.float32) for n in range(3))
    return [torch.from_numpy(x).requires_grad_(gradients) for x in values]


def messages(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in seen if issubclass(one.category, PolicyWarning)]


@pytest.fixture(autouse=True)
def nothing_failed_before():
    choice.forget()


def test_measured_shapes_come_first():
    with ab.use_policy(predicting(*EAGER_FIRST)):
        told = ab.explain(*arrays(64), mask=CAUSAL)
    assert told.pick == "torch.sdpa"
    assert told.evidence is not None
    assert told.evidence.predicted == ""


def test_else_the_prediction_and_explain_says_so():
    with ab.use_policy(predicting(*EAGER_FIRST)):
        told = ab.explain(*arrays(dim=48), mask=CAUSAL)
    assert told.pick == "torch.eager"
    assert told.why.startswith("torch.eager in place of torch.flex, which compiles too long; a policy made in this")
    assert "predicted, as head_dim 48 was not measured (expected regret 1.040 from 20 held-out shapes" in told.why
    assert told.regret == 1.04 * 2
    assert "no entry for head_dim 48" in told.missed[0]
    reasons = {one.name: one.reason for one in told.candidates}
    assert reasons["torch.sdpa-flash"] == "can run; predicted at 3.00 times the time of torch.flex"
    assert "compiles for about 4.0 s, which does not pay off for 1,000 calls" in str(reasons["torch.flex"])


def test_the_call_takes_it():
    with ab.use_policy(predicting(*EAGER_FIRST), on_miss="quiet"):
        out = ab.attention(*arrays(dim=48), mask=CAUSAL)
    np.testing.assert_allclose(out, ab.attention(*arrays(dim=48), mask=CAUSAL, impl="torch.sdpa"), atol=1e-5)


def test_it_is_a_miss_which_is_reported_once():
    with ab.use_policy(predicting(*EAGER_FIRST)):
        said = messages(lambda: [ab.attention(*arrays(n, dim=48), mask=CAUSAL) for n in (24, 25, 26)])
    (told,) = [one for one in said if one.startswith("no measured policy covers")]
    assert "torch.eager is used, predicted, as head_dim 48 was not measured (expected regret 1.040" in told


def test_on_miss_error_raises_all_the_same():
    with ab.use_policy(predicting(*EAGER_FIRST), on_miss="error"):
        ab.attention(*arrays(33), mask=CAUSAL)
        with pytest.raises(PolicyMiss, match="head_dim 48"):
            ab.attention(*arrays(33, dim=48), mask=CAUSAL)


def test_a_prediction_that_failed_its_check_gives_way_to_the_fixed_order():
    with ab.use_policy(predicting(*EAGER_FIRST, passed=False)):
        told = ab.explain(*arrays(dim=48), mask=CAUSAL)
    assert told.pick == "torch.sdpa-flash"
    assert re.search(r"predicted picks lost 1.300 on held-out shapes and the fixed order 1.040", " ".join(told.missed))


def test_measured_choices_of_a_later_policy_come_before_predictions():
    later = here(structs.replace(entry("torch.sdpa-math"), at=structs.replace(entry("x").at, head_dim=48)))
    with ab.use_policy(later), ab.use_policy(predicting(*EAGER_FIRST)):
        assert ab.explain(*arrays(dim=48), mask=CAUSAL).pick == "torch.sdpa-math"


def test_a_refusal_at_run_time_goes_to_the_next_predicted(monkeypatch):
    from attnbench import registry
    from attnbench.errors import Unsupported
    from attnbench.spec import Implementation

    class Refusing(Implementation):
        name, framework = "torch.refusing", "torch"

        def supports(self, workload, environment):
            return None

        def build(self, workload, config):
            def call(q, k, v):
                raise Unsupported("torch.refusing: not today.")

            return call

    with registry.restored(), ab.use_policy(predicting(model("torch.refusing", 1), *EAGER_FIRST)):
        registry.register(Refusing())
        q, k, v = arrays(dim=48)
        assert ab.explain(q, k, v, mask=CAUSAL).pick == "torch.refusing"
        said = messages(lambda: ab.attention(q, k, v, mask=CAUSAL))
        assert any("torch.eager is used instead" in one for one in said)
        assert ab.explain(q, k, v, mask=CAUSAL).pick == "torch.eager"


@pytest.mark.jax
def test_of_a_traced_call_measured_training_comes_before_a_predicted_forward_pass():
    import jax
    import jax.numpy as jnp

    def forward_is_predicted(*models):
        check = HeldOutCheck(predicted=LOST, fixed=FIXED)
        made = Prediction(units=2, models=models, checks=dict.fromkeys(("shape", "class", "head_dim", "mask"), check))
        trained = entry("jax.einsum", pass_="train")
        return here(trained, framework="jax", prediction=made)

    from attnbench.dispatch.plan import jax_choices

    workload = ab.Workload(batch=1, q_len=32, heads=4, head_dim=16, mask=CAUSAL)
    demands = [Demand(structs.replace(workload, pass_=one), "jax", "cpu") for one in ("forward", "train")]
    with ab.use_policy(forward_is_predicted(model("jax.xla", 1))):
        choose = jax_choices("auto", *demands)
        assert choose(False)[0].label == "jax.einsum"
    del jax, jnp


class TestCompiling:
    """A predicted torch.flex: four seconds that must pay off."""

    @pytest.fixture(autouse=True)
    def on_a_gpu(self, monkeypatch):
        gpu = Environment(
            device="cuda", device_name="Test GPU", framework="torch", capability=(9, 0), packages={"torch": "2.13.0"}
        )
        for module in (demand, choice):
            monkeypatch.setattr(module, "environment_of", lambda framework, device: gpu)
        monkeypatch.setattr(torch_compile, "needs_package", lambda *_: None)
        self.gpu = gpu

    def pick(self, flex_ns, eager_ns, form="call", **fields):
        from policy_factory import policy

        flex, eager = model("torch.flex", flex_ns, compile_s=4.0), model("torch.eager", eager_ns)
        pass_ = fields.get("pass_", "forward")
        models = tuple(structs.replace(one, pass_=pass_) for one in (flex, eager))
        check = HeldOutCheck(predicted=LOST, fixed=FIXED)
        made = Prediction(units=2, models=models, checks=dict.fromkeys(("shape", "class", "head_dim", "mask"), check))
        work = ab.Workload(**{"batch": 1, "q_len": 4096, "heads": 2, "head_dim": 64, "mask": CAUSAL, **fields})
        with ab.use_policy(policy(entry("torch.eager"), at=self.gpu, prediction=made)):
            return decide("auto", Demand(work, "torch", "cuda", form=form)).label

    def test_prompts_wait_only_for_what_pays_off_within_a_thousand_calls(self):
        assert self.pick(1e6, 3e6) == "torch.eager"  # 2 ms each
        assert self.pick(1e6, 9e6) == "torch.flex"  # 8 ms each

    def test_training_shapes_stay(self):
        assert self.pick(1e6, 3e6, pass_="train") == "torch.flex"

    def test_never_for_a_token_or_for_lengths(self):
        assert self.pick(1e6, 100e6, q_len=1, kv_len=500) == "torch.eager"
        assert self.pick(1e6, 100e6, mask=ab.masks.lengths([300]), q_len=512) == "torch.eager"

    def test_a_graph_of_torch_compile_is_compiled_anyway(self):
        assert self.pick(1e6, 1.1e6, form="traced") == "torch.flex"


class TestFixedOrderAndMasks(TestCompiling):
    """What skips hidden pairs comes before what reads a mask array."""

    def first(self, monkeypatch, installed=(), **fields):
        from attnbench.impls.torch import flash_attention as flash

        monkeypatch.setattr(flash.conditions, "needs_package", lambda *_: None if installed else "is not installed")
        monkeypatch.setattr(flash, "fa3_module", lambda: "fa3" if "fa3" in installed else None)
        monkeypatch.setattr(flash, "fa3_left_out", frozenset)
        work = {"batch": 1, "q_len": 2048, "heads": 8, "head_dim": 64, "dtype": "bfloat16", "mask": CAUSAL}
        return decide("auto", Demand(ab.Workload(**(work | fields)), "torch", "cuda")).label

    def test_a_window(self, monkeypatch):
        window = {"mask": ab.masks.window(128, 0)}
        assert self.first(monkeypatch, ("fa3",), **window) == "torch.fa3"
        assert self.first(monkeypatch, **window) == "torch.sdpa-cudnn"  # flex would compile for every prompt
        assert self.first(monkeypatch, **window, pass_="train") == "torch.flex"

    def test_causal_and_full_stay_as_they_were(self, monkeypatch):
        for mask in (CAUSAL, ab.masks.full()):
            assert self.first(monkeypatch, ("fa3",), mask=mask) == "torch.sdpa-cudnn"
        longer = {"q_len": 512, "kv_len": 2048}  # aligned to the bottom right: an array for cuDNN, not for flash
        assert self.first(monkeypatch, **longer) == "torch.sdpa-flash"

    def test_a_soft_cap_goes_to_a_library_that_has_one(self, monkeypatch):
        assert self.first(monkeypatch, ("fa3",), softcap=30.0) == "torch.fa3"
        assert self.first(monkeypatch, softcap=30.0) == "torch.eager"


def test_the_environment_is_that_of_this_machine():
    assert predicting(*EAGER_FIRST).places[0].device_name == environment_of("torch", "cpu").device_name
