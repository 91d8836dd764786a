"""How a device of a mesh gets to see everybody's keys: they travel round the ring, or all are gathered first.

`meet(state, pair, source)` computes with the keys and values of one device; going backward it returns the new state and
the gradients of that pair, which are brought home.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

AXIS = "ranks"
Meet = Callable[[Any, Any, Any], Any]


class Travel:
    """A ring: what is here now is computed with while the next is on its way."""

    def __init__(self, world: int) -> None:
        self._world = world

    def forward(self, meet: Meet, state: Any, pair: Any) -> Any:
        """The state after all have passed by."""
        import jax

        me = jax.lax.axis_index(AXIS)

        def turn(n: Any, carry: Any) -> Any:
            state, pair = carry
            coming = self._pass_on(pair)
            return meet(state, pair, (me - n) % self._world), coming

        state, pair = jax.lax.fori_loop(0, self._world - 1, turn, (state, pair))
        return meet(state, pair, (me + 1) % self._world)

    def backward(self, meet: Meet, state: Any, pair: Any, zeros: Any) -> tuple[Any, Any]:
        """(state, gradients of the device's own pair): the sums travel with the keys, one step further, home."""
        import jax

        me = jax.lax.axis_index(AXIS)

        def add(state: Any, pair: Any, sums: Any, source: Any) -> tuple[Any, Any]:
            state, grads = meet(state, pair, source)
            return state, self._pass_on(jax.tree_util.tree_map(lambda a, b: a + b, sums, grads))

        def turn(n: Any, carry: Any) -> Any:
            state, pair, sums = carry
            coming = self._pass_on(pair)
            state, sums = add(state, pair, sums, (me - n) % self._world)
            return state, coming, sums

        state, pair, sums = jax.lax.fori_loop(0, self._world - 1, turn, (state, pair, zeros))
        return add(state, pair, sums, (me + 1) % self._world)

    def _pass_on(self, tree: Any) -> Any:
        import jax

        links = [(n, (n + 1) % self._world) for n in range(self._world)]
        return jax.tree_util.tree_map(lambda x: jax.lax.ppermute(x, AXIS, links), tree)


class Gather:
    """All keys on every device first; their gradients are summed and scattered at the end."""

    def __init__(self, world: int) -> None:
        self._world = world

    def forward(self, meet: Meet, state: Any, pair: Any) -> Any:
        """The state after each device's part of what was gathered."""
        import jax

        parts = self._gathered(pair)
        return jax.lax.fori_loop(0, self._world, lambda n, state: meet(state, _part(parts, n), n), state)

    def backward(self, meet: Meet, state: Any, pair: Any, zeros: Any) -> tuple[Any, Any]:
        """(state, gradients of the device's own pair)."""
        import jax
        import jax.numpy as jnp

        tree, parts = jax.tree_util, self._gathered(pair)
        sums = tree.tree_map(lambda x: jnp.zeros((self._world, *x.shape), x.dtype), zeros)

        def turn(n: Any, carry: Any) -> Any:
            state, sums = carry
            state, grads = meet(state, _part(parts, n), n)
            return state, tree.tree_map(lambda all_, one: all_.at[n].set(one), sums, grads)

        state, sums = jax.lax.fori_loop(0, self._world, turn, (state, sums))
        return state, tree.tree_map(lambda x: jax.lax.psum_scatter(x, AXIS, scatter_dimension=0), sums)

    def _gathered(self, pair: Any) -> Any:
        import jax

        return jax.tree_util.tree_map(lambda x: jax.lax.all_gather(x, AXIS), pair)


def _part(parts: Any, n: Any) -> Any:
    import jax

    return jax.tree_util.tree_map(lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), parts)
