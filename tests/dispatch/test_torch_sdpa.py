"""The drop-in means what torch's function means, and a redirected model computes what it computed."""

from __future__ import annotations

import contextlib
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_early

import attnbench as ab
from attnbench import registry
from attnbench.dispatch import torch_sdpa
from attnbench.dispatch.torch_sdpa import redirect_sdpa, scaled_dot_product_attention
from attnbench.errors import Unsupported, UsageError
from attnbench.impls.torch import _sdpa_pins as torch_sdpa_turns
from attnbench.impls.torch._sdpa_pins import Pinned
from attnbench.spec import Implementation

pytestmark = pytest.mark.torch
BUILTIN = F.scaled_dot_product_attention
SHAPES = {
    "4 axes": ((2, 4, 7, 8), (2, 4, 7, 8)),
    "longer keys": ((2, 4, 5, 8), (2, 4, 9, 8)),
    "longer queries": ((2, 4, 9, 8), (2, 4, 5, 8)),
    "3 axes": ((3, 7, 8), (3, 7, 8)),
    "2 axes": ((7, 8), (7, 8)),
    "5 axes": ((2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
}
IMPLS = ["auto", "torch.eager"]


def tensors(q, k, v_dim=None, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (q, k, k if v_dim is None else (*k[:-1], v_dim))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


@pytest.fixture
def seen(monkeypatch):
    """Masks that `ab.attention` was asked with."""
    found, right = [], torch_sdpa.dispatch.attention
    monkeypatch.setattr(
        torch_sdpa.dispatch, "attention", lambda *a, **k: (found.append((k["impl"], k["mask"])), right(*a, **k))[1]
    )
    return found


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_torch(shape, causal, impl, seen):
    ours, theirs = (tensors(*SHAPES[shape], grad=True) for _ in range(2))
    found = scaled_dot_product_attention(*ours, is_causal=causal, scale=0.3, impl=impl)
    expected = F.scaled_dot_product_attention(*theirs, is_causal=causal, scale=0.3)
    torch.testing.assert_close(found, expected)
    assert len(seen) == 1
    for x in (found, expected):
        x.square().sum().backward()
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["boolean", "additive", "half of the batch sees nothing"])
@pytest.mark.parametrize("shape", ["4 axes", "longer keys", "3 axes", "5 axes"])
def test_masks_as_torch(shape, kind, impl, seen):
    q, k, v = tensors(*SHAPES[shape])
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand((*q.shape[:-3], 1, q.shape[-2], k.shape[-2]), generator=generator) < 0.5
    mask[..., 0] = True
    if kind == "additive":
        mask = torch.randn(mask.shape, generator=generator).masked_fill(~mask, float("-inf"))
    elif kind.startswith("half") and mask.ndim > 3:
        mask[0] = False
    found = scaled_dot_product_attention(q, k, v, mask, impl=impl)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, mask))
    assert len(seen) == (impl != "auto")


def test_a_learned_bias_gets_its_gradient():
    q, k, v = tensors(*SHAPES["4 axes"])
    biases = [torch.zeros(4, 7, 7, requires_grad=True) for _ in range(2)]
    scaled_dot_product_attention(q, k, v, biases[0]).square().sum().backward()
    F.scaled_dot_product_attention(q, k, v, biases[1]).square().sum().backward()
    torch.testing.assert_close(biases[0].grad, biases[1].grad)
    with pytest.raises(Unsupported, match="requires gradients"):
        scaled_dot_product_attention(q, k, v, biases[0], impl="torch.eager")


def test_grouped_heads_and_a_wider_v():
    q, k, v = tensors((2, 4, 7, 8), (2, 2, 7, 8), v_dim=6)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, enable_gqa=True), F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    )


def test_autocast():
    q, k, v = tensors((2, 4, 7, 8), (2, 4, 7, 8))
    with torch.autocast("cpu", torch.bfloat16):
        found = scaled_dot_product_attention(q, k, v.bfloat16())
        expected = F.scaled_dot_product_attention(q, k, v.bfloat16())
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


REFUSED = {
    "dropout": ({"dropout_p": 0.1}, "attention dropout"),
    "causal and a mask": ({"is_causal": True, "attn_mask": torch.ones(7, 7, dtype=torch.bool)}, "together"),
    "heads": ({"key": torch.randn(2, 1, 7, 8), "value": torch.randn(2, 1, 7, 8)}, "without enable_gqa"),
    "batches": ({"key": torch.randn(1, 4, 7, 8), "value": torch.randn(1, 4, 7, 8)}, "broadcast"),
    "dtypes": ({"query": torch.randn(2, 4, 7, 8).double()}, "dtypes float32, float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_taken_is_refused(case):
    changed, message = REFUSED[case]
    given = dict(zip(("query", "key", "value"), tensors(*SHAPES["4 axes"]))) | changed
    with pytest.raises(Unsupported, match=message):
        scaled_dot_product_attention(**given)


def test_a_fall_back_is_asked_for_and_told_once():
    torch_sdpa._WARNED.clear()
    q, k, v = tensors(*SHAPES["4 axes"])
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="does not take attention dropout"):
        found = scaled_dot_product_attention(q, k, v, dropout_p=0.5, fallback=True)
    torch.manual_seed(3)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled_dot_product_attention(q, k, v, dropout_p=0.5, fallback=True)


def test_a_causal_bias_keeps_its_meaning_while_redirected():
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = tensors(*SHAPES["longer keys"])
    bias = causal_lower_right(5, 9)
    expected = F.scaled_dot_product_attention(q, k, v, bias)
    with redirect_sdpa(fallback=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, bias), expected)


class TestRedirect:
    def test_every_name_of_the_function_is_reached_and_restored(self, seen):
        q, k, v = tensors(*SHAPES["4 axes"])
        with redirect_sdpa():
            F.scaled_dot_product_attention(q, k, v)
            torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)
            imported_early(q, k, v)
            from torch.nn.functional import scaled_dot_product_attention as kept
        assert [mask if mask is None else mask.id for _, mask in seen] == [None, "causal-topleft", None]
        assert F.scaled_dot_product_attention is BUILTIN
        assert imported_early is BUILTIN
        torch.testing.assert_close(kept(q, k, v), BUILTIN(q, k, v))
        assert len(seen) == 3

    def test_an_exception_restores(self):
        with pytest.raises(ZeroDivisionError), redirect_sdpa():
            _ = 1 / 0
        assert F.scaled_dot_product_attention is BUILTIN
        assert torch.backends.mha.get_fastpath_enabled()

    @pytest.mark.parametrize("enabled", [True, False])
    def test_blocks_that_overlap_leave_the_fast_path_as_it_was(self, enabled):
        mha = torch.backends.mha
        mha.set_fastpath_enabled(enabled)
        try:
            first, second = redirect_sdpa(), redirect_sdpa()
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            assert not mha.get_fastpath_enabled()
            second.__exit__(None, None, None)
            assert mha.get_fastpath_enabled() == enabled
        finally:
            mha.set_fastpath_enabled(True)

    def test_blocks_nest(self, seen):
        q, k, v = tensors(*SHAPES["4 axes"])
        with redirect_sdpa("torch.eager"):
            with redirect_sdpa("torch.sdpa-math"):
                F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, k, v)
        assert [impl for impl, _ in seen] == ["torch.sdpa-math", "torch.eager"]
        assert F.scaled_dot_product_attention is BUILTIN

    @pytest.mark.parametrize("impl", ["auto", "torch.sdpa", "torch.hf-sdpa"])
    def test_an_implementation_that_calls_torchs_function_ends(self, impl):
        if impl == "torch.hf-sdpa":
            pytest.importorskip("transformers")
        q, k, v = tensors(*SHAPES["4 axes"])
        expected = BUILTIN(q, k, v)
        with redirect_sdpa(impl):
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_torchs_own_layers(self, mode, seen):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).train(mode == "train")
        attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).train(mode == "train")
        x = torch.randn(2, 6, 16)
        padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])

        def run():
            with torch.inference_mode(mode == "eval"):
                return (
                    layer(x),
                    attention(x, x, x, need_weights=False)[0],
                    layer(x, src_key_padding_mask=padding)[:, :4],
                )

        expected = run()
        with redirect_sdpa("torch.eager"):
            found = run()
        assert [impl for impl, _ in seen] == ["torch.eager"] * 3
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    def test_a_hugging_face_model(self, seen):
        pytest.importorskip("transformers")
        from hf_models import batch, model

        lm, inputs = model("llama"), batch("left")
        lm.set_attn_implementation("sdpa")
        with torch.no_grad():
            expected = lm(**inputs).logits
            with redirect_sdpa("torch.eager"):
                found = lm(**inputs).logits
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)
        assert len(seen) == 2

    def test_other_threads_are_redirected_too(self, seen):
        q, k, v = tensors(*SHAPES["4 axes"])
        with redirect_sdpa():
            threads = [threading.Thread(target=F.scaled_dot_product_attention, args=(q, k, v)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(seen) == 4

    def test_a_wrong_name_is_an_error_at_once(self):
        with pytest.raises(UsageError, match=r"Near: torch\.sdpa"), redirect_sdpa("torch.sdap"):
            raise AssertionError("never reached")

        with pytest.raises(UsageError, match=r'has no setting "chnk"'), redirect_sdpa("torch.chunked[chnk=4]"):
            raise AssertionError("never reached")

    def test_settings_in_brackets_go_by_name(self):
        q = torch.randn(1, 2, 8, 4)
        wanted = F.scaled_dot_product_attention(q, q, q)
        with redirect_sdpa("torch.chunked[chunk=4]"):
            torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), wanted)

    def test_somebody_elses_replacement_is_not_overwritten(self, monkeypatch):
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: None)
        with pytest.raises(UsageError, match="replaced by other code already"), redirect_sdpa():
            raise AssertionError("never reached")

    def test_compiled(self):
        q, k, v = tensors(*SHAPES["4 axes"])
        expected = BUILTIN(q, k, v, is_causal=True)
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), backend="eager")
        with redirect_sdpa("torch.eager"):
            torch.testing.assert_close(compiled(q, k, v), expected)
        torch.testing.assert_close(compiled(q, k, v), expected)


SDPA_OF = {"torch.sdpa-flash": "flash_attention_for_cpu", "torch.sdpa-math": "attention_math"}


def operators(function):
    """Names of the SDPA operators that a call runs, and softmax, which is torch.eager's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        function()
    return {event.key for event in seen.key_averages() if "scaled_dot_product" in event.key or "softmax" in event.key}


def within(seconds, work):
    """The result of work() in a thread of its own; a thread that waits for itself fails the test, and not the run."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it waits for itself, or it raised"
    return found[0]


@pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
class TestAttentionInsideARedirection:
    """`ab.attention` runs what it was asked for or chose, whatever torch's function is redirected to around it."""

    @pytest.mark.parametrize("outer", ["auto", "torch.eager", "torch.sdpa-math", "torch.sdpa-flash", "torch.sdpa"])
    @pytest.mark.parametrize("inner", ["torch.sdpa-flash", "torch.sdpa-math"])
    def test_a_named_implementation_is_used(self, outer, inner):
        q, k, v = tensors((1, 16, 2, 8), (1, 16, 2, 8))

        def work():
            with redirect_sdpa(outer):
                return operators(lambda: ab.attention(q, k, v, impl=inner))

        for built_before in (False, True):
            ran = within(60, work)
            assert any(SDPA_OF[inner] in name for name in ran), (built_before, ran)
            others = [name for impl, name in SDPA_OF.items() if impl != inner]
            assert not any(other in name for other in others for name in ran)

    def test_auto_does_not_wait_for_itself(self):
        q, k, v = tensors((1, 16, 2, 8), (1, 16, 2, 8))

        def work():
            with redirect_sdpa("torch.sdpa-math"):
                return ab.attention(q, k, v)

        expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        torch.testing.assert_close(within(60, work), expected)

    @pytest.mark.parametrize("name", ["torch.hf-sdpa", "torch.test-foreign"])
    def test_what_an_implementation_calls_itself_is_not_redirected(self, name):
        """Transformers' function, and one that a user registers, look torch's function up when they run."""
        pytest.importorskip("transformers")
        q, k, v = tensors((1, 16, 2, 8), (1, 16, 2, 8))

        class Foreign(Implementation):
            name, framework, layout = "torch.test-foreign", "torch", "bhsd"

            def supports(self, workload, environment):
                return None

            def build(self, workload, config):
                return lambda q, k, v: F.scaled_dot_product_attention(q, k, v)

        def work():
            with redirect_sdpa("torch.eager"):
                return operators(lambda: ab.attention(q, k, v, impl=name))

        with registry.restored():
            ab.register(Foreign())
            assert any("scaled_dot_product" in one for one in within(60, work))

    def test_a_model_of_both_kinds(self):
        """Torch's own function is redirected, our own call beside it is not."""
        q, k, v = tensors((1, 2, 16, 8), (1, 2, 16, 8))

        def work():
            with redirect_sdpa("torch.eager"):
                mine = operators(lambda: ab.attention(q, k, v, impl="torch.sdpa-math", layout="bhsd"))
                return mine, operators(lambda: F.scaled_dot_product_attention(q, k, v))

        mine, theirs = within(60, work)
        assert any("attention_math" in name for name in mine)
        assert not any("scaled_dot_product" in name for name in theirs)


class TestPins:
    def flags(self):
        return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()

    def test_a_pin_inside_another_of_the_same_thread(self):
        before = self.flags()

        def work():
            seen = []
            with Pinned("flash"):
                seen.append(self.flags())
                with Pinned("math"):
                    seen.append(self.flags())
                    with Pinned("math"), Pinned("flash"):
                        seen.append(self.flags())
                    seen.append(self.flags())
                seen.append(self.flags())
            return seen

        flash, math = (True, False), (False, True)
        assert within(60, work) == [flash, math, flash, math, flash]
        assert self.flags() == before

    def test_two_threads_that_nest_crosswise(self):
        """Each holds one pin and asks for the other: whoever waits holds none."""
        before, both = self.flags(), threading.Barrier(2)

        def work(first, second):
            with Pinned(first):
                pass
            both.wait(30)
            for _ in range(50):
                with Pinned(first), Pinned(second):
                    assert self.flags() == ((True, False) if second == "flash" else (False, True))
            return True

        def run():
            with ThreadPoolExecutor(2) as pool:
                return list(pool.map(work, ("flash", "math"), ("math", "flash")))

        assert within(60, run) == [True, True]
        assert self.flags() == before

    @pytest.fixture
    def interrupted(self, monkeypatch):
        """Let the next so many waits for another thread's pin end with a KeyboardInterrupt, as Ctrl-C does."""
        waits = []

        def wait(*_):
            if waits.pop(0):
                raise KeyboardInterrupt
            raise AssertionError("nobody wakes this thread")

        monkeypatch.setattr(torch_sdpa_turns._TURN.over, "wait", wait)
        return waits.extend

    @pytest.fixture
    def elsewhere(self):
        """Hold a pin in another thread until the test says `leave`."""
        stack = contextlib.ExitStack()

        def hold(flag):
            there, leave = threading.Event(), threading.Event()

            def work():
                with Pinned(flag):
                    there.set()
                    leave.wait(60)

            thread = threading.Thread(target=work)
            thread.start()
            assert there.wait(60)

            def end():
                leave.set()
                thread.join(60)

            stack.callback(end)
            return end

        with stack:
            yield hold

    def as_before(self, before):
        """Check that flags are back, and that no pin waits for one that is not there."""
        assert self.flags() == before
        assert not torch_sdpa_turns._TURN.inside
        for flag in ("math", "flash"):
            with Pinned(flag):
                assert self.flags() == (flag == "flash", flag == "math")
        assert self.flags() == before

    def test_an_interrupt_while_an_inner_pin_waits_leaves_the_outer_one_in_force(self, interrupted, elsewhere):
        before, seen = self.flags(), []
        leave = elsewhere("flash")
        interrupted([True])
        with Pinned("flash"):
            with pytest.raises(KeyboardInterrupt), Pinned("math"):
                raise AssertionError("the pin was not had")
            seen.append(self.flags())
        leave()
        assert seen == [(True, False)]
        self.as_before(before)

    def test_an_interrupt_while_an_outer_pin_is_taken_back(self, interrupted, elsewhere):
        """While the inner one ends, another thread takes its turn with it, so that the outer one has to wait."""
        before = self.flags()
        outer, inner = Pinned("flash"), Pinned("math")
        outer.__enter__()
        inner.__enter__()
        leave = elsewhere("math")
        interrupted([True, True])  # it is tried again once
        with pytest.raises(KeyboardInterrupt):
            inner.__exit__()
        outer.__exit__()
        leave()
        self.as_before(before)

    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("at", range(3))
    def test_an_interrupt_between_two_switches_is_undone(self, at, nested):
        before, calls = self.flags(), []
        pin = Pinned("math")
        pin._switches = [(name, get, self.raises_once(put, calls, at)) for name, get, put in pin._switches]
        outer = Pinned("flash") if nested else contextlib.nullcontext()
        with outer:
            held = self.flags()
            with pytest.raises(KeyboardInterrupt), pin:
                raise AssertionError("the pin was not had")
            assert self.flags() == held
        self.as_before(before)

    @pytest.mark.parametrize("at", range(3, 6))
    def test_an_interrupt_while_the_switches_are_put_back(self, at):
        before, calls = self.flags(), []
        pin = Pinned("math")
        pin._switches = [(name, get, self.raises_once(put, calls, at)) for name, get, put in pin._switches]
        with contextlib.suppress(KeyboardInterrupt), pin:
            assert self.flags() == (False, True)
        self.as_before(before)

    def raises_once(self, put, calls, at):
        def interrupted(value):
            calls.append(value)
            if len(calls) == at + 1:
                raise KeyboardInterrupt
            put(value)

        return interrupted
