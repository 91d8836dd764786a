"""Inside torch.autocast a call computes in autocast's dtype, whoever computes it, and its gradients belong to it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import attnbench as ab

NAMES = ["torch.eager", "torch.sdpa-flash", "torch.pair[forward=torch.eager,backward=torch.sdpa-flash]"]


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_16_bit_call(name: str):
    torch.manual_seed(0)
    wide = [(6 * torch.randn(1, 48, heads, 16)).requires_grad_() for heads in (4, 2, 2)]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    with torch.autocast("cpu", torch.bfloat16):
        out = ab.attention(*wide, mask=ab.masks.causal(), impl=name)
    expected = ab.attention(*narrow, mask=ab.masks.causal(), impl=name)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    found, wanted = torch.autograd.grad(out, wide, dout), torch.autograd.grad(expected, narrow, dout)
    for one, other in zip(found, wanted):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other.float())


@pytest.mark.torch
def test_float64_is_left_alone():
    arrays = [torch.randn(1, 8, 2, 8, dtype=torch.float64) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        assert ab.attention(*arrays, impl="torch.eager").dtype == torch.float64
