"""`ab.capture` sees what a step asks of attention, how long it takes, and writes it as a suite."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

pytest.importorskip("torch")

import torch
from cli_in_process import attnbench
from torch.nn import functional as F

import attnbench as ab
from attnbench import attention as imported_early
from attnbench.dispatch.torch_sdpa import redirect_sdpa
from attnbench.errors import Unsupported, UsageError
from attnbench.workloads import suites

pytestmark = pytest.mark.torch
BUILTIN = F.scaled_dot_product_attention


class Clock:
    """Time that passes when a test says so, and by a microsecond whenever it is read."""

    def __init__(self):
        self.ns = 0

    def sleep(self, seconds):
        self.ns += round(seconds * 1e9)

    def read_ns(self):
        self.ns += 1000
        return self.ns


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("attnbench.dispatch.capture.perf_counter", lambda: CLOCK.read_ns() / 1e9)
    monkeypatch.setattr("attnbench.dispatch.capture.perf_counter_ns", CLOCK.read_ns)


def tensors(*shape, grad=False):
    return [torch.randn(shape, requires_grad=grad) for _ in range(3)]


def ids(calls):
    return {one.workload.id: one.count for one in calls}


def test_calls_of_torchs_function():
    q, k, v = tensors(2, 4, 6, 8, grad=True)
    with ab.capture() as calls:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, scale=0.5)
        F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        F.scaled_dot_product_attention(q[:, :, :3], k, v, is_causal=True)
    assert ids(calls) == {
        "b2-t6-h4-d8-causal-float32-train": 2,
        "b2-t6-h4-d8-full-float32-forward-scale=0.5": 1,
        "b2-t6-h4:2-d8-full-float32-forward": 1,
        "b2-t3x6-h4-d8-causal-topleft-float32-forward": 1,
    }
    assert len(calls) == 5
    assert {one.via for one in calls} == {"F.scaled_dot_product_attention"}
    assert F.scaled_dot_product_attention is BUILTIN


def test_calls_of_ours_by_any_name_and_only_the_outermost():
    q, k, v = tensors(2, 6, 4, 8)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    with ab.capture() as calls:
        ab.attention(q, k, v, mask=ab.masks.window(2), softcap=3.0)
        imported_early(q, k, v)
        ab.attention(q, k, v, impl="torch.sdpa")
        ab.attention(q.flatten(2), k.flatten(2), v.flatten(2), layout="packed", heads=4)
        with redirect_sdpa():
            F.scaled_dot_product_attention(*heads_first)
    assert ids(calls) == {
        "b2-t6-h4-d8-window2:0-float32-forward-softcap=3": 1,
        "b2-t6-h4-d8-full-float32-forward": 4,
    }


def test_a_redirection_outside_the_block_is_seen_as_ours():
    q, k, v = tensors(2, 4, 6, 8)
    with redirect_sdpa("torch.eager"), ab.capture() as calls:
        F.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 1


PADDING = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
RIGHT = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
LOWER = torch.ones(6, 6, dtype=torch.bool).tril()
ARRAYS = {
    "full": torch.ones(6, 6, dtype=torch.bool),
    "causal": LOWER,
    "window": LOWER.triu(-2),
    "causal&lengths": LOWER & RIGHT[:, None, None],
    "causal&valid": LOWER & PADDING[:, None, None],
    "valid": PADDING[:, None, None],
    "dense": torch.tensor([[True, False, True, False, True, False]] * 3 + [[False, True] * 3] * 3),
    "bias": torch.linspace(-1, 1, 36).reshape(6, 6),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_mask_arrays_are_recognised(name):
    q, k, v = tensors(2, 4, 6, 8)
    with ab.capture() as calls:
        F.scaled_dot_product_attention(q, k, v, ARRAYS[name])
    (one,) = calls
    mask, array = one.workload.mask, ARRAYS[name]
    assert mask.kinds == (("dense",) if name == "bias" else tuple(name.split("&")))
    if name == "bias":
        assert torch.equal(torch.from_numpy(mask.values.array).reshape(6, 6), array)
    else:
        seen = torch.from_numpy(mask.array(one.workload.mask_shape).copy())
        assert torch.equal(seen.expand(2, 1, 6, 6), array.expand(2, 1, 6, 6))


def test_masks_on_the_device_are_not_read():
    q, k, v = tensors(2, 6, 4, 8)
    with ab.capture() as calls:
        ab.attention(q, k, v, mask=ab.masks.causal() & ab.masks.lengths(torch.tensor([3, 6]), constant=False))
    (one,) = calls
    assert one.workload.visible_mask == ab.masks.causal()
    assert one.note == "its mask has lengths on the device, which nobody reads: written without them"


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_an_additive_mask_that_only_hides_is_recognised(hidden):
    q, k, v = tensors(2, 4, 6, 8)
    with ab.capture() as calls:
        F.scaled_dot_product_attention(q, k, v, torch.zeros(6, 6).masked_fill(~LOWER, hidden))
    assert ids(calls) == {"b2-t6-h4-d8-causal-float32-forward": 1}


def test_a_mask_that_is_changed_after_the_call_is_told():
    q, k, v = tensors(2, 4, 6, 8)
    mask = LOWER.clone()
    with ab.capture() as calls:
        F.scaled_dot_product_attention(q, k, v, mask)
        mask.fill_(True)
    (one,) = calls
    assert "changed in place" in one.note


@pytest.mark.parametrize("attention", ["sdpa", "attnbench"])
def test_a_hugging_face_step(attention):
    pytest.importorskip("transformers")
    from hf_models import batch, model

    from attnbench.dispatch import hf

    hf.register()
    lm, inputs = model("qwen2-sliding").train(), batch("right")
    lm.set_attn_implementation(attention)
    with ab.capture() as calls:
        lm(**inputs, labels=inputs["input_ids"]).loss.backward()
    kinds = sorted(one.workload.mask.kinds for one in calls)
    assert kinds == [("causal", "lengths"), ("window", "lengths")]
    assert all(one.workload.pass_ == "train" and one.workload.scale is None for one in calls)
    assert all(one.workload.kv_heads == (4 if attention == "sdpa" else 2) for one in calls)
    assert 0 < calls.share < 1


def test_what_was_captured_is_a_suite(tmp_path):
    q, k, v = tensors(1, 2, 16, 8, grad=True)
    with ab.capture() as calls:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        F.scaled_dot_product_attention(q, k, v, PADDING[:1, None, None, :1].expand(1, 1, 16, 16))
    path = calls.save(tmp_path / "model.toml")
    suite = suites.load(str(path))
    assert suite.name == "model"
    assert [one.id for one in suite.workloads] == [one.id for one in calls.workloads]
    with pytest.raises(UsageError, match=r"cannot write .*model\.toml"):
        calls.save(path / "model.toml")
    assert suite.workloads[0].source == "1 of 2 calls captured in a step"
    done = attnbench(tmp_path, "run", "model.toml", "--impl", "torch.eager", "--budget", "0.05", "--json")
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


class _Slow(torch.autograd.Function):
    """Forward takes 40 ms, backward 80 ms."""

    @staticmethod
    def forward(ctx, q, k, v):
        CLOCK.sleep(0.04)
        return q + k + v

    @staticmethod
    def backward(ctx, gradient):
        CLOCK.sleep(0.08)
        return gradient, gradient, gradient


@pytest.mark.usefixtures("clock")
def test_the_share_is_that_of_forward_and_backward(monkeypatch):
    from attnbench.dispatch import attention as dispatch

    monkeypatch.setattr(dispatch, "attention", lambda *x: _Slow.apply(*(one.transpose(1, 2) for one in x)))
    _hook_what_is_there_now(monkeypatch)
    x = torch.randn(1, 6, 4, 8, requires_grad=True)
    with ab.capture() as calls:
        CLOCK.sleep(0.06)
        loss = dispatch.attention(x * 2, x * 3, x * 4).square().sum()
        CLOCK.sleep(0.06)
        loss.backward()
    assert calls.captured[0].workload.pass_ == "train"
    assert 0.12 <= calls.seconds <= calls.step_seconds - 0.12
    assert calls.share == calls.seconds / calls.step_seconds
    assert "wall clock" in calls.method


def _hook_what_is_there_now(monkeypatch):
    """Let `capture` find the attention function that the test has put in place."""
    from attnbench.dispatch import attention as dispatch
    from attnbench.dispatch import capture

    dispatch.attention.__name__ = "attention"
    monkeypatch.setattr(capture, "_hook", capture._hook.__wrapped__)


def test_a_gain_is_stated_for_the_step():
    calls = _calls(share=0.4)
    assert calls.gain(2) == pytest.approx(1 / 0.8)
    assert calls.gain(1) == pytest.approx(1)
    assert "attention twice as fast would make the step 1.25x as fast" in str(calls)
    with pytest.raises(UsageError, match="positive ratio"):
        calls.gain(0)


def _calls(share):
    from attnbench.dispatch.capture import Captured, CapturedCalls

    calls = CapturedCalls()
    work = ab.Workload(batch=1, q_len=4, heads=1, head_dim=8)
    calls.captured, calls.step_seconds, calls.reason = [Captured(work, 3, "ab.attention", share * 0.5)], 0.5, ""
    return calls


def test_nothing_seen_is_said():
    with ab.capture() as calls:
        torch.ones(2).sum()
    assert len(calls) == 0
    assert calls.share is None
    assert "no attention call was seen" in str(calls)
    with pytest.raises(UsageError, match="nothing was captured"):
        calls.save("never.toml")
    with pytest.raises(UsageError, match="is unknown: no attention call"):
        calls.gain(2)


def test_an_exception_leaves_everything_as_it_was():
    with pytest.raises(ZeroDivisionError), ab.capture() as calls:
        _ = 1 / 0
    assert F.scaled_dot_product_attention is BUILTIN
    assert ab.attention is imported_early
    assert calls.share is None


def test_a_call_that_cannot_be_read_is_made_all_the_same():
    q = torch.randn(2, 2, 6, 8)
    with ab.capture() as calls:
        out = F.scaled_dot_product_attention(q, q[:1], q[:1])
    torch.testing.assert_close(out, BUILTIN(q, q[:1], q[:1]))
    assert "cannot be written as a workload" in calls.reason


def test_threads_are_seen():
    q, k, v = tensors(2, 4, 6, 8)
    with ab.capture() as calls:
        threads = [threading.Thread(target=F.scaled_dot_product_attention, args=(q, k, v)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 8


class TestCompiled:
    def run(self, function, *arrays, **how):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager", fullgraph=True, **how)
        with ab.capture() as calls:
            found = [compiled(*arrays) for _ in range(3)]
        torch.testing.assert_close(found[0], function(*arrays))
        return calls

    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_a_graph_is_seen_while_it_is_traced(self, dynamic):
        arrays = tensors(2, 4, 6, 8, grad=True)
        calls = self.run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *arrays, dynamic=dynamic)
        (one,) = calls
        assert (one.workload.id, one.count, one.seconds) == ("b2-t6-h4-d8-full-float32-train", 1, None)
        assert "counted once" in one.note
        assert calls.share is None
        assert "compiled code" in calls.reason

    def test_the_values_of_its_mask_are_not_known(self):
        calls = self.run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, LOWER), *tensors(2, 4, 6, 8))
        (one,) = calls
        assert one.workload.mask.id == "full"
        assert "values only at run time" in one.note
        assert "values only at run time" in calls.workloads[0].source

    def test_ours_with_its_mask(self):
        calls = self.run(lambda q, k, v: ab.attention(q, k, v, mask=ab.masks.window(2)), *tensors(2, 6, 4, 8))
        assert ids(calls) == {"b2-t6-h4-d8-window2:0-float32-forward": 1}

    def test_a_graph_from_before_is_traced_anew_and_comes_back(self):
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend="eager")
        arrays = tensors(2, 4, 6, 8)
        expected = compiled(*arrays)
        with ab.capture() as calls:
            torch.testing.assert_close(compiled(*arrays), expected)
        assert len(calls) == 1
        torch.testing.assert_close(compiled(*arrays), expected)


@pytest.mark.gpu
def test_on_a_gpu_events_time_forward_and_backward():
    q, k, v = (torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step():
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    step()
    with ab.capture() as calls:
        step()
    assert ids(calls) == {"b2-t2048-h8-d64-causal-bfloat16-train": 1}
    assert 0 < calls.share < 1
    assert "events" in calls.method


def test_dropout_is_told():
    q = torch.randn(1, 2, 8, 4)
    with ab.capture() as calls:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert "dropout" in str(calls)
    assert "dropout" in calls.workloads[0].source
    with ab.capture() as calls:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.0)
    assert "dropout" not in str(calls)


class _SlowBackward(torch.autograd.Function):
    """Backward takes 80 ms, after it has looked at what was saved."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q + k + v

    @staticmethod
    def backward(ctx, gradient):
        _ = ctx.saved_tensors
        CLOCK.sleep(0.08)
        return gradient, gradient, gradient


@pytest.mark.usefixtures("clock")
class TestCheckpointed:
    """Regions that take 200 ms, each time they run, with attention in them."""

    def run(self, region, reentrant=False, early_stop=True):
        from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

        x = torch.randn(2, 4, 6, 8, requires_grad=True)
        with set_checkpoint_early_stop(early_stop), ab.capture() as calls:
            checkpoint(region, x, use_reentrant=reentrant).sum().backward()
        assert calls.step_seconds > 0.4
        return calls

    def at_the_end(self, x):
        CLOCK.sleep(0.2)
        return F.scaled_dot_product_attention(x * 2, x * 3, x * 4)

    def in_the_middle(self, x):
        out = self.at_the_end(x)
        return out.exp() * x

    @pytest.mark.parametrize("region", ["at_the_end", "in_the_middle"])
    def test_what_is_recomputed_is_neither_a_call_nor_attention(self, region):
        calls = self.run(getattr(self, region))
        assert ids(calls) == {"b2-t6-h4-d8-full-float32-train": 1}
        assert 0 < calls.seconds < 0.2
        assert "neither counted nor timed" in calls.captured[0].note
        assert "without what the backward pass recomputes" in calls.method

    def test_the_backward_that_starts_the_recomputation_is_timed(self, monkeypatch):
        from attnbench.dispatch import attention as dispatch

        monkeypatch.setattr(dispatch, "attention", lambda *x: _SlowBackward.apply(*x))
        _hook_what_is_there_now(monkeypatch)

        def region(x):
            CLOCK.sleep(0.2)
            return dispatch.attention(x * 2, x * 3, x * 4)

        calls = self.run(region)
        assert len(calls) == 1
        assert 0.08 <= calls.seconds < 0.28
        assert "not timed" not in calls.captured[0].note.replace("neither counted nor timed", "")

    def test_a_recomputation_whose_end_is_not_seen_is_left_out(self):
        def region(x):
            out = F.scaled_dot_product_attention(x * 2, x * 3, x * 4)
            CLOCK.sleep(0.2)
            return out

        calls = self.run(region, early_stop=False)
        assert ids(calls) == {"b2-t6-h4-d8-full-float32-train": 1}
        assert calls.seconds < 0.2
        assert "could not be separated from the recomputation" in calls.captured[0].note

    def test_within_another(self):
        from torch.utils.checkpoint import checkpoint

        calls = self.run(lambda x: checkpoint(self.at_the_end, x.exp(), use_reentrant=False).sin())
        assert ids(calls) == {"b2-t6-h4-d8-full-float32-train": 1}
        assert calls.seconds < 0.2
        assert "neither counted nor timed" in calls.captured[0].note

    def test_reentrant_both_are_calls_and_it_is_told(self):
        calls = self.run(self.at_the_end, reentrant=True)
        assert ids(calls) == {"b2-t6-h4-d8-full-float32-forward": 1, "b2-t6-h4-d8-full-float32-train": 1}
        assert calls.seconds < 0.2
        notes = {one.workload.pass_: one.note for one in calls}
        assert "made in a backward pass" in notes["train"]
        assert not notes["forward"]
        assert "recomputes" not in calls.method


def test_a_call_that_fails_is_no_call():
    q = torch.randn(2, 4, 6, 8)
    with redirect_sdpa("torch.eager"), ab.capture() as calls:
        with pytest.raises(Unsupported):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        F.scaled_dot_product_attention(q, q, q)
    assert len(calls) == 1


@pytest.mark.usefixtures("clock")
def test_the_operators_that_made_a_learned_bias_are_not_attention():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            CLOCK.sleep(0.2)
            return gradient

    q, k, v = tensors(2, 4, 6, 8, grad=True)
    bias = torch.zeros(6, 6, requires_grad=True)
    with ab.capture() as calls:
        F.scaled_dot_product_attention(q, k, v, Slow.apply(bias)).square().sum().backward()
    assert bias.grad is not None
    assert calls.seconds < 0.2


@pytest.mark.filterwarnings("ignore:There is a performance drop")
class TestVmap:
    """Three examples of a batch of two."""

    Q = torch.randn(3, 2, 4, 6, 8)
    MASKS = LOWER & torch.ones(3, 2, 1, 1, 1, dtype=torch.bool)

    def one(self, function, *arrays, **how):
        with ab.capture() as calls:
            torch.vmap(function, **how)(*arrays)
        (one,) = calls
        return one.workload.id, one.note

    def test_the_batch_is_that_of_all_examples(self):
        told = "called under vmap: its 3 examples are written as one batch"
        found = self.one(lambda q: F.scaled_dot_product_attention(q, q, q), self.Q)
        assert found == ("b6-t6-h4-d8-full-float32-forward", told)
        found = self.one(lambda q: ab.attention(q, q, q, layout="bhsd"), self.Q)
        assert found == ("b6-t6-h4-d8-full-float32-forward", told)
        found = self.one(lambda q, k: F.scaled_dot_product_attention(q, k, k), self.Q, self.Q[0], in_dims=(0, None))
        assert found == ("b6-t6-h4-d8-full-float32-forward", told)

    def test_levels_multiply_and_gradients_lie_between(self):
        nested = torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q))
        assert self.one(nested, self.Q)[0] == "b6-t6-h4-d8-full-float32-forward"
        gradient = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, q, q).sum())
        assert self.one(gradient, self.Q)[0] == "b6-t6-h4-d8-full-float32-train"

    def test_a_mask_that_all_share(self):
        found = self.one(lambda q: F.scaled_dot_product_attention(q, q, q, LOWER), self.Q)
        assert found[0] == "b6-t6-h4-d8-causal-float32-forward"

    def test_a_mask_for_each_row_of_an_example(self):
        found = self.one(lambda q: F.scaled_dot_product_attention(q, q, q, self.MASKS[0]), self.Q)
        assert found == ("b2-t6-h4-d8-causal-float32-forward", "called under vmap: written as one of its 3 examples")
        lengths = ab.masks.lengths([3, 2])
        found = self.one(lambda q: ab.attention(q, q, q, mask=lengths, layout="bhsd"), self.Q)
        assert found[0].startswith("b2-t6-h4-d8-lengths")
        assert "one of its 3 examples" in found[1]

    def test_a_mask_for_each_example(self):
        found = self.one(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask), self.Q, self.MASKS)
        assert found[0] == "b6-t6-h4-d8-full-float32-forward"
        assert "differs between the examples" in found[1]

    def test_traced(self):
        torch._dynamo.reset()
        compiled = torch.compile(torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q)), backend="eager")
        with ab.capture() as calls:
            compiled(self.Q)
        (one,) = calls
        assert "written as one of its 3 examples" in one.note


def test_a_block_that_fails_keeps_the_calls_it_made(tmp_path):
    q = torch.randn(1, 4, 16, 8)
    with suppress(KeyboardInterrupt), ab.capture() as calls:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        raise KeyboardInterrupt
    assert [(one.count, one.seconds) for one in calls] == [(1, None)]
    assert (calls.share, calls.reason) == (None, "the block ended with KeyboardInterrupt")
    assert "1 call " in str(calls)
    assert [work.id for work in calls.workloads] == ["b1-t16-h4-d8-causal-float32-forward"]
    assert "1 attention calls" in calls.save(tmp_path / "x.toml").read_text()


def test_every_call_that_cannot_be_written_is_counted(tmp_path):
    good, empty = torch.randn(1, 2, 8, 8), torch.randn(0, 2, 8, 8)
    with ab.capture() as calls:
        for q in (good, empty, empty):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert (len(calls), len(calls.unread)) == (1, 2)
    assert "    2 not captured: a call of F.scaled_dot_product_attention cannot be written as a workload" in str(calls)
    assert "2 more cannot be written as workloads" in calls.save(tmp_path / "x.toml").read_text()


def test_under_autocast_a_call_has_the_dtype_that_it_is_computed_in():
    from attnbench.dispatch import array_masks, hf_decode

    q, k, v = tensors(2, 6, 4, 8)
    visible, graph = (
        torch.ones(6, 6, dtype=torch.bool).tril(),
        torch.compile(lambda *x: ab.attention(*x), backend="eager"),
    )
    calls_made = {
        "ours": lambda: ab.attention(q, k, v),
        "torch's": lambda: F.scaled_dot_product_attention(q, k, v),
        "with an array": lambda: array_masks.attention_with_array(q, k, v, visible=visible),
        "one query": lambda: hf_decode.attend(q[:, :, :1], k, v, scale=None, softcap=None, impl="auto"),
        "graph": lambda: graph(q, k, v),
    }
    for name, call in calls_made.items():
        with ab.capture() as calls, torch.autocast("cpu", dtype=torch.bfloat16):
            assert call().dtype == torch.bfloat16
        assert [w.dtype for w in calls.workloads] == ["bfloat16"], name
    wide = [x.double() for x in (q, k, v)]
    with ab.capture() as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        assert ab.attention(*wide).dtype == torch.float64
    assert [w.dtype for w in calls.workloads] == ["float64"]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_run_and_are_counted_as_unread(layout):
    parts = [torch.randn(n, 2, 4) for n in (3, 5)]
    if layout == torch.jagged:
        nested = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    else:
        nested = torch.nested.nested_tensor([x.transpose(0, 1) for x in parts])
    want = F.scaled_dot_product_attention(nested, nested, nested)
    compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x), backend="eager")
    for function in (lambda *x: F.scaled_dot_product_attention(*x), compiled):
        with ab.capture() as calls:
            got = function(nested, nested, nested)
        for one, other in zip(got.unbind(), want.unbind()):
            torch.testing.assert_close(one, other)
        assert len(calls) == 0
        assert "nested" in calls.unread[0]
        if layout == torch.strided:
            break  # torch.compile does not take them


def test_what_cannot_be_read_for_any_reason_is_counted_and_runs(monkeypatch):
    from attnbench.dispatch import capture_calls

    def broken(*_):
        raise RuntimeError("no such thing\nand more")

    q, k, v = tensors(2, 6, 4, 8)
    monkeypatch.setattr(capture_calls, "_vmap_levels", broken)
    with ab.capture() as calls:
        ab.attention(q, k, v)
    assert calls.unread == ("a call of ab.attention could not be read: no such thing",)


def test_the_fast_path_of_torchs_layers_is_seen():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 16, 0.0, batch_first=True).eval()
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad(), ab.capture() as calls:
        layer(x)
        attention(x, x, x, need_weights=False)
    assert ids(calls) == {"b2-t7-h4-d4-full-float32-forward": 2}
    assert torch.backends.mha.get_fastpath_enabled()
