"""The learned gate of block-sparse attention and its training, for users of `attnbench.nn`.

gate = BlockGate(heads=16, head_dim=128)
losses = train_gate(gate, [(q, k), ...], masks.causal(), block_size=128)    # q, k in layout bhsd
attend = create_block_sparse_attention(0.9, "learned", causal=True, gate=gate)
"""

from __future__ import annotations

from attnbench.impls.block_sparse.gate import BlockGate, train_gate

__all__ = ["BlockGate", "train_gate"]
