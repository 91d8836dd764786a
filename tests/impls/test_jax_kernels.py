"""The Pallas kernels inside JAX, interpreted: small shapes against float64 NumPy, and what they refuse."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from jax_oracle import CPU, HOPPER, check, check_lse

from attnbench import masks
from attnbench.impls.jax.pallas import SPLASH, TRITON, power_of_two_divisor
from attnbench.spec import Workload

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
needs_no_gpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter is tested on the CPU")


@needs_no_gpu
class TestTriton:
    def test_grouped_heads_documents_and_gradients(self):
        ids = np.repeat([[0, 1], [3, 2]], 16, axis=1)
        mask = masks.documents(ids) & masks.causal()
        workload = Workload(batch=2, q_len=32, heads=4, kv_heads=2, head_dim=24, mask=mask, scale=0.3, pass_="train")
        check(TRITON, workload, 2e-5)

    def test_lse_is_natural_log_of_rectangles_aligned_top_left(self):
        workload = Workload(batch=1, q_len=16, kv_len=48, heads=2, head_dim=16, mask=masks.causal("top-left"))
        check_lse(TRITON, workload, 5e-6)

    def test_only_verified_here(self):
        assert "interpreter" in TRITON.verify_only
        assert "interpreter" in SPLASH.verify_only

    def test_the_library_is_still_wrong_on_grouped_heads(self):
        """When this fails the repetition of K and V can go."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.attention import mha
        random = np.random.default_rng(0)
        q, k = (jax.numpy.asarray(random.standard_normal((1, 16, h, 16)), "float32") for h in (4, 2))
        found = mha(q, k, k, None, sm_scale=0.25, interpret=True)
        right = jax.nn.dot_product_attention(q, k, k, scale=0.25)
        assert abs(found - right).max() > 0.1


@pytest.mark.parametrize(
    "change,words",
    [
        ({"q_len": 100}, "blocks of 16"),
        ({"head_dim": 256}, "128"),
        ({"mask": masks.window(3)}, "window"),
        ({"kv_len": 128, "mask": masks.causal()}, "top-left"),
        ({"kv_len": 128, "pass_": "train"}, "backward"),
        ({"kv_len": 32, "mask": masks.causal("top-left")}, "past the keys"),
        ({"kv_len": 128, "mask": masks.documents(np.zeros(128, int))}, "self-attention"),
        ({"softcap": 2.0}, "softcap"),
        ({"v_head_dim": 8}, "v_head_dim"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_triton_refuses(change, words):
    workload = Workload(**({"batch": 1, "q_len": 64, "heads": 2, "head_dim": 64} | change))
    assert words in (TRITON.supports(workload, HOPPER) or "")


def test_blocks_divide_the_length():
    assert [power_of_two_divisor(n, 128) for n in (1024, 96, 48, 7)] == [128, 32, 16, 1]


@needs_no_gpu
class TestSplash:
    def test_grouped_heads_bottom_right_softcap_and_gradients(self):
        shape = {"batch": 2, "q_len": 64, "kv_len": 128, "heads": 4, "kv_heads": 2, "head_dim": 16}
        workload = Workload(**shape, mask=masks.causal(), softcap=4.0, pass_="train")
        check(SPLASH, workload, 2e-5)

    def test_lse_of_windows_in_documents(self):
        ids = np.repeat([0, 1], 64)
        mask = masks.documents(ids) & masks.window(20, 3)
        check_lse(SPLASH, Workload(batch=2, q_len=128, heads=2, head_dim=16, mask=mask, scale=0.5), 1e-5)

    def test_lse_in_bfloat16_is_that_of_unrounded_queries(self):
        workload = Workload(batch=1, q_len=8, kv_len=128, heads=2, head_dim=80, dtype="bfloat16")
        call = SPLASH.build_lse(workload, SPLASH.configs(workload)[0])
        random = np.random.default_rng(0)
        q, k, v = (jax.numpy.asarray(4 * random.standard_normal((1, 2, n, 80)), "bfloat16") for n in (8, 128, 128))
        out, lse = call(q, k, v)
        logits = np.einsum("bhqd,bhkd->bhqk", *(np.asarray(x, np.float64) for x in (q, k))) * workload.softmax_scale
        assert str(out.dtype) == "bfloat16"
        np.testing.assert_allclose(lse, np.logaddexp.reduce(logits, axis=-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"kv_len": 100}, "blocks of 128"),
        ({"q_len": 100}, "blocks of 8"),
        ({"q_len": 256, "mask": masks.causal()}, "no key"),
        ({"mask": masks.prefix(3)}, "prefix"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_splash_refuses(change, words):
    workload = Workload(**({"batch": 1, "q_len": 128, "kv_len": 128, "heads": 2, "head_dim": 64} | change))
    assert words in (SPLASH.supports(workload, CPU) or "")


def test_splash_is_no_gpu_kernel():
    assert "TPU kernel" in (SPLASH.available(HOPPER) or "")
