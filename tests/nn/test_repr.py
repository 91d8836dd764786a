"""A module says what it is: every option that changes its numbers is in its repr."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from attnbench import nn

PATTERN = ([8, 24], [1, 3])
MADE = {
    "dilated8r1+24r3, causal=True": lambda: nn.DilatedAttention(*PATTERN, causal=True),
    "dilated8r1+24r3, causal=False": lambda: nn.ImprovedDilatedAttention(*PATTERN),
    "mix_grad=full, layout=striped": lambda: nn.RingDilatedAttention(*PATTERN, layout="striped"),
    "sparsity=0.5, pattern=random, block_size=4, seed=3": lambda: nn.BlockSparseRingDilatedAttention(
        *PATTERN, sparsity=0.5, pattern="random", block_size=4, seed=3
    ),
    "block_mask=blocks4-": lambda: nn.BlockSparseRingDilatedAttention(
        *PATTERN, block_mask=np.ones((2, 2), bool), block_size=4
    ),
    "embed_dim=24, num_heads=6, num_kv_heads=2": lambda: nn.MultiheadDilatedAttention(24, 6, *PATTERN, num_kv_heads=2),
    "embed_dim=24, num_heads=6, num_kv_heads=6": lambda: nn.RingMultiheadDilatedAttention(24, 6, *PATTERN),
    "sparsity=0.75, pattern=local, block_size=16, causal=True, scale=None": lambda: nn.create_block_sparse_attention(
        0.75, "local", block_size=16, causal=True
    ),
    "pattern=random, seed=3": lambda: nn.create_block_sparse_attention(0.75, "random", seed=3),
    "pattern=dynamic_threshold, pool=4, threshold=0.9": lambda: nn.create_block_sparse_attention(
        0.75, "dynamic_threshold", pool=4, threshold=0.9
    ),
    "heads=2, head_dim=8, pool=8": lambda: nn.create_block_sparse_attention(0.5, "learned", gate=nn.BlockGate(2, 8)),
    "min_sparsity=0.5, max_sparsity=0.9, mass=0.95, pool=8": lambda: nn.create_adaptive_sparse_attention(0.5, 0.9),
}


@pytest.mark.parametrize("words", MADE)
def test_a_module_says_what_it_is(words):
    assert words in repr(MADE[words]())
