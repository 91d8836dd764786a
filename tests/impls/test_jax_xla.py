"""jax.einsum, jax.xla and jax.cudnn: every mask against float64 NumPy, and each trap of jax.nn's function."""

from __future__ import annotations

import numpy as np
import pytest
from jax_oracle import CPU, HOPPER, check, check_lse, draw, every_mask

from attnbench import masks
from attnbench.impls.jax._libraries import mask_arguments
from attnbench.impls.jax.nn import CUDNN, EINSUM, XLA
from attnbench.spec import Environment, Workload

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
jnp = jax.numpy
quick = pytest.mark.usefixtures("quick_to_compile")
SQUARE = {"batch": 2, "q_len": 24, "heads": 4, "kv_heads": 2, "head_dim": 8}


@quick
@pytest.mark.parametrize("implementation", [EINSUM, XLA], ids=repr)
@pytest.mark.parametrize("kind", every_mask())
def test_every_mask_forward_and_backward(implementation, kind):
    check(implementation, Workload(**SQUARE, mask=every_mask()[kind], pass_="train"), 3e-6)


@quick
@pytest.mark.parametrize("implementation", [EINSUM, XLA], ids=repr)
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("sizes", [(6, 20), (20, 6)])
def test_rectangles_in_both_alignments(implementation, align, sizes):
    shape = {"batch": 2, "q_len": sizes[0], "kv_len": sizes[1], "heads": 4, "kv_heads": 1, "head_dim": 8}
    for mask in (masks.causal(align), masks.window(3, 0, align), masks.prefix(2, align)):
        check(implementation, Workload(**shape, mask=mask, pass_="train"), 3e-6)


@pytest.mark.parametrize(
    "implementation,dtype,tolerance", [(EINSUM, "float16", 3e-3), (EINSUM, "bfloat16", 2e-2), (XLA, "bfloat16", 2e-2)]
)
def test_sixteen_bits_compiled(implementation, dtype, tolerance):
    workload = Workload(**SQUARE, mask=masks.causal(), dtype=dtype, pass_="train")
    check(implementation, workload, tolerance, compiled=True)


def test_compiled_with_a_mask_array():
    check(XLA, Workload(**SQUARE, mask=every_mask()["additive"], pass_="backward"), 3e-6, compiled=True)


def test_einsum_in_float64_is_float64():
    workload = Workload(**SQUARE, mask=every_mask()["additive"], dtype="float64", softcap=3.0, pass_="train")
    check(EINSUM, workload, 1e-12, compiled=True)


def test_einsum_softcap_scale_and_narrow_values():
    workload = Workload(**SQUARE, v_head_dim=5, scale=0.7, softcap=2.0, mask=masks.causal(), pass_="train")
    check(EINSUM, workload, 3e-6)


@quick
@pytest.mark.parametrize("implementation", [EINSUM, XLA], ids=repr)
@pytest.mark.parametrize("kind", ["full", "causal", "lengths", "additive", "dense"])
def test_lse(implementation, kind):
    check_lse(implementation, Workload(**SQUARE, mask=every_mask()[kind]), 3e-6)


def test_einsum_lse_stays_float32_for_bfloat16():
    check_lse(EINSUM, Workload(**SQUARE, mask=masks.causal(), dtype="bfloat16"), 2e-2)


def test_gradients_of_rows_without_keys_are_zero_not_nan():
    workload = Workload(**SQUARE, mask=masks.lengths([0, 0]), pass_="backward")
    for implementation in (EINSUM, XLA):
        check(implementation, workload, 0.0)


def test_no_pair_table_becomes_a_constant_of_the_program():
    workload = Workload(batch=1, q_len=256, heads=2, head_dim=8, mask=masks.prefix(9) & masks.documents(np.arange(256)))
    closed = jax.make_jaxpr(EINSUM.build(workload, {}))(*(jnp.asarray(x, jnp.float32) for x in draw(workload)[:3]))
    assert max((np.size(x) for x in closed.consts), default=0) <= 256


@pytest.mark.parametrize(
    "change,words",
    [
        ({"dtype": "float64"}, "float64"),
        ({"softcap": 5.0}, "softcap"),
        ({"v_head_dim": 4}, "v_head_dim"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_xla_refuses_what_it_would_get_wrong(change, words):
    reason = XLA.supports(Workload(**(SQUARE | change)), CPU)
    assert reason is not None
    assert words in reason


def test_cudnn_takes_no_mask_array_in_float16():
    gpu = Environment(device="cuda", device_name="H200", framework="jax", capability=(9, 0))
    shape = SQUARE | {"head_dim": 64, "dtype": "float16"}
    for mask, refused in ((masks.causal(), False), (masks.prefix(3), True)):
        reason = CUDNN.supports(Workload(**shape, mask=mask), gpu)
        assert (reason is not None and "adding -45,850" in reason) == refused
        assert CUDNN.supports(Workload(**shape | {"dtype": "bfloat16"}, mask=mask), gpu) is None


def test_xla_offers_lse_only_where_it_is_not_rounded():
    assert XLA.build_lse(Workload(**SQUARE, dtype="bfloat16"), {}) is None
    assert CUDNN.build_lse(Workload(**SQUARE, dtype="bfloat16"), {}) is None


class TestTheTrapsAreStillThere:
    """What jax.nn does by itself: when one of these fails, the adaptation beside it can go."""

    q = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, 2, 8)), jnp.float32)
    k = jnp.asarray(np.random.default_rng(2).standard_normal((1, 6, 2, 8)), jnp.float32)

    def test_causal_is_top_left(self):
        out = jax.nn.dot_product_attention(self.q, self.k, self.k, is_causal=True)
        assert np.allclose(out[0, 0], self.k[0, 0], atol=1e-6)

    def test_a_row_without_keys_is_the_mean_of_v(self):
        out = jax.nn.dot_product_attention(self.q, self.k, self.k, mask=jnp.zeros((1, 1, 4, 6), bool))
        assert np.allclose(out[0, 2], self.k[0].mean(0), atol=1e-6)

    def test_an_infinite_bias_row_is_nan(self):
        out = jax.nn.dot_product_attention(self.q, self.k, self.k, bias=jnp.full((1, 1, 4, 6), -jnp.inf))
        assert np.isnan(out).all()

    def test_lengths_must_be_int32(self):
        with jax.enable_x64(True), pytest.raises(ValueError, match="int32"):
            jax.nn.dot_product_attention(self.q, self.k, self.k, key_value_seq_lengths=jnp.asarray([3], jnp.int64))

    def test_lse_is_rounded_and_carries_no_gradient(self):
        def lse(q):
            return jax.nn.dot_product_attention(q, self.k, self.k, return_residual=True)[1].sum()

        assert not jax.grad(lse)(self.q).any()
        half = self.q.astype(jnp.bfloat16)
        keys = self.k.astype(jnp.bfloat16)
        assert jax.nn.dot_product_attention(half, keys, keys, return_residual=True)[1].dtype == jnp.bfloat16

    def test_float64_is_not_float64(self):
        with jax.enable_x64(True):
            q, k = (jnp.asarray(np.random.default_rng(3).standard_normal((1, 16, 2, 8))) for _ in range(2))
            found = jax.nn.dot_product_attention(q, k, k)
            exact = EINSUM.build(Workload(batch=1, q_len=16, heads=2, head_dim=8, dtype="float64"), {})(q, k, k)
            assert 1e-9 < float(abs(found - exact).max()) < 1e-5

    def test_float16_compiles_eagerly_only_on_the_cpu(self):
        q, k = self.q.astype(jnp.float16), self.k.astype(jnp.float16)
        with pytest.raises(ValueError, match="F16_F16_F32"):
            jax.jit(jax.nn.dot_product_attention)(q, k, k)


class EvenXla(type(XLA)):
    """cuDNN's way with odd lengths on a library that runs here."""

    trains_even_only = True


@quick
@pytest.mark.parametrize("kind", [kind for kind, mask in every_mask().items() if not mask.weighted])
def test_odd_lengths_as_even_ones(kind):
    check(EvenXla(), Workload(**SQUARE | {"q_len": 23}, mask=every_mask(tokens=23)[kind], pass_="train"), 3e-6)


@quick
@pytest.mark.parametrize("sizes", [(1, 23), (23, 24), (24, 23)], ids=str)
@pytest.mark.parametrize("mask", [masks.full(), masks.causal("top-left"), masks.causal()], ids=str)
def test_one_odd_length(mask, sizes):
    shape = SQUARE | {"q_len": sizes[0], "kv_len": sizes[1]}
    check(EvenXla(), Workload(**shape, mask=mask, pass_="train"), 3e-6, compiled=True)


@quick
def test_odd_lengths_as_even_ones_with_a_window_and_lengths():
    mask = masks.window(3, 0) & masks.lengths([23, 20])
    check(EvenXla(), Workload(**SQUARE | {"q_len": 23}, mask=mask, pass_="train"), 3e-6, compiled=True)


class TestCudnn:
    """cuDNN does not run without a GPU: what it is asked, and what is refused."""

    shape = {"batch": 2, "q_len": 16, "heads": 4, "head_dim": 64, "dtype": "bfloat16"}

    def asked(self, monkeypatch, mask, shapes=None, **change):
        """Keywords the library would receive, with arrays of these shapes."""
        workload = Workload(**(self.shape | change), mask=mask)
        assert CUDNN.supports(workload, HOPPER) is None
        seen = {}

        def fake(q, k, v, **words):
            seen.update(words)
            assert shapes is None or [x.shape for x in (q, k, v)] == shapes
            return q

        monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
        q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in draw(workload))
        CUDNN.build(workload, {})(q, k, v)
        assert seen.pop("implementation") == "cudnn"
        return seen

    def test_a_left_window_always_comes_with_causal(self, monkeypatch):
        words = self.asked(monkeypatch, masks.window(5, 0))
        assert words["is_causal"] is True
        assert words["local_window_size"] == (5, 0)
        assert "mask" not in words

    def test_a_right_window_is_a_mask_array(self, monkeypatch):
        words = self.asked(monkeypatch, masks.window(5, 2))
        assert "local_window_size" not in words
        assert "is_causal" not in words
        assert words["mask"].shape == (2, 4, 16, 16)

    def test_bottom_right_causal_of_a_rectangle_is_a_mask_array(self, monkeypatch):
        words = self.asked(monkeypatch, masks.causal(), kv_len=32)
        assert "is_causal" not in words
        expected = masks.causal().array(Workload(**self.shape, kv_len=32).mask_shape)
        assert np.array_equal(words["mask"], np.broadcast_to(expected, (2, 4, 16, 32)))

    def test_padding_masks_are_broadcast_to_all_pairs(self, monkeypatch):
        words = self.asked(monkeypatch, masks.valid(np.arange(16) != 3))
        assert words["mask"].shape == (2, 4, 16, 16)

    def test_lengths_are_int32_and_scale_is_given(self, monkeypatch):
        words = self.asked(monkeypatch, masks.lengths([4, 16]) & masks.causal(), scale=0.3)
        assert words["key_value_seq_lengths"].dtype == jnp.int32
        assert words["is_causal"] is True
        assert words["scale"] == 0.3

    @pytest.mark.parametrize(
        "change,words",
        [
            ({"dtype": "float32"}, "float32"),
            ({"head_dim": 60}, "steps of 8"),
            ({"head_dim": 264}, "256"),
            ({"v_head_dim": 32}, "v_head_dim"),
            ({"softcap": 5.0}, "softcap"),
            ({"mask": masks.dense(np.zeros((16, 16), np.float32))}, "rounds"),
        ],
    )
    def test_refusals(self, change, words):
        reason = CUDNN.supports(Workload(**(self.shape | change)), HOPPER)
        assert reason is not None
        assert words in reason

    def test_before_hopper_head_dim_ends_at_128(self):
        ampere = Environment(device="cuda", device_name="test", capability=(8, 0))
        assert "128" in (CUDNN.supports(Workload(**(self.shape | {"head_dim": 256})), ampere) or "")

    @pytest.mark.parametrize("mask", [masks.causal(), masks.full(), masks.window(5, 0), masks.prefix(3)], ids=str)
    def test_odd_lengths_train_as_even_ones(self, monkeypatch, mask):
        """JAX refuses them whatever the mask."""
        words = self.asked(monkeypatch, mask, q_len=15, kv_len=15, pass_="train", shapes=[(2, 16, 4, 64)] * 3)
        if "mask" in words:
            assert words["mask"].shape == (2, 4, 16, 16)
            assert not words["mask"][..., :15, 15].any()
            assert words["mask"][..., 15, :].any(-1).all()
        else:
            assert words["key_value_seq_lengths"].tolist() == [15, 15]

    def test_odd_lengths_without_gradients_stay(self, monkeypatch):
        words = self.asked(monkeypatch, masks.full(), q_len=15, kv_len=15, shapes=[(2, 15, 4, 64)] * 3)
        assert "key_value_seq_lengths" not in words

    def test_unavailable_without_cuda(self):
        assert "cuda" in (CUDNN.available(CPU) or "")


def test_two_windows_keep_both():
    workload = Workload(**SQUARE, mask=masks.window(5, 0) & masks.window(3, 0))
    arguments = mask_arguments(workload)
    assert arguments.window == (5, 0)
    assert arguments.needs_array
    check(XLA, workload, 3e-6)
