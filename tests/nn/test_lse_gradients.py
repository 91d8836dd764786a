"""A loss made of output and LSE learns from both, in every module of the family and through `ab.attention`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]

from dilated_oracle import attention, detached, visible_counts

import attnbench as ab
from attnbench.kernels.ring.function import ring_attention
from attnbench.nn import (
    BlockSparseRingDilatedAttention,
    DilatedAttention,
    ImprovedDilatedAttention,
    RingDilatedAttention,
)

PATTERN = ([8, 24], [2, 3])
SEEN_BY_NONE = -1e30


def draw(dtype=torch.float64, tokens=29):
    torch.manual_seed(2)
    arrays = [torch.randn(2, tokens, heads, 8, dtype=dtype) for heads in (4, 2, 2, 4)]
    return [x.requires_grad_() for x in arrays[:3]], arrays[3], torch.randn(2, 4, tokens, dtype=dtype)


def loss(found, dout, dlse):
    out, lse = found
    return (out * dout).sum() + torch.where(lse > SEEN_BY_NONE, lse * dlse.to(lse.dtype), 0.0).sum()


def block_sparse(*pattern, **options):
    return BlockSparseRingDilatedAttention(*pattern, sparsity=0.0, block_size=4, **options)


MODULES = {
    "standard": DilatedAttention,
    "improved": ImprovedDilatedAttention,
    "ring": RingDilatedAttention,
    "block-sparse ring": block_sparse,
}


def assert_gradients(call, want, leaves, dout, dlse):
    expected = torch.autograd.grad(loss(want, dout, dlse), leaves)
    for got, exact in zip(torch.autograd.grad(loss(call, dout, dlse), leaves), expected, strict=True):
        # An LSE is float32, and so is its gradient on the way in.
        torch.testing.assert_close(got, exact, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("causal", [False, True])
def test_modules(kind, causal):
    leaves, dout, dlse = draw()
    found = MODULES[kind](*PATTERN, causal=causal)(*leaves, return_lse=True)
    assert found[1].requires_grad
    count = visible_counts(leaves[0], *PATTERN, causal=causal)
    assert not count.any(-1).all(), "some rows see nothing"
    assert_gradients(found, attention(*leaves, count), leaves, dout, dlse)


@pytest.mark.parametrize("kind", MODULES)
def test_the_lse_alone(kind):
    leaves, _, dlse = draw()
    lse = MODULES[kind]([8], [1])(*leaves, return_lse=True)[1]
    want = attention(*leaves, visible_counts(leaves[0], [8], [1]))[1]
    for got, exact in zip(
        torch.autograd.grad(lse, leaves[:2], dlse.float()), torch.autograd.grad(want, leaves[:2], dlse)
    ):
        torch.testing.assert_close(got, exact, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", MODULES)
def test_detached_mixing_leaves_the_lse_its_whole_gradient(kind):
    leaves, dout, dlse = draw()
    pattern = ([8, 32], [1, 2])
    found = MODULES[kind](*pattern, causal=True, mix_grad="detached")(*leaves, return_lse=True)
    _, lse = attention(*leaves, visible_counts(leaves[0], *pattern, causal=True))
    assert_gradients(found, (detached(*leaves, *pattern, True), lse), leaves, dout, dlse)


@pytest.mark.parametrize("kind", ["standard", "improved"])
def test_with_key_lengths(kind):
    leaves, dout, dlse = draw()
    found = MODULES[kind](*PATTERN)(*leaves, kv_lengths=[29, 5], return_lse=True)
    want = attention(*leaves, visible_counts(leaves[0], *PATTERN, lengths=[29, 5]))
    assert_gradients(found, want, leaves, dout, dlse)


@pytest.mark.parametrize("impl", ["torch.dilated", "torch.dilated-improved"])
def test_through_attention(impl):
    leaves, dout, dlse = draw()
    mask = ab.masks.dilated(*PATTERN) & ab.masks.causal()
    found = ab.attention(*leaves, mask=mask, impl=impl, return_lse=True)
    want = attention(*leaves, visible_counts(leaves[0], *PATTERN, causal=True))
    assert_gradients(found, want, leaves, dout, dlse)


def test_dense_ring():
    leaves, dout, dlse = draw()
    count = torch.ones(2, 4, 29, 29, dtype=torch.float64).tril()
    found = ring_attention(*leaves, causal=True, return_lse=True)
    assert_gradients(found, attention(*leaves, count), leaves, dout, dlse)


@pytest.mark.parametrize("kind", MODULES)
def test_sixteen_bits(kind):
    leaves, dout, dlse = draw(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got = torch.autograd.grad(loss(MODULES[kind](*PATTERN)(*leaves, return_lse=True), dout, dlse), leaves)
    want = attention(*exact, visible_counts(exact[0], *PATTERN))
    for one, other in zip(got, torch.autograd.grad(loss(want, dout.double(), dlse.double()), exact)):
        assert float((one.double() - other).norm() / other.norm()) < 0.01
