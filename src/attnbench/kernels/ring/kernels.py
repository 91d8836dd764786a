"""The kernels that tiles of one problem are computed with, made once for each shape, and which they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from attnbench.impls.partial.torch_choice import choose, current
from attnbench.kernels.ring.tiles import Tile
from attnbench.masks import Causal, Full
from attnbench.spec import Partial, Workload

if TYPE_CHECKING:
    import torch


class Kernels:
    """Partial forms on one device. `shape` gives all that a tile does not; `inner` is a name or "auto"."""

    def __init__(self, shape: Workload, inner: str, device: torch.device) -> None:
        self._shape, self._inner, self._device = shape, inner, device.type
        self._made: dict[Any, Partial] = {}
        self.used: dict[str, None] = {}
        """Names of the implementations that were chosen, in order."""

    @property
    def batch(self) -> int:
        """Batch rows of the whole."""
        return self._shape.batch

    def at(self, tile: Tile) -> Partial:
        """(forward, backward) for a tile of all heads; raises Unsupported with every refusal."""
        shape = self._shape
        return self.of((shape.batch, *tile.shape, shape.heads, shape.kv_heads), tile.causal)

    def of(self, sizes: tuple[int, int, int, int, int], causal: bool) -> Partial:
        """The same for any (batch, queries, keys, heads, kv_heads)."""
        rules = current()
        key = (*sizes, causal, rules)
        if key not in self._made:
            name, self._made[key] = choose(self._inner, self._workload(sizes, causal), self._device, rules)
            self.used[name] = None
        return self._made[key]

    def _workload(self, sizes: tuple[int, int, int, int, int], causal: bool) -> Workload:
        batch, q_len, kv_len, heads, kv_heads = sizes
        given = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "heads": heads, "kv_heads": kv_heads}
        mask, scale = Causal() if causal else Full(), self._shape.softmax_scale
        return msgspec.structs.replace(self._shape, **given, mask=mask, scale=scale, source="", tags=())
