"""A gradient of a gradient is right, or an error that says so; never silently left out."""

from __future__ import annotations

import pytest

import attnbench as ab
from attnbench.errors import Unsupported

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]
DILATED = ab.masks.dilated([8, 16], [1, 2])
MASKS = {
    "torch.sdpa-flash": None,
    "torch.pair": None,
    "torch.dilated": DILATED,
    "torch.dilated-improved": DILATED,
    "torch.chunked": None,
    "torch.ring": None,
    "torch.block-sparse": ab.masks.blocks([[True, False], [True, True]], 8),
}
REFUSED = r"second derivatives .* torch\.eager"


def leaves():
    torch.manual_seed(0)
    return [torch.randn(1, 16, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def output(impl, q, k, v):
    return ab.attention(q, k, v, mask=MASKS.get(impl), impl=impl, return_lse=True)[0]


@pytest.mark.parametrize("impl", MASKS)
def test_of_a_linear_loss(impl):
    """Its gradient on the way in is a constant, and what was saved is not."""
    q, k, v = leaves()
    (dq,) = torch.autograd.grad(output(impl, q, k, v).sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match=REFUSED):
        (dq.pow(2).sum() + q.sum()).backward(retain_graph=True)
    for leaf in (q, k, v):
        with pytest.raises(Unsupported, match=REFUSED):
            torch.autograd.grad(dq.pow(2).sum() + leaf.sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("impl", MASKS)
def test_the_first_gradient_is_the_same_in_a_graph(impl):
    q, k, v = leaves()
    found, wanted = (
        torch.autograd.grad(output(impl, q, k, v).pow(2).sum(), (q, k, v), create_graph=graph)
        for graph in (True, False)
    )
    for got, want in zip(found, wanted, strict=True):
        assert got.requires_grad
        assert torch.equal(got, want)


def test_the_plain_implementation_has_them():
    def loss(q, k, v):
        out, lse = ab.attention(q, k, v, impl="torch.eager", return_lse=True)
        return out, lse.double()

    with torch.random.fork_rng():
        assert torch.autograd.gradgradcheck(loss, leaves(), atol=1e-3, rtol=1e-3, eps=1e-2)


@pytest.mark.parametrize("impl", MASKS)
def test_what_is_saved_is_read_once(impl):
    """A checkpoint hands it out no second time."""
    arrays = leaves()
    found = torch.autograd.grad(checkpoint(output, impl, *arrays, use_reentrant=False).sum(), arrays, create_graph=True)
    for got, want in zip(found, torch.autograd.grad(output(impl, *arrays).sum(), arrays)):
        assert torch.equal(got, want)


def test_the_operator_of_compiled_graphs():
    q, k, v = leaves()
    compiled = torch.compile(output, backend="eager", fullgraph=True)
    (dq,) = torch.autograd.grad(compiled("torch.pair", q, k, v).sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match=REFUSED):
        torch.autograd.grad(dq.pow(2).sum() + q.sum(), q)
