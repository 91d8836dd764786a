"""Dilated attention, plain and improved, against the dense softmax that defines it: values, LSE, gradients."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import dilated_oracle as oracle
from dilated_family import EIGHT
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.errors import InvalidWorkload, UsageError
from attnbench.nn import DilatedAttention, ImprovedDilatedAttention

BOTH = pytest.mark.parametrize("kind", [DilatedAttention, ImprovedDilatedAttention])
RATES = (1, 2, 3, 4, 6, 12)
PAPER = ([8, 16, 32, 64, 128], [1, 2, 4, 6, 12])
"""The paper's five branches, sixteen of its tokens as one."""


def draw(batch, tokens, heads, kv_heads, dim=4, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(batch, tokens, h, dim, dtype=torch.float64, generator=rng).to(dtype) for h in shapes]


def check(module, q, k, v, dout, count, **options):
    """Output, LSE and the three gradients."""
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want, want_lse = oracle.attention(*exact, count, module.scale)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = module(*leaves, return_lse=True, **options)
    close = {"atol": 1e-9, "rtol": 1e-9} if q.dtype == torch.float64 else {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(out.double(), want, **close)
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad(out, leaves, dout)
    for one, expected in zip(got, torch.autograd.grad(want, exact, dout.double())):
        torch.testing.assert_close(one.double(), expected, **close)


@st.composite
def problems(draw_from):
    branches = draw_from(st.lists(st.tuples(st.integers(1, 70), st.sampled_from(RATES)), min_size=1, max_size=3))
    kv_heads = draw_from(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw_from(st.sampled_from([1, 2, 4]))
    batch, tokens = draw_from(st.integers(1, 3)), draw_from(st.integers(1, 64))
    lengths = draw_from(st.none() | st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
    options = {"causal": draw_from(st.booleans()), "offset": draw_from(st.sampled_from(["mod", "group"]))}
    return *zip(*branches), (batch, tokens, heads, kv_heads), lengths, options


@BOTH
@given(problem=problems())
@settings(max_examples=80, deadline=None)
def test_any_pattern_at_any_length(kind, problem):
    segments, rates, shape, lengths, options = problem
    q, k, v, dout = draw(*shape)
    count = oracle.visible_counts(q, segments, rates, options["offset"], options["causal"], lengths)
    check(kind(segments, rates, **options), q, k, v, dout, count, kv_lengths=lengths)


@given(problem=problems())
@settings(max_examples=15, deadline=None)
def test_the_other_six_at_any_length(problem):
    """Rings on one rank, block-sparse ones with every block, and those with projections; rings take no key lengths."""
    segments, rates, shape, lengths, options = problem
    q, k, v, dout = draw(*shape)
    for name in EIGHT.keys() - {"DilatedAttention", "ImprovedDilatedAttention"}:
        asked = {} if "Ring" in name else {"kv_lengths": lengths}
        found = [x.clone().requires_grad_() for x in (q, k, v)]
        exact = [x.clone().requires_grad_() for x in (q, k, v)]
        count = oracle.visible_counts(q, segments, rates, options["offset"], options["causal"], asked.get("kv_lengths"))
        out, (want, _) = EIGHT[name](segments, rates, **options)(*found, **asked), oracle.attention(*exact, count)
        gradients = [torch.autograd.grad(one, leaves, dout) for one, leaves in ((out, found), (want, exact))]
        for got, expected in zip((out, *gradients[0]), (want, *gradients[1])):
            torch.testing.assert_close(
                got, expected, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


@BOTH
@pytest.mark.parametrize("tokens", [128, 131, 63])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", ["mod", "group"])
def test_the_papers_branches_on_twelve_heads(kind, offset, causal, tokens):
    """Rates 6 and 12 divide neither 64 nor 128: outputs must still lie at their tokens."""
    q, k, v, dout = draw(1, tokens, 12, 12)
    count = oracle.visible_counts(q, *PAPER, offset, causal)
    check(kind(*PAPER, causal=causal, offset=offset), q, k, v, dout, count)
    out, lse = kind(*PAPER, causal=causal, offset=offset)(q, k, v, return_lse=True)
    assert lse.isfinite().all(), "the first branch holds every token, so every row sees a key"
    assert (out.abs().amax(-1) > 0).all(), "no head and no row is left out"


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions(kind, dtype):
    q, k, v, _ = draw(2, 48, 4, 2, 16, dtype)
    want, _ = oracle.attention(*(x.double() for x in (q, k, v)), oracle.visible_counts(q, [16, 48], [1, 3]))
    out = kind([16, 48], [1, 3])(q, k, v)
    assert out.dtype == dtype
    error = (out.double() - want).norm() / want.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_scale_is_used(kind, causal):
    q, k, v, dout = draw(2, 20, 4, 4)
    count = oracle.visible_counts(q, [8, 20], [1, 3], causal=causal)
    check(kind([8, 20], [1, 3], causal=causal, scale=0.9), q, k, v, dout, count)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_detached_mixing_weights_give_torchscales_gradient(kind, causal):
    """2.3 % off the derivative in a small case elsewhere; here both can be had."""
    segments, rates = [8, 24], [1, 3]
    q, k, v, dout = draw(2, 24, 6, 6)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(oracle.detached(*exact, segments, rates, causal), exact, dout)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = kind(segments, rates, causal=causal, mix_grad="detached")(*leaves)
    torch.testing.assert_close(out, kind(segments, rates, causal=causal)(q, k, v))
    for one, expected in zip(torch.autograd.grad(out, leaves, dout), want):
        torch.testing.assert_close(one, expected)
    full = torch.autograd.grad(kind(segments, rates, causal=causal)(*leaves), leaves, dout)
    assert (full[0] - want[0]).norm() > 1e-3 * want[0].norm()


@BOTH
@pytest.mark.parametrize("layout", ["heads first", "one array", "expanded", "every second token"])
def test_arrays_that_are_no_dense_bshd(kind, layout):
    q, k, v, dout = draw(2, 21, 4, 4)
    if layout == "heads first":
        given_arrays = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    elif layout == "one array":
        given_arrays = list(torch.stack((q, k, v), 2).unbind(2))
    elif layout == "expanded":
        q, k, v = (x[:1].expand(2, -1, -1, -1) for x in (q, k, v))
        given_arrays = [q, k, v]
    else:
        given_arrays = [x.repeat_interleave(2, 1)[:, ::2] for x in (q, k, v)]
    module = kind([7, 21], [1, 2], causal=True)
    copies = [x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k, v)]
    views = [x.detach().requires_grad_() for x in given_arrays]
    out, want = module(*views), module(*copies)
    torch.testing.assert_close(out, want)
    for one, expected in zip(torch.autograd.grad(out.sum(), views), torch.autograd.grad(want.sum(), copies)):
        torch.testing.assert_close(one, expected)
    del dout


@pytest.mark.parametrize("how", [{"kernel": "torch.eager"}, {"diagonal": False}, {"merge": "eager"}])
def test_the_automatic_choice_can_be_overruled(how):
    q, k, v, _ = draw(2, 20, 6, 6)
    module = ImprovedDilatedAttention([8, 20], [1, 3])
    want = module(q, k, v)
    module.how = how
    torch.testing.assert_close(module(q, k, v), want)
    module.how = {"merge": "triton"}
    with pytest.raises(UsageError, match="triton"):
        module(q, k, v)


def test_derivative_by_finite_differences():
    q, k, v, _ = draw(1, 9, 2, 1, 3)
    module = ImprovedDilatedAttention([4, 9], [1, 2], causal=True)
    assert torch.autograd.gradcheck(module, tuple(x.requires_grad_() for x in (q, k, v)))


def test_no_graph_without_gradients():
    q, k, v, _ = draw(1, 8, 2, 2)
    assert not any(x.requires_grad for x in ImprovedDilatedAttention([4, 8], [1, 2])(q, k, v, return_lse=True))
    out, lse = ImprovedDilatedAttention([4, 8], [1, 2])(q.requires_grad_(), k, v, return_lse=True)
    assert out.requires_grad
    assert lse.requires_grad


@BOTH
@pytest.mark.parametrize("arguments,options,words", [
    (([4, 8], [1]), {}, "as many dilation rates"),
    (([4], [0]), {}, "at least 1"),
    (([4], [1]), {"offset": "branch"}, "mod"),
    (([4], [1]), {"mix_grad": "none"}, "detached"),
    (([4], [1]), {"dropout": 0.1}, "no dropout"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(kind, arguments, options, words):
    with pytest.raises(UsageError, match=words):
        kind(*arguments, **options)


@BOTH
def test_shapes_that_do_not_go_together(kind):
    q, k, v, _ = draw(2, 8, 4, 4)
    module = kind([4], [1])
    with pytest.raises(InvalidWorkload, match="self-attention"):
        module(q, k[:, :4], v[:, :4])
    with pytest.raises(InvalidWorkload, match="4 axes"):
        module(q[0], k[0], v[0])
    with pytest.raises(InvalidWorkload, match="length"):
        module(q, k, v, kv_lengths=[3])
