"""`impl="auto"`: policies first, the fixed order with one warning (or an error) on a miss, and `explain`."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from dispatch_problem import entry, here

import attnbench as ab
from attnbench import policy, registry
from attnbench.config import load_settings
from attnbench.errors import PolicyMiss, PolicyWarning, Unsupported, UsageError
from attnbench.policy import Constraints, save_policy
from attnbench.spec import Implementation

pytestmark = pytest.mark.torch
CAUSAL = ab.masks.causal()


def arrays(tokens=32, heads=4, dim=16, framework="torch"):
    values = [np.random.default_rng(n).standard_normal((1, tokens, heads, dim), np.float32) for n in range(3)]
    if framework == "numpy":
        return values
    if framework == "jax":
        import jax.numpy as jnp

        return [jnp.asarray(x) for x in values]
    import torch

    return [torch.from_numpy(x) for x in values]


class Spy(Implementation):
    """Notes what it is built with and computes as torch.eager does."""

    framework = "torch"
    tunables = {"blocks": 1}

    def __init__(self, name="torch.spy", refuses=None):
        self.name, self.refuses, self.built = name, refuses, []

    def supports(self, workload, environment):
        return self.refuses

    def build(self, workload, config):
        self.built.append((workload.q_len, dict(config)))
        return registry.get("torch.eager").build(workload, {})


@pytest.fixture
def spy():
    with registry.restored():
        yield registry.register(Spy())


def warned(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in seen if issubclass(one.category, PolicyWarning)]


def test_a_policy_of_this_machine_is_used_with_its_config_and_nobody_is_warned(spy):
    chosen = here(entry("torch.spy", config={"blocks": 3}))
    with ab.use_policy(chosen):
        assert warned(lambda: ab.attention(*arrays(), mask=CAUSAL)) == []
        assert spy.built == [(32, {"blocks": 3})]
        ab.attention(*arrays(), mask=CAUSAL)
        assert len(spy.built) == 1, "it is built once"
    ab.attention(*arrays(), mask=CAUSAL)
    assert len(spy.built) == 1, "outside the block nobody asks the policy"


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"approximate": True}, "is approximate: ask for it by name"),
        ({"verify_only": "an interpreter"}, "is for verification only: an interpreter"),
        ({"by_name_only": "takes all devices"}, "is used only if asked for by name: takes all devices"),
    ],
)
def test_a_policy_leads_to_nothing_that_must_be_asked_for_by_name(spy, fields, told):
    for name, value in fields.items():
        setattr(spy, name, value)
    for within in (None, Constraints(only=("torch",)), Constraints(only=("torch.spy",))):
        with ab.use_policy(here(entry("torch.spy"), within=within)):
            found = ab.explain(*arrays(), mask=CAUSAL)
        allowed = "by_name_only" in fields and within == Constraints(only=("torch.spy",))
        assert (found.pick == "torch.spy") == allowed
        assert (told in str(found)) != allowed
    assert ab.attention(*arrays(), mask=CAUSAL, impl="torch.spy") is not None


def test_explain_tells_what_a_choice_had_to_keep_to(spy):
    bound = here(entry("torch.spy"), within=Constraints(max_memory=10**9, forbid=("torch.flex",)))
    with ab.use_policy(bound):
        told = ab.explain(*arrays(), mask=CAUSAL)
    assert told.evidence.within == "at most 1,000,000,000 extra bytes; without torch.flex"
    assert "chosen within: at most 1,000,000,000 extra bytes; without torch.flex" in str(told)


def test_the_innermost_policy_is_asked_first_and_the_outer_where_it_is_silent(spy):
    outer = here(entry("torch.eager"), entry("torch.eager", mask=ab.masks.full()))
    with ab.use_policy(outer), ab.use_policy(here(entry("torch.spy"))):
        assert ab.explain(*arrays(), mask=CAUSAL).pick == "torch.spy"
        told = ab.explain(*arrays())
    assert told.pick == "torch.eager"
    assert "no entry for mask full" in told.missed[0]


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.jax)])
def test_a_miss_takes_the_fixed_order_and_warns_once_a_class(framework):
    first = "torch.sdpa-flash" if framework == "torch" else "jax.xla"
    with ab.use_policy(here(entry(f"{framework}.eager", mask=ab.masks.full()), framework=framework)):
        told = warned(lambda: ab.attention(*arrays(framework=framework), mask=CAUSAL))
        assert len(told) == 1
        assert f"{first} is used" in told[0]
        assert "attnbench choose" in told[0]
        assert "no entry for mask causal" in told[0]
        assert warned(lambda: ab.attention(*arrays(48, framework=framework), mask=CAUSAL)) == [], "the same class"
        (other,) = warned(lambda: ab.attention(*arrays(dim=32, framework=framework), mask=CAUSAL))
        assert "heads of 32" in other
    assert len(warned(lambda: ab.attention(*arrays(framework=framework), mask=CAUSAL))) == 1, "no policy at all"
    assert warned(lambda: ab.attention(*arrays(64, dim=64, framework=framework))) == [], "one warning says it for all"


def test_the_warning_points_to_whoever_called():
    from attnbench.dispatch.torch_sdpa import scaled_dot_product_attention

    with ab.use_policy(here(entry("torch.eager"))), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ab.attention(*arrays(), mask=ab.masks.window(3))
        scaled_dot_product_attention(*arrays())
    assert [one.filename for one in seen] == [__file__] * 2


def test_numpy_has_nothing_to_choose_and_explain_never_warns():
    assert warned(lambda: ab.attention(*arrays(framework="numpy"))) == []
    assert warned(lambda: ab.explain(*arrays(), mask=CAUSAL)) == []
    assert warned(lambda: ab.attention(*arrays(), mask=CAUSAL, impl="torch.eager")) == [], "asked for by name"


def test_a_shape_too_far_from_every_entry_is_a_miss():
    with ab.use_policy(here(entry("torch.eager"))):
        assert ab.explain(*arrays(64), mask=CAUSAL).pick == "torch.eager"
        told = ab.explain(*arrays(1024), mask=CAUSAL)
    assert told.pick == "torch.sdpa-flash"
    assert "octaves away" in told.missed[0]
    assert told.evidence is None


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"device_name": "another CPU"}, "measured on another CPU"),
        ({"software": {"torch": "1.0"}}, r"measured with torch 1.0 \(here"),
        ({"threads": 99}, "measured with 99 threads"),
    ],
)
def test_a_policy_that_does_not_hold_here_is_not_used_and_named_once(spy, changes, says):
    with ab.use_policy(here(entry("torch.spy"), **changes)):
        told = warned(lambda: ab.attention(*arrays(), mask=CAUSAL))
        assert spy.built == []
        (stale,) = (text for text in told if text.endswith("it is not used."))
        assert re.search(says, stale)
        assert warned(lambda: ab.attention(*arrays(48), mask=CAUSAL)) == []
        assert ab.explain(*arrays(), mask=CAUSAL).pick == "torch.sdpa-flash"


@pytest.mark.parametrize("on_miss", ["warn", "error"])
def test_a_stale_policy_is_named_even_where_another_speaks(spy, on_miss):
    stale = here(entry("torch.eager"), software={"torch": "1.0"})
    with ab.use_policy(here(entry("torch.spy"))), ab.use_policy(stale, on_miss=on_miss):
        (told,) = warned(lambda: ab.attention(*arrays(), mask=CAUSAL))
    assert "it is not used" in told
    assert len(spy.built) == 1


def test_a_miss_can_be_an_error_or_pass_in_silence(monkeypatch, tmp_path):
    nothing = here(entry("torch.eager", mask=ab.masks.full()))
    with ab.use_policy(nothing, on_miss="error"), pytest.raises(PolicyMiss, match=r"no measured policy covers.*choose"):
        ab.attention(*arrays(), mask=CAUSAL)
    with ab.use_policy(nothing, on_miss="quiet"):
        assert warned(lambda: ab.attention(*arrays(), mask=CAUSAL)) == []
    monkeypatch.setenv("ATTNBENCH_ON_MISS", "error")
    policy.forget()
    with pytest.raises(PolicyMiss):
        ab.attention(*arrays(96), mask=CAUSAL)
    with ab.use_policy(nothing, on_miss="error"):
        ab.attention(*arrays())
        ab.attention(*arrays(), mask=CAUSAL, impl="torch.eager")
    monkeypatch.setenv("ATTNBENCH_ON_MISS", "loudly")
    with pytest.raises(
        UsageError, match=r"on_miss = 'loudly' in the environment is wrong: it is one of warn, error, quiet\."
    ):
        load_settings()
    with (
        pytest.raises(UsageError, match="on_miss must be warn or error or quiet"),
        ab.use_policy(nothing, on_miss="never"),
    ):
        pass


def test_the_users_file_is_asked_too(monkeypatch, tmp_path, spy):
    save_policy(here(entry("torch.spy")), tmp_path / "mine.json")
    monkeypatch.setenv("ATTNBENCH_POLICY", str(tmp_path / "mine.json"))
    policy.forget()
    assert ab.explain(*arrays(), mask=CAUSAL).policy == str(tmp_path / "mine.json")
    ab.attention(*arrays(), mask=CAUSAL)
    assert len(spy.built) == 1


def test_a_choice_that_refuses_is_passed_over_for_the_next_best(spy):
    spy.refuses = "dislikes it"
    with ab.use_policy(here(entry("torch.spy", regret=1.01, regret_high=1.02, rivals=(("torch.eager", 1.5),)))):
        told = ab.explain(*arrays(), mask=CAUSAL)
        assert warned(lambda: ab.attention(*arrays(), mask=CAUSAL)) == []
    assert told.pick == "torch.eager"
    assert told.candidates[0] == ("torch.spy", "dislikes it")
    assert told.regret == pytest.approx(1.01 * 1.5)
    assert spy.built == []


def test_a_policy_of_which_nothing_can_run_is_a_miss(spy):
    spy.refuses = "dislikes it"
    with ab.use_policy(here(entry("torch.spy"), entry("torch.nobody", mask=ab.masks.full()))):
        (told,) = warned(lambda: ab.attention(*arrays(), mask=CAUSAL))
        assert "cannot run here" in told
        unknown = ab.explain(*arrays())
    assert unknown.pick == "torch.sdpa-flash"
    assert "no implementation called" in unknown.candidates[0].reason


def test_whom_a_policy_found_incorrect_at_a_shape_no_one_runs_there(spy):
    """Neither it, from a neighbour, nor the policy that is asked next, nor the fixed order."""
    q, k, v = arrays(64)
    with ab.use_policy(here(), on_miss="quiet"):
        first = ab.explain(q, k, v, mask=CAUSAL).pick
    there = entry("torch.spy", tokens=64)
    wrong = policy.Barred(at=there.at, measured=there.use.measured, incorrect=("torch.spy", str(first)))
    outer, inner = here(entry("torch.spy", tokens=48)), here(entry("torch.spy", tokens=32), barred=(wrong,))
    with ab.use_policy(outer, on_miss="quiet"), ab.use_policy(inner):
        told = ab.explain(q, k, v, mask=CAUSAL)
        ab.attention(q, k, v, mask=CAUSAL)
        assert told.pick not in ("torch.spy", first, None)
        assert f"{first}: was found incorrect at {there.use.measured}" in str(told)
        assert spy.built == []
        assert ab.explain(*arrays(32), mask=CAUSAL).pick == "torch.spy"


def test_explain_gives_the_evidence(spy):
    rivals = (("torch.eager", 1.25), ("torch.sdpa-math", 2.0))
    with ab.use_policy(here(entry("torch.spy", regret=1.003, regret_high=1.01, rivals=rivals))):
        told = ab.explain(*arrays(64), mask=CAUSAL)
    assert (told.pick, told.regret) == ("torch.spy", None), "nothing was held out, so nothing is known off the grid"
    assert told.evidence.runner_up.label == "torch.eager"
    assert told.evidence.measured == ab.Workload(batch=1, q_len=32, heads=4, head_dim=16, mask=CAUSAL).id
    assert told.evidence.distance == pytest.approx(1.0)
    text = str(told)
    for words in (
        "regret unknown off the grid",
        "next torch.eager, 1.25 times",
        "1.0 octaves away",
        "a policy made in this process",
    ):
        assert words in text
    reasons = dict(told.candidates)
    assert reasons["torch.spy"] is None
    assert "1.25 times the time of torch.spy" in reasons["torch.eager"]
    assert "takes precedence over the fixed order" in reasons["torch.sdpa-flash"]
    every = [registry.get(name) for name in registry.names() if name.startswith("torch.")]
    assert set(reasons) == {one.name for one in every if not one.step}


def test_explain_without_policies_says_so():
    told = ab.explain(*arrays(), mask=CAUSAL)
    assert told.why == "the first of the fixed order that can run this; no measured policy is active"
    assert (told.policy, told.evidence, told.regret, told.missed) == (None, None, None, ())


def test_settings_in_brackets_go_by_name(spy):
    ab.attention(*arrays(), impl="torch.spy[blocks=7]")
    assert spy.built == [(32, {"blocks": 7})]
    assert ab.explain(*arrays(), impl="torch.spy[blocks=7]").pick == "torch.spy[blocks=7]"
    with pytest.raises(UsageError, match='no setting "block"; it has blocks'):
        ab.attention(*arrays(), impl="torch.spy[block=7]")
    spy.refuses = "dislikes it"
    with pytest.raises(Unsupported, match=r"torch.spy\[blocks=8\] cannot run .*dislikes it"):
        ab.attention(*arrays(), impl="torch.spy[blocks=8]")


def test_a_registration_is_noticed(spy):
    ab.attention(*arrays(), impl="torch.spy")
    other = registry.register(Spy())
    ab.attention(*arrays(), impl="torch.spy")
    assert (len(spy.built), len(other.built)) == (1, 1)


def test_on_the_grid_the_regret_is_known(spy):
    with ab.use_policy(here(entry("torch.spy", regret=1.003, regret_high=1.01))):
        told = ab.explain(*arrays(32), mask=CAUSAL)
    assert (told.pick, told.regret) == ("torch.spy", 1.003)
    assert "expected regret 1.003" in str(told)


def test_a_chosen_pair_trains_and_gives_way_where_a_part_of_it_is_missing():
    import torch

    def gradients(impl):
        q, k, v = (x.requires_grad_() for x in arrays())
        out = ab.attention(q, k, v, mask=CAUSAL, impl=impl)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    here_it_runs = {"forward": "torch.sdpa-flash", "backward": "torch.eager"}
    missing = {"forward": "torch.fa3", "backward": "torch.fa4"}
    wanted = gradients("torch.eager")
    for config, picked in ((here_it_runs, "torch.pair"), (missing, "torch.eager")):
        chosen = here(entry("torch.pair", pass_="train", config=config, rivals=(("torch.eager", 1.1),)))
        with ab.use_policy(chosen, on_miss="error"):
            q, k, v = (x.requires_grad_() for x in arrays())
            assert ab.explain(q, k, v, mask=CAUSAL).pick.startswith(picked)
            for found, exact in zip(gradients("auto"), wanted):
                torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_a_setting_that_nobody_has_is_no_choice(spy):
    with ab.use_policy(here(entry("torch.spy", config={"foo": 1}, rivals=(("torch.eager", 1.1),)))):
        told = ab.explain(*arrays(), mask=CAUSAL)
    assert told.pick == "torch.eager"
    assert 'has no setting "foo"; it has blocks' in str(told)
    assert told.why.startswith("torch.eager in place of torch.spy[foo=1], which cannot run; ")


def test_a_block_may_be_entered_again(spy):
    block = ab.use_policy(here(entry("torch.spy")))
    for _ in range(2):
        with block, block:
            assert ab.explain(*arrays(), mask=CAUSAL).pick == "torch.spy"
        assert ab.explain(*arrays(), mask=CAUSAL).pick != "torch.spy"
