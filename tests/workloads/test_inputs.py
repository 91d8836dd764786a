"""Inputs: shapes, fresh for each seed, reproducible, never zeros, sine, cosine and tangent ramps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attnbench.errors import InvalidWorkload
from attnbench.spec import Workload
from attnbench.workloads import inputs
from attnbench.workloads.inputs import draw

W = Workload(batch=2, q_len=5, kv_len=7, heads=4, kv_heads=2, head_dim=8, v_head_dim=6)


def test_shapes_and_types():
    q, k, v, dout = draw(W, 0)
    assert [a.shape for a in (q, k, v, dout)] == [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6), (2, 5, 4, 6)]
    assert {a.dtype for a in (q, k, v, dout)} == {np.dtype(np.float32)}
    half = draw(Workload(batch=1, q_len=2, heads=1, head_dim=4, dtype="bfloat16"), 0)
    assert half.q.dtype == np.float32
    assert draw(Workload(batch=1, q_len=2, heads=1, head_dim=4, dtype="float64"), 0).q.dtype == np.float64


def test_same_seed_same_bits_other_seed_other_everything():
    first, again, other = draw(W, 3), draw(W, 3), draw(W, 4)
    for a, b, c in zip(first, again, other):
        np.testing.assert_array_equal(a, b)
        assert not np.any(a == c)
        assert np.all(a != 0)


def test_arrays_are_independent_normals():
    drawn = draw(Workload(batch=4, q_len=256, heads=8, head_dim=64), 1)
    for n, a in enumerate(drawn):
        assert abs(a.mean()) < 0.01
        assert abs(a.std() - 1) < 0.01
        for b in drawn[n + 1 :]:
            assert abs(np.mean(a * b)) < 0.01


def test_chunks_do_not_repeat_and_do_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK", 1000)
    w = Workload(batch=2, q_len=64, heads=4, head_dim=16)
    first = draw(w, 0).q.reshape(-1)
    assert not np.any(first[:1000] == first[1000:2000])
    monkeypatch.setattr(inputs.os, "cpu_count", lambda: 1)
    np.testing.assert_array_equal(draw(w, 0).q.reshape(-1), first)


def test_scale_leaves_dout_alone():
    plain, scaled = draw(W, 2), draw(W, 2, scale=100.0)
    for a, b in zip(plain[:3], scaled[:3]):
        np.testing.assert_allclose(b, a * 100, rtol=1e-6)
    np.testing.assert_array_equal(plain.dout, scaled.dout)


def test_ramps_are_sine_cosine_and_tangent():
    w = Workload(batch=1, q_len=32, heads=1, head_dim=32, inputs="sincostan")
    q, k, v, dout = draw(w, 0)
    for i in (0, 1, 157, 1023):
        assert q.reshape(-1)[i] == pytest.approx(0.1 * math.sin(0.01 * i), rel=1e-6)
        assert k.reshape(-1)[i] == pytest.approx(0.1 * math.cos(0.01 * i), rel=1e-6)
        assert v.reshape(-1)[i] == pytest.approx(0.1 * math.tan(0.01 * i), rel=1e-6)
    assert abs(v).max() > 100, "the poles of the tangent are kept"
    assert np.isfinite(v).all()
    assert dout.std() > 0.5


def test_ramps_differ_between_seeds():
    w = Workload(batch=1, q_len=32, heads=1, head_dim=32, inputs="sincostan")
    assert not np.array_equal(draw(w, 0).q, draw(w, 1).q)
    assert not np.array_equal(draw(w, 1).v, draw(w, 2).v)


def attention_of(w, seed, causal=False):
    """[h, t, s] probabilities of structured inputs."""
    q, k, *_ = draw(w, seed)
    logits = np.einsum("bihd,bjhd->hij", q, np.repeat(k, w.group, axis=2)) * w.softmax_scale
    logits = np.where(np.tri(w.q_len, w.kv_len, dtype=bool), logits, -np.inf) if causal else logits
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


STRUCTURED = {"batch": 1, "q_len": 1024, "heads": 4, "kv_heads": 2, "head_dim": 64, "inputs": "structured"}


@pytest.mark.parametrize("causal", [False, True])
def test_structured_attention_has_sinks_slashes_and_needles(causal):
    p = attention_of(Workload(**STRUCTURED), 3, causal)
    assert p[:, 128:, :4].sum(-1).mean() > 0.15, "sinks draw from everywhere"
    distance = np.abs(np.arange(1024)[:, None] - np.arange(1024))
    assert (p * (distance < 32)).sum(-1)[:, 128:].mean() > 0.1, "the near slash"
    column = p[:, 256:, 64:].mean(axis=(0, 1))
    assert column.max() > 20 * np.median(column), "a vertical"
    mass = -np.sort(-p.reshape(4, 1024, 64, 16).sum(-1), axis=-1)
    assert mass[..., :16].sum(-1).mean() > 0.9, "a quarter of the blocks holds almost everything"


def test_normals_have_no_sparsity_to_find():
    p = attention_of(Workload(**(STRUCTURED | {"inputs": "normal"})), 3)
    mass = -np.sort(-p.reshape(4, 1024, 64, 16).sum(-1), axis=-1)
    assert mass[..., :16].sum(-1).mean() < 0.55


def test_structured_directions_stay_and_content_changes():
    w = Workload(**STRUCTURED)
    first, again, other = draw(w, 3), draw(w, 3), draw(w, 4)
    np.testing.assert_array_equal(first.q, again.q)
    assert not np.any(first.k == other.k)
    sinks = [x.k[0, :4, 0].mean(axis=0) for x in (first, other)]
    cosine = sinks[0] @ sinks[1] / np.linalg.norm(sinks[0]) / np.linalg.norm(sinks[1])
    assert cosine > 0.8, "a head's sink direction is the head's, not the draw's"
    assert all(np.isfinite(a).all() for a in first)
    half = draw(Workload(**(STRUCTURED | {"q_len": 7, "kv_len": 40})), 0)
    assert half.q.shape == (1, 7, 4, 64)


def test_structured_needs_room():
    with pytest.raises(InvalidWorkload, match="head_dim 16 or more"):
        draw(Workload(batch=1, q_len=8, heads=1, head_dim=8, inputs="structured"), 0)
