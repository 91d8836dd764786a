"""The partial forms of torch's dense kernels and the merge of their results, against float64."""

import numpy as np
import pytest

from attnbench import masks
from attnbench.spec import Workload

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from test_torch_numbers import BASE, CASES, attention_in_float64, draw, workload

from attnbench.impls.partial.torch_passes import merge_, nothing_yet
from attnbench.impls.torch import _sdpa_operators as torch_sdpa_aten
from attnbench.impls.torch import eager as torch_eager
from attnbench.impls.torch import sdpa as torch_sdpa

ON_CPU = [torch_eager.EAGER, torch_sdpa.FLASH]
ON_GPU = [torch_eager.EAGER, torch_sdpa.FLASH, torch_sdpa.EFFICIENT, torch_sdpa.CUDNN]
MASKED = [
    "full", "causal_square", "causal", "causal_top_left", "causal_dead_rows", "causal_top_left_tall", "empty_length",
    "dilated_dead_rows", "bias", "scale", "scale_negative", "scale_zero", "mqa",
]  # fmt: skip
WIDE = {"float64": "float64", "float32": "float32", "bfloat16": "float32", "float16": "float32"}
LEAST_ERROR = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def close(got, want, dtype):
    values = got.double().cpu().numpy()
    assert np.isfinite(values).all()
    assert np.linalg.norm(values - want) <= LEAST_ERROR[dtype] * max(np.linalg.norm(want), 1e-3)


def part_of(case, keys, dtype):
    """The same queries over some of the keys."""
    w = workload(case)
    bias = w.visible_mask.bias(w.mask_shape)[..., keys]
    return Workload(**{**BASE, **CASES[case], "dtype": dtype, "kv_len": bias.shape[-1], "mask": masks.dense(bias)})


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("case", MASKED)
@pytest.mark.parametrize("implementation", ON_CPU, ids=lambda i: i.name)
def test_a_whole_as_its_only_part(implementation, case, dtype):
    w = workload(case, dtype=dtype)
    (q, k, v, dout), exact = draw(w)
    want_out, want_lse, *want = attention_in_float64(w, *exact)
    forward, backward = implementation.partial(w, {})
    out, lse = forward(q, k, v)
    assert out.shape == (w.batch, w.q_len, w.heads, w.value_dim)
    assert out.dtype == q.dtype
    assert lse.dtype == getattr(torch, WIDE[dtype])
    np.testing.assert_array_equal(np.isneginf(lse.numpy()), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(lse.numpy()[seen], want_lse[seen], rtol=LEAST_ERROR[dtype], atol=LEAST_ERROR[dtype])
    close(out, want_out, dtype)
    for got, expected, like in zip(backward(q, k, v, out, lse, dout), want, (q, k, v)):
        assert got.shape == like.shape
        close(got, expected, dtype)


@pytest.mark.parametrize("case", ["softcap", "value_dim"])
def test_plain_takes_what_kernels_refuse(case):
    w = workload(case, dtype="float64")
    (q, k, v, dout), exact = draw(w)
    want_out, _, *want = attention_in_float64(w, *exact)
    forward, backward = torch_eager.EAGER.partial(w, {})
    out, lse = forward(q, k, v)
    close(out, want_out, "float64")
    for got, expected in zip(backward(q, k, v, out, lse, dout), want):
        close(got, expected, "float64")


@pytest.mark.parametrize("case", ["full", "causal", "causal_dead_rows", "empty_length", "bias", "mqa"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ON_CPU, ids=lambda i: i.name)
def test_two_halves_of_the_keys_give_the_whole(implementation, case, dtype):
    """Forward: the parts merged. Backward: each part with the whole's out and lse, added up."""
    w = workload(case, dtype=dtype)
    (q, k, v, dout), exact = draw(w)
    want_out, want_lse, *want = attention_in_float64(w, *exact)
    out, lse = nothing_yet(tuple(want_out.shape), q.dtype, q.device)
    halves = [slice(0, w.kv_len // 2), slice(w.kv_len // 2, None)]
    pairs = [implementation.partial(part_of(case, keys, dtype), {}) for keys in halves]
    for keys, (forward, _) in zip(halves, pairs):
        merge_(out, lse, *forward(q, k[:, keys], v[:, keys]))
    close(out, want_out, dtype)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=LEAST_ERROR[dtype], atol=LEAST_ERROR[dtype])
    grads = [
        backward(q, k[:, keys], v[:, keys], out.to(q.dtype), lse, dout) for keys, (_, backward) in zip(halves, pairs)
    ]
    total = sum(g[0] for g in grads), torch.cat([g[1] for g in grads], 1), torch.cat([g[2] for g in grads], 1)
    for got, expected in zip(total, want):
        close(got, expected, dtype)


@pytest.mark.parametrize("implementation", ON_CPU, ids=lambda i: i.name)
def test_strided_views_give_what_copies_give(implementation):
    """Every third token from the second on, and two of four heads: what dilated attention hands in."""
    w = Workload(batch=2, q_len=5, heads=2, head_dim=8, mask=masks.causal())
    q, k, v, dout = (torch.randn(2, 15, 4, 8)[:, 1::3, ::2] for _ in range(4))
    forward, backward = implementation.partial(w, {})
    out, lse = forward(q, k, v)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    for got, want in zip((out, lse), forward(*copies)):
        torch.testing.assert_close(got, want)
    given = backward(q, k, v, out, lse.expand(1, *lse.shape)[0], dout)
    for got, want in zip(given, backward(*copies, out, lse, dout.contiguous())):
        torch.testing.assert_close(got, want)


def test_merge_in_views_of_a_whole():
    out, lse = nothing_yet((1, 6, 4, 2), torch.bfloat16, torch.device("cpu"))
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    part, part_lse = torch.randn(1, 3, 2, 2), torch.randn(1, 2, 3)
    merge_(out[:, 1::2, ::2], lse[:, ::2, 1::2], part, part_lse)
    torch.testing.assert_close(out[:, 1::2, ::2], part)
    torch.testing.assert_close(lse[:, ::2, 1::2], part_lse)
    assert not out[:, ::2].any()
    assert not out[:, :, 1::2].any()
    assert torch.isneginf(lse[:, 1::2]).all()


def test_merge_of_rows_that_nobody_has_seen_and_of_far_apart_parts():
    hidden = float("-inf")
    out, lse = torch.tensor([0.0, 7.0, 1.0, 2.0]).view(1, 4, 1, 1), torch.tensor([[[hidden, 3.0, -900.0, hidden]]])
    part, part_lse = torch.tensor([0.0, 5.0, 4.0, 6.0]).view(1, 4, 1, 1), torch.tensor([[[hidden, hidden, 900.0, 1.0]]])
    merge_(out, lse, part, part_lse)
    assert out.flatten().tolist() == [0.0, 7.0, 4.0, 6.0]
    assert lse.flatten().tolist() == [hidden, 3.0, 900.0, 1.0]


def test_cudnn_is_never_shown_strides_that_its_graph_was_not_built_for():
    q, k, v, dout = (torch.randn(2, 4, 6, 8) for _ in range(4))
    key = torch_sdpa_aten.graph_key(q, k, v)
    assert torch_sdpa_aten.strided_as_at_first(key, dout) is dout
    turned, strided = torch.randn(2, 6, 4, 8).transpose(1, 2), torch.randn(2, 4, 8, 6).transpose(2, 3)
    for given in (turned, strided, torch.ones(()).expand(2, 4, 6, 8), dout[:1].expand(2, 4, 6, 8)):
        seen = torch_sdpa_aten.strided_as_at_first(key, given)
        assert seen.stride() == dout.stride()
        assert torch.equal(seen, given)
    assert torch_sdpa_aten.strided_as_at_first(torch_sdpa_aten.graph_key(q.transpose(1, 2), k, v), turned) is turned


def test_a_dout_of_one_number_leaves_no_strides_that_a_later_one_cannot_have():
    q, k, v, dout = (torch.randn(2, 3, 6, 8) for _ in range(4))
    key = torch_sdpa_aten.graph_key(q, k, v)
    torch_sdpa_aten.strided_as_at_first(key, torch.ones(()).expand(2, 3, 6, 8))
    assert torch_sdpa_aten.strided_as_at_first(key, dout) is dout


def test_out_is_laid_out_for_cudnn_as_its_own_forward_operator_does():
    q, out = torch.randn(2, 6, 4, 8).transpose(1, 2), torch.randn(2, 4, 6, 16)
    seen = torch_sdpa_aten.ordered_as(q, out)
    assert seen.transpose(1, 2).is_contiguous()
    assert torch.equal(seen, out)
    assert torch_sdpa_aten.ordered_as(torch.randn(2, 4, 6, 8), out) is out


def test_only_a_dout_of_the_cudnn_path_is_held_to_its_first_strides(monkeypatch):
    """As on a GPU: torch's autograd gives its cuDNN graph the dO of the first strides."""
    seen = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    kept = torch_sdpa_aten.strided_as_at_first
    monkeypatch.setattr(
        torch_sdpa_aten, "strided_as_at_first", lambda key, dout: seen.append(dout.stride()) or kept(key, dout)
    )
    w = Workload(batch=1, q_len=6, heads=2, head_dim=8, pass_="train")
    q, k, v = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    for implementation, hooked in ((torch_sdpa.AUTO, True), (torch_sdpa.MATH, False)):
        seen.clear()
        out = implementation.build(w, {})(q, k, v)
        want = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
        got = torch.autograd.grad(out.sum(), (q, k, v))
        assert len(seen) == (2 if hooked else 0)
        assert all(torch.equal(x, y) for x, y in zip(got, want))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [torch_sdpa.AUTO, torch_sdpa.CUDNN], ids=lambda i: i.name)
def test_gradients_on_a_gpu_hold_for_dout_of_several_strides_of_one_shape(implementation):
    w = Workload(batch=2, q_len=256, heads=4, head_dim=128, dtype="bfloat16", mask=masks.causal(), pass_="train")
    inputs = [torch.randn(2, 4, 256, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    call, dout = implementation.build(w, {}), inputs[3]
    found = []
    for order in ((1, 2), (1, 1), (2, 3), (1, 2)):
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
        given = dout.transpose(*order).contiguous().transpose(*order)
        found.append(torch.autograd.grad(call(q, k, v), (q, k, v), given))
    for one in found[1:]:
        for x, y in zip(one, found[0]):
            assert float((x - y).float().norm() / y.float().norm()) < 1e-2


def test_partials_record_no_graph():
    w = workload("causal_square")
    (q, k, v, _), _ = draw(w)
    for implementation in ON_CPU:
        forward = implementation.partial(w, {})[0]
        assert not any(x.requires_grad for x in forward(q.requires_grad_(), k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.id)
@pytest.mark.parametrize("implementation", ON_GPU, ids=lambda i: i.name)
def test_on_a_gpu(implementation, mask):
    kv_heads = 4 if implementation is torch_sdpa.EFFICIENT else 2
    w = Workload(batch=2, q_len=130, heads=4, kv_heads=kv_heads, head_dim=64, dtype="bfloat16", mask=mask)
    (q, k, v, dout), exact = draw(w)
    want_out, want_lse, *want = attention_in_float64(w, *exact)
    q, k, v, dout = (x.cuda() for x in (q, k, v, dout))
    forward, backward = implementation.partial(w, {})
    out, lse = forward(q, k, v)
    np.testing.assert_allclose(lse.cpu().numpy(), want_lse, atol=2e-3)
    for got, expected in zip((out, *backward(q, k, v, out, lse, dout)), (want_out, *want)):
        close(got, expected, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ON_GPU, ids=lambda i: i.name)
def test_out_and_dout_of_any_strides_on_a_gpu(implementation):
    """Same q, k and v strides; out and dout first as views with holes, then dense."""
    w = Workload(batch=2, q_len=64, heads=4, head_dim=64, dtype="bfloat16", mask=masks.causal())
    (q, k, v, dout), exact = draw(w)
    _, _, *want = attention_in_float64(w, *exact)
    q, k, v, dout = (x.cuda() for x in (q, k, v, dout))
    forward, backward = implementation.partial(w, {})
    out, lse = forward(q, k, v)
    for given in ([x.repeat_interleave(3, 1)[:, ::3] for x in (out, dout)], [out.contiguous(), dout.contiguous()]):
        for got, expected in zip(backward(q, k, v, given[0], lse, given[1]), want):
            close(got, expected, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ON_GPU, ids=lambda i: i.name)
def test_two_halves_on_a_gpu(implementation):
    """Views of every second token, keys in two halves, each backward with the whole's output and LSE."""
    w = Workload(batch=1, q_len=64, kv_len=128, heads=4, head_dim=64, dtype="bfloat16")
    (q, k, v, dout), exact = draw(w)
    want_out, want_lse, *want = attention_in_float64(w, *exact)
    q, k, v, dout = (x.cuda().repeat_interleave(2, 1)[:, 1::2] for x in (q, k, v, dout))
    half = Workload(batch=1, q_len=64, heads=4, head_dim=64, dtype="bfloat16")
    forward, backward = implementation.partial(half, {})
    out, lse = nothing_yet(tuple(want_out.shape), q.dtype, q.device)
    halves = [slice(0, 64), slice(64, 128)]
    for keys in halves:
        merge_(out, lse, *forward(q, k[:, keys], v[:, keys]))
    np.testing.assert_allclose(lse.cpu().numpy(), want_lse, atol=2e-3)
    close(out, want_out, "bfloat16")
    grads = [backward(q, k[:, keys], v[:, keys], out.bfloat16(), lse, dout) for keys in halves]
    close(grads[0][0].float() + grads[1][0].float(), want[0], "bfloat16")
    for name in (1, 2):
        close(torch.cat([of_half[name] for of_half in grads], 1), want[name], "bfloat16")


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_dynamo_traces_the_operators_of_a_gpu(backend):
    """Without a GPU: on fake tensors of one, as Dynamo sees them. torch's quicker bindings cannot be traced."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    lengths = {"q_len": 64, "kv_len": 128} if backend == "flash" else {"q_len": 128}
    workload = Workload(batch=1, heads=4, head_dim=64, dtype="bfloat16", mask=masks.causal(), **lengths)
    call = torch_sdpa_aten.operator(backend, workload)
    with FakeTensorMode():
        q, k = (torch.empty(1, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (workload.q_len, 128))
        out, lse = torch.compile(call, backend="eager", fullgraph=True)(q, k, k)
    assert out.shape == q.shape
    assert lse.shape[:3] == q.shape[:3]
