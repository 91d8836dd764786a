"""Masks with blocks at every edge, checked in float64 from the definition; the CPU and GPU tests share them."""

import numpy as np
import torch
from test_torch_numbers import attention_in_float64

from attnbench import masks
from attnbench.spec import Workload

random = np.random.default_rng(7)


def kept(*axes, share=0.5):
    return random.random(axes) < share


BASE = {"batch": 2, "q_len": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "pass_": "train"}
CASES = {
    "one plane": {"mask": masks.blocks(kept(4, 4), 16)},
    "per head": {"mask": masks.blocks(kept(4, 4, 4), 16)},
    "per batch and head": {"mask": masks.blocks(kept(2, 4, 4, 4), 16)},
    "per batch": {"mask": masks.blocks(kept(2, 1, 4, 4), 16)},
    "all kept": {"mask": masks.blocks(np.ones((2, 2), bool), 32)},
    "nothing kept": {"mask": masks.blocks(np.zeros((4, 4), bool), 16)},
    "a blind row and column": {"mask": masks.blocks(np.eye(4, k=1, dtype=bool), 16)},
    "causal": {"mask": masks.causal() & masks.blocks(kept(4, 4, 4, share=0.7), 16)},
    "top-left": {"kv_len": 96, "mask": masks.causal("top-left") & masks.blocks(kept(4, 6, share=0.7), 16)},
    "ragged": {"q_len": 57, "mask": masks.causal() & masks.blocks(kept(4, 4, share=0.7), 16)},
    "more queries than keys": {"q_len": 90, "kv_len": 40, "mask": masks.causal() & masks.blocks(kept(6, 3), 16)},
    "lengths": {"kv_len": 90, "mask": masks.lengths([0, 50]) & masks.blocks(kept(4, 6, share=0.7), 16)},
    "window": {"mask": masks.window(20, 5) & masks.blocks(kept(4, 4, 4, share=0.8), 16)},
    "documents": {"mask": masks.documents(np.arange(64) // 23) & masks.causal() & masks.blocks(kept(2, 2), 32)},
    "MHA": {"kv_heads": 4, "mask": masks.blocks(kept(4, 4, 4), 16)},
    "MQA": {"kv_heads": 1, "mask": masks.causal() & masks.blocks(kept(4, 2, 2, share=0.8), 32)},
    "scale": {"scale": 0.9, "mask": masks.blocks(kept(4, 4), 16)},
    "blocks of 48": {"q_len": 96, "mask": masks.causal() & masks.blocks(kept(2, 2, share=0.8), 48)},
    "head_dim 40": {"head_dim": 40, "mask": masks.blocks(kept(4, 4), 16)},
}


def workload(case, **changes):
    return Workload(**{**BASE, **CASES[case], **changes})


def draw(w, device="cpu"):
    """q, k, v, dout in bhsd of the workload's dtype, and the same numbers in float64 and bshd."""
    q, kv = (w.batch, w.heads, w.q_len), (w.batch, w.kv_heads, w.kv_len)
    shapes = ((*q, w.head_dim), (*kv, w.head_dim), (*kv, w.value_dim), (*q, w.value_dim))
    tensors = [torch.from_numpy(random.normal(size=shape)).to(getattr(torch, w.dtype)) for shape in shapes]
    return [x.to(device) for x in tensors], [x.transpose(1, 2).double().numpy() for x in tensors]


def check(implementation, w, config, allowed, device="cpu"):
    """Output, LSE and gradients of an implementation against float64; returns its output."""
    (q, k, v, dout), exact = draw(w, device)
    want, want_lse, *want_grads = attention_in_float64(w, *exact)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = implementation.build_lse(w, config)(q, k, v)
    assert lse.dtype == (torch.float64 if w.dtype == "float64" else torch.float32)
    assert out.dtype == q.dtype
    grads = torch.autograd.grad(out, (q, k, v), dout)
    np.testing.assert_allclose(lse.detach().cpu().numpy(), want_lse, atol=max(3e-6, allowed / 10), rtol=1e-5)
    for name, got, right in zip(("out", "dq", "dk", "dv"), (out, *grads), (want, *want_grads)):
        values = got.detach().transpose(1, 2).double().cpu().numpy()
        assert np.isfinite(values).all(), name
        error = np.linalg.norm(values - right)
        assert error <= allowed * max(np.linalg.norm(right), 1e-3), f"{name}: {error}"
    return out
