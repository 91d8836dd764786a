"""The call that returns the LSE too is verified like the one that is timed; so are the halves of a training step."""

from __future__ import annotations

import numpy as np
import pytest

import attnbench as ab
from attnbench import masks, registry
from attnbench.measuring import session
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Workload

WORKLOAD = Workload(batch=2, q_len=64, heads=16, head_dim=8)
REFERENCE = type(registry.get("numpy.float32"))


def record_of(subject, workload=WORKLOAD, thorough=False):
    with registry.restored():
        if subject.name != "numpy.float32":
            registry.register(subject)
        return Local("numpy", None).ask(p.Open(Cell(subject.name, workload), thorough, False, None, 1), 60).record


def liar(change):
    """numpy.float32 whose call with the LSE changes what it returns."""

    class Liar(REFERENCE):
        def build_lse(self, workload, config):
            honest = super().build_lse(workload, config)
            return lambda q, k, v: change(*honest(q, k, v))

    return Liar("numpy.liar", np.float32, "The reference with another LSE.")


def test_an_honest_one_is_right():
    record = record_of(liar(lambda out, lse: (out, lse)))
    assert record.status == "ok"
    assert record.errors.lse is not None


def one_wrong_head(out, lse):
    lse = lse.copy()
    lse[1, 5] += 1.0
    return out, lse


KEPT: list[np.ndarray] = []


def first_for_ever(out, lse):
    KEPT.append(lse)
    return out, KEPT[0]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda out, lse: (np.zeros_like(out), lse), "the call that returns the LSE returns a different output"),
        (first_for_ever, "on the second input set only: a stored result?"),
        (lambda out, lse: (out, lse[:, :, :-1]), "lse has shape"),
        (lambda out, lse: (out, lse / np.log(2)), "lse: off by"),
    ],
)
def test_what_is_wrong_in_it_is_found(change, words):
    KEPT.clear()
    record = record_of(liar(change))
    assert record.status == "incorrect"
    assert words in record.reason


def test_a_head_beyond_the_sample_is_found(monkeypatch):
    monkeypatch.setitem(__import__("attnbench.verifying.draws", fromlist=["ALL_HEADS"]).ALL_HEADS, "cpu", 0)
    record = record_of(liar(one_wrong_head))
    assert record.status == "incorrect"
    assert "lse: " in record.reason


def test_prefill_and_decode_give_the_whole(monkeypatch):
    causal = ab.Workload(batch=1, q_len=24, heads=2, head_dim=8, mask=masks.causal())
    record = record_of(registry.get("numpy.float32"), causal, thorough=True)
    assert "prefill and decode give the whole" in record.errors.properties

    class TopLeft(REFERENCE):
        """Aligns a rectangle at its beginning."""

        def build(self, workload, config):
            if workload.q_len != workload.kv_len:
                workload = ab.Workload(
                    batch=1, q_len=workload.q_len, kv_len=24, heads=2, head_dim=8, mask=masks.causal("top-left")
                )
            return super().build(workload, config)

    tried = record_of(TopLeft("numpy.top-left", np.float32, "A variant of the reference."), causal, thorough=True)
    assert tried.status == "ok", "what somebody tries is judged by what it was given to do"
    monkeypatch.setattr(session, "origin", lambda name: "a-package")
    record = record_of(TopLeft("numpy.top-left", np.float32, "A variant of the reference."), causal, thorough=True)
    assert record.status == "incorrect"
    assert record.reason.startswith("decode alone gives another output than the whole sequence")


def test_clamped_logits_are_found():
    class Clamped(REFERENCE):
        """Right while logits are small."""

        def build(self, workload, config):
            def call(q, k, v):
                logits = np.einsum("bthd,bshd->bhts", q, k) * workload.softmax_scale
                weights = np.exp(np.clip(logits, -8, 8))
                return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)

            return call

    subject = Clamped("numpy.clamped", np.float32, "A variant of the reference.")
    for thorough in (False, True):
        record = record_of(subject, thorough=thorough)
        assert record.status == "incorrect"
        assert "output (keys counted)" in record.reason


@pytest.mark.torch
def test_a_forward_half_that_leaves_its_work_to_the_backward_one_is_found():
    import torch

    def gradients(q, k, v, dout):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            heads_first = (x.transpose(1, 2) for x in leaves)
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

    class Deferred(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out = torch.zeros_like(q)
            ctx.save_for_backward(q, k, v)
            ctx.out = out.detach()
            return out

        @staticmethod
        def backward(ctx, dout):
            out, *found = gradients(*ctx.saved_tensors, dout)
            ctx.out.copy_(out)
            return tuple(found)

    workload = Workload(batch=1, q_len=32, heads=2, head_dim=16, pass_="train")
    with registry.restored():
        registry.register(registry.Function(Deferred.apply, "torch", "deferred"))
        worker, cell = Local("torch", "cpu"), Cell("deferred", workload)
        assert isinstance(worker.ask(p.Open(cell, False, True, None, 1), 60), p.Opened)
        worker.ask(p.WarmUp(cell.id, None), 60)
        assert isinstance(worker.ask(p.TakeSample(cell.id, "main", 3, 1), 60), p.Sampled)
        answer = worker.ask(p.TakeSample(cell.id, "forward", 3, 1), 60)
    assert isinstance(answer, p.Closed)
    assert answer.record.reason.startswith("a timed call returned a wrong out")


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept, status", [(1.0, "ok"), (0.0, "incorrect"), (1.44, "incorrect")])
def test_a_gradient_of_the_lse_that_is_declared_is_checked(kept, status, dtype):
    pytest.importorskip("torch")

    class Eager(type(registry.get("torch.eager"))):
        """Keeps a share of the gradient of the LSE."""

        def build_lse(self, workload, config):
            honest = super().build_lse(workload, config)

            def call(q, k, v):
                out, lse = honest(q, k, v)
                return out, kept * lse + (1 - kept) * lse.detach()

            return call

    workload = Workload(
        batch=1, q_len=48, heads=4, kv_heads=2, head_dim=16, pass_="train", dtype=dtype, mask=masks.causal()
    )
    with registry.restored():
        subject = Eager()
        subject.name = "torch.subject"
        assert subject.lse_gradient
        registry.register(subject)
        record = Local("torch", "cpu").ask(p.Open(Cell("torch.subject", workload), False, False, None, 1), 60).record
    assert record.status == status, record.reason
    assert status == "ok" or "its gradient dq is off" in record.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["torch.eager", "torch.sdpa-flash", "jax.einsum"])
@pytest.mark.parametrize("wrong", ["", "lse", "out", "dq", "whole"])
def test_the_partial_form_is_checked_when_thorough(name, dtype, wrong):
    pytest.importorskip(name.partition(".")[0])

    class Changed(type(registry.get(name))):
        """Has a partial form that is wrong in something."""

        def partial(self, workload, config):
            forward, backward = super().partial(workload, config)

            def other_forward(q, k, v):
                out, lse = forward(q, k, v)
                return (1.5 * out if wrong == "out" else out), (lse + 0.1 if wrong == "lse" else lse)

            def other_backward(q, k, v, out, lse, dout):
                if wrong == "whole":
                    out, lse = forward(q, k, v)
                dq, dk, dv = backward(q, k, v, out, lse, dout)
                return (1.2 * dq if wrong == "dq" else dq), dk, dv

            return other_forward, other_backward

    subject = Changed.__new__(Changed)
    subject.__dict__.update(vars(registry.get(name)), name="subject")
    workload = Workload(
        batch=2, q_len=48, heads=4, kv_heads=2, head_dim=16, pass_="train", dtype=dtype, mask=masks.causal()
    )
    with registry.restored():
        registry.register(subject)
        worker = Local(name.partition(".")[0], "cpu")
        record = worker.ask(p.Open(Cell("subject", workload), True, False, None, 1), 120).record
    if not wrong:
        assert record.status == "ok", record.reason
        assert "partial form" in record.errors.properties
    else:
        assert record.status == "incorrect"
        assert record.reason.startswith("its partial form")
