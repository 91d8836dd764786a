"""Masks whose values stay on the device, and packed sequences: against the reference; one graph for all values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from dispatch_problem import assert_close, entry, here
from hypothesis import given, settings
from hypothesis import strategies as st

import attnbench as ab
from attnbench import policy, reference
from attnbench.dispatch import device_masks
from attnbench.errors import InvalidWorkload, Unsupported
from attnbench.masks import DeviceMask

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
FIXED = {
    "alone": ab.masks.full(),
    "causal": ab.masks.causal(),
    "top-left": ab.masks.causal("top-left"),
    "window": ab.masks.window(3, 1),
    "prefix": ab.masks.prefix(2),
}
MORE_FIXED = FIXED | {
    "host data": ab.masks.valid([True, False, True, True, True, True]),
    "bias": ab.masks.dense(np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)),
}
FRAMEWORKS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "jax")]
pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")


@pytest.fixture(autouse=True)
def _fresh():
    device_masks.PLANS.clear()
    yield
    import sys

    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def array(framework, values):
    if framework == "torch":
        import torch

        return torch.from_numpy(np.array(values))
    import jax.numpy as jnp

    return jnp.asarray(values)


def drawn(shape_q, shape_k, seed=0):
    random = np.random.default_rng(seed)
    kv = (*shape_k[:-1], DIM)
    return [random.standard_normal(shape).astype(np.float32) for shape in (shape_q, kv, kv, shape_q)]


def problem(q_len=4, kv_len=6, seed=0):
    return drawn((BATCH, q_len, HEADS, DIM), (BATCH, kv_len, KV_HEADS, DIM), seed)


def wanted(q, k, v, dout, mask, **words):
    """Output, LSE and gradients by the float64 reference."""
    work = ab.Workload(
        batch=q.shape[0], q_len=q.shape[1], kv_len=k.shape[1], heads=q.shape[2], kv_heads=k.shape[2], head_dim=DIM,
        mask=mask, pass_="train", **words,
    )  # fmt: skip
    wide = [x.astype(np.float64) for x in (q, k, v, dout)]
    return reference.attention(work, *wide[:3]), reference.attention_gradients(work, *wide)


def in_torch(call, arrays, dout, compiled=None):
    """Output, LSE and gradients of a call in torch; the gradients without the LSE."""
    import torch

    leaves = [torch.from_numpy(x.copy()).requires_grad_() for x in arrays]
    out = call(*leaves)
    return out.detach().numpy(), [x.numpy() for x in torch.autograd.grad(out, leaves, torch.from_numpy(dout))]


def in_jax(call, arrays, dout):
    import jax

    out, pullback = jax.vjp(call, *arrays)
    return np.asarray(out), pullback(jax.numpy.asarray(dout))


@st.composite
def device_data(draw):
    """Kind of mask, its data for 2 rows, 4 queries and 6 keys, and a fixed part."""
    kind = draw(st.sampled_from(["lengths", "valid", "documents", "block_causal"]))
    rows = draw(st.sampled_from([1, BATCH]))
    if kind == "lengths":
        return kind, (np.array(draw(st.lists(st.integers(0, 6), min_size=2, max_size=2))),), draw(FIXED_PARTS)
    if kind == "valid":
        keys = draw(st.lists(st.booleans(), min_size=6 * rows, max_size=6 * rows))
        return kind, (np.array(keys).reshape(rows, 6),), draw(FIXED_PARTS)
    ids = np.array(draw(st.lists(st.integers(0, 3), min_size=6 * rows, max_size=6 * rows)), np.int32).reshape(rows, 6)
    q_ids = np.array(draw(st.lists(st.integers(0, 3), min_size=4, max_size=4)), np.int32)[None]
    return kind, (ids, q_ids) if draw(st.booleans()) else (ids,), draw(FIXED_PARTS)


FIXED_PARTS = st.sampled_from(list(MORE_FIXED))
IMPLS = {"torch": ("auto", "torch.eager", "torch.sdpa"), "jax": ("auto", "jax.einsum", "jax.xla")}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@settings(max_examples=25, deadline=None)
@given(device_data(), st.sampled_from([0, 1, 2]), st.integers(0, 99))
def test_any_values_are_computed_as_the_reference_does(framework, data, which, seed):
    kind, values, fixed = data
    *arrays, dout = problem(seed=seed)
    make, fixed = getattr(ab.masks, kind), MORE_FIXED[fixed]
    (out, _), gradients = wanted(*arrays, dout, make(*values) & fixed)
    mask = fixed & make(*[array(framework, x) for x in values], constant=False)
    assert isinstance(mask, DeviceMask)
    impl = IMPLS[framework][which]
    run = {"torch": in_torch, "jax": in_jax}[framework]
    got, found = run(lambda *x: ab.attention(*x, mask=mask, impl=impl), arrays, dout)
    assert_close(got, out)
    for one, want in zip(found, gradients):
        assert_close(one, want, 5e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
def test_the_lse_in_each_layout(framework, layout):
    *arrays, dout = problem()
    (out, lse), _ = wanted(*arrays, dout, ab.masks.causal() & ab.masks.lengths([0, 5]))
    if layout == "bhsd":
        arrays, out = [x.transpose(0, 2, 1, 3).copy() for x in arrays], out.transpose(0, 2, 1, 3)
    elif layout == "packed":
        arrays, out = [x.reshape(*x.shape[:2], -1) for x in arrays], out.reshape(*out.shape[:2], -1)
    got, found = ab.attention(
        *[array(framework, x) for x in arrays], return_lse=True, layout=layout,
        mask=ab.masks.causal() & ab.masks.lengths(array(framework, [0, 5]), constant=False),
        heads=(HEADS, KV_HEADS) if layout == "packed" else None,
    )  # fmt: skip
    assert_close(got, out)
    assert_close(found, lse)
    assert np.isneginf(np.asarray(found)[0]).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_soft_cap_scale_and_large_logits(framework):
    *arrays, dout = problem(6, 6)
    arrays[0] *= 30
    mask, words = ab.masks.lengths([3, 6]), {"softcap": 2.0, "scale": 0.7}
    (out, _), gradients = wanted(*arrays, dout, mask, **words)
    mask = ab.masks.lengths(array(framework, [3, 6]), constant=False)
    run = {"torch": in_torch, "jax": in_jax}[framework]
    got, found = run(lambda *x: ab.attention(*x, mask=mask, **words), arrays, dout)
    assert_close(got, out)
    for one, want in zip(found, gradients):
        assert_close(one, want, 2e-4)


VALUES = ([6, 3], [0, 1], [2, 6], [6, 6])


@pytest.mark.torch
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_of_torch_compile_serves_all_lengths(dynamic, grad):
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(
        lambda q, k, v, n: ab.attention(q * 1, k, v, mask=ab.masks.causal() & ab.masks.lengths(n)), backend=counter,
        fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    *arrays, dout = problem()
    for lengths in VALUES:
        (out, _), gradients = wanted(*arrays, dout, ab.masks.causal() & ab.masks.lengths(lengths))
        n = torch.tensor(lengths)
        if grad:
            got, found = in_torch(lambda *x: call(*x, n), arrays, dout)  # noqa: B023
            for one, want in zip(found, gradients):
                assert_close(one, want, 5e-5)
        else:
            got = call(*map(torch.from_numpy, arrays), n)
        assert_close(got, out)
    assert counter.frame_count == 1


@pytest.mark.torch
def test_one_graph_of_torch_compile_serves_all_sizes_and_a_mask_may_be_an_argument():
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    call = torch.compile(
        lambda q, k, v, mask: ab.attention(q, k, v, mask=mask), backend=counter, fullgraph=True, dynamic=True
    )
    for tokens in (7, 9, 12):
        *arrays, dout = problem(tokens, tokens)
        lengths = [tokens - 2, 3]
        (out, _), _ = wanted(*arrays, dout, ab.masks.causal() & ab.masks.lengths(lengths))
        mask = ab.masks.lengths(torch.tensor(lengths), constant=False) & ab.masks.causal()
        assert_close(call(*map(torch.from_numpy, arrays), mask), out)
    assert counter.frame_count == 1


@pytest.mark.torch
def test_documents_that_a_model_computes_inside_its_graph():
    import torch

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q, k, v, tokens):
        ids = (tokens == 0).cumsum(1)
        return ab.attention(q, k, v, mask=ab.masks.causal() & ab.masks.documents(ids))

    *arrays, dout = problem(6, 6)
    tokens = np.array([[0, 5, 0, 7, 8, 9], [0, 1, 2, 3, 0, 0]])
    (out, _), _ = wanted(*arrays, dout, ab.masks.causal() & ab.masks.documents((tokens == 0).cumsum(1)))
    assert_close(call(*map(torch.from_numpy, arrays), torch.from_numpy(tokens)), out)


@pytest.mark.jax
@pytest.mark.parametrize("kind", ["lengths", "valid", "documents", "block_causal"])
def test_one_trace_of_jit_serves_all_values(kind):
    import jax

    traces = []
    *arrays, dout = problem()

    @jax.jit
    def call(q, k, v, values):
        traces.append(1)
        return ab.attention(q, k, v, mask=getattr(ab.masks, kind)(values) & ab.masks.causal())

    random = np.random.default_rng(0)
    for _ in range(3):
        values = {
            "lengths": random.integers(0, 7, 2), "valid": random.random((2, 6)) < 0.5,
            "documents": random.integers(0, 3, (1, 6)), "block_causal": random.integers(0, 3, 6),
        }[kind]  # fmt: skip
        (out, _), _ = wanted(*arrays, dout, getattr(ab.masks, kind)(values) & ab.masks.causal())
        assert_close(call(*arrays, jax.numpy.asarray(values)), out)
    assert len(traces) == 1


@pytest.mark.torch
def test_one_plan_serves_all_values():
    import torch

    arrays = [torch.from_numpy(x) for x in problem()[:3]]
    for lengths in VALUES:
        ab.attention(*arrays, mask=ab.masks.lengths(torch.tensor(lengths), constant=False))
    assert len(device_masks.PLANS) == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_values_of_a_cpu_are_read_unless_asked(framework):
    assert ab.masks.lengths(array(framework, [3, 4])) == ab.masks.lengths([3, 4])
    assert ab.masks.valid(array(framework, [True, False]), constant=True) == ab.masks.valid([True, False])
    assert isinstance(ab.masks.documents(array(framework, [0, 1]), constant=False), DeviceMask)
    with pytest.raises(InvalidWorkload, match="lists and NumPy arrays are constants"):
        ab.masks.lengths([3, 4], constant=False)


@pytest.mark.torch
def test_a_policys_entry_for_the_kind_decides():
    import torch

    mask = ab.masks.lengths([3, 6])
    arrays = [torch.randn(2, 6, 4, 16) for _ in range(3)]
    asked = ab.masks.lengths(torch.tensor([3, 6]), constant=False)
    found = here(entry("torch.sdpa-flash", 6, ab.masks.lengths([3]), rivals=(("torch.eager", 1.5),)))
    with ab.use_policy(found):
        told = ab.explain(*arrays, mask=asked)
    assert told.pick == "torch.eager", told
    assert next(one.reason for one in told.candidates if one.name == "torch.sdpa-flash") is not None
    assert_close(ab.attention(*arrays, mask=asked), ab.attention(*arrays, mask=mask), 2e-6)
    policy.forget()


@pytest.mark.torch
def test_what_does_not_fit_is_refused_in_words():
    import torch

    arrays = [torch.from_numpy(x) for x in problem()[:3]]

    def lengths(values):
        return ab.masks.lengths(values, constant=False)

    with pytest.raises(InvalidWorkload, match="lengths has 3 batch rows, the call has 2"):
        ab.attention(*arrays, mask=lengths(torch.tensor([1, 2, 3])))
    with pytest.raises(InvalidWorkload, match=r"whole numbers with 1 axes, not float32"):
        lengths(torch.tensor([1.0, 2.0]))
    with pytest.raises(InvalidWorkload, match="valid must be booleans with 1 or 2 axes, not int64"):
        ab.masks.valid(torch.tensor([1, 0]), constant=False)
    with pytest.raises(InvalidWorkload, match="valid covers 5 tokens, kv_len is 6"):
        ab.attention(*arrays, mask=ab.masks.valid(torch.ones(5, dtype=torch.bool), constant=False))
    ids = torch.zeros(6, dtype=torch.int32)
    with pytest.raises(InvalidWorkload, match="documents q_ids covers 6 tokens, q_len is 4"):
        ab.attention(*arrays, mask=ab.masks.documents(ids, ids, constant=False))
    with pytest.raises(InvalidWorkload, match="the mask is on meta"):
        ab.attention(*arrays, mask=lengths(torch.zeros(2, dtype=torch.int32, device="meta")))
    with pytest.raises(InvalidWorkload, match="both must be torch tensors or JAX arrays"):
        ab.attention(*[x.numpy() for x in arrays], mask=lengths(torch.tensor([1, 2])))
    with pytest.raises(Unsupported, match=r"torch\.sdpa-math .*: does not take a mask as an argument"):
        ab.attention(*arrays, mask=lengths(torch.tensor([1, 2])), impl="torch.sdpa-math")
    bias = ab.masks.dense(np.full((1, 6), -1e9, np.float32))
    with pytest.raises(Unsupported, match="no large bias together with a mask on the device"):
        ab.attention(*arrays, mask=bias & lengths(torch.tensor([1, 2])), impl="torch.eager")


@pytest.mark.torch
def test_autocast_checkpointing_and_vmap():
    import torch
    from torch.utils.checkpoint import checkpoint

    *arrays, dout = problem()
    n = torch.tensor([5, 2])

    def call(q, k, v, n=n):
        return ab.attention(q, k, v, mask=ab.masks.causal() & ab.masks.lengths(n, constant=False))

    (out, _), gradients = wanted(*arrays, dout, ab.masks.causal() & ab.masks.lengths([5, 2]))
    got, found = in_torch(lambda *x: checkpoint(call, *x, use_reentrant=False), arrays, dout)
    assert_close(got, out)
    for one, want in zip(found, gradients):
        assert_close(one, want, 5e-5)
    tensors = [torch.from_numpy(x) for x in arrays]
    with torch.autocast("cpu", torch.bfloat16):
        low = call(*tensors)
    assert low.dtype == torch.bfloat16
    assert_close(low.float(), out, 0.05)
    many = [torch.stack([x, x.flip(0)]) for x in tensors]
    got = torch.func.vmap(call)(*many, torch.stack([n, n.flip(0)]))
    assert_close(got, np.stack([out, out[::-1]]))


@pytest.mark.jax
def test_vmap_in_jax():
    import jax

    *arrays, dout = problem()
    (out, _), _ = wanted(*arrays, dout, ab.masks.lengths([5, 2]))
    one_row = jax.vmap(lambda q, k, v, n: ab.attention(q[None], k[None], v[None], mask=ab.masks.lengths(n[None]))[0])
    assert_close(one_row(*arrays, jax.numpy.array([5, 2])), out)


# Packed sequences.


def packed_reference(q, k, v, dout, q_lengths, k_lengths, mask, **words):
    """Output, LSE [heads, tokens] and gradients of each sequence by itself."""
    out, lse = np.zeros(q.shape), np.full((q.shape[1], q.shape[0]), -np.inf)
    grads = [np.zeros(x.shape) for x in (q, k, v)]
    q_at = k_at = 0
    for n, m in zip(q_lengths, k_lengths):
        rows, keys = slice(q_at, q_at + n), slice(k_at, k_at + m)
        q_at, k_at = q_at + n, k_at + m
        if n and m:
            parts = [x[None, at] for x, at in ((q, rows), (k, keys), (v, keys), (dout, rows))]
            (one, one_lse), found = wanted(*parts, mask, **words)
            out[rows], lse[:, rows] = one[0], one_lse[0]
            for whole, part, at in zip(grads, found, (rows, keys, keys)):
                whole[at] = part[0]
    return out, lse, grads


def offsets_of(framework, lengths):
    return array(framework, np.cumsum([0, *lengths]).astype(np.int32))


def packed_problem(q_lengths, k_lengths, tail=0, seed=0):
    return drawn((sum(q_lengths) + tail, HEADS, DIM), (sum(k_lengths) + tail, KV_HEADS, DIM), seed)


LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.data())
def test_packed_sequences_are_computed_one_by_one(framework, q_lengths, data):
    k_lengths = data.draw(
        st.none() | st.lists(st.integers(0, 6), min_size=len(q_lengths), max_size=len(q_lengths)).filter(any)
    )
    fixed = FIXED[data.draw(st.sampled_from(list(FIXED)))]
    known, tail = data.draw(st.booleans()), data.draw(st.sampled_from([0, 0, 3]))
    impl = data.draw(st.sampled_from(IMPLS[framework]))
    *arrays, dout = packed_problem(q_lengths, k_lengths or q_lengths, tail)
    out, _, gradients = packed_reference(*arrays, dout, q_lengths, k_lengths or q_lengths, fixed)
    words = {
        "cu_seqlens_q": offsets_of(framework, q_lengths),
        "cu_seqlens_k": None if k_lengths is None else offsets_of(framework, k_lengths),
        "max_seqlen_q": max(q_lengths) if known else None,
        "max_seqlen_k": max(k_lengths or q_lengths) if known else None,
    }
    run = {"torch": in_torch, "jax": in_jax}[framework]
    got, found = run(lambda *x: ab.attention_varlen(*x, **words, mask=fixed, impl=impl), arrays, dout)
    assert_close(got, out)
    for one, want in zip(found, gradients):
        assert_close(one, want, 5e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("known", [False, True], ids=["no largest length", "largest length"])
def test_the_lse_and_a_soft_cap_of_packed_sequences(framework, known):
    lengths, words = [5, 0, 7, 1], {"softcap": 1.5}
    *arrays, dout = packed_problem(lengths, lengths)
    out, lse, _ = packed_reference(*arrays, dout, lengths, lengths, ab.masks.causal(), **words)
    got, found = ab.attention_varlen(
        *[array(framework, x) for x in arrays], offsets_of(framework, lengths), mask=ab.masks.causal(),
        max_seqlen_q=7 if known else None, max_seqlen_k=7 if known else None, return_lse=True, **words,
    )  # fmt: skip
    assert_close(got, out)
    assert_close(found, lse)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_packed_equals_padded(framework):
    lengths = [6, 2]
    q, k, v, _ = problem(6, 6)
    packed = [np.concatenate([row[:n] for row, n in zip(x, lengths)]) for x in (q, k, v)]
    padded = ab.attention(*[array(framework, x) for x in (q, k, v)], mask=ab.masks.causal() & ab.masks.lengths(lengths))
    got = ab.attention_varlen(
        *[array(framework, x) for x in packed], offsets_of(framework, lengths), mask=ab.masks.causal()
    )
    assert_close(got, np.concatenate([row[:n] for row, n in zip(np.asarray(padded), lengths)]), 2e-6)


@pytest.mark.torch
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("known", [False, True], ids=["no largest length", "largest length"])
def test_one_graph_serves_all_offsets_and_numbers_of_tokens(known, grad):
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def function(q, k, v, cu):
        return ab.attention_varlen(q * 1, k, v, cu, None, 9 if known else None, 9 if known else None, mask=CAUSAL)

    call = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([4, 9, 3], [5, 2, 6], [0, 7, 1], [9, 9, 9]):
        *arrays, dout = packed_problem(lengths, lengths)
        out, _, gradients = packed_reference(*arrays, dout, lengths, lengths, CAUSAL)
        cu = offsets_of("torch", lengths)
        if grad:
            got, found = in_torch(lambda *x: call(*x, cu), arrays, dout)  # noqa: B023
            for one, want in zip(found, gradients):
                assert_close(one, want, 5e-5)
        else:
            got = call(*map(torch.from_numpy, arrays), cu)
        assert_close(got, out)
    assert counter.frame_count == 1


CAUSAL = ab.masks.causal()


@pytest.mark.jax
def test_offsets_of_numpy_are_constants_of_a_program():
    import jax

    lengths = [4, 0, 3]
    *arrays, dout = packed_problem(lengths, lengths)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    got = jax.jit(lambda *x: ab.attention_varlen(*x, cu, None, np.int64(4), np.int64(4), mask=CAUSAL))(*arrays)
    assert_close(got, packed_reference(*arrays, dout, lengths, lengths, CAUSAL)[0])


@pytest.mark.jax
def test_one_trace_serves_all_offsets_and_padding_may_follow_the_last():
    import jax

    traces = []

    @jax.jit
    def loss(q, k, v, cu, dout):
        traces.append(1)
        return (ab.attention_varlen(q, k, v, cu, None, 8, 8, mask=CAUSAL) * dout).sum()

    for lengths in ([4, 8, 3], [0, 2, 6], [8, 8, 8]):
        *arrays, dout = packed_problem(lengths, lengths, tail=24 - sum(lengths))
        _, _, gradients = packed_reference(*arrays, dout, lengths, lengths, CAUSAL)
        found = jax.grad(loss, argnums=(0, 1, 2))(*arrays, offsets_of("jax", lengths), dout)
        for one, want in zip(found, gradients):
            assert_close(one, want, 5e-5)
    assert len(traces) == 1


@pytest.mark.torch
def test_plans_of_packed_sequences_are_kept_by_doublings():
    import torch

    for lengths in ([4, 9, 3], [5, 2, 10], [0, 17, 11]):
        *arrays, _ = packed_problem(lengths, lengths)
        out = ab.attention_varlen(*map(torch.from_numpy, arrays), offsets_of("torch", lengths), mask=CAUSAL)
        assert_close(out, packed_reference(*arrays, np.zeros_like(arrays[0]), lengths, lengths, CAUSAL)[0])
    assert len(device_masks.PLANS) == 1


@pytest.mark.torch
def test_packed_arrays_that_do_not_fit_are_refused_in_words():
    import torch

    q, k, v, _ = map(torch.from_numpy, packed_problem([3, 2], [3, 2]))
    cu = offsets_of("torch", [3, 2])
    for wrong, words in (
        ((q, k, v, cu.long()), r"cu_seqlens_q must be an int32 array \[sequences \+ 1\], not int64 of shape \(3,\)"),
        ((q, k, v, [0, 3, 5]), "must be a 32-bit array of the inputs' framework, not list"),
        ((q, k, v, cu[:1]), r"not int32 of shape \(1,\)"),
        ((q, k, v, cu, cu[:2]), "must have one length, not 3 and 2"),
        ((q[:4], k, v, cu), "4 queries and 5 keys have different offsets"),
        ((q, k, v[:4], cu), "5 keys and 4 values"),
        ((q[None], k[None], v[None], cu), r"packed arrays are \[tokens, heads, dim\]"),
        ((q, k, v, cu, None, torch.tensor(3)), "max_seqlen_q must be a whole number"),
        ((q, k, v, cu.to("meta")), "the mask is on meta"),
    ):
        with pytest.raises(InvalidWorkload, match=words):
            ab.attention_varlen(*wrong)
    for mask in (ab.masks.lengths([3, 2]), ab.masks.lengths(torch.tensor([3, 2]), constant=False), "causal"):
        with pytest.raises(InvalidWorkload, match="inside of packed sequences is full, causal, window or prefix"):
            ab.attention_varlen(q, k, v, cu, mask=mask)
    for impl, words in (
        ("torch.sdpa-flash", "needs cuda"), ("torch.flex", "does not take"),
        ("torch.chunked", "does not take"),
    ):  # fmt: skip
        with pytest.raises(Unsupported, match=words):
            ab.attention_varlen(q, k, v, cu, impl=impl)


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["auto", "torch.eager"])
def test_the_lse_of_float64_beside_values(impl):
    import torch

    q, k, v = (torch.from_numpy(x).double() for x in problem(40, 40)[:3])
    lengths = [40, 3]
    _, want = ab.attention(q, k, v, mask=ab.masks.lengths(lengths), impl="torch.eager", return_lse=True)
    mask = ab.masks.lengths(torch.tensor(lengths), constant=False)
    _, lse = ab.attention(q, k, v, mask=mask, impl=impl, return_lse=True)
    assert lse.dtype == torch.float32
    assert_close(lse, want, 2e-6)


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["torch.eager", "torch.sdpa"])
def test_slopes_beside_values_in_one_graph(impl):
    import torch

    slopes = ab.masks.alibi(problem(40, 40)[0].shape[2])
    q, k, v = map(torch.from_numpy, problem(40, 40)[:3])

    def function(lengths):
        return ab.attention(q, k, v, mask=ab.masks.lengths(lengths) & slopes, impl=impl)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for lengths in ([40, 3], [7, 11]):
        want = ab.attention(q, k, v, mask=slopes & ab.masks.lengths(lengths), impl="torch.eager")
        assert_close(compiled(torch.tensor(lengths)), want, 2e-6)


def attend_packed(q, k, v, values, options):
    """flash-attention's function of packed sequences, in float32 by torch.eager."""
    import torch

    cu_q, cu_k, longest_q, longest_k = (
        values[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    )
    left, right = options.get("window_size", (-1, 0 if options["causal"] else -1))
    mask = ab.masks.window(*[None if side == -1 else side for side in (left, right)])
    with torch.enable_grad():
        leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
        out, lse = ab.attention_varlen(
            *leaves, cu_q, cu_k, longest_q, longest_k, mask=mask, scale=options["softmax_scale"],
            softcap=options.get("softcap") or None, impl="torch.eager", return_lse=True,
        )  # fmt: skip
    return leaves, out, lse.detach().masked_fill(lse.detach() == float("-inf"), float("inf"))


@pytest.fixture
def flash_on_cpu():
    """FlashAttention 2's adapter over a library with the same functions and words, which computes on a CPU."""
    from types import SimpleNamespace

    import torch

    from attnbench import registry
    from attnbench.impls.torch.flash_attention import FlashAttention2

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, values, options):
            leaves, out, lse = attend_packed(q, k, v, values, options)
            ctx.saved = leaves, out
            return out.detach().to(q.dtype), lse

        @staticmethod
        def backward(ctx, dout, _):
            leaves, out = ctx.saved
            return *[x.to(dout.dtype) for x in torch.autograd.grad(out, leaves, dout.float())], None, None

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, return_attn_probs=False,
    ):  # fmt: skip
        values = dict(zip(PACKED_WORDS, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)))
        options = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
        options |= {} if window_size == (-1, -1) else {"window_size": window_size}
        out, lse = Function.apply(q, k, v, values, options)
        return (out, lse, None) if return_attn_probs else out

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # fmt: skip
        assert not torch.isneginf(softmax_lse).any()
        values = dict(zip(PACKED_WORDS, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)))
        options = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
        if (window_size_left, window_size_right) != (-1, -1):
            options["window_size"] = (window_size_left, window_size_right)

        def gradients():
            leaves, again, _ = attend_packed(q, k, v, values, options)
            torch.testing.assert_close(again.to(out.dtype), out)
            return torch.autograd.grad(again, leaves, dout.float())

        with ThreadPoolExecutor(1) as elsewhere:  # an operator runs below autograd, another thread does not
            found = elsewhere.submit(gradients).result()
        for place, grad in zip((dq, dk, dv), found):
            place.copy_(grad)

    class OnCpu(FlashAttention2):
        name = "torch.flash-on-cpu"

        def available(self, environment):
            return None

        def library(self):
            return SimpleNamespace(
                flash_attn_varlen_func=flash_attn_varlen_func, _flash_attn_varlen_backward=_flash_attn_varlen_backward
            )

    with registry.restored():
        yield registry.register(OnCpu()).name


PACKED_WORDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@pytest.mark.torch
@pytest.mark.parametrize("compiled", [False, True], ids=["called", "an operator of a graph"])
@pytest.mark.parametrize("within", ["alone", "causal", "window"])
def test_libraries_get_the_words_of_flash_attention(flash_on_cpu, within, compiled):
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, mask = CompileCounterWithBackend("aot_eager"), FIXED[within]

    def function(q, k, v, cu_q, cu_k):
        return ab.attention_varlen(q * 1, k, v, cu_q, cu_k, 9, 9, mask=mask, impl=flash_on_cpu, softcap=3.0)

    call = torch.compile(function, backend=counter, fullgraph=True, dynamic=True) if compiled else function
    for q_lengths, k_lengths in (([5, 3, 9], [6, 0, 9]), ([2, 4, 1], [9, 2, 2]), ([9, 9, 9], [9, 9, 9])):
        *arrays, dout = [torch.from_numpy(x).bfloat16() for x in packed_problem(q_lengths, k_lengths)]
        leaves, wide = (
            [x.clone().to(kind).requires_grad_() for x in arrays] for kind in (torch.bfloat16, torch.float32)
        )
        cu = (offsets_of("torch", q_lengths), offsets_of("torch", k_lengths))
        out = call(*leaves, *cu)
        want = ab.attention_varlen(*wide, *cu, mask=mask, impl="torch.eager", softcap=3.0)
        torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)
        found = torch.autograd.grad(out, leaves, dout)
        for one, other in zip(found, torch.autograd.grad(want, wide, dout.float())):
            torch.testing.assert_close(one.float(), other, atol=5e-2, rtol=5e-2)
    assert counter.frame_count == compiled


@pytest.mark.torch
def test_the_lse_and_refusals_of_libraries(flash_on_cpu):
    import torch

    lengths = [4, 0, 3]
    arrays = [torch.from_numpy(x).bfloat16() for x in packed_problem(lengths, [2, 3, 2])[:3]]
    cu = (offsets_of("torch", lengths), offsets_of("torch", [2, 3, 2]))
    words = {"mask": CAUSAL, "return_lse": True}
    _, want = ab.attention_varlen(*[x.float() for x in arrays], *cu, impl="torch.eager", **words)
    _, lse = ab.attention_varlen(*arrays, *cu, impl=flash_on_cpu, **words)
    torch.testing.assert_close(lse, want, atol=1e-2, rtol=1e-2)
    assert torch.isneginf(lse[:, :2]).all()
    with pytest.raises(Unsupported, match="top-left needs keys with the offsets of the queries"):
        ab.attention_varlen(*arrays, *cu, mask=ab.masks.causal("top-left"), impl=flash_on_cpu)
    with pytest.raises(Unsupported, match="has no prefix mask"):
        ab.attention_varlen(*arrays, *cu, mask=ab.masks.prefix(2), impl=flash_on_cpu)
    q = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="takes lengths of host data only, not on the device"):
        ab.attention(q, q, q, mask=ab.masks.lengths(torch.tensor([2]), constant=False), impl=flash_on_cpu)
