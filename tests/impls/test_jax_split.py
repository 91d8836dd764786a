"""jax.xla-split and jax.cudnn-split: against float64 with gradients, without pair tables, and honest refusals."""

from __future__ import annotations

import numpy as np
import pytest
from jax_oracle import CPU, HOPPER, check, check_lse, draw

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.frameworks.jax.framework import FRAMEWORK as JAX
from attnbench.impls.jax.nn import CUDNN, EINSUM
from attnbench.impls.partial.jax_passes import corner_of
from attnbench.impls.split import JAX_CUDNN_SPLIT as CUDNN_SPLIT
from attnbench.impls.split import JAX_XLA_SPLIT as XLA_SPLIT
from attnbench.impls.split import JaxSplit, cut_of
from attnbench.spec import Environment, Workload

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


class EinsumSplit(JaxSplit):
    """Of a library that shows both of its passes on any device."""

    def needs_array(self, part, environment):
        return part.visible_mask.kinds != ("full",)


BY_PASSES = EinsumSplit(EINSUM, ())


@pytest.mark.parametrize("sequences", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", ["pi0", "documents"])
@pytest.mark.parametrize("split", [XLA_SPLIT, BY_PASSES], ids=lambda one: one.name)
def test_some_sequences_at_a_time(split, kind, sequences):
    workload = Workload(**SQUARE | {"batch": 4}, mask=MASKS[kind], pass_="train")
    check(split.configured({"sequences": sequences}), workload, 3e-6, compiled=True)


@pytest.mark.parametrize("sequences", [0, 2])
@pytest.mark.parametrize("sizes", [(16, 1, 7), (1, 1, 1, 21), (20, 4), (3, 2, 19)], ids=str)
def test_common_keys_are_one_call_and_the_corner_is_exact(sizes, sequences):
    """Also where the corner is the larger part, and one query of four sees all keys."""
    ids = np.repeat(np.arange(len(sizes)), sizes)
    workload = Workload(**SQUARE | {"batch": 4}, mask=masks.block_causal(ids), pass_="train")
    assert corner_of(cut_of(workload)) is not None
    check(BY_PASSES.configured({"sequences": sequences}), workload, 3e-6, compiled=True)


def test_common_keys_are_asked_of_the_kernel_once_and_copy_no_queries():
    """The kernel is handed all queries as they are; only the corner's rows are cut out."""
    asked = []

    def passes(workload, config):
        asked.append((workload.q_len, workload.kv_len, workload.visible_mask.kinds))
        return EINSUM.passes(workload, config)

    inner = type("Inner", (type(EINSUM),), {"passes": staticmethod(passes)})()
    EinsumSplit(inner, ()).build(PI0, {"sequences": 8})
    assert set(asked) == {(867, 816, ("full",))}
    rows, keys, seen = corner_of(cut_of(PI0))
    assert (rows, keys, seen.shape) == (816, 816, (51, 51))
    assert seen[0].sum() == 1
    assert seen[1:].all()


@pytest.mark.parametrize("sequences", [0, 2])
def test_later_blocks_may_see_less_than_earlier_ones(sequences):
    """Ids of queries need not grow as those of keys do."""
    keys, queries = (np.repeat(ids, [12, 6, 6])[None] for ids in ([0, 1, 2], [0, 2, 1]))
    workload = Workload(**SQUARE | {"batch": 4}, mask=masks.block_causal(keys, queries), pass_="train")
    assert corner_of(cut_of(workload)) is not None
    check(BY_PASSES.configured({"sequences": sequences}), workload, 3e-6, compiled=True)


@pytest.mark.parametrize("kind", ["documents", "documents-causal", "padding"])
def test_masks_without_common_keys_go_piece_by_piece(kind):
    assert corner_of(cut_of(Workload(**SQUARE, mask=MASKS[kind]))) is None


def test_a_large_corner_goes_piece_by_piece():
    halves = Workload(**SQUARE | {"q_len": 512}, mask=masks.block_causal(np.arange(512) // 256))
    assert corner_of(cut_of(halves)) is None


def test_training_by_turns_keeps_no_piece_of_its_inputs():
    """Of q only the whole is kept for the backward pass: slices are made again."""
    workload = Workload(**SQUARE, mask=LIKE_PI0, pass_="train")
    arrays = [jax.numpy.asarray(x, "float32") for x in draw(workload)[:3]]
    _, pull = jax.vjp(BY_PASSES.build(workload, {"sequences": 1}), *arrays)
    shapes = [x.shape for x in jax.tree.leaves(pull)]
    assert (2, 24, 4, 8) in shapes
    assert not [shape for shape in shapes if 16 in shape or 7 in shape]


def test_fewer_sequences_need_less_memory():
    workload = Workload(
        **SQUARE | {"batch": 8, "q_len": 256}, mask=masks.block_causal(np.arange(256) // 128), pass_="train"
    )
    arrays = [jax.numpy.asarray(x, "float32") for x in draw(workload)[:3]]

    def temporaries(sequences):
        call = BY_PASSES.build(workload, {"sequences": sequences})
        step = jax.jit(lambda q, k, v: jax.vjp(call, q, k, v)[1](q))
        return step.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2) < temporaries(8) / 2


def test_sequences_that_do_not_divide_the_batch_or_differ_are_refused():
    odd = CUDNN_SPLIT.configured({"sequences": 5})
    assert "batch of 32 by 5 sequences" in str(odd.supports(PI0, HOPPER))
    differing = Workload(**SQUARE, mask=MASKS["padding"], pass_="train")
    assert "the same mask" in str(XLA_SPLIT.configured({"sequences": 1}).supports(differing, CPU))
    with pytest.raises(UsageError, match=r"jax\.cudnn-split: sequences must be a whole number"):
        CUDNN_SPLIT.configured({"sequences": "few"})


def test_tuning_tries_parts_of_a_large_batch():
    assert CUDNN_SPLIT.configs(PI0) == ({}, {"sequences": 4}, {"sequences": 8})
    assert XLA_SPLIT.configs(Workload(**SQUARE, mask=MASKS["padding"])) == ({},)


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
        ({"mask": masks.prefix(400)}, "would need a mask array for causal of queries 400-866"),
        ({"mask": masks.window(7)}, "at most 8 blocks"),
        ({"mask": PI0.mask & masks.valid(np.arange(867) != 600)}, "one run of keys"),
        ({"mask": PI0.mask & masks.lengths([0] + [867] * 31)}, "jax.cudnn"),
        ({"dtype": "float32"}, "jax.cudnn takes float16 or bfloat16, not float32"),
        ({"head_dim": 512, "v_head_dim": 512}, "head_dim up to 256"),
        ({"softcap": 3.0}, "no softcap"),
    ],
    ids=["full", "prefix", "window", "hole", "lengths", "float32", "wide heads", "softcap"],
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
@pytest.mark.parametrize(
    "kind, sequences", [("pi0", 0), ("pi0", 1), ("documents-causal", 0), ("documents-causal", 1), ("padding", 0)]
)
def test_cudnn_on_a_gpu(kind, sequences):
    shape = SQUARE | {"heads": 8, "head_dim": 256, "dtype": "bfloat16"}
    split = CUDNN_SPLIT.configured({"sequences": sequences})
    check(split, Workload(**shape, mask=MASKS[kind], pass_="train"), 3e-2, JAX.environment("cuda"), True, "cuda")
