"""Torch modules built on the package's attention: `attnbench.nn.DilatedAttention` and its family."""

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
