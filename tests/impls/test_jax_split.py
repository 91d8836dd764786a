"""jax.xla-split and jax.cudnn-split: against float64 with gradients, without pair tables, and honest refusals."""

from __future__ import annotations

import numpy as np
import pytest
from jax_oracle import CPU, HOPPER, check, check_lse, draw

from attnbench.frameworks.jax import FRAMEWORK as JAX
from attnbench.impls.jax_nn import CUDNN
from attnbench.impls.jax_split import CUDNN_SPLIT, XLA_SPLIT
from attnbench.spec import Environment, Workload
from attnbench.workloads import masks

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("quick_to_compile")]
SQUARE = {"batch": 2, "q_len": 24, "heads": 4, "kv_heads": 1, "head_dim": 8}
LIKE_PI0 = masks.block_causal(np.repeat([0, 1, 2], [16, 1, 7]))
PI0 = Workload(
    batch=32, q_len=867, heads=8, kv_heads=1, head_dim=256, dtype="bfloat16", pass_="train",
    mask=masks.block_causal(np.repeat([0, 1, 2], [816, 1, 50])),
)  # fmt: skip
MASKS = {
    "pi0": LIKE_PI0,
    "pi0.5": masks.block_causal(np.repeat([0, 1], [16, 8])),
    "documents": masks.documents(np.repeat([0, 1, 2], [9, 10, 5])),
    "documents-causal": masks.documents(np.repeat([0, 1], [9, 15])) & masks.causal(),
    "padding": LIKE_PI0 & masks.lengths([24, 11]),
}


@pytest.mark.parametrize("kind", MASKS)
def test_forward_and_backward(kind):
    check(XLA_SPLIT, Workload(**SQUARE, mask=MASKS[kind], pass_="train"), 3e-6, compiled=True)


def test_op_by_op():
    check(XLA_SPLIT, Workload(**SQUARE, mask=MASKS["pi0.5"], pass_="train"), 3e-6)


def test_fewer_queries_than_keys_and_a_scale():
    check(XLA_SPLIT, Workload(**SQUARE | {"q_len": 8}, kv_len=24, mask=LIKE_PI0, scale=0.3, pass_="train"), 3e-6)


def test_lse():
    check_lse(XLA_SPLIT, Workload(**SQUARE, mask=LIKE_PI0), 3e-6)


def test_nothing_of_the_size_of_all_pairs_is_made():
    workload = Workload(**SQUARE | {"heads": 1}, mask=LIKE_PI0)
    closed = jax.make_jaxpr(XLA_SPLIT.build(workload, {}))(
        *(jax.numpy.asarray(x, "float32") for x in draw(workload)[:3])
    )
    shapes = [
        variable.aval.shape for equation in _equations(closed.jaxpr) for variable in equation.outvars
    ]  # fmt: skip
    assert shapes
    assert not any(shape[-2:] == (24, 24) for shape in shapes)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_pi0_trains_with_an_array_and_without():
    assert CUDNN.supports(PI0, HOPPER) is None
    assert CUDNN_SPLIT.supports(PI0, HOPPER) is None


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"mask": masks.full()}, "nothing to split: jax.cudnn takes full"),
        ({"mask": masks.prefix(400)}, "would need an array for causal of queries 400-866"),
        ({"mask": masks.window(7)}, "at most 8 blocks"),
        ({"mask": PI0.mask & masks.valid(np.arange(867) != 600)}, "one run of keys"),
        ({"mask": PI0.mask & masks.lengths([0] + [867] * 31)}, "jax.cudnn"),
        ({"dtype": "float32"}, "jax.cudnn takes float16 or bfloat16, not float32"),
        ({"head_dim": 512, "v_head_dim": 512}, "head_dim up to 256"),
        ({"softcap": 3.0}, "no softcap"),
    ],
    ids=str,
)
def test_refusals(changes, why):
    from msgspec.structs import replace

    assert why in str(CUDNN_SPLIT.supports(replace(PI0, **changes), HOPPER))


def test_ids_that_hide_nothing_are_one_call_without_an_array():
    """pi0.5's denoise step: `jax.nn` would be handed an array of trues."""
    w = Workload(**SQUARE | {"q_len": 8}, kv_len=24, mask=masks.block_causal(np.repeat([0, 1], [16, 8])), pass_="train")
    check(XLA_SPLIT, w, 3e-6)


def test_what_runs_where():
    assert "cuda" in str(CUDNN_SPLIT.available(CPU))
    assert "128" in str(CUDNN_SPLIT.supports(PI0, Environment(device="cuda", device_name="old", capability=(8, 0))))
    assert CUDNN_SPLIT.expects == CUDNN.expects


def test_the_suite_gemma_has_it_measured():
    from attnbench.workloads import suites

    training = [w for w in suites.load("gemma").workloads if w.id == PI0.id]
    assert len(training) == 1
    assert CUDNN_SPLIT.supports(training[0], HOPPER) is None


@pytest.mark.gpu
@pytest.mark.skipif(JAX.devices()[0] != "cuda", reason="needs a CUDA device that JAX sees")
@pytest.mark.parametrize("kind", ["pi0", "documents-causal", "padding"])
def test_cudnn_on_a_gpu(kind):
    shape = SQUARE | {"heads": 8, "head_dim": 256, "dtype": "bfloat16"}
    check(CUDNN_SPLIT, Workload(**shape, mask=MASKS[kind], pass_="train"), 3e-2, JAX.environment("cuda"), True, "cuda")
