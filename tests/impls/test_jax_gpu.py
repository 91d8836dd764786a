"""The JAX implementations that need a CUDA device, on it: cuDNN, the Pallas kernel compiled, and float16 in XLA."""

from __future__ import annotations

import numpy as np
import pytest
from jax_oracle import check, every_mask

from attnbench import masks
from attnbench.frameworks.jax.framework import FRAMEWORK as JAX
from attnbench.impls.jax import tokamax as jax_tokamax
from attnbench.impls.jax._libraries import import_beside_torch
from attnbench.impls.jax.nn import CUDNN, EINSUM, XLA
from attnbench.impls.jax.pallas import TRITON
from attnbench.spec import Workload

pytest.importorskip("jax")
pytestmark = [
    pytest.mark.jax,
    pytest.mark.gpu,
    pytest.mark.skipif(JAX.devices()[0] != "cuda", reason="needs a CUDA device that JAX sees"),
]
SHAPE = {"batch": 2, "q_len": 64, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float16", "pass_": "train"}
MASKS = every_mask(tokens=64)
UNWEIGHTED = [kind for kind, mask in MASKS.items() if not mask.weighted]


def on_gpu(implementation, workload, tolerance=4e-3):
    check(implementation, workload, tolerance, JAX.environment("cuda"), compiled=True, device="cuda")


@pytest.mark.parametrize("kind", UNWEIGHTED)
def test_cudnn_masks_and_rows_without_keys(kind):
    on_gpu(CUDNN, Workload(**SHAPE | {"dtype": "bfloat16"}, mask=MASKS[kind]), 2e-2)


@pytest.mark.parametrize("kind", ["full", "causal", "prefix", "lengths"])
def test_cudnn_odd_lengths(kind):
    on_gpu(CUDNN, Workload(**SHAPE | {"q_len": 63, "dtype": "bfloat16"}, mask=every_mask(tokens=63)[kind]), 2e-2)


def test_cudnn_rectangle_is_bottom_right():
    on_gpu(CUDNN, Workload(**SHAPE | {"q_len": 16, "dtype": "bfloat16"}, kv_len=64, mask=masks.causal()), 2e-2)


def test_cudnn_wide_heads():
    on_gpu(CUDNN, Workload(**(SHAPE | {"head_dim": 256, "kv_heads": 1}), mask=masks.causal()))


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-4), ("float16", 4e-3)])
def test_pallas_triton_compiled(dtype, tolerance):
    mask = masks.documents(np.repeat([0, 1], 64)) & masks.causal()
    on_gpu(TRITON, Workload(**(SHAPE | {"q_len": 128, "dtype": dtype}), mask=mask), tolerance)


@pytest.mark.parametrize("implementation", [EINSUM, XLA], ids=repr)
@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-5), ("float16", 4e-3)])
def test_xla_without_tf32(implementation, dtype, tolerance):
    on_gpu(implementation, Workload(**(SHAPE | {"dtype": dtype}), mask=MASKS["additive"]), tolerance)


@pytest.mark.parametrize("implementation", [jax_tokamax.MOSAIC, jax_tokamax.TRITON, jax_tokamax.CUDNN], ids=repr)
@pytest.mark.parametrize("kind", ["full", "causal", "window", "lengths", "valid-causal"])
def test_tokamax(implementation, kind):
    try:
        import_beside_torch("tokamax")
    except ImportError as missing:
        pytest.skip(str(missing))
    workload = Workload(**SHAPE, mask=MASKS[kind])
    if implementation is jax_tokamax.CUDNN and kind in ("lengths", "valid-causal"):
        assert "backward" in implementation.supports(workload, JAX.environment("cuda"))
        workload = Workload(**(SHAPE | {"pass_": "forward", "dtype": "bfloat16"}), mask=MASKS[kind])
    on_gpu(implementation, workload, 4e-3 if workload.dtype == "float16" else 2e-2)
