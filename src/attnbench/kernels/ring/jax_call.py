"""Attention over a mesh as one call on whole arrays: spread over the devices, attended to, gathered again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnbench.frameworks.base import Inputs
from attnbench.kernels.ring.jax_engine import Sharded
from attnbench.spec import Array, Workload


class MeshCall:
    """`(q, k, v) -> out`, or (out, lse); `make(device kind)` gives what a Sharded is made of."""

    def __init__(self, workload: Workload, make: Callable[[str], tuple[Any, ...]], with_lse: bool) -> None:
        self.workload, self._make, self._with_lse = workload, make, with_lse
        self._made: dict[str, Sharded] = {}

    def on(self, array: Array) -> Sharded:
        """The problem over the devices of the array's kind; of the default kind while it is only traced."""
        import jax

        traced = isinstance(array, jax.core.Tracer)  # pyright: ignore[reportAttributeAccessIssue]
        kind = jax.default_backend() if traced else next(iter(array.devices())).platform
        if kind not in self._made:
            self._made[kind] = Sharded(*self._make(kind))
        return self._made[kind]

    def place(self, inputs: Inputs) -> Inputs:
        """In slot order, on the devices."""
        import jax
        from jax.sharding import NamedSharding

        sharded = self.on(inputs.q)
        where = NamedSharding(sharded.mesh, sharded.specs[0])
        sides = (sharded.q_slots, sharded.kv_slots, sharded.kv_slots, sharded.q_slots)
        return Inputs(*(jax.device_put(slots.spread(x), where) for slots, x in zip(sides, inputs)))

    def __call__(self, q: Array, k: Array, v: Array) -> Any:
        sharded = self.on(q)
        placed = self.place(Inputs(q, k, v, q))
        out, lse = sharded.compiled(placed.q, placed.k, placed.v)
        out = sharded.q_slots.gathered(out)
        return (out, sharded.q_slots.gathered(lse, axis=2).astype("float32")) if self._with_lse else out
