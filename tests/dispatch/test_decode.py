"""ab.decode: every implementation's cache form against the whole, contiguous and in pages; graphs, plans, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from cache_problem import Problem, cache_of, dense, must_agree
from hypothesis import given, settings
from hypothesis import strategies as st

import attnbench as ab
from attnbench import registry
from attnbench.dispatch import decode as decoding
from attnbench.dispatch.choice import READ_CACHES, READ_CACHES_ON_CPU, forget
from attnbench.errors import InvalidWorkload, Unsupported
from attnbench.impls.torch import _caches

CASES = {
    "one query": Problem((5, 64, 33)),
    "an empty sequence": Problem((0, 7)),
    "all are empty": Problem((0, 0), queries=2),
    "equal lengths": Problem((40, 40, 40), queries=3),
    "fewer tokens than queries": Problem((2, 0, 20, 8), queries=8),
    "soft cap": Problem((9, 64), queries=2, softcap=1.5),
    "window": Problem((9, 64, 3), queries=4, window=6),
    "window of one": Problem((9, 64), window=0),
    "one key head": Problem((17, 5), heads=6, kv_heads=1),
    "no groups, a scale": Problem((17, 5), heads=3, kv_heads=3, scale=0.7),
    "negative scale": Problem((17, 5), queries=2, scale=-0.3),
    "narrow values": Problem((17, 5), v_dim=8),
}
PAGES = {
    "pages of 1": Problem((5, 20, 0), page_size=1, capacity=24),
    "pages of 16": Problem((5, 64, 33, 16), queries=2, page_size=16),
    "pages of 64": Problem((100, 0, 64, 65), page_size=64, capacity=128),
    "pages of 256": Problem((300, 256, 1), page_size=256, capacity=512, queries=3),
    "a shared prefix": Problem((50, 40, 33), page_size=8, shared=32, queries=2),
    "pages and window": Problem((50, 3, 16), page_size=8, window=10, queries=3),
    "pages and soft cap": Problem((50, 3, 16), page_size=8, softcap=2.0),
}
ALL = CASES | PAGES
TORCH = ("auto", "torch.eager", "torch.sdpa-flash")


def in_torch(problem, dtype="float32", **how):
    """Run a problem in torch; return (out, lse) and what is right, both as NumPy's."""
    import torch

    kind = getattr(torch, dtype)
    k, v, table = problem.cache_arrays()
    q = problem.tokens()[0]
    k, v, q = (torch.as_tensor(x).to(kind) for x in (k, v, q))
    cache = cache_of(k, v, None if table is None else torch.as_tensor(table), list(problem.lengths))
    found = ab.decode(q, cache, return_lse=True, **problem.words, **how)
    expected = problem.expected(lambda x: torch.as_tensor(x).to(kind).double().numpy())
    return [x.double().numpy() for x in found], expected


def refused(name, problem):
    narrow = problem.v_dim != problem.dim
    return name == "torch.sdpa-flash" and (problem.softcap is not None or narrow)


@pytest.mark.torch
@pytest.mark.parametrize("impl", TORCH)
@pytest.mark.parametrize("case", ALL)
def test_torch_equals_the_whole(case, impl):
    """Garbage, NaN, behind the end of every sequence, and entries of the table that are no pages."""
    if refused(impl, ALL[case]):
        with pytest.raises(Unsupported, match=r"has no softcap|needs v_head_dim = head_dim"):
            in_torch(ALL[case], impl=impl)
    else:
        must_agree(*in_torch(ALL[case], impl=impl))


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["auto", "torch.eager"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("case", ["fewer tokens than queries", "pages of 16", "window"])
def test_other_dtypes(case, dtype, impl):
    must_agree(*in_torch(ALL[case], dtype, impl=impl), dtype if dtype != "float64" else "float32")


@pytest.mark.torch
@pytest.mark.parametrize("case", ["fewer tokens than queries", "pages and window", "a shared prefix", "equal lengths"])
@pytest.mark.parametrize("impl", TORCH)
def test_in_chunks_of_keys(case, impl, monkeypatch):
    monkeypatch.setattr(_caches, "CPU_CHUNK_BYTES", 8 * 2 * 16 * 4)
    must_agree(*in_torch(ALL[case], impl=impl))


@pytest.mark.parametrize("impl", ["auto", "numpy.reference"])
@pytest.mark.parametrize("case", ALL)
def test_numpy_equals_the_whole(case, impl):
    problem = ALL[case]
    k, v, table = problem.cache_arrays()
    cache = cache_of(k, v, table, np.array(problem.lengths, np.int32))
    found = ab.decode(problem.tokens()[0], cache, return_lse=True, impl=impl, **problem.words)
    must_agree(found, problem.expected())


def in_jax(problem, jit=False, dtype="float32", **how):
    import jax
    import jax.numpy as jnp

    k, v, table = problem.cache_arrays()
    q, k, v = (jnp.asarray(x).astype(dtype) for x in (problem.tokens()[0], k, v))
    cache = cache_of(k, v, None if table is None else jnp.asarray(table), jnp.asarray(problem.lengths, jnp.int32))

    def call(q, cache):
        return ab.decode(q, cache, return_lse=True, **problem.words, **how)

    found = (jax.jit(call) if jit else call)(q, cache)
    return [np.asarray(x, np.float64) for x in found]


@pytest.mark.jax
@pytest.mark.parametrize("case", ALL)
def test_jax_equals_the_whole(case):
    must_agree(in_jax(ALL[case]), ALL[case].expected())


@pytest.mark.jax
@pytest.mark.parametrize("case", ["fewer tokens than queries", "pages of 16"])
def test_jax_in_a_program_and_in_bfloat16(case):
    import jax.numpy as jnp

    must_agree(in_jax(ALL[case], jit=True), ALL[case].expected())
    rounded = ALL[case].expected(lambda x: np.asarray(jnp.asarray(x).astype("bfloat16"), np.float64))
    must_agree(in_jax(ALL[case], dtype="bfloat16"), rounded, "bfloat16")


@st.composite
def problems(draw):
    page_size = draw(st.sampled_from([None, 1, 2, 4, 16]))
    capacity = draw(st.integers(1, 40))
    sequences = draw(st.integers(1, 4))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Problem(
        tuple(draw(st.lists(st.integers(0, capacity), min_size=sequences, max_size=sequences))),
        queries=draw(st.integers(1, 8)), heads=kv_heads * draw(st.sampled_from([1, 2, 4])), kv_heads=kv_heads,
        dim=8, v_dim=8, page_size=page_size, capacity=capacity, scale=draw(st.sampled_from([None, 0.5, 3.0])),
        softcap=draw(st.sampled_from([None, None, 2.0])), window=draw(st.sampled_from([None, 0, 3, 100])),
        shared=draw(st.integers(0, 20)), seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@pytest.mark.torch
@settings(max_examples=120)
@given(problems())
def test_any_problem(problem):
    for impl in ("auto", "torch.eager"):
        must_agree(*in_torch(problem, impl=impl))


@pytest.mark.torch
@pytest.mark.parametrize("page_size", [None, 4, 16])
@pytest.mark.parametrize("impl", ["torch.sdpa-flash", "torch.eager"])
def test_the_lab_verifies_a_cache_like_any_kernel(impl, page_size):
    """With its own checks: unseen keys, permuted heads, exactness under powers of two, hidden NaN and others."""
    import torch

    lengths, size = [40, 21], page_size or 48

    def call(q, k, v):
        table = torch.randperm(2 * 48 // size, generator=torch.Generator().manual_seed(3)).int().view(2, -1)
        order = table.flatten().long()
        if page_size is None:
            return ab.decode(q, ab.ContiguousCache(k, v, lengths), impl=impl)
        parts = (x.reshape(-1, size, *x.shape[2:]) for x in (k, v))
        pages = (torch.empty_like(x).index_copy(0, order, x) for x in parts)
        return ab.decode(q, ab.PagedCache(*pages, table, lengths), impl=impl)

    mask = ab.masks.lengths(lengths)
    record = ab.verify(call, ab.Workload(batch=2, q_len=1, kv_len=48, heads=4, kv_heads=2, head_dim=16, mask=mask))
    assert record.status == "ok", record.reason
    assert record.errors.hidden_nan == "contained"
    assert len(record.errors.properties) > 8


MISTAKES = {
    "a key too many": lambda table, lengths: (table, [min(one + 1, 64) for one in lengths]),
    "a key too few": lambda table, lengths: (table, [max(one - 1, 0) for one in lengths]),
    "lengths of other rows": lambda table, lengths: (table, lengths[::-1]),
    "the last page first": lambda table, lengths: (table[:, [4, 1, 2, 3, 0, *range(5, table.shape[1])]], lengths),
    "the table of another row": lambda table, lengths: (table[::-1].copy(), lengths),
}


@pytest.mark.torch
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_finds(mistake):
    import torch

    problem = Problem((50, 40, 33), page_size=8, queries=2)
    k, v, table = (torch.as_tensor(x) for x in problem.cache_arrays(poison=1.0))
    table = table.clamp(0, len(k) - 1).numpy()
    wrong, lengths = MISTAKES[mistake](table, list(problem.lengths))
    found = ab.decode(
        torch.as_tensor(problem.tokens()[0]), ab.PagedCache(k, v, torch.as_tensor(wrong), lengths), return_lse=True
    )
    with pytest.raises(AssertionError):
        must_agree(found, problem.expected())


# Growing


def grown(framework, paged):
    """Decode token after token, with appended keys; return all outputs [b, n, h, d] and what one pass gives."""
    problem = Problem((11, 11), queries=11)
    q, k, v = problem.tokens()
    k, v = np.stack(k), np.stack(v)
    shape = (2, 16, 2, 16)
    if framework == "torch":
        import torch

        make, read = torch.as_tensor, lambda x: x.numpy()
    elif framework == "jax":
        import jax.numpy as jnp

        make, read = jnp.asarray, np.asarray
    else:
        make = read = np.array
    if paged:
        pages = [make(np.full((9, 4, 2, 16), np.nan, np.float32)) for _ in range(2)]
        cache = ab.PagedCache(*pages, make(np.array([[3, 1, 8, 0], [2, 7, 4, 6]], np.int32)), 0)
    else:
        cache = ab.ContiguousCache(*(make(np.full(shape, np.nan, np.float32)) for _ in range(2)), 0)
    q, k, v = (make(x) for x in (q, k, v))
    outs = []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9), (9, 10), (10, 11)):
        cache = cache.append(k[:, start:stop], v[:, start:stop])
        outs.append(read(ab.decode(q[:, start:stop], cache)))
    assert [int(one) for one in cache.lengths] == [11, 11]
    return np.concatenate(outs, axis=1), problem.expected()[0]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "framework",
    ["numpy", pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)],
)
def test_decoding_while_the_cache_grows_equals_one_pass(framework, paged):
    found, expected = grown(framework, paged)
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.torch
def test_appending_writes_in_place_and_keeps_the_lengths_tensor():
    import torch

    lengths = torch.tensor([1, 3], dtype=torch.int32)
    k, v = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    cache = ab.ContiguousCache(k, v, lengths)
    assert cache.lengths is lengths
    assert cache.append(torch.ones(2, 1, 1, 8), torch.full((2, 1, 1, 8), 2.0)) is cache
    assert lengths.tolist() == [2, 4]
    assert k[0, :, 0, 0].tolist() == [0, 1, 0, 0]
    assert v[1, :, 0, 0].tolist() == [0, 0, 0, 2]
    with pytest.raises(InvalidWorkload, match="a sequence of 4 tokens has no room for 1 more"):
        cache.append(torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8))


@pytest.mark.jax
def test_a_cache_goes_through_jit_and_scan():
    import jax
    import jax.numpy as jnp

    problem = Problem((6, 6), queries=6)
    q, k, v = problem.tokens()
    k, v = np.stack(k), np.stack(v)
    cache = ab.ContiguousCache(jnp.zeros((2, 8, 2, 16)), jnp.zeros((2, 8, 2, 16)), 0)

    def step(cache, now):
        q, k, v = (x[:, None] for x in now)
        cache = cache.append(k, v)
        return cache, ab.decode(q, cache)[:, 0]

    tokens = tuple(jnp.asarray(x).swapaxes(0, 1) for x in (q, k, v))
    cache, out = jax.jit(lambda cache, tokens: jax.lax.scan(step, cache, tokens))(cache, tokens)
    np.testing.assert_allclose(np.asarray(out).swapaxes(0, 1), problem.expected()[0], atol=3e-6)
    assert isinstance(cache, ab.ContiguousCache)
    assert cache.lengths.tolist() == [6, 6]


@pytest.mark.jax
def test_lengths_and_tables_of_numpy_are_taken_by_jax():
    import jax
    import jax.numpy as jnp

    pages = jnp.zeros((5, 4, 2, 16))
    cache = ab.PagedCache(pages, pages, np.array([[3, 1], [0, 4]], np.int32), np.array([3, 4], np.int32))
    token = jnp.ones((2, 1, 2, 16))
    cache = jax.jit(lambda cache: cache.append(token, token))(cache)
    assert cache.lengths.tolist() == [4, 5]
    assert float(cache.k_pages[3, 3].sum()) == float(cache.k_pages[4, 0].sum()) == 32


# Graphs and plans


@pytest.mark.torch
@pytest.mark.parametrize("paged", [False, True])
def test_one_graph_for_all_lengths(paged):
    """A compiled step that appends and decodes: no break, compiled once, equal to the same in eager mode."""
    import torch

    graphs = []

    def backend(module, example):
        graphs.append(module)
        return module.forward

    def step(q, k, v, cache):
        cache.append(k, v)
        return ab.decode(q, cache, return_lse=True)

    def cache():
        if paged:
            table = torch.tensor([[3, 1, 8, 0], [2, 7, 4, 6]], dtype=torch.int32)
            return ab.PagedCache(torch.zeros(9, 4, 2, 16), torch.zeros(9, 4, 2, 16), table, [3, 0])
        return ab.ContiguousCache(torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16), [3, 0])

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    mine, theirs = cache(), cache()
    with torch.no_grad():
        for _ in range(10):
            arrays = [torch.randn(2, 1, heads, 16) for heads in (4, 2, 2)]
            for a, b in zip(compiled(*arrays, mine), step(*arrays, theirs)):
                torch.testing.assert_close(a, b)
    assert len(graphs) == 1
    assert mine.lengths.tolist() == [13, 10]


@pytest.mark.torch
def test_caches_may_be_made_inside_a_graph():
    import torch

    def call(q, k, v, lengths):
        return ab.decode(q, ab.ContiguousCache(k, v, lengths))

    q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 8, 2, 16)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with torch.no_grad():
        for lengths in ([3, 8], [1, 1]):
            lengths = torch.tensor(lengths, dtype=torch.int32)
            torch.testing.assert_close(compiled(q, k, k, lengths), call(q, k, k, lengths))


@pytest.mark.torch
def test_meta_tensors_and_exported_programs():
    import torch

    class Layer(torch.nn.Module):
        def forward(self, q, k, lengths):
            return ab.decode(q, ab.ContiguousCache(k, k, lengths))

    arrays = torch.randn(2, 1, 4, 16), torch.randn(2, 8, 2, 16), torch.tensor([3, 8], dtype=torch.int32)
    with torch.no_grad():
        program = torch.export.export(Layer(), arrays)
        for lengths in (arrays[2], torch.tensor([8, 0], dtype=torch.int32)):
            torch.testing.assert_close(program.module()(*arrays[:2], lengths), Layer()(*arrays[:2], lengths))
    assert Layer()(*(x.to("meta") for x in arrays)).shape == (2, 1, 4, 16)


@pytest.mark.torch
def test_the_operator_follows_torchs_rules():
    import torch

    from attnbench.dispatch.decode_operator import operator

    q, k = torch.randn(2, 3, 4, 16), torch.randn(5, 4, 2, 16)
    table, lengths = torch.tensor([[1, 2], [0, 4]], dtype=torch.int32), torch.tensor([3, 8], dtype=torch.int32)
    torch.library.opcheck(operator, (q, k, k, lengths, table, None, None, 3, "auto"))


@pytest.mark.torch
def test_one_plan_for_each_doubling_of_the_capacity():
    import torch

    decoding._PLANS.clear()
    q = torch.randn(1, 1, 4, 16)
    for capacity in range(65, 129):
        k = torch.randn(1, capacity, 2, 16)
        ab.decode(q, ab.ContiguousCache(k, k, capacity - 3))
    assert len(decoding._PLANS) == 2, "65 to 127, and 128"


@pytest.mark.torch
def test_what_cannot_run_gives_way_to_the_next(monkeypatch):
    import torch

    def refusing(*arrays):
        raise Unsupported("torch.sdpa-flash: no kernel today.")

    q, k = torch.randn(1, 1, 4, 16), torch.randn(1, 9, 2, 16)
    whole = ab.decode(q, ab.ContiguousCache(k, k, 9))
    decoding._PLANS.clear()
    forget()
    monkeypatch.setattr(type(registry.get("torch.sdpa-flash")), "decode", lambda *a: refusing)
    with pytest.warns(UserWarning, match=r"torch\.eager is used instead"):
        found = ab.decode(q, ab.ContiguousCache(k, k, 9))
    torch.testing.assert_close(found, whole)
    forget()
    decoding._PLANS.clear()


# Layouts, and what is refused


@pytest.mark.torch
def test_views_of_other_layouts():
    """Heads before tokens (HND), keys and values joined in one array, a capacity cut from a larger one."""
    import torch

    problem = CASES["fewer tokens than queries"]
    k, v, _ = (None if x is None else torch.as_tensor(x) for x in problem.cache_arrays())
    q = torch.as_tensor(problem.tokens()[0])
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    joined = torch.stack([k, v], dim=3)
    longer = [torch.cat([x, x], 1)[:, :64] for x in (k, v)]
    for keys, values in (turned, (joined[..., 0, :], joined[..., 1, :]), longer):
        cache = ab.ContiguousCache(keys, values, torch.tensor(problem.lengths))
        for impl in ("auto", "torch.eager"):
            must_agree(ab.decode(q, cache, return_lse=True, impl=impl), problem.expected())
    strided = torch.stack([q, q], dim=4)[..., 0]
    assert strided.stride(3) == 2
    must_agree(ab.decode(strided, ab.ContiguousCache(k, v, list(problem.lengths)), return_lse=True), problem.expected())


@pytest.mark.torch
def test_arrays_that_do_not_go_together():
    import torch

    k, q = torch.zeros(2, 8, 2, 16), torch.zeros(2, 1, 4, 16)
    table = torch.zeros(2, 3, dtype=torch.int32)
    cache = ab.ContiguousCache(k, k, 8)
    for make, words in (
        (lambda: ab.ContiguousCache(k, k[:, :4], 3), "keys and values of a cache are"),
        (lambda: ab.ContiguousCache(k, k, torch.zeros(3, dtype=torch.int32)), "one length for each"),
        (lambda: ab.ContiguousCache(k, k, torch.zeros(2)), "lengths must be int32"),
        (lambda: ab.ContiguousCache(k, k.double(), 3), "must have one dtype"),
        (lambda: ab.ContiguousCache(k.transpose(2, 3), k.transpose(2, 3), 3), "side by side"),
        (lambda: ab.ContiguousCache(k, k, torch.zeros(2, dtype=torch.int32, device="meta")), "must be on the device"),
        (lambda: ab.ContiguousCache([1.0], [1.0], 1), "made of arrays of torch, JAX or NumPy"),
        (lambda: ab.PagedCache(k, k, table.float(), 3), "block_table must be int32"),
        (lambda: ab.PagedCache(k, k, 3, 3), "block_table must be an array"),
        (lambda: ab.decode(q[:1], cache), "with 2 sequences and dim 16"),
        (lambda: ab.decode(q.double(), cache), "must have the dtype of the cache"),
        (lambda: ab.decode(q.to("meta"), cache), "must be on the device of the cache"),
        (lambda: ab.decode(q[:, :, :3], cache), "cannot share 2 key/value heads"),
        (lambda: ab.decode(q, (k, k)), "must be a ContiguousCache or PagedCache"),
        (lambda: ab.decode(q, cache, window=-1), "window"),
        (lambda: cache.append(k[:1], k[:1]), "new k must be"),
        (lambda: cache.append(k.double(), k.double()), "dtype of the cache"),
    ):
        with pytest.raises(InvalidWorkload, match=words):
            make()


@pytest.mark.torch
def test_gradients_are_refused_and_names_obeyed():
    import torch

    k, q = torch.zeros(2, 8, 2, 16), torch.zeros(2, 1, 4, 16, requires_grad=True)
    cache = ab.ContiguousCache(k, k, 8)
    with pytest.raises(Unsupported, match="computes no gradients"):
        ab.decode(q, cache)
    with pytest.raises(Unsupported, match="reads no KV caches"):
        ab.decode(q.detach(), cache, impl="torch.chunked")
    with pytest.raises(Unsupported, match="on a CPU alone"):
        ab.decode(q.detach(), cache, impl="torch.sdpa-math")
    with torch.autocast("cpu"), torch.no_grad():
        assert ab.decode(q, cache).dtype == torch.float32


@pytest.mark.torch
def test_explain_tells_who_reads_the_cache_and_who_does_not():
    import torch

    q, k = torch.zeros(2, 2, 4, 16), torch.zeros(2, 20, 2, 16)
    told = decoding.explain(q, ab.ContiguousCache(k, k, 8))
    assert (told.pick, told.workload.kv_len, told.device) == ("torch.sdpa-flash", 32, "cpu")
    assert told.workload.visible_mask == ab.masks.causal()
    told = decoding.explain(q, ab.ContiguousCache(k, k, 8), softcap=2.0)
    assert told.pick == "torch.eager"
    assert "torch.sdpa-flash: has no softcap" in str(told)
    told = decoding.explain(q, ab.ContiguousCache(k, k, 8), impl="torch.triton-decode")
    assert told.pick is None
    assert "needs cuda, this is cpu" in str(told)


def test_on_a_gpu_kernels_that_split_keys_come_first(monkeypatch):
    """The choice for a cache of a device that is not here, by capability and what is installed."""
    pytest.importorskip("torch")
    from attnbench.dispatch import choice
    from attnbench.dispatch.demand import Demand
    from attnbench.spec import Environment, Workload

    def pick(capability, page_size=None, **shape):
        place = Environment(device="cuda", device_name="a GPU", framework="torch", capability=capability)
        monkeypatch.setattr(choice, "environment_of", lambda framework, device: place)
        monkeypatch.setattr(Demand, "environment", property(lambda self: place))
        shape = {"batch": 1, "q_len": 1, "kv_len": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, **shape}
        workload = Workload(**{"dtype": "bfloat16", **shape})
        return choice.decide("auto", Demand(workload, "torch", "cuda", form="cache", page_size=page_size))

    assert pick((9, 0)).label == "torch.triton-decode"
    assert pick((8, 9), page_size=16).label == "torch.triton-decode"
    assert pick((7, 5)).label == "torch.eager"
    assert pick((9, 0), dtype="float64").label == "torch.eager"
    assert pick((9, 0), softcap=30.0).label == "torch.triton-decode"
    reasons = dict(pick((7, 5), page_size=16).candidates)
    assert "8.0" in reasons["torch.triton-decode"]
    assert reasons["torch.flash-attn"]
    assert not {"torch.fa3", "torch.fa4"} & reasons.keys()  # which let a NaN behind the end of a sequence through


def test_the_orders_name_what_reads_caches():
    for order in (*READ_CACHES.values(), *READ_CACHES_ON_CPU.values()):
        for name in order:
            kind = type(registry.get(name))
            assert any("decode" in vars(base) for base in kind.__mro__[:-1] if base.__name__ != "Implementation"), name


def test_dense_is_softmax_of_what_is_seen():
    """The yardstick itself, on a case worked out by hand: two equal keys, the mean of their values."""
    problem = Problem((2,), heads=1, kv_heads=1, dim=2, v_dim=2)
    out, lse = dense(np.ones((1, 1, 2)), np.ones((2, 1, 2)), np.array([[[0.0, 2.0]], [[4.0, 6.0]]]), 2, problem)
    np.testing.assert_allclose(out, [[[2.0, 4.0]]])
    np.testing.assert_allclose(lse, [[2**0.5 + np.log(2)]])


ONE_QUERY = {
    "contiguous": Problem((5, 64, 33), dim=64, v_dim=64, heads=8),
    "an empty sequence": Problem((0, 7), dim=64, v_dim=64),
    "pages of 16": Problem((5, 64, 33, 16), dim=128, v_dim=128, page_size=16),
}


@pytest.mark.gpu
@pytest.mark.jax
@pytest.mark.parametrize("impl", ["auto", "jax.cudnn", "jax.einsum"])
@pytest.mark.parametrize("case", ONE_QUERY)
def test_jax_on_a_gpu(case, impl):
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU here")
    rounded = ONE_QUERY[case].expected(lambda x: np.asarray(jnp.asarray(x).astype("bfloat16"), np.float64))
    must_agree(in_jax(ONE_QUERY[case], jit=True, dtype="bfloat16", impl=impl), rounded, "bfloat16")
    told = decoding.explain(
        jnp.zeros((1, 1, 8, 64), jnp.bfloat16), ab.ContiguousCache(*[jnp.zeros((1, 64, 2, 64), jnp.bfloat16)] * 2, 5)
    )
    assert told.pick == "jax.cudnn"
