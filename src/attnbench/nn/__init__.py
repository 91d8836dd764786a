"""Torch modules built on the package's attention: `attnbench.nn.DilatedAttention` and its family."""

from attnbench.nn.dilated import DilatedAttention as DilatedAttention
from attnbench.nn.dilated import ImprovedDilatedAttention as ImprovedDilatedAttention
from attnbench.nn.factory import create_dilated_attention as create_dilated_attention
from attnbench.nn.factory import create_multihead_dilated_attention as create_multihead_dilated_attention
from attnbench.nn.multihead import ImprovedMultiheadDilatedAttention as ImprovedMultiheadDilatedAttention
from attnbench.nn.multihead import MultiheadDilatedAttention as MultiheadDilatedAttention
