"""Masks with values on a GPU, and packed sequences by kernels made for them: right, and the host never waits."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

import attnbench as ab
from attnbench.dispatch import device_masks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]
DIM = 64
KERNELS = ("torch.fa3", "torch.fa4", "torch.flash-attn", "torch.sdpa-flash")
WITHIN = {"full": ab.masks.full(), "causal": ab.masks.causal(), "window": ab.masks.window(40, 0)}
LENGTHS = {
    "same": ([130, 1, 0, 257, 64], None),
    "other keys": ([130, 1, 33, 257, 64], [200, 70, 0, 257, 90]),
    "fewer keys": ([130, 40, 33], [90, 40, 1]),
}


def drawn(q_lengths, k_lengths, heads=(8, 2), train=False):
    import torch

    torch.manual_seed(0)
    tokens = (sum(q_lengths), sum(k_lengths or q_lengths))
    shapes = ((tokens[0], heads[0], DIM), *[(tokens[1], heads[1], DIM)] * 2)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(train) for shape in shapes]


def offsets(lengths):
    import torch

    return None if lengths is None else torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device="cuda")


@contextmanager
def no_waiting():
    """Let every operation that makes the host wait for the GPU raise."""
    import torch

    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def skip_if_refused(impl, q, k, v, cu_q, cu_k, mask, **words):
    """Skip a kernel that is not installed, or that this build lacks; any other refusal is a failure."""
    from attnbench.errors import Unsupported

    try:
        ab.attention_varlen(q, k, v, cu_q, cu_k, mask=mask, impl=impl, **words)
    except Unsupported as error:
        absent = ("not installed", "neither flash_attn_interface", "this build has no", "is a stub", "needs compute")
        if any(text in str(error) for text in absent):
            pytest.skip(str(error))
        raise


def grads_of(out, arrays, dout):
    import torch

    return torch.autograd.grad(out, arrays, dout)


@pytest.mark.torch
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
def test_kernels_of_packed_sequences(impl, within, lengths, train):
    import torch

    q_lengths, k_lengths = LENGTHS[lengths]
    q, k, v = drawn(q_lengths, k_lengths, train=train)
    cu = (offsets(q_lengths), offsets(k_lengths), max(q_lengths), max(k_lengths or q_lengths))
    mask = WITHIN[within]
    skip_if_refused(impl, q, k, v, *cu[:2], mask)
    wide = [x.detach().float().requires_grad_(train) for x in (q, k, v)]
    want = ab.attention_varlen(*wide, *cu, mask=mask, impl="torch.eager")
    with no_waiting():
        out = ab.attention_varlen(q, k, v, *cu, mask=mask, impl=impl)
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)
    if train:
        dout = torch.randn_like(out)
        expected = grads_of(want, wide, dout.float())
        with no_waiting():
            found = grads_of(out, [q, k, v], dout)
        for one, other in zip(found, expected):
            assert one.isfinite().all()
            torch.testing.assert_close(one.float(), other, atol=5e-2, rtol=5e-2)


@pytest.mark.torch
@pytest.mark.parametrize("impl", KERNELS)
def test_the_lse_of_packed_kernels(impl):
    import torch

    q_lengths, k_lengths = LENGTHS["other keys"]
    q, k, v = drawn(q_lengths, k_lengths)
    cu = (offsets(q_lengths), offsets(k_lengths), max(q_lengths), max(k_lengths))
    skip_if_refused(impl, q, k, v, *cu[:2], ab.masks.causal(), return_lse=True)
    _, want = ab.attention_varlen(
        *[x.float() for x in (q, k, v)], *cu, mask=ab.masks.causal(), impl="torch.eager", return_lse=True
    )
    _, lse = ab.attention_varlen(q, k, v, *cu, mask=ab.masks.causal(), impl=impl, return_lse=True)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, want, atol=2e-2, rtol=2e-2)
    assert torch.isneginf(lse[:, 131:164]).all()


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["auto", *KERNELS])
@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
def test_one_graph_serves_all_batches(impl, train):
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(q, k, v, cu):
        return ab.attention_varlen(q * 1, k, v, cu, None, 256, 256, mask=ab.masks.causal(), impl=impl)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([130, 70, 256], [200, 0, 31], [256, 256, 256]):
        q, k, v = drawn(lengths, None, train=train)
        cu = offsets(lengths)
        skip_if_refused(impl, q, k, v, cu, None, ab.masks.causal())
        out, want = compiled(q, k, v, cu), function(q, k, v, cu)
        torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)
        if train:
            dout = torch.randn_like(out)
            for one, other in zip(grads_of(out, [q, k, v], dout), grads_of(want, [q, k, v], dout)):
                torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    # torch's varlen_attn is traced a second time when sizes change
    assert counter.frame_count <= (2 if impl == "torch.sdpa-flash" else 1)


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["torch.sdpa", "torch.eager"])
@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
def test_lengths_and_documents_on_the_device(impl, train):
    import torch

    device_masks.PLANS.clear()
    torch.manual_seed(0)
    shapes = ((2, 300, 8, DIM), (2, 300, 2, DIM), (2, 300, 2, DIM))
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_(train) for s in shapes)
    wide = [x.detach().float().requires_grad_(train) for x in (q, k, v)]
    batches = [([300, 17], np.arange(300) // 70), ([0, 211], np.arange(300) // 110)]
    for number, (lengths, ids) in enumerate(batches):
        known = ab.masks.causal() & ab.masks.lengths(lengths) & ab.masks.documents(ids)
        want = ab.attention(*wide, mask=known, impl="torch.eager")
        values = torch.tensor(lengths, device="cuda"), torch.tensor(ids, device="cuda")
        if not number:  # compiled once
            mask = ab.masks.causal() & ab.masks.lengths(values[0]) & ab.masks.documents(values[1])
            out = ab.attention(q, k, v, mask=mask, impl=impl)
            if train:
                out.sum().backward()
        with no_waiting():
            mask = ab.masks.causal() & ab.masks.lengths(values[0]) & ab.masks.documents(values[1])
            out = ab.attention(q, k, v, mask=mask, impl=impl)
        torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)
        if train:
            dout = torch.randn_like(out)
            for one, other in zip(grads_of(out, [q, k, v], dout), grads_of(want, wide, dout.float())):
                torch.testing.assert_close(one.float(), other, atol=5e-2, rtol=5e-2)
    assert len(device_masks.PLANS) == 1


@pytest.mark.torch
def test_a_tensor_on_a_gpu_is_never_read():
    import torch

    ids, keys = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.ones(8, dtype=torch.bool, device="cuda")
    with no_waiting():
        masks = [ab.masks.lengths(ids), ab.masks.documents(ids), ab.masks.block_causal(ids), ab.masks.valid(keys)]
    assert all(isinstance(mask, ab.masks.DeviceMask) for mask in masks)
    assert ab.masks.documents(ids, constant=True) == ab.masks.documents(np.zeros(8, int))


@pytest.mark.jax
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("packed", [False, True], ids=["lengths", "packed"])
def test_cudnn_takes_lengths_in_jax(packed, mask):
    import jax
    import jax.numpy as jnp

    lengths, within = [130, 0, 257, 64], WITHIN[mask]
    random = np.random.default_rng(0)
    rows = (sum(lengths),) if packed else (4, 258)
    shapes = ((*rows, 8, DIM), (*rows, 2, DIM), (*rows, 2, DIM), (*rows, 8, DIM))
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]

    def loss(q, k, v, dout, values, impl):
        if packed:
            out = ab.attention_varlen(q, k, v, values, None, 257, 257, mask=within, impl=impl)
        else:
            out = ab.attention(q, k, v, mask=within & ab.masks.lengths(values), impl=impl)
        return (out.astype(jnp.float32) * dout).sum(), out

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), static_argnums=5)
    values = jnp.asarray(np.cumsum([0, *lengths]) if packed else lengths, jnp.int32)
    found, out = grad(*arrays, values, "jax.cudnn")
    wanted, want = grad(*[x.astype(jnp.float32) for x in arrays], values, "jax.einsum")
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=2e-2, rtol=2e-2)
    for one, other in zip(found, wanted):
        np.testing.assert_allclose(np.asarray(one, np.float32), other, atol=5e-2, rtol=5e-2)
