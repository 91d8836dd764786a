"""`ab.attention` in CUDA graphs and compiled on a GPU."""

from __future__ import annotations

import pytest
from compiled_problem import arrays

import attnbench as ab

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]
OUTER = ab.masks.causal()


@pytest.mark.parametrize("impl", ["auto", "torch.sdpa-cudnn", "torch.sdpa-flash", "torch.eager"])
def test_a_cuda_graph_replays_it(impl):
    q, k, v = (x.cuda().to(torch.bfloat16) for x in arrays(tokens=128))

    def function():
        return ab.attention(q, k, v, mask=OUTER, impl=impl)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        function()  # chosen, built and its mask made before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    torch.testing.assert_close(out, function(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("mask", [OUTER, ab.masks.window(50), ab.masks.lengths([100, 128])], ids=lambda mask: mask.id)
def test_compiled_on_a_gpu(mode, grad, mask):
    inputs = [x.detach().cuda().to(torch.bfloat16).requires_grad_(grad) for x in arrays(tokens=128)]
    assert_alike(lambda q, k, v: ab.attention(q, k, v, mask=mask), inputs, mode, grad)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("impl", ["torch.sdpa-flash", "torch.sdpa-cudnn", "torch.flex", "torch.eager"])
def test_the_last_queries_of_a_causal_mask(impl, grad):
    """Rectangular and aligned bottom-right: torch's own flag means something else."""
    q, k, v = (x.cuda().to(torch.bfloat16) for x in arrays(tokens=128))
    inputs = [x.detach().requires_grad_(grad) for x in (q[:, 64:], k, v)]
    assert_alike(lambda q, k, v: ab.attention(q, k, v, mask=OUTER, impl=impl), inputs, "default", grad)


def assert_alike(function, inputs, mode, grad):
    """Compiled and not, forward and backward, several times."""

    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode=mode)
    for _ in range(3):
        got, want = compiled(*inputs).clone(), function(*inputs)
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
        if grad:
            dout = torch.randn_like(want)
            for a, b in zip(torch.autograd.grad(got, inputs, dout), torch.autograd.grad(want, inputs, dout)):
                torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)
