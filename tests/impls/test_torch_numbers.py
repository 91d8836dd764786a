"""Every torch implementation that runs eagerly on a CPU, forward and gradients, against float64 NumPy written here."""

import numpy as np
import pytest

from attnbench import masks
from attnbench.spec import Environment, Workload

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from attnbench.impls.torch import eager as torch_eager
from attnbench.impls.torch import hugging_face as torch_hf
from attnbench.impls.torch import sdpa as torch_sdpa

CPU = Environment(device="cpu", device_name="test")
IMPLEMENTATIONS = [
    torch_eager.EAGER, torch_sdpa.AUTO, torch_sdpa.MATH, torch_sdpa.FLASH, torch_hf.EAGER, torch_hf.SDPA,
]  # fmt: skip
random = np.random.default_rng(0)
BLOCKS = np.array([[[True, False, True], [False, True, True]], [[True, True, False], [False, False, True]]])
BASE = {"batch": 2, "q_len": 7, "kv_len": 9, "heads": 4, "kv_heads": 2, "head_dim": 8, "mask": masks.full()}
LARGE_ROWS = np.full((7, 7), 0.0) + np.array([0.0, -1e9, 1e7, -70.0, 1e9, -1e4, 0.0])[:, None]
LARGE_ROWS[6, :3], LARGE_ROWS[0, 5] = -1e9, 1e300
CASES = {
    "full": {},
    "mha": {"kv_heads": 4},
    "mqa": {"kv_heads": 1},
    "scale": {"scale": 0.9},
    "scale_negative": {"scale": -0.5, "kv_len": 7, "mask": masks.causal()},
    "scale_negative_lower_right": {"scale": -0.5, "mask": masks.causal()},
    "scale_negative_array": {"scale": -0.5, "mask": masks.lengths([5, 9])},
    "scale_zero": {"scale": 0.0, "kv_len": 7, "mask": masks.causal()},
    "softcap": {"softcap": 1.5, "mask": masks.causal()},
    "value_dim": {"v_head_dim": 5, "mask": masks.causal()},
    "causal_square": {"kv_len": 7, "mask": masks.causal()},
    "causal": {"mask": masks.causal()},
    "causal_top_left": {"mask": masks.causal("top-left")},
    "causal_dead_rows": {"q_len": 9, "kv_len": 7, "mask": masks.causal()},
    "causal_top_left_tall": {"q_len": 9, "kv_len": 7, "mask": masks.causal("top-left")},
    "decode": {"q_len": 1, "mask": masks.causal()},
    "one_key": {"q_len": 1, "kv_len": 1},
    "window": {"mask": masks.window(2, 1)},
    "prefix": {"mask": masks.prefix(4)},
    "block_causal": {"mask": masks.block_causal([[0, 0, 1, 1, 2, 2, 2, 3, 3], [0, 1, 1, 1, 1, 1, 2, 2, 2]])},
    "documents": {"mask": masks.documents([0, 0, 0, 1, 1, 1, 2, 2, 2]) & masks.causal()},
    "lengths": {"mask": masks.lengths([5, 9])},
    "empty_length": {"mask": masks.lengths([0, 9])},
    "valid": {"mask": masks.valid(random.random((2, 9)) > 0.4)},
    "dilated": {"kv_len": 7, "mask": masks.dilated([3, 7], [1, 2]) & masks.causal()},
    "dilated_dead_rows": {"kv_len": 7, "mask": masks.dilated([4], [2])},
    "blocks": {"heads": 2, "mask": masks.blocks(BLOCKS, 4)},
    "dense": {"mask": masks.dense(random.random((2, 4, 7, 9)) > 0.5)},
    "bias_large": {"kv_len": 7, "mask": masks.dense(LARGE_ROWS) & masks.causal()},
    "bias": {"mask": masks.dense(np.where(random.random((4, 7, 9)) > 0.3, random.normal(size=(4, 7, 9)), -np.inf))},
}


def attention_in_float64(w, q, k, v, dout):
    """(out, lse, dq, dk, dv), layout bshd, from the definition and its derivative."""
    k, v = (np.repeat(x, w.group, axis=2) for x in (k, v))
    raw = np.einsum("bihd,bjhd->bhij", q, k) * (w.head_dim**-0.5 if w.scale is None else w.scale)
    slope = 1.0
    if w.softcap is not None:
        slope = 1 - np.tanh(raw / w.softcap) ** 2
        raw = w.softcap * np.tanh(raw / w.softcap)
    logits = raw + w.visible_mask.bias(w.mask_shape)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * slope * (w.head_dim**-0.5 if w.scale is None else w.scale)
    per_head = np.einsum("bhij,bihd->bjhd", ds, q), np.einsum("bhij,bihd->bjhd", p, dout)
    dk, dv = (x.reshape(*x.shape[:2], w.kv_heads, w.group, -1).sum(3) for x in per_head)
    return np.einsum("bhij,bjhd->bihd", p, v), lse, np.einsum("bhij,bjhd->bihd", ds, k), dk, dv


def draw(w):
    shapes = ((w.q_len, w.heads, w.head_dim), (w.kv_len, w.kv_heads, w.head_dim), (w.kv_len, w.kv_heads, w.value_dim))
    arrays = [random.normal(size=(w.batch, *shape)) for shape in (*shapes, (w.q_len, w.heads, w.value_dim))]
    kind = getattr(torch, w.dtype)
    tensors = [torch.from_numpy(a).to(kind) for a in arrays]
    return tensors, [t.double().numpy() for t in tensors]


def swap(implementation, tensor):
    return tensor.transpose(1, 2).contiguous() if implementation.layout == "bhsd" else tensor


def workload(case, **changes):
    return Workload(**{**BASE, **CASES[case], **changes})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
def test_forward_and_gradients(implementation, case):
    w = workload(case, pass_="train")
    reason = implementation.supports(w, CPU)
    if reason is not None:
        assert (implementation.name, case) in REFUSED, reason
        return
    assert (implementation.name, case) not in REFUSED
    (q, k, v, dout), exact = draw(w)
    expected = attention_in_float64(w, *exact)
    q, k, v = (swap(implementation, x).requires_grad_() for x in (q, k, v))
    out = implementation.build(w, {})(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), swap(implementation, dout))
    for what, got, want in zip(("out", "dq", "dk", "dv"), (out, *grads), (expected[0], *expected[2:])):
        np.testing.assert_allclose(swap(implementation, got.detach()).numpy(), want, rtol=2e-4, atol=5e-6, err_msg=what)


REFUSED = {
    *((name, "softcap") for name in (i.name for i in IMPLEMENTATIONS) if name != "torch.eager"),
    ("torch.sdpa-flash", "value_dim"),
    *(("torch.hf-eager", case) for case in ("causal_dead_rows", "empty_length", "dilated_dead_rows")),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
def test_precisions(implementation, dtype):
    w = workload("dilated", dtype=dtype)
    if implementation is torch_hf.EAGER and dtype == "float64":
        assert "float32" in str(implementation.supports(w, CPU))
        return
    if implementation is torch_hf.EAGER and dtype == "float16":
        assert "overflows" in str(implementation.supports(w, CPU))
        return
    assert implementation.supports(w, CPU) is None
    (q, k, v, _), exact = draw(w)
    out = implementation.build(w, {})(*(swap(implementation, x) for x in (q, k, v)))
    assert out.dtype == q.dtype
    want = attention_in_float64(w, *exact)[0]
    error = np.linalg.norm(swap(implementation, out).double().numpy() - want) / np.linalg.norm(want)
    assert error < {"float64": 1e-14, "float32": 5e-7, "bfloat16": 8e-3, "float16": 1e-3}[dtype]


@pytest.mark.parametrize(
    "case", ["full", "causal", "causal_dead_rows", "empty_length", "dilated", "bias", "bias_large", "scale"]
)
@pytest.mark.parametrize("implementation", [torch_eager.EAGER, torch_sdpa.FLASH], ids=lambda i: i.name)
def test_lse(implementation, case):
    w = workload(case)
    (q, k, v, _), exact = draw(w)
    call = implementation.build_lse(w, {})
    assert call is not None
    out, lse = call(*(swap(implementation, x) for x in (q, k, v)))
    want, want_lse, *_ = attention_in_float64(w, *exact)
    assert lse.dtype == torch.float32
    assert tuple(lse.shape) == (w.batch, w.heads, w.q_len)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(swap(implementation, out).numpy(), want, rtol=2e-4, atol=5e-6)
