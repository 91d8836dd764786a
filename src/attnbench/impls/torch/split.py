"""torch.sdpa-flash-split and torch.sdpa-cudnn-split: a mask of a few blocks as SDPA calls without a mask array.

block_causal and documents masks are calls without a mask. The causal part of a prefix mask is torch's lower-right bias,
which only the flash kernel of a GPU takes without an array; on a CPU, and with cuDNN, such a piece is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.impls.partial.splitting import Split
from attnbench.impls.torch._masks import route
from attnbench.impls.torch.sdpa import CUDNN, FLASH, Sdpa
from attnbench.spec import Array, Environment, Workload


class TorchSplit(Split):
    """Through one backend of scaled_dot_product_attention."""

    def __init__(self, inner: Sdpa, never_on: tuple[str, ...] = ()) -> None:
        super().__init__(inner)
        self.untested = (*never_on, *inner.untested)
        self._lower_right = inner.backend == "flash"

    def needs_array(self, part: Workload, environment: Environment) -> bool:
        way = route(part)
        if way == "lower-right":
            return not self._lower_right or environment.device == "cpu"
        return way not in ("none", "causal")

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        import torch

        return torch.cat(list(parts), dim=axis)


FLASH_SPLIT = TorchSplit(FLASH, never_on=("cuda",))
CUDNN_SPLIT = TorchSplit(CUDNN)
