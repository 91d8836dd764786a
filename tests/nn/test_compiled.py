"""torch.compile: modules stay right in a compiled model; graphs end before block-sparse and rings and begin after."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from attnbench import nn  # noqa: E402

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
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
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
