"""The fused merge: in Triton's interpreter, compiled for Hopper, and on a GPU; and what it refuses."""

import gc
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.kernels.dilated.pieces import DilatedProblem, Task, pieces

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

import dilated_oracle as oracle

from attnbench.kernels.dilated import torch_engines, torch_fused
from attnbench.kernels.dilated.torch_engines import dilated
from attnbench.kernels.dilated.torch_fused import is_fused, strands
from attnbench.nn import DilatedAttention, ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention

PAPER = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnbench.kernels.dilated import triton_kernels
from attnbench.kernels.dilated.torch_fused import ENTRIES, TOKENS

sizes = dict(WIDTHS={widths}, RATES={rates}, RESTS=(False, True, True, True, True), BRANCHES=5, DIM=64, BLOCK_DIM=64,
             ALIGN=8, BLOCK=TOKENS)
pointers = dict(table="*i64", source="*i64", lse="*fp32", **dict.fromkeys(["out", "first", "second", "third"], "*bf16"))
tuples = dict(parts=("*bf16",) * 12 + ("*fp32",) * 12, wholes=("*bf16", "*fp32"))


def compiled(kernel, fixed):
    names = kernel.arg_names
    signature = {{n: "constexpr" if n in fixed else (pointers | tuples).get(n, "i32") for n in names}}
    constants = {{(names.index(n),): value for n, value in fixed.items()}}
    aligned = {{(names.index(n),): [["tt.divisibility", 16]] for n in names if n in pointers}}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


for kernel, more in (
    (triton_kernels.merge_kernel, dict(KEEP=False)),
    (triton_kernels.merge_kernel, dict(KEEP=True)),
    (triton_kernels.add_kernel, dict(STRANDS=2)),
):
    ptx = compiled(kernel, sizes | more)
    print(ptx.count("ld.global.v4.b32"), ptx.count("st.global.v4.b32"), ptx.count("ld.global.b16"))
    assert ("bar.sync" in ptx[ptx.rindex("ld.global.v4.b32"):]) or not more.get("KEEP")
assert compiled(triton_kernels.place_kernel, dict(FIRST=0, PIECES=12, HAS_LSE=True, BLOCK=ENTRIES))
"""


def in_a_process(*arguments, **variables):
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | variables, capture_output=True, text=True, timeout=280
    )


@needs_triton
def test_fused_and_eager_merges_agree_in_tritons_interpreter():
    done = in_a_process(str(Path(__file__).with_name("fused_in_interpreter.py")), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "9 cases agree" in done.stdout


@needs_triton
def test_kernels_compile_for_hopper_with_wide_loads():
    """No GPU needed; a load of single 16-bit numbers would mean that alignment was lost on the way."""
    assert (torch_fused.TOKENS, torch_fused.ENTRIES) == (64, 128), "the sizes that were measured on an H200"
    done = in_a_process("-c", COMPILE.format(widths=tuple(PAPER[0]), rates=tuple(PAPER[1])))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        wide_loads, wide_stores, narrow_loads = map(int, line.split())
        assert wide_loads >= 20
        assert wide_stores > 0
        assert narrow_loads == 0


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("heads,kv_heads", [(12, 12), (6, 2)])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("tokens", [36, 41, 5])
def test_strands_lead_to_every_row_of_every_piece_once(tokens, fold, heads, kv_heads, keys):
    problem = DilatedProblem(masks.dilated([6, 12, 36], [1, 2, 6]), 2, tokens, heads, kv_heads, True)
    found = strands(problem, fold, True, keys)
    led = Counter()
    for row, head, branch, slot, kind in zip(*np.nonzero(found.piece >= 0)):
        at = (row, head, branch, slot, kind)
        width, rate = problem.pattern.segment_lengths[branch], problem.pattern.dilation_rates[branch]
        for token in range(tokens):
            segment, inside = divmod(token, width)
            rest = segment >= tokens // width
            if rest == bool(kind) and inside % rate == found.offset[at]:
                stacked = found.stacked[at] + (0 if rest else segment)
                led[int(found.piece[at]), int(stacked), int(found.head[at]), inside // rate] += 1
    want = Counter()
    for number, piece in enumerate(pieces(problem, fold)):
        count, length = (piece.heads.kv_number, piece.keys) if keys else (piece.heads.number, piece.queries)
        want.update((number, s, h, i) for s in range(piece.stack) for h in range(count) for i in range(length))
    assert led == want


@pytest.mark.parametrize("lengths,dtype,words", [
    ((3, 4), torch.float32, "no key lengths"),
    (None, torch.float64, "float64"),
    (None, torch.float32, "needs a GPU"),
])  # fmt: skip
def test_what_cannot_be_fused_says_so_or_is_merged_eagerly(lengths, dtype, words):
    task = Task(DilatedProblem(masks.dilated([4], [1]), 2, 8, 2, 2, False, lengths), 1.0)
    assert not is_fused(task, dtype, torch.device("cpu"))
    with pytest.raises(UsageError, match=words):
        is_fused(task._replace(merge="triton"), dtype, torch.device("cpu"))
    with pytest.raises(UsageError, match="eager"):
        is_fused(task._replace(merge="compiled"), dtype, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("heads,kv_heads,dim", [(12, 12, 64), (12, 4, 128)])
@pytest.mark.parametrize("batch,tokens,causal", [(2, 384, True), (2, 401, True), (1, 384, False)])
def test_on_a_gpu_against_float64(batch, tokens, causal, heads, kv_heads, dim, diagonal):
    segments, rates = [64, 128, 256, 384], [1, 2, 6, 12]
    rng = torch.Generator().manual_seed(0)
    shapes = [(batch, tokens, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=rng).bfloat16() for shape in shapes)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want, want_lse = oracle.attention(*exact, oracle.visible_counts(q, segments, rates, causal=causal))
    want_grads = torch.autograd.grad(want, exact, dout.double())
    problem = DilatedProblem(masks.dilated(segments, rates), batch, tokens, heads, kv_heads, causal)
    for merge in ("triton", "eager"):
        leaves = [x.cuda().requires_grad_() for x in (q, k, v)]
        out, lse = dilated(*leaves, "strided", Task(problem, dim**-0.5, merge=merge, diagonal=diagonal))
        got = out, *torch.autograd.grad(out, leaves, dout.cuda())
        torch.testing.assert_close(lse.double().cpu(), want_lse, atol=3e-3, rtol=3e-3)
        for one, expected in zip(got, (want, *want_grads)):
            assert (one.double().cpu() - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("mix_grad", ["full", "detached"])
def test_modules_on_a_gpu_agree(mix_grad):
    """First one mode, then the other, on arrays of the same strides: cuDNN's graphs are looked up by those alone."""
    arrays = [torch.randn(2, 512, 12, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    dout = torch.randn(2, 512, 12, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    for kind in (DilatedAttention, ImprovedDilatedAttention):
        out = kind([128, 512], [1, 6], causal=True, mix_grad=mix_grad)(*arrays)
        found.append((out, *torch.autograd.grad(out, arrays, dout)))
    for one, other in zip(*found):
        assert (one - other).norm() < 2e-2 * other.norm()


@pytest.mark.gpu
def test_a_captured_call_replays_on_a_gpu():
    module = ImprovedMultiheadDilatedAttention(
        768, 12, [128, 512], [1, 6], causal=True, device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(1, 512, 768, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        warm_up(lambda: module(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(out, module(x), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mix_grad", ["full", "detached"])
def test_a_captured_training_step_replays_with_new_inputs_after_its_plan_was_forgotten(mix_grad):
    module = ImprovedDilatedAttention([128, 500], [1, 6], causal=True, mix_grad=mix_grad)
    *leaves, dout = (torch.randn(2, 500, 12, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in leaves]

    def step():
        out = module(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    torch_engines._plan.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
    with torch.no_grad():
        for x in (*leaves, dout):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for got, want in zip(captured, step()):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_a_first_call_inside_a_capture_says_what_to_do():
    module = ImprovedDilatedAttention([96, 480], [1, 6], causal=True)
    arrays = [torch.randn(1, 480, 12, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    module.how = {"merge": "eager"}
    warm_up(lambda: module(*arrays))
    module.how = {}
    with pytest.raises(UsageError, match="once before capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(*arrays)


@pytest.mark.gpu
def test_a_planned_call_neither_waits_for_the_gpu_nor_copies_to_it():
    module = ImprovedDilatedAttention([128, 512], [1, 6], causal=True)
    leaves = [torch.randn(2, 512, 12, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    dout = torch.randn_like(leaves[0])

    def step():
        torch.autograd.grad(module(*leaves), leaves, dout)

    warm_up(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert not [event.key for event in profiler.key_averages() if "HtoD" in event.key]


def warm_up(run):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
