"""torch.block-sparse-triton: the kernels' numbers on a GPU, and on any machine in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the tests marked for it run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.spec import Environment, Workload

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.torch

from block_sparse_cases import CASES, check, draw, workload

from attnbench.kernels.block_sparse.tiles import candidates, read_config, read_tile
from attnbench.kernels.block_sparse.torch_impls import BLOCK_SPARSE_TRITON

CPU = Environment(device="cpu", device_name="test")
CUDA = Environment(device="cuda", device_name="test", capability=(9, 0))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, with TRITON_INTERPRET=1")
ALLOWED = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}
SMALL = {"forward": "16x16w1s1", "query": "16x16w1s1", "key": "16x16w1s1"}
LATE = {"forward": "16x16w1s1-late", "key": "16x16w1s1", "dq": "atomic"}


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


EDGES = ("per batch and head", "more queries than keys", "lengths", "MQA", "head_dim 40")
"""Those in which the kernels' own bookkeeping matters; the interpreter takes seconds for each."""


@interpreter
@pytest.mark.parametrize("case", EDGES)
def test_numbers_interpreted(case):
    w = workload(case)
    assert BLOCK_SPARSE_TRITON.supports(w, CPU) is None
    check(BLOCK_SPARSE_TRITON, w, {}, ALLOWED["float32"])


@interpreter
@pytest.mark.parametrize("config", [SMALL, LATE], ids=["small", "late and atomic"])
def test_tiles_smaller_than_blocks_interpreted(config):
    """Late products, atomic sums and several tiles in a block give the same numbers, blind rows of blocks too."""
    kept = np.array([[[True, False], [True, True]], [[False, False], [True, True]]])
    mask = masks.causal() & masks.blocks(kept, 48)
    shape = {"batch": 1, "q_len": 90, "heads": 2, "kv_heads": 1, "head_dim": 16, "pass_": "train"}
    check(BLOCK_SPARSE_TRITON, Workload(**shape, mask=mask), config, ALLOWED["float32"])


@interpreter
def test_float16_and_other_layouts_interpreted():
    """Strided views, an expanded gradient and a width that is no power of two are read where they lie, or copied."""
    w = workload("causal", dtype="float16", batch=1)
    check(BLOCK_SPARSE_TRITON, w, {}, ALLOWED["float16"])
    (q, k, v, _), _ = draw(w)
    call = BLOCK_SPARSE_TRITON.build(w, {})
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    assert torch.equal(call(*strided), call(q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ones = torch.autograd.grad(call(*leaves).sum(), leaves)
    want = torch.autograd.grad(call(*leaves), leaves, torch.ones_like(q))
    assert all(torch.equal(a, b) for a, b in zip(ones, want))


@interpreter
def test_same_bits_and_refusals_interpreted():
    w = workload("per head", batch=1)
    (q, k, v, dout), _ = draw(w)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    call = BLOCK_SPARSE_TRITON.build(w, {})
    first, again = (torch.autograd.grad(call(q, k, v), (q, k, v), dout) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert "interpreter" in BLOCK_SPARSE_TRITON.verify_only
    assert "interpreter" in str(BLOCK_SPARSE_TRITON.supports(workload("causal", dtype="bfloat16"), CPU))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes other devices")
def test_refusals():
    supports = BLOCK_SPARSE_TRITON.supports
    assert "TRITON_INTERPRET=1" in str(supports(workload("causal"), CPU))
    assert "9.0" in str(supports(workload("causal"), Environment(device="cuda", device_name="x", capability=(8, 0))))
    assert supports(workload("causal", dtype="bfloat16"), CUDA) is None
    assert "float64" in str(supports(workload("causal", dtype="float64"), CUDA))
    assert "none" in str(supports(Workload(batch=1, q_len=64, heads=1, head_dim=16), CUDA))
    eights = masks.blocks(np.ones((8, 8), bool), 8)
    assert "multiple of 16 tokens, not 8" in str(supports(workload("causal", mask=eights), CUDA))
    assert "steps of 8" in str(supports(workload("causal", dtype="bfloat16", head_dim=36), CUDA))
    assert "positive scale" in str(supports(workload("causal", scale=-1.0), CUDA))
    assert "softcap" in str(supports(workload("causal", softcap=2.0), CUDA))


def test_configs_are_tiles_that_can_be_read():
    for dtype in ("float32", "bfloat16"):
        for dim in (32, 64, 128, 192, 256):
            for pass_ in ("forward", "train"):
                w = workload("causal", dtype=dtype, head_dim=dim, pass_=pass_)
                configs = candidates(w)
                assert len({str(config) for config in configs}) == len(configs)
                for config in configs:
                    tiles, atomic = read_config(w, config)
                    assert set(tiles) == {"forward", "query", "key"}
                    assert atomic == (config.get("dq") == "atomic")
    assert read_tile("128x64w8s3-late") == (128, 64, 8, 3, True)
    assert read_tile("128x64w8s3").fitted(48)[:2] == (16, 16)
    with pytest.raises(UsageError, match="ROWSxKEYS"):
        read_tile("96x64w8s3")
    with pytest.raises(UsageError, match="no tunable block"):
        read_config(workload("causal"), {"block": 3})
    with pytest.raises(UsageError, match='"rows"'):
        read_config(workload("causal"), {"dq": "both"})


TILED = {"q": 0, "dout": 0, "out": 0, "dq": 0, "k": 1, "v": 1, "dk": 1, "dv": 1}
"""Arguments read in tiles of the tile's rows (0) or keys (1)."""


def compiled_for_hopper(kernel, tile, **constants):
    """The kernel for head_dim 128 in bfloat16, compiled without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {"SIZE": 128, "TILE_M": tile.rows, "TILE_N": tile.keys, "DIM": 128, "V_DIM": 128, "GROUP": 1} | constants
    types, values = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name.endswith("_tiles"):
            types[name] = f"tensordesc<bf16[1, 1, {tile[TILED[name.removesuffix('_tiles')]]}, 128]>"
        elif name in known:
            types[name], values[place,] = "constexpr", known[name]
        elif name in ("lse", "delta", "dq_sum"):
            types[name] = "*fp32"
        elif name in ("scale", "softmax_scale"):
            types[name] = "fp32"
        else:
            types[name] = "*i32" if name in ("order", "begin", "wholes", "columns", "low", "high") else "i32"
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(ASTSource(kernel, types, values, {}), target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
def test_the_default_kernels_compile_for_hopper():
    """Tensor-core instructions, asynchronous copies of tiles, and no more shared memory than an SM has."""
    from attnbench.kernels.block_sparse import triton_kernels

    tiles, _ = read_config(large(128), {})
    forward = {"PARTIAL": False, "LATE": tiles["forward"].late}
    for kernel, name, constants in (
        (triton_kernels.block_sparse_forward, "forward", forward),
        (triton_kernels.block_sparse_query_gradient, "query", {"PARTIAL": True}),
        (triton_kernels.block_sparse_key_gradients, "key", {"PARTIAL": False, "ATOMIC": False}),
    ):
        found = compiled_for_hopper(kernel, tiles[name], **constants)
        assert "wgmma.mma_async" in found.asm["ptx"]
        assert "cp.async.bulk.tensor" in found.asm["ptx"]
        assert found.metadata.shared <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_numbers_on_a_gpu(case, dtype):
    w = workload(case, dtype=dtype)
    check(BLOCK_SPARSE_TRITON, w, {}, ALLOWED[dtype], "cuda")


def large(dim, **more):
    mask = masks.causal() & masks.blocks(np.random.default_rng(0).random((4, 4, 4)) < 0.6, 128)
    shape = {"batch": 1, "q_len": 500, "heads": 4, "kv_heads": 2, "head_dim": dim, "dtype": "bfloat16"}
    return Workload(**shape, pass_="train", mask=mask, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_config_on_a_gpu(dim):
    for config in candidates(large(dim)):
        check(BLOCK_SPARSE_TRITON, large(dim), config, ALLOWED["bfloat16"], "cuda")
