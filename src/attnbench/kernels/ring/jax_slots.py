"""How tokens lie on the devices of a JAX mesh: equally many slots on each, in runs as the layout says.

Where the length does not divide, the last slots of a run are empty. Positions are arithmetic on the device's number, so
that a device knows whose token it meets without being told.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from attnbench.spec import Array

EMPTY = 1 << 30
"""Position of a slot without a token: after every other."""


class Slots(NamedTuple):
    """One side, queries or keys."""

    layout: str
    length: int
    world: int

    @property
    def runs(self) -> int:
        """Runs on each device."""
        return 2 if self.layout == "zigzag" else 1

    @property
    def size(self) -> int:
        """Slots of a run."""
        return -(-self.length // (self.runs * self.world))

    @property
    def has_empty(self) -> bool:
        """Whether any slot has no token."""
        return self.size * self.runs * self.world != self.length

    def positions(self, rank: Any, run: int, xp: Any) -> Any:
        """Tokens of a run's slots; `rank` may be traced, `xp` is numpy or jax.numpy."""
        slot = xp.arange(self.size)
        if self.layout == "striped":
            token = rank + self.world * slot
            return xp.where(token < self.length, token, EMPTY)
        parts = self.runs * self.world
        chunk = rank if run == 0 else parts - 1 - rank
        base, longer = divmod(self.length, parts)
        first = chunk * base + xp.minimum(chunk, longer)
        return xp.where(slot < base + (chunk < longer), first + slot, EMPTY)

    def spread(self, array: Array) -> Array:
        """[b, tokens, ...] in slot order; empty slots repeat the first token, and nobody looks at them."""
        return array[:, np.where(self._table == EMPTY, 0, self._table)]

    def gathered(self, array: Array, axis: int = 1) -> Array:
        """Slot order -> token order."""
        import jax.numpy as jnp

        table = self._table
        return jnp.take(array, np.argsort(table, kind="stable")[: self.length], axis=axis)

    @property
    def _table(self) -> np.ndarray:
        """Token of each slot, device after device."""
        runs = [self.positions(rank, run, np) for rank in range(self.world) for run in range(self.runs)]
        return np.concatenate(runs)
