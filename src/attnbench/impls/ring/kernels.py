"""The kernels a tile is computed with: the partial form of a dense implementation, chosen and built once per shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench import frameworks, registry
from attnbench.errors import Unsupported
from attnbench.impls.ring.tiles import Tile
from attnbench.spec import Environment, Partial, Workload
from attnbench.workloads.masks import Causal, Full

if TYPE_CHECKING:
    import torch

ORDER = {
    "cpu": ("torch.sdpa-flash", "torch.eager"),
    "cuda": ("torch.sdpa-cudnn", "torch.sdpa-flash", "torch.sdpa-efficient", "torch.eager"),
}
"""What `inner="auto"` tries, the first that takes the tile."""


class Kernels:
    """Partial forms for the tiles of one problem on one device. `shape` gives all that a tile does not."""

    def __init__(self, shape: Workload, inner: str, device: torch.device) -> None:
        self._shape, self._inner = shape, inner
        self._environment: Environment = frameworks.get("torch").environment(device.type)
        self._made: dict[tuple[int, int, int, bool], Partial] = {}
        self.used: dict[str, None] = {}
        """Names of the implementations that were chosen, in order."""

    def at(self, tile: Tile, batch: int | None = None) -> Partial:
        """(forward, backward) for a tile; raises Unsupported with every refusal."""
        key = (*tile.shape, batch or self._shape.batch, tile.causal)
        if key not in self._made:
            self._made[key] = self._choose(self.workload(tile, batch))
        return self._made[key]

    def workload(self, tile: Tile, batch: int | None = None) -> Workload:
        """A tile as a problem of its own."""
        whole, (rows, keys) = self._shape, tile.shape
        return Workload(
            batch=batch or whole.batch,
            q_len=rows,
            kv_len=keys,
            heads=whole.heads,
            kv_heads=whole.kv_heads,
            head_dim=whole.head_dim,
            v_head_dim=whole.value_dim,
            dtype=whole.dtype,
            mask=Causal() if tile.causal else Full(),
            pass_=whole.pass_,
            scale=whole.softmax_scale,
            softcap=whole.softcap,
        )

    def _choose(self, tile: Workload) -> Partial:
        names = inner_names(self._inner, self._environment.device)
        reasons = {}
        for name in names:
            implementation = registry.get(name)
            refused = implementation.available(self._environment) or implementation.supports(tile, self._environment)
            pair = None if refused else implementation.partial(tile, {})
            if pair is not None:
                self.used[name] = None
                return pair
            reasons[name] = refused or "has no partial form of this"
        told = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        raise Unsupported(f"no kernel for {tile.id}: {told}")


def inner_names(inner: str, device: str) -> tuple[str, ...]:
    """Names to try for an `inner` that was asked for."""
    return ORDER.get(device, ORDER["cuda"]) if inner == "auto" else (inner,)
