"""torch.triton-decode: the kernels' numbers on a GPU, and on any machine in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.torch

from cache_problem import POISON, Problem, cache_of, must_agree

import attnbench as ab
from attnbench.errors import Unsupported
from attnbench.impls.torch.eager import EAGER
from attnbench.kernels.decode import torch_impls
from attnbench.kernels.decode.torch_impls import TRITON_DECODE
from attnbench.spec import Environment, Workload

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, with TRITON_INTERPRET=1")
CPU = Environment(device="cpu", device_name="test")
CUDA = Environment(device="cuda", device_name="test", capability=(9, 0))
CASES = {
    "unequal, one empty": Problem((0, 5, 64, 33)),
    "all empty": Problem((0, 0), queries=2),
    "several shares": Problem((1000, 3, 257), capacity=1024, queries=2),
    "fewer tokens than queries": Problem((2, 0, 20, 8), queries=8, heads=8),
    "window over several shares": Problem((1000, 3, 257), capacity=1024, queries=3, window=300),
    "negative scale": Problem((17, 5), queries=2, scale=-0.3),
    "odd widths": Problem((40, 9), dim=40, v_dim=24, heads=6, kv_heads=2),
    "rows beyond a tile": Problem((70, 9), queries=9, heads=8, kv_heads=1, dim=256, v_dim=256, capacity=80),
    "pages of 1": Problem((5, 20, 0), page_size=1, capacity=24),
    "pages of 16": Problem((5, 64, 33, 16), queries=2, page_size=16),
    "pages of 24": Problem((600, 64, 24), queries=2, page_size=24, capacity=700),
    "pages of 64, shared": Problem((300, 200, 64, 65), page_size=64, capacity=512, shared=128),
    "pages of 256": Problem((700, 256, 1), page_size=256, capacity=1024, queries=3, window=400),
}


def check(problem, dtype="float32", device="cpu", impl="torch.triton-decode", poison=POISON):
    kind = getattr(torch, dtype)
    k, v, table = problem.cache_arrays(poison=poison)
    q = problem.tokens()[0]
    k, v, q = (torch.as_tensor(x).to(device, kind) for x in (k, v, q))
    table = None if table is None else torch.as_tensor(table).to(device)
    found = ab.decode(q, cache_of(k, v, table, list(problem.lengths)), return_lse=True, impl=impl, **problem.words)
    expected = problem.expected(lambda x: torch.as_tensor(x).to(kind).double().numpy())
    must_agree([x.double().cpu().numpy() for x in found], expected, dtype)


@pytest.mark.slow(reason="the interpreter takes seconds for each case")
@pytest.mark.skipif(INTERPRETED, reason="is what this process runs")
def test_the_kernels_in_the_interpreter():
    """Every test marked for the interpreter, in a fresh process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@interpreter
@pytest.mark.parametrize("case", CASES)
def test_numbers_interpreted(case):
    check(CASES[case])


@interpreter
def test_float16_with_a_soft_cap_interpreted():
    check(Problem((40, 9, 300), queries=2, softcap=1.5, page_size=16, capacity=320), "float16")
    check(Problem((40, 9), softcap=30.0), "float16")


WHOLE = (
    {"q_len": 1, "kv_len": 700},
    {"q_len": 3, "kv_len": 70, "mask": ab.masks.causal()},
    {"q_len": 3, "kv_len": 2, "mask": ab.masks.causal()},
    {"q_len": 4, "kv_len": 70, "mask": ab.masks.window(9)},
    {"q_len": 2, "kv_len": 70},
)


@interpreter
@pytest.mark.parametrize("shape", WHOLE, ids=str)
def test_whole_arrays_interpreted(shape):
    """Plain attention of arrays, which are a full cache: out and LSE as those of torch.eager."""
    workload = Workload(batch=2, heads=4, kv_heads=2, head_dim=32, **shape)
    assert TRITON_DECODE.supports(workload, CPU) is None
    q, k, v = (torch.randn(2, n, heads, 32) for n, heads in ((shape["q_len"], 4), *[(shape["kv_len"], 2)] * 2))
    for a, b in zip(TRITON_DECODE.build_lse(workload, {})(q, k, v), EAGER.build_lse(workload, {})(q, k, v)):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-6)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes other devices")
def test_refusals():
    def reason(environment=CUDA, **shape):
        shape = {"batch": 1, "q_len": 1, "kv_len": 64, "heads": 4, "head_dim": 64, "dtype": "bfloat16", **shape}
        return str(TRITON_DECODE.supports(Workload(**shape), environment))

    assert reason() == "None"
    assert "TRITON_INTERPRET=1" in reason(CPU)
    assert "8.0" in reason(Environment(device="cuda", device_name="x", capability=(7, 5)))
    assert "up to 64 queries" in reason(q_len=65)
    assert "float64" in reason(dtype="float64")
    assert "256" in reason(head_dim=264)
    assert "no backward" in reason(pass_="train")
    assert "right = 0" in reason(mask=ab.masks.window(3, 3))
    assert "bottom-right" in reason(mask=ab.masks.causal(align="top-left"), q_len=2)
    assert "soft cap" in reason(softcap=2.0, dtype="float32")
    assert reason(softcap=2.0) == "None"


def test_shares_fill_the_device_and_are_not_too_small(monkeypatch):
    monkeypatch.setattr(torch_impls, "_processors", lambda device: 132)
    assert torch_impls._shares(8, 131072, CPU) == 33
    assert torch_impls._shares(128, 131072, CPU) == 2
    assert torch_impls._shares(1024, 131072, CPU) == 1
    assert torch_impls._shares(8, 512, CPU) == 2
    assert torch_impls._shares(1, 1 << 20, CPU) == 128


def compiled_for(capability, dtype, dim, page, tile, tokens, causal, ones=()):
    """The kernel over keys, compiled without a GPU; `ones` are arguments of 1, which Triton makes constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attnbench.kernels.decode.triton_kernels import decode_part as kernel

    constants = {
        "GROUP": 4, "PAGE": page, "DIM": dim, "V_DIM": dim, "WIDTH": dim, "V_WIDTH": dim, "TILE_M": tile,
        "TILE_N": tokens, "CAUSAL": causal, "WINDOW": causal, "SOFTCAP": causal, "HAS_LENGTHS": True,
        **({} if page else {"table": None}), **dict.fromkeys(ones, 1),
    }  # fmt: skip
    types = {"q": dtype, "k": dtype, "v": dtype, "lengths": "i32", "table": "i32", "out": "fp32", "lse": "fp32"}
    types = {name: f"*{kind}" for name, kind in types.items()} | {"scale": "fp32", "softcap": "fp32"}
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [n for n, name in enumerate(names) if name in ("q", "k", "v") or name[:2] in ("q_", "k_", "v_")]
    attributes = {(n,): [["tt.divisibility", 16]] for n in aligned}
    options = {"num_warps": 4, "num_stages": torch_impls.STAGES[page > 0]}
    source = ASTSource(kernel, types, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("page", [0, 16, 64])
def test_the_kernel_compiles_for_small_and_large_gpus(page):
    """Keys come in asynchronous copies of 16 bytes, as many under way in pages as without; 99 KiB fit everywhere."""
    for dtype, dim, tile, tokens in (("bf16", 128, 16, 64), ("bf16", 256, 32, 32), ("fp32", 256, 16, 16)):
        for capability in (89, 90):
            found = compiled_for(capability, dtype, dim, page, tile, tokens, causal=dim == 256)
            assert found.asm["ptx"].count("cp.async.cg") == 48
            assert found.metadata.shared <= 99 * 1024


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
def test_the_kernels_compile_for_arguments_of_one():
    """One query, one key head, one row: Triton then sees constants, which have fewer methods than numbers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attnbench.kernels.decode.triton_kernels import decode_merge

    compiled_for(90, "bf16", 64, 16, 16, 64, causal=True, ones=("queries", "kv_heads", "left", "table_row", "k_head"))
    compiled_for(90, "bf16", 64, 1, 16, 64, causal=False, ones=("queries", "kv_heads", "capacity"))
    for ones in ((), ("queries",), ("queries", "heads", "rows")):
        constants = {"V_DIM": 64, "V_WIDTH": 64, "SHARES": 4, **dict.fromkeys(ones, 1)}
        types = {"parts": "*fp32", "part_lse": "*fp32", "out": "*bf16", "lse": "*fp32"}
        names = decode_merge.arg_names
        types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        triton.compile(ASTSource(decode_merge, types, constants, {}), target=GPUTarget("cuda", 90, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_numbers_on_a_gpu(case, dtype):
    check(CASES[case], dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", WHOLE, ids=str)
def test_whole_arrays_are_verified_on_a_gpu(shape):
    workload = Workload(batch=2, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", **shape)
    record = ab.verify("torch.triton-decode", workload, device="cuda")
    assert record.status == "ok", record.reason


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_cuda_graph_decodes_while_the_cache_grows(page_size):
    """Captured once after a warm-up: appending and decoding, replayed for token after token."""
    steps = 20
    k, v = (torch.zeros(2, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    new_q, new_k, new_v = (torch.zeros(2, 1, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    if page_size is None:
        cache = ab.ContiguousCache(k, v, lengths)
    else:
        k, v = (x.view(8, 16, 2, 64) for x in (k, v))
        table = torch.tensor([[3, 1, 7, 0], [2, 6, 4, 5]], dtype=torch.int32, device="cuda")
        cache = ab.PagedCache(k, v, table, lengths)

    def step():
        cache.append(new_k, new_v)
        return ab.decode(new_q, cache)

    step()
    torch.cuda.synchronize()
    lengths.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lengths.zero_()
    tokens = [[torch.randn_like(x) for x in (new_q, new_k, new_v)] for _ in range(steps)]
    found = []
    for token in tokens:
        for place, value in zip((new_q, new_k, new_v), token):
            place.copy_(value)
        graph.replay()
        found.append(out.clone())
    q, keys, values = (torch.cat(one, 1).float() for one in zip(*tokens))
    whole = ab.attention(q, keys, values, mask=ab.masks.causal(), impl="torch.eager")
    torch.testing.assert_close(torch.cat(found, 1).float(), whole, atol=2e-2, rtol=2e-2)
    assert lengths.tolist() == [steps, steps]


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    """Neither appending nor decoding reads lengths or tables on the host."""
    k = torch.zeros(2, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    q, new = (torch.randn(2, 1, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    for impl in ("auto", "torch.eager"):
        cache = ab.ContiguousCache(k, k.clone(), torch.zeros(2, dtype=torch.int32, device="cuda"))
        ab.decode(q, cache.append(new, new), impl=impl)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ab.decode(q, cache.append(new, new), impl=impl)
        finally:
            torch.cuda.set_sync_debug_mode("default")


LIBRARIES = ("torch.triton-decode", "torch.eager", "torch.flash-attn", "torch.fa3", "torch.fa4", "torch.flashinfer")
ON_LIBRARIES = {
    "unequal, one empty": Problem((0, 5, 1000, 333), dim=64, v_dim=64, capacity=1024, heads=8),
    "few queries": Problem((2, 0, 200, 8), queries=8, dim=128, v_dim=128, capacity=256, heads=8),
    "one key head, 256 wide": Problem((70, 9), queries=2, heads=8, kv_heads=1, dim=256, v_dim=256, capacity=80),
    "window": Problem((1000, 3, 257), dim=64, v_dim=64, capacity=1024, queries=3, window=300),
    "soft cap": Problem((1000, 3, 257), dim=64, v_dim=64, capacity=1024, softcap=1.5),
    "pages of 1": Problem((5, 20, 0), dim=64, v_dim=64, page_size=1, capacity=24),
    "pages of 16": Problem((5, 64, 33, 16), queries=2, dim=64, v_dim=64, page_size=16),
    "pages of 64, shared": Problem((300, 200, 64, 65), dim=128, v_dim=128, page_size=64, capacity=512, shared=128),
    "pages of 128": Problem((300, 0, 64, 129), dim=128, v_dim=128, page_size=128, capacity=512),
    "pages of 256": Problem((700, 256, 1), dim=64, v_dim=64, page_size=256, capacity=1024, queries=3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("impl", LIBRARIES)
@pytest.mark.parametrize("case", ON_LIBRARIES)
def test_every_library_on_a_gpu(case, impl):
    """NaN behind the ends of sequences, and entries of the table that are no pages; a refusal says why. FA3 and FA4 let
    a NaN through, so they get large numbers there."""
    try:
        check(ON_LIBRARIES[case], "bfloat16", "cuda", impl, 1e3 if impl in ("torch.fa3", "torch.fa4") else POISON)
    except Unsupported as error:
        pytest.skip(str(error))
