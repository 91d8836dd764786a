"""Torch modules built on the package's attention: the dilated family, block-sparse attention and its gates."""

from attnbench.nn.block_sparse import AdaptiveSparseAttention as AdaptiveSparseAttention
from attnbench.nn.block_sparse import BlockSparseAttention as BlockSparseAttention
from attnbench.nn.block_sparse import create_adaptive_sparse_attention as create_adaptive_sparse_attention
from attnbench.nn.block_sparse import create_block_sparse_attention as create_block_sparse_attention
from attnbench.nn.block_sparse_ring import BlockSparseRingDilatedAttention as BlockSparseRingDilatedAttention
from attnbench.nn.block_sparse_ring import (
    BlockSparseRingMultiheadDilatedAttention as BlockSparseRingMultiheadDilatedAttention,
)
from attnbench.nn.dilated import DilatedAttention as DilatedAttention
from attnbench.nn.dilated import ImprovedDilatedAttention as ImprovedDilatedAttention
from attnbench.nn.factory import create_dilated_attention as create_dilated_attention
from attnbench.nn.factory import create_multihead_dilated_attention as create_multihead_dilated_attention
from attnbench.nn.multihead import ImprovedMultiheadDilatedAttention as ImprovedMultiheadDilatedAttention
from attnbench.nn.multihead import MultiheadDilatedAttention as MultiheadDilatedAttention
from attnbench.nn.ring import RingDilatedAttention as RingDilatedAttention
from attnbench.nn.ring import RingMultiheadDilatedAttention as RingMultiheadDilatedAttention
from attnbench.nn.sparse_gate import BlockGate as BlockGate
from attnbench.nn.sparse_gate import train_gate as train_gate
