"""Transformers' own attention functions, with what they do to a mask that they are not handed as an array."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import attnbench as ab

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]
MASKS = {
    "full": ab.masks.full(),
    "causal": ab.masks.causal(),
    "causal top-left": ab.masks.causal("top-left"),
    "window": ab.masks.window(2),
    "window top-left": ab.masks.window(2, 0, align="top-left"),
    "window both ways, top-left": ab.masks.window(1, 2, align="top-left"),
    "prefix": ab.masks.prefix(1),
    "prefix of 3": ab.masks.prefix(3),
}
LENGTHS = ab.masks.lengths([4, 1])


@pytest.mark.parametrize("impl", ["torch.hf-sdpa", "torch.hf-eager"])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 2), (1, 9), (2, 9), (9, 2), (5, 5)])
@pytest.mark.parametrize("name", MASKS)
def test_every_alignment_and_number_of_queries(name, q_len, kv_len, lengths, impl):
    mask = MASKS[name] & LENGTHS if lengths else MASKS[name]
    random = np.random.default_rng(0)
    q = random.standard_normal((2, q_len, 4, 8), np.float32)
    k, v = (random.standard_normal((2, kv_len, 2, 8), np.float32) for _ in range(2))
    try:
        expected = ab.attention(q, k, v, mask=mask, impl="numpy.reference")
        found = ab.attention(*map(torch.from_numpy, (q, k, v)), mask=mask, impl=impl)
    except (ab.errors.Unsupported, ab.errors.InvalidWorkload):  # rows without keys, a prefix longer than the keys
        assert impl == "torch.hf-eager" or max(4 * lengths, name == "prefix of 3" and 3) > kv_len
        return
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
