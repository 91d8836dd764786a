"""torch.sdpa-flash-split and torch.sdpa-cudnn-split: numbers with gradients, LSE, compiled, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import attnbench as ab
from attnbench import masks
from attnbench.spec import Environment, Workload

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from test_torch_numbers import attention_in_float64, draw

from attnbench.impls.split import TORCH_CUDNN_SPLIT as CUDNN_SPLIT
from attnbench.impls.split import TORCH_FLASH_SPLIT as FLASH_SPLIT

CPU = Environment(device="cpu", device_name="test")
CUDA = Environment(device="cuda", device_name="test", capability=(9, 0))
SHAPE = {"batch": 2, "q_len": 24, "heads": 4, "kv_heads": 1, "head_dim": 8}
LIKE_PI0 = masks.block_causal(np.repeat([0, 1, 2], [16, 1, 7]))
MASKS = {
    "pi0": LIKE_PI0,
    "documents": masks.documents(np.repeat([0, 1, 2], [9, 10, 5])),
    "documents-causal": masks.documents(np.repeat([0, 1], [9, 15])) & masks.causal(),
}


def compared(run, w):
    """Output and gradients of a call on bshd tensors against float64."""
    (q, k, v, dout), exact = draw(w)
    expected = attention_in_float64(w, *exact)
    q, k, v = (x.to(run.device).requires_grad_() for x in (q, k, v))
    out = run(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), dout.to(run.device))
    tolerance = 2e-2 if w.dtype == "bfloat16" else 5e-6
    for what, got, want in zip(("out", "dq", "dk", "dv"), (out, *grads), (expected[0], *expected[2:])):
        error = np.linalg.norm(got.detach().cpu().double().numpy() - want) / np.linalg.norm(want)
        assert error < tolerance, what


class Run:
    """`ab.attention` by name, maybe compiled."""

    def __init__(self, w, name, device="cpu", compiled=False):
        self.device = device
        call = lambda q, k, v: ab.attention(q, k, v, mask=w.mask, impl=name)  # noqa: E731
        self.call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call

    def __call__(self, *arrays):
        return self.call(*arrays)


@pytest.mark.parametrize("kind", MASKS)
def test_forward_and_gradients(kind):
    w = Workload(**SHAPE, mask=MASKS[kind], pass_="train")
    assert FLASH_SPLIT.supports(w, CPU) is None
    compared(Run(w, FLASH_SPLIT.name), w)


def test_compiled_in_one_graph():
    w = Workload(**SHAPE, mask=LIKE_PI0, pass_="train")
    compared(Run(w, FLASH_SPLIT.name, compiled=True), w)


def test_lse():
    w = Workload(**SHAPE, mask=LIKE_PI0)
    (q, k, v, _), exact = draw(w)
    out, lse = ab.attention(q, k, v, mask=w.mask, impl=FLASH_SPLIT.name, return_lse=True)
    want, want_lse, *_ = attention_in_float64(w, *exact)
    np.testing.assert_allclose(out.numpy(), want, rtol=2e-4, atol=5e-6)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=2e-4, atol=5e-6)


def test_no_operator_is_handed_a_mask(monkeypatch):
    seen = []
    plain = torch._C._nn.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, *more, **words):
        seen.append(attn_mask)
        return plain(q, k, v, attn_mask, *more, **words)

    monkeypatch.setattr(torch._C._nn, "scaled_dot_product_attention", watched)
    w = Workload(**SHAPE, mask=LIKE_PI0)
    FLASH_SPLIT.build(w, {})(*(x.transpose(1, 2) for x in draw(w)[0][:3]))
    assert seen == [None] * 3


def test_the_causal_part_of_a_prefix_needs_the_flash_kernel_of_a_gpu():
    w = Workload(**SHAPE | {"head_dim": 64, "dtype": "bfloat16"}, mask=masks.prefix(16))
    assert FLASH_SPLIT.supports(w, CUDA) is None
    assert "would need a mask array" in str(FLASH_SPLIT.supports(w, CPU))
    assert "would need a mask array" in str(CUDNN_SPLIT.supports(w, CUDA))


def test_padding_is_refused():
    w = Workload(**SHAPE | {"head_dim": 64, "dtype": "bfloat16"}, mask=LIKE_PI0 & masks.lengths([24, 11]))
    assert "would need a mask array" in str(FLASH_SPLIT.supports(w, CUDA))
    assert "would need a mask array" in str(CUDNN_SPLIT.supports(w, CUDA))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("implementation", [FLASH_SPLIT, CUDNN_SPLIT], ids=repr)
@pytest.mark.parametrize("kind", [*MASKS, "prefix"])
def test_on_a_gpu(implementation, kind):
    mask = {**MASKS, "prefix": masks.prefix(16)}[kind]
    w = Workload(**SHAPE | {"head_dim": 256, "dtype": "bfloat16"}, mask=mask, pass_="train")
    if implementation is CUDNN_SPLIT and kind == "prefix":
        pytest.skip("refused")
    compared(Run(w, implementation.name, "cuda"), w)
