"""Inputs and comparisons for the tests of `ab.attention` inside torch.compile. Needs torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


class Counter:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


def arrays(tokens=24, batch=2, layout="bshd", grad=False, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    found = [torch.randn(batch, tokens, heads, 16, generator=drawn) for heads in (4, 2, 2)]
    if layout != "bshd":
        found = [x.flatten(2) if layout == "packed" else x.transpose(1, 2).contiguous() for x in found]
    return [x.requires_grad_(grad) for x in found]


def assert_same(function, compiled, inputs, grad=False):
    """Output, LSE where there is one, and gradients."""
    got, want = compiled(*inputs), function(*inputs)
    pairs = zip(got, want) if isinstance(want, tuple) else [(got, want)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
    if grad:
        got, want = (x[0] if isinstance(x, tuple) else x for x in (got, want))
        dout = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(got, inputs, dout), torch.autograd.grad(want, inputs, dout)):
            torch.testing.assert_close(a, b, atol=5e-5, rtol=0)
