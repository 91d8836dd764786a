"""tokamax, kvax and flash-attn-jax, none of which installs here: fakes with their documented behaviour stand in.

A fake computes what the real one computes for the arguments it is given (top-left causal, the mean of V on rows without
keys, scale 1 by default), so an adapter that forgets one of them gets a wrong answer, not only a wrong call.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
from jax_oracle import CPU, HOPPER, check, every_mask

from attnbench import masks
from attnbench.impls.jax import tokamax as jax_tokamax
from attnbench.impls.jax.flash_attention import FLASH_ATTN
from attnbench.impls.jax.kvax import KVAX
from attnbench.spec import Workload

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
jnp = jax.numpy
SQUARE = {"batch": 2, "q_len": 24, "heads": 4, "kv_heads": 2, "head_dim": 16}
BACKENDS = [jax_tokamax.MOSAIC, jax_tokamax.TRITON, jax_tokamax.CUDNN, jax_tokamax.XLA, jax_tokamax.XLA_CHUNKED]


def softmax_attention(q, k, v, bias, mask, scale, softcap=None):
    """Grouped attention with the bias before the cap and a finite mask value, as the libraries do it."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bihd,bjhd->bhij", q.astype(wide), k.astype(wide)) * scale
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    p = jax.nn.softmax(jnp.where(mask, logits, -1e30), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", p, v.astype(wide)).astype(q.dtype)


def empty_the_cache_of_triton_on_import(monkeypatch, module):
    """As importing jax-triton does, which kvax and tokamax do."""
    real = importlib.import_module

    def import_module(name):
        if name == module:
            os.environ["TRITON_CACHE_DIR"] = ""
        return real(name)

    monkeypatch.setattr(importlib, "import_module", import_module)


@pytest.fixture
def tokamax(monkeypatch):
    fake = types.ModuleType("tokamax")

    def dot_product_attention(
        query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
        key_value_seq_lengths=None, local_window_size=None, logits_soft_cap=None, precision=None, implementation=None,
    ):  # fmt: skip
        assert implementation in ("mosaic", "triton", "cudnn", "xla", "xla_chunked"), "one explicit name"
        assert query_seq_lengths is None, "padded query rows are not zeroed"
        assert scale is not None
        i, j = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])[None]
        seen = jnp.ones((1, 1, i.size, j.size), bool) if mask is None else mask
        if is_causal:
            seen = seen & (j <= i)
        if local_window_size is not None:
            left, right = local_window_size
            seen = seen & (j >= i - left) & (j <= i + right)
        if key_value_seq_lengths is not None:
            seen = seen & (j < key_value_seq_lengths[:, None, None, None])
        fake.asked = implementation
        return softmax_attention(query, key, value, bias, seen, scale, logits_soft_cap)

    fake.dot_product_attention = dot_product_attention
    monkeypatch.setitem(sys.modules, "tokamax", fake)
    return fake


class TestTokamax:
    @pytest.mark.parametrize("kind", every_mask())
    def test_every_mask_with_rows_without_keys_set_to_zero(self, tokamax, kind):
        check(jax_tokamax.XLA_CHUNKED, Workload(**SQUARE, mask=every_mask()[kind], pass_="backward"), 5e-6)

    def test_the_cache_of_triton_outlives_its_import(self, tokamax, monkeypatch):
        monkeypatch.setenv("TRITON_CACHE_DIR", "/some/where")
        empty_the_cache_of_triton_on_import(monkeypatch, "tokamax")
        check(jax_tokamax.XLA, Workload(**SQUARE), 5e-6)
        assert os.environ["TRITON_CACHE_DIR"] == "/some/where"

    def test_bottom_right_rectangles(self, tokamax):
        for sizes in ({"q_len": 6, "kv_len": 20}, {"q_len": 20, "kv_len": 6}):
            check(jax_tokamax.XLA, Workload(**(SQUARE | sizes), mask=masks.causal()), 5e-6)

    def test_softcap_and_narrow_values_in_float64(self, tokamax):
        workload = Workload(**SQUARE, v_head_dim=4, softcap=2.0, mask=masks.causal(), dtype="float64")
        check(jax_tokamax.XLA, workload, 1e-12)

    @pytest.mark.parametrize("implementation", BACKENDS, ids=repr)
    def test_each_names_exactly_itself(self, tokamax, implementation):
        workload = Workload(**SQUARE, mask=masks.causal(), dtype="bfloat16")
        check(implementation, workload, 3e-2, HOPPER)
        assert tokamax.asked == implementation.backend
        assert implementation.name == f"jax.tokamax-{implementation.backend.replace('_', '-')}"
        assert implementation.process == "tokamax"

    @pytest.mark.parametrize(
        "implementation,change,words",
        [
            (jax_tokamax.XLA, {"softcap": 2.0, "mask": masks.dense(np.zeros((24, 24), np.float32))}, "after adding"),
            (jax_tokamax.TRITON, {"softcap": 2.0, "pass_": "train", "dtype": "bfloat16"}, "softcap"),
            (jax_tokamax.CUDNN, {"softcap": 2.0, "dtype": "bfloat16"}, "softcap"),
            (jax_tokamax.CUDNN, {"head_dim": 20, "dtype": "bfloat16"}, "steps of 8"),
            (jax_tokamax.MOSAIC, {"dtype": "float32"}, "float32"),
        ],
    )
    def test_refusals(self, implementation, change, words):
        assert words in (implementation.supports(Workload(**(SQUARE | change)), HOPPER) or "")

    @pytest.mark.parametrize("implementation", [jax_tokamax.MOSAIC, jax_tokamax.TRITON], ids=repr)
    def test_kernels_overflow_in_float16_under_a_soft_cap(self, implementation):
        work = Workload(**(SQUARE | {"dtype": "float16", "softcap": 30.0}))
        assert "overflows" in (implementation.supports(work, HOPPER) or "")
        for fields in ({"dtype": "bfloat16"}, {"softcap": 10.0}, {"softcap": None}):
            assert implementation.supports(msgspec.structs.replace(work, **fields), HOPPER) is None

    def test_mosaic_backward_needs_hopper(self):
        ampere = replace_capability((8, 0))
        workload = Workload(**SQUARE, dtype="bfloat16")
        assert jax_tokamax.MOSAIC.supports(workload, ampere) is None
        train = Workload(**SQUARE, dtype="bfloat16", pass_="train")
        assert "9.x or 10.x" in (jax_tokamax.MOSAIC.supports(train, ampere) or "")
        consumer = jax_tokamax.MOSAIC.supports(workload, replace_capability((12, 0)))
        assert consumer == "needs compute capability 8.x or 9.x or 10.x, this is 12.0"

    def test_kernels_need_cuda(self):
        for implementation in BACKENDS[:3]:
            assert "needs cuda" in (implementation.supports(Workload(**SQUARE, dtype="bfloat16"), CPU) or "")

    def test_missing_package_says_how_to_get_it(self, monkeypatch):
        monkeypatch.setattr("attnbench.impls.conditions.find_module", lambda _: None)
        assert "pip install tokamax" in (jax_tokamax.XLA.available(CPU) or "")


def replace_capability(capability):
    import msgspec

    return msgspec.structs.replace(HOPPER, capability=capability)


class Constexpr:
    """Triton's wrapper of compile-time values."""

    def __init__(self, value):
        self.value = value


@dataclass(frozen=True)
class Blocks:
    query_block_size: int = 64
    kv_block_size: int = 64
    num_warps: int = 4
    num_stages: int = 3


@pytest.fixture
def kvax(monkeypatch):
    """kvax 0.1.0: its import needs a repaired JAX attribute, its kernels repaired constants, its call the specs."""
    inside = {"specs": False}
    shard_map = types.ModuleType("jax.experimental.shard_map")
    language = types.ModuleType("triton.language")
    language.constexpr = Constexpr
    kernels = types.ModuleType("kvax.ops.flash_attention_triton")
    kernels.LOG2_CONST, kernels.NEG_INF = 1.44, -(2**31)
    ops, utils = types.ModuleType("kvax.ops"), types.ModuleType("kvax.utils")

    @contextmanager
    def attention_specs(query_specs, kv_specs):
        assert len(query_specs) == len(kv_specs) == 4
        inside["specs"] = True
        yield
        inside["specs"] = False

    def create_attention_mask(*tokens, fwd_params, bwd_params, calc_bwd_mask, mesh):
        assert inside["specs"]
        assert hasattr(shard_map, "Specs")
        utils.blocks = (fwd_params, bwd_params)
        return ("table",) * (3 if calc_bwd_mask else 1)

    def flash_attention(q, k, v, q_pos, q_seg, kv_pos, kv_seg, mask, scale=1.0, **_):
        assert isinstance(kernels.LOG2_CONST, Constexpr)
        assert inside["specs"]
        utils.tables = len(mask)
        assert scale != 1, "'float' object has no attribute 'to', in the backward kernel"
        if len(mask) == 3:  # the backward pass takes whole blocks only
            largest = max(max(b.query_block_size, b.kv_block_size) for b in utils.blocks)
            assert {x.shape[1] % largest for x in (q, k, v, q_pos, q_seg, kv_pos, kv_seg)} == {0}
        seen = (q_pos[:, :, None] >= kv_pos[:, None]) & (q_seg[:, :, None] == kv_seg[:, None]) & (kv_seg[:, None] != -1)
        return softmax_attention(q, k, v, None, seen[:, None], scale)

    ops.create_attention_mask, ops.flash_attention = create_attention_mask, flash_attention
    utils.attention_specs, utils.FlashAttentionParamsConfig = attention_specs, Blocks
    for module in (shard_map, language, kernels, ops, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return utils


class TestKvax:
    shape = SQUARE | {"dtype": "float16", "mask": masks.causal()}

    def test_causal_documents_and_gradients(self, kvax):
        mask = every_mask()["documents-causal"]
        check(KVAX, Workload(**(self.shape | {"mask": mask}), scale=0.4, pass_="train"), 3e-3, HOPPER)
        assert kvax.tables == 3

    def test_bottom_right_rectangle_by_positions(self, kvax):
        check(KVAX, Workload(**(self.shape | {"q_len": 6, "kv_len": 20})), 3e-3, HOPPER)
        assert kvax.tables == 1

    def test_blocks_are_given_not_guessed_from_the_device_name(self, kvax):
        check(KVAX, Workload(**self.shape), 3e-3, HOPPER)
        assert kvax.blocks == (Blocks(128, 128, 8, 3), replace(Blocks(128, 128, 8, 3), query_block_size=64))

    @pytest.mark.parametrize(
        "change,words",
        [
            ({"mask": masks.full()}, "full"),
            ({"mask": masks.documents(np.zeros(24, int))}, "always causal"),
            ({"mask": masks.documents(np.full(24, -1)) & masks.causal()}, "padding"),
            ({"mask": masks.documents([0] * 8 + [1] * 8 + [0] * 8) & masks.causal()}, "consecutive"),
            ({"mask": masks.window(3)}, "window"),
            ({"head_dim": 80}, "80"),
            ({"q_len": 30, "kv_len": 24}, "no key"),
            ({"dtype": "float32"}, "float32"),
        ],
    )
    def test_refusals(self, change, words):
        assert words in (KVAX.supports(Workload(**(self.shape | change)), HOPPER) or "")

    def test_has_a_process_of_its_own(self):
        assert KVAX.process == "kvax"

    @pytest.mark.parametrize("before", [None, "/some/where"])
    def test_the_cache_of_triton_outlives_its_import(self, kvax, monkeypatch, before):
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        if before is not None:
            monkeypatch.setenv("TRITON_CACHE_DIR", before)
        empty_the_cache_of_triton_on_import(monkeypatch, "kvax.ops")
        check(KVAX, Workload(**self.shape), 3e-3, HOPPER)
        assert os.environ.get("TRITON_CACHE_DIR") == before

    def test_a_scale_of_one(self, kvax):
        check(KVAX, Workload(**self.shape, scale=1.0, pass_="train"), 3e-3, HOPPER)

    def test_lengths_that_are_no_whole_blocks_in_training(self, kvax):
        check(KVAX, Workload(**(self.shape | {"q_len": 131, "kv_len": 257}), pass_="train"), 3e-3, HOPPER)


@pytest.fixture
def flash_attn(monkeypatch):
    fake = types.ModuleType("flash_attn_jax")

    def flash_mha(q, k, v, softmax_scale=None, is_causal=False, window_size=(-1, -1)):
        assert q.dtype in (jnp.float16, jnp.bfloat16)
        assert type(softmax_scale) is float
        i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None]
        seen = np.ones((i.size, j.size), bool)
        if is_causal:
            seen &= j <= i
        left, right = window_size
        seen &= (left < 0) | (j >= i - left)
        seen &= (right < 0) | (j <= i + right)
        return softmax_attention(q, k, v, None, jnp.asarray(seen), softmax_scale)

    fake.flash_mha = flash_mha
    monkeypatch.setitem(sys.modules, "flash_attn_jax", fake)


class TestFlashAttn:
    @pytest.mark.parametrize("kind", ["full", "causal", "window", "window-both", "window-open"])
    def test_masks_and_grouped_heads(self, flash_attn, kind):
        workload = Workload(**SQUARE, mask=every_mask()[kind], dtype="float16", scale=1, pass_="train")
        check(FLASH_ATTN, workload, 3e-3, HOPPER)

    @pytest.mark.parametrize(
        "change,words",
        [
            ({"kv_len": 32, "mask": masks.causal()}, "alignment"),
            ({"mask": masks.causal() & masks.window(3)}, "not both"),
            ({"mask": masks.prefix(3)}, "prefix"),
            ({"dtype": "float32"}, "float32"),
            ({"softcap": 2.0}, "softcap"),
        ],
    )
    def test_refusals(self, change, words):
        workload = Workload(**(SQUARE | {"dtype": "float16"} | change))
        assert words in (FLASH_ATTN.supports(workload, HOPPER) or "")
