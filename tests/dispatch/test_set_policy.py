"""`ab.set_policy` holds in every thread, and recomputation asks the policies that its forward pass asked."""

from __future__ import annotations

import threading

import pytest
from dispatch_problem import entry, here

import attnbench as ab
from attnbench import policy
from attnbench.errors import UsageError
from attnbench.policy import checkpoint_context, stack

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]
CAUSAL = ab.masks.causal()


@pytest.fixture(autouse=True)
def _nothing_set():
    yield
    ab.set_policy(None)


def eager():
    return here(entry("torch.eager", tokens=24, pass_="train"), entry("torch.eager", tokens=24))


def arrays():
    import torch

    make = torch.Generator().manual_seed(0)
    return [torch.randn(1, 24, 4, 16, generator=make).requires_grad_() for _ in range(3)]


def in_a_thread(work):
    """The result of work() in another thread, or what it raised."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    return found[0]


def test_every_thread_sees_it_and_blocks_come_first():
    q, k, v = arrays()
    pick = lambda: ab.explain(q, k, v, mask=CAUSAL).pick  # noqa: E731
    assert in_a_thread(pick) == pick() == "torch.sdpa-flash"
    ab.set_policy(eager())
    assert in_a_thread(pick) == pick() == "torch.eager"
    with ab.use_policy(here(entry("torch.sdpa-math", tokens=24, pass_="train"))):
        assert pick() == "torch.sdpa-math"
        assert in_a_thread(pick) == "torch.eager"
    ab.set_policy(here(entry("torch.sdpa-math", tokens=24, pass_="train")))
    assert pick() == "torch.sdpa-math"
    ab.set_policy(None)
    assert pick() == "torch.sdpa-flash"


def test_calls_follow_it_though_they_were_planned_before():
    import torch

    q, k, v = (x.detach() for x in arrays())
    ab.attention(q, k, v, mask=CAUSAL)
    ab.set_policy(eager())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        ab.attention(q, k, v, mask=CAUSAL)
    assert not any("scaled_dot_product" in event.key for event in seen.key_averages())


def test_on_miss_and_what_is_no_policy():
    with pytest.raises(UsageError, match="set_policy takes what load_policy"):
        ab.set_policy("policy.json")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="on_miss"):
        ab.set_policy(None, on_miss="quiet")
    ab.set_policy(eager(), on_miss="error")
    assert policy.on_miss() == "error"
    assert in_a_thread(policy.on_miss) == "error"
    with ab.use_policy(eager(), on_miss="quiet"):
        assert policy.on_miss() == "quiet"
    ab.set_policy(None)
    assert policy.on_miss() == "warn"


@pytest.mark.parametrize("where", ["inside", "outside", "thread"])
@pytest.mark.parametrize("how", ["use_policy", "use_policy, context_fn", "set_policy"])
def test_recomputation_asks_what_the_forward_pass_asked(how, where):
    """With a block alone, a backward pass elsewhere asks other policies, and its kernel saves other tensors here: torch
    raises a CheckpointError. Kernels that save the same tensors are not told apart: see the next test."""
    import torch
    from torch.utils.checkpoint import CheckpointError, checkpoint

    leaves = arrays()
    out = ab.attention(*leaves, mask=CAUSAL, impl="torch.eager") * 2
    want = torch.autograd.grad(out.square().sum(), leaves)
    more = {"context_fn": checkpoint_context} if "context_fn" in how else {}

    def forward():
        found = checkpoint(lambda q, k, v: ab.attention(q, k, v, mask=CAUSAL) * 2, *leaves, use_reentrant=False, **more)
        return found.square().sum()

    def backward(loss):
        return torch.autograd.grad(loss, leaves)

    def go():
        if how == "set_policy":
            ab.set_policy(eager())
            loss = forward()
            return in_a_thread(lambda: backward(loss)) if where == "thread" else backward(loss)
        with ab.use_policy(eager()):
            loss = forward()
            if where == "inside":
                return backward(loss)
            if where == "thread":
                return in_a_thread(lambda: backward(loss))
        return backward(loss)

    try:
        got = go()
    except CheckpointError as error:
        got = error
    if how == "use_policy" and where != "inside":
        assert isinstance(got, CheckpointError)
        return
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other)


def test_two_kernels_that_save_the_same_tensors_share_the_work_of_a_checkpoint_silently():
    """A policy that is gone before the backward pass: the forward pass is one kernel's, the recomputation another's."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint

    pair = {"forward": "torch.sdpa-flash", "backward": "torch.eager"}
    leaves = arrays()
    want = torch.autograd.grad(ab.attention(*leaves, mask=CAUSAL, impl="torch.eager").square().sum(), leaves)
    ab.set_policy(here(entry("torch.pair", tokens=24, pass_="train", config=pair)))
    out = checkpoint(lambda q, k, v: ab.attention(q, k, v, mask=CAUSAL), *leaves, use_reentrant=False)
    ab.set_policy(here(entry("torch.chunked", tokens=24, pass_="train")))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        got = torch.autograd.grad(out.square().sum(), leaves)
    ran = {event.key: event.count for event in profiled.key_averages()}
    assert ran["aten::_scaled_dot_product_flash_attention_for_cpu"] > 1  # torch.chunked's tiles; the pair has one call
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" not in ran  # the pair's backward is eager
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other)


def test_a_checkpoint_may_be_computed_again_more_than_once():
    import torch
    from torch.utils.checkpoint import checkpoint

    leaves = arrays()
    with ab.use_policy(eager()):
        out = checkpoint(
            lambda q, k, v: ab.attention(q, k, v, mask=CAUSAL),
            *leaves,
            use_reentrant=False,
            context_fn=checkpoint_context,
        )
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves)
    for one, other in zip(first, second):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("later", ["another policy", "none", "read again"])
def test_recomputation_asks_the_policy_of_the_process_at_the_forward_pass(later, monkeypatch, tmp_path):
    """Of what was computed under one policy and is computed again under another, both must take the same kernel."""
    import torch
    from torch.utils.checkpoint import checkpoint

    mathematics = here(entry("torch.sdpa-math", tokens=24, pass_="train"))
    picks = []

    def layer(q, k, v):
        picks.append(ab.explain(q, k, v, mask=CAUSAL).pick)
        with ab.use_policy(here(entry("torch.eager", tokens=9999))):  # says nothing of this shape
            picks.append(ab.explain(q, k, v, mask=CAUSAL).pick)
        return ab.attention(q, k, v, mask=CAUSAL)

    if later == "read again":
        policy.save_policy(eager(), tmp_path / "first.json")
        monkeypatch.setenv("ATTNBENCH_POLICY", str(tmp_path / "first.json"))
        policy.forget()
    else:
        ab.set_policy(eager(), on_miss="quiet")
    leaves = arrays()
    out = checkpoint(layer, *leaves, use_reentrant=False, context_fn=checkpoint_context)
    if later == "read again":
        monkeypatch.delenv("ATTNBENCH_POLICY")
        policy.forget()
    else:
        ab.set_policy(mathematics if later == "another policy" else None)
    in_a_thread(lambda: torch.autograd.grad(out.sum(), leaves))
    assert picks == ["torch.eager"] * 4
    assert ab.explain(*leaves, mask=CAUSAL).pick != "torch.eager"


def test_settings_are_read_again_by_forget_alone(monkeypatch):
    assert policy.on_miss() == "warn"
    monkeypatch.setenv("ATTNBENCH_ON_MISS", "quiet")
    ab.set_policy(eager())
    assert policy.on_miss() == "warn"
    policy.forget()
    assert policy.on_miss() == "quiet"


def test_changes_of_the_process_are_made_one_after_the_other(monkeypatch):
    """A second thread would read the epoch that the first is about to replace: two states under one number."""
    change, held = stack.replace, []
    monkeypatch.setattr(
        stack, "replace", lambda *old, **new: held.append(stack._changing.locked()) or change(*old, **new)
    )
    before = policy.generation()[0]
    ab.set_policy(eager())
    policy.forget()
    ab.set_policy(None)
    assert held == [True] * 3
    assert policy.generation()[0] == before + 3
