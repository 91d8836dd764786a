"""torch.compile: modules stay right in a compiled model; a graph ends before each attention and one begins after."""

import warnings

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from attnbench import nn

MADE = {
    "fixed": lambda: nn.create_block_sparse_attention(0.5, "local", block_size=8, causal=True),
    "by content": lambda: nn.create_block_sparse_attention(0.5, "dynamic_threshold", block_size=8, threshold=0.9),
    "adaptive": lambda: nn.create_adaptive_sparse_attention(0.5, 0.9, block_size=8, causal=True),
    "ring": lambda: nn.RingDilatedAttention([8, 24], [1, 3], causal=True),
    "block-sparse ring": lambda: nn.BlockSparseRingDilatedAttention([8, 24], [1, 3], sparsity=0.5, block_size=8),
    "dilated": lambda: nn.ImprovedDilatedAttention([8, 24], [1, 3], causal=True),
}


class Layer(torch.nn.Module):
    """Something to compile on both sides."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v):
        return self.attend(q * 2, k, v) + 1


@pytest.mark.parametrize("name", MADE)
def test_a_module_in_a_compiled_model(name):
    """The first call is a compiled one: nothing was prepared by an eager call."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Layer(MADE[name]())
    leaves = [torch.randn(1, 24, 4, 8, requires_grad=True) for _ in range(3)]
    out = torch.compile(layer, backend="aot_eager")(*leaves)
    got = torch.autograd.grad(out.sum(), leaves)
    want = layer(*leaves)
    torch.testing.assert_close(out, want)
    for one, expected in zip(got, torch.autograd.grad(want.sum(), leaves)):
        torch.testing.assert_close(one, expected)


class Net(torch.nn.Module):
    """Linear, attention, Linear."""

    def __init__(self, attend):
        super().__init__()
        self.first, self.attend, self.last = torch.nn.Linear(32, 32), attend, torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.last(self.attend(self.first(x)))


def graphs_of(net, *inputs):
    """What is called in each graph that torch.compile makes; the output is that of the net."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.testing.assert_close(torch.compile(net, backend=keep)(*inputs), net(*inputs))
    assert not [str(one.message) for one in told if issubclass(one.category, UserWarning)]
    return graphs


@pytest.mark.parametrize("kind", ["standard", "improved", "ring"])
def test_one_graph_before_the_attention_and_one_after(kind):
    sizes = [8, 24], [1, 3]
    assert len(graphs_of(Layer(nn.create_dilated_attention(kind, *sizes)), *[torch.randn(1, 24, 4, 8)] * 3)) == 2
    multihead, x = nn.create_multihead_dilated_attention(kind, 32, 4, *sizes), torch.randn(1, 24, 32)
    assert len(graphs_of(torch.nn.Sequential(torch.nn.Linear(32, 32), multihead, torch.nn.Linear(32, 32)), x)) == 2
    first, before, after, last = graphs_of(Net(multihead), x)
    assert len(first) == len(last) == 1, "the net's own layers"
    assert "unflatten" in before
    assert "flatten" in after
