"""Cost against counts made by hand: pairs one by one, matmul shapes one by one, arrays one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench import masks
from attnbench.spec import Workload
from attnbench.workloads import cost

SHAPE = {"batch": 2, "q_len": 8, "kv_len": 12, "heads": 4, "kv_heads": 2, "head_dim": 16}


def matmul(m, k, n) -> int:
    return 2 * m * k * n


def test_dense_forward_backward_and_train():
    q, s, d, dv, heads = 8, 12, 16, 24, 2 * 4
    flops = {p: cost.demand(Workload(**SHAPE, v_head_dim=dv, pass_=p)).flops for p in ("forward", "backward", "train")}
    assert flops["forward"] == heads * (matmul(q, d, s) + matmul(q, s, dv))
    recomputed, dp, dv_, dq, dk = matmul(q, d, s), matmul(q, dv, s), matmul(s, q, dv), matmul(q, s, d), matmul(s, q, d)
    assert flops["backward"] == heads * (recomputed + dp + dv_ + dq + dk)
    assert flops["train"] == flops["forward"] + flops["backward"]


def test_backward_is_two_and_a_half_forwards_when_the_widths_agree():
    forward, backward = (cost.demand(Workload(**SHAPE, pass_=p)).flops for p in ("forward", "backward"))
    assert backward * 2 == forward * 5


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.window(2), masks.prefix(3), masks.lengths([12, 0])], ids=lambda m: m.id
)
def test_flops_follow_the_visible_pairs(mask):
    w = Workload(**SHAPE, mask=mask)
    visible = np.broadcast_to(mask.array(w.mask_shape), w.mask_shape).sum()
    assert cost.demand(w).flops == visible * 4 * 16


def test_bytes_are_each_array_once():
    w = Workload(**SHAPE, v_head_dim=24, dtype="bfloat16", pass_="forward")
    q, k, v, out = 2 * 8 * 4 * 16, 2 * 12 * 2 * 16, 2 * 12 * 2 * 24, 2 * 8 * 4 * 24
    lse = 2 * 4 * 8 * 4
    forward = cost.demand(w)
    assert forward.bytes == forward.io_bytes == 2 * (q + k + v + out)
    assert forward.output_bytes == 2 * out
    assert forward.kv_cache_bytes == 2 * (k + v)
    assert forward.scores_bytes == 2 * 4 * 8 * 12 * 4
    train = cost.demand(Workload(**SHAPE, v_head_dim=24, dtype="bfloat16", pass_="train"))
    assert train.bytes == 2 * (2 * (q + k + v + out)) + lse
    assert train.output_bytes == 2 * (out + q + k + v)
    backward = cost.demand(Workload(**SHAPE, v_head_dim=24, dtype="bfloat16", pass_="backward"))
    assert backward.bytes == train.bytes
    assert backward.output_bytes == 2 * (q + k + v)


def test_least_bytes_leave_out_keys_that_nobody_sees():
    """A window over a long cache reads the window: counting the cache would put an honest kernel above the roofline."""
    shape = {"batch": 1, "q_len": 1, "kv_len": 1000, "heads": 1, "head_dim": 8}
    whole, window = (cost.demand(Workload(**shape, mask=mask)) for mask in (masks.full(), masks.window(9)))
    assert whole.bytes - window.bytes == 2 * 990 * 8 * 4
    assert whole.io_bytes == window.io_bytes


def test_a_sparse_decode_reads_its_blocks():
    """One query of two that are kept of 1024 blocks: counting the cache would put a kernel that reads them far above
    the roofline, and fail it as implausible. Heads that share keys and values may keep other blocks."""
    kept = np.zeros((4, 1, 1024), bool)
    kept[:, 0, 7] = True
    kept[3, 0, 9] = True
    shape = {"batch": 2, "q_len": 1, "kv_len": 1024 * 64, "heads": 4, "kv_heads": 2, "head_dim": 8}
    dense = kept.repeat(64, axis=-1)
    bias = np.where(dense, 1.0, -np.inf).astype(np.float32)
    for mask in (masks.blocks(kept, 64), masks.dense(dense), masks.dense(bias)):
        cells = cost.demand(Workload(**shape, mask=mask))
        assert cells.bytes == 2 * (2 * 1 * 4 * 8 + (1 + 2) * 64 * 2 * 8) * 4
        assert cells.io_bytes == cost.demand(Workload(**shape)).io_bytes


@given(st.data(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
def test_seen_keys_against_the_array(data, batch, q_len, kv_len):
    kv_lengths = data.draw(st.lists(st.integers(0, kv_len), min_size=batch, max_size=batch))
    keys = np.array(data.draw(st.lists(st.booleans(), min_size=kv_len, max_size=kv_len)))
    shape = masks.MaskShape(batch, 4, q_len, kv_len)
    window = masks.window(data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5)))
    numbers = np.random.default_rng(data.draw(st.integers(0, 1000)))
    ids, q_ids = numbers.integers(0, 4, (batch, kv_len)), numbers.integers(0, 4, q_len)
    visible = numbers.random((4, q_len, kv_len)) < 0.3
    single = [
        window, masks.lengths(kv_lengths), masks.valid(keys), masks.documents(ids, q_ids),
        masks.block_causal(ids, q_ids), masks.dense(visible), masks.dense(visible[:1, :, :1]),
        masks.dense(np.where(visible, 0.0, -np.inf)[None]), masks.blocks(visible[:, ::2, ::2], 2),
    ]  # fmt: skip
    single += [masks.dilated((2, 4), (2, 4), offset=how) for how in ("mod", "group")] if q_len == kv_len else []
    runs = [
        masks.causal("top-left") & masks.valid(keys), masks.causal("top-left") & window & masks.lengths(kv_lengths),
        masks.prefix(3, "top-left") & masks.documents(np.sort(ids), q_ids),
    ]  # fmt: skip
    for kv_heads in (1, 2, 4):

        def want(mask: masks.AnyMask, groups: int = kv_heads) -> int:
            seen = np.broadcast_to(mask.array(shape), shape).any(axis=2)
            return int(seen.reshape(batch, groups, -1, kv_len).any(axis=2).sum())

        for mask in (*single, *runs):
            assert cost.seen_keys(mask, shape, kv_heads) == want(mask), mask.id
        for mask in (single[5] & window, single[8] & single[3]):
            assert cost.seen_keys(mask, shape, kv_heads) >= want(mask), mask.id


def test_published_figure_of_openpi():
    """Unfused float32 logits of pi0 at batch 32 and 867 tokens are 770 MB per layer."""
    w = Workload(batch=32, q_len=867, heads=8, kv_heads=1, head_dim=256, dtype="bfloat16")
    assert cost.demand(w).scores_bytes == 32 * 8 * 867 * 867 * 4 == 769_729_536
    prefix = Workload(batch=1, q_len=816, heads=8, kv_heads=1, head_dim=256, dtype="bfloat16")
    assert cost.demand(prefix).kv_cache_bytes == 816 * 256 * 2 * 2


def test_a_million_tokens_are_counted_at_once():
    w = Workload(batch=1, q_len=1 << 20, heads=8, head_dim=128, dtype="bfloat16", mask=masks.causal())
    assert cost.demand(w).flops == 8 * (2**20 * (2**20 + 1) // 2) * 4 * 128
    assert cost.demand(w).intensity > 1000
