"""Attention over a sequence that is sharded over a JAX mesh, by `shard_map`, with both passes written out.

`Slots` says how tokens lie on the devices. `Travel` and `Gather` are the two ways in which a device sees all keys: they
travel round the ring, or all are gathered first. `Sharded` computes. Blocks that no query of a run can see are skipped,
by each device for itself; no softmax ever sees an empty slot. This module imports jax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from attnbench.impls.partial.jax_passes import Rule, block_backward, block_forward, merge_parts, no_parts
from attnbench.kernels.ring.schedule import RingProblem
from attnbench.spec import Array

EMPTY = 1 << 30
"""Position of a slot without a token: after every other position."""


class Slots(NamedTuple):
    """Slots of one side, queries or keys: equally many on each device, in runs as the layout says.

    If the length does not divide, the last slots of a run are empty. Positions are arithmetic on the device's number,
    so that a device knows the positions of the tokens it meets without a message.
    """

    layout: str
    length: int
    world: int

    @property
    def runs(self) -> int:
        """Number of runs on each device."""
        return 2 if self.layout == "zigzag" else 1

    @property
    def size(self) -> int:
        """Number of slots of a run."""
        return -(-self.length // (self.runs * self.world))

    @property
    def has_empty(self) -> bool:
        return self.size * self.runs * self.world != self.length

    def positions(self, rank: Any, run: int, xp: Any) -> Any:
        """Return the tokens of a run's slots; `rank` may be traced, `xp` is numpy or jax.numpy."""
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
        """Put [b, tokens, ...] into slot order; empty slots repeat the first token and are always masked."""
        return array[:, np.where(self._table == EMPTY, 0, self._table)]

    def gathered(self, array: Array, axis: int = 1) -> Array:
        """Put an array in slot order back into token order."""
        return jnp.take(array, np.argsort(self._table, kind="stable")[: self.length], axis=axis)

    @property
    def _table(self) -> np.ndarray:
        """Tokens of the slots, device after device."""
        return np.concatenate([self.positions(rank, n, np) for rank in range(self.world) for n in range(self.runs)])


AXIS = "ranks"
Meet = Callable[[Any, Any, Any], Any]


class Travel:
    """A ring: while the present keys are computed with, the next keys are on their way.

    `meet(state, pair, source)` computes with the keys and values of device `source`; in the backward pass it returns
    the new state and the gradients of that pair, which are brought home.
    """

    def __init__(self, world: int) -> None:
        self._world = world

    def forward(self, meet: Meet, state: Any, pair: Any) -> Any:
        """Return the state after the keys of all devices have passed by."""
        me = jax.lax.axis_index(AXIS)

        def turn(n: Any, carry: Any) -> Any:
            state, pair = carry
            coming = self._pass_on(pair)
            return meet(state, pair, (me - n) % self._world), coming

        state, pair = jax.lax.fori_loop(0, self._world - 1, turn, (state, pair))
        return meet(state, pair, (me + 1) % self._world)

    def backward(self, meet: Meet, state: Any, pair: Any, zeros: Any) -> tuple[Any, Any]:
        """Return (state, gradients of the device's own pair); the sums travel with the keys, and one step more home."""
        me = jax.lax.axis_index(AXIS)

        def add(state: Any, pair: Any, sums: Any, source: Any) -> tuple[Any, Any]:
            state, grads = meet(state, pair, source)
            return state, self._pass_on(jax.tree.map(lambda a, b: a + b, sums, grads))

        def turn(n: Any, carry: Any) -> Any:
            state, pair, sums = carry
            coming = self._pass_on(pair)
            state, sums = add(state, pair, sums, (me - n) % self._world)
            return state, coming, sums

        state, pair, sums = jax.lax.fori_loop(0, self._world - 1, turn, (state, pair, zeros))
        return add(state, pair, sums, (me + 1) % self._world)

    def _pass_on(self, tree: Any) -> Any:
        links = [(n, (n + 1) % self._world) for n in range(self._world)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, links), tree)


class Gather:
    """All-gather: every device has all keys first; their gradients are summed and scattered at the end."""

    def __init__(self, world: int) -> None:
        self._world = world

    def forward(self, meet: Meet, state: Any, pair: Any) -> Any:
        """Return the state after each device's part of the gathered keys."""
        parts = self._gathered(pair)
        return jax.lax.fori_loop(0, self._world, lambda n, state: meet(state, _part(parts, n), n), state)

    def backward(self, meet: Meet, state: Any, pair: Any, zeros: Any) -> tuple[Any, Any]:
        parts = self._gathered(pair)
        sums = jax.tree.map(lambda x: jnp.zeros((self._world, *x.shape), x.dtype), zeros)

        def turn(n: Any, carry: Any) -> Any:
            state, sums = carry
            state, grads = meet(state, _part(parts, n), n)
            return state, jax.tree.map(lambda total, part: total.at[n].set(part), sums, grads)

        state, sums = jax.lax.fori_loop(0, self._world, turn, (state, sums))
        return state, jax.tree.map(lambda x: jax.lax.psum_scatter(x, AXIS, scatter_dimension=0), sums)

    def _gathered(self, pair: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS), pair)


def _part(parts: Any, n: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), parts)


class Sharded:
    """One problem over one mesh."""

    def __init__(self, problem: RingProblem, rule: Rule, mesh: Any, movement: Travel | Gather) -> None:
        problem.check()
        self.problem, self.mesh, self._rule, self._movement = problem, mesh, rule, movement
        self.q_slots = Slots(problem.layout, problem.q_len, problem.world)
        self.kv_slots = Slots(problem.layout, problem.kv_len, problem.world)

    def call(self, with_lse: bool = False) -> Callable[..., Any]:
        """Return `(q, k, v) -> out [b, slots, h, d]`, or (out, lse [b, h, slots]); differentiable, in slot order."""
        tokens, rows = self.specs
        options = {"mesh": self.mesh, "check_vma": False}
        ahead = jax.shard_map(self._forward, in_specs=(tokens,) * 3, out_specs=(tokens, rows), **options)
        given = (tokens, tokens, tokens, tokens, rows, tokens)
        back = jax.shard_map(self._backward, in_specs=given, out_specs=(tokens,) * 3, **options)
        attend = jax.custom_vjp(lambda q, k, v: ahead(q, k, v))

        def keep(q: Array, k: Array, v: Array) -> Any:
            results = ahead(q, k, v)
            return results, (q, k, v, *results)

        attend.defvjp(keep, lambda kept, cotangents: back(*[*kept, cotangents[0]]))
        return attend if with_lse else lambda q, k, v: attend(q, k, v)[0]

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """`(q, k, v) -> (out, lse)`, compiled once for each shape."""
        return jax.jit(self.call(with_lse=True))

    @property
    def specs(self) -> tuple[Any, Any]:
        """Partition specs of [b, slots, h, d] and [b, h, slots]."""
        return PartitionSpec(None, AXIS), PartitionSpec(None, None, AXIS)

    def _forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Compute one device's queries over the keys of all devices; return (out, lse)."""
        queries = self._runs(q, self.q_slots)

        def meet(state: Any, pair: Any, source: Any) -> Any:
            def block(n: int, m: int, kept: Any, seen: Any) -> Any:
                k, v = keys[m]
                (out, lse), part = kept, block_forward(queries[n], k, v, seen, self._rule)
                return merge_parts(out, lse, *part)

            keys = list(zip(*(self._runs(x, self.kv_slots) for x in pair)))
            merged = []
            for n, kept in enumerate(state):
                for m in range(len(keys)):
                    kept = self._if_seen(n, source, m, block, kept)
                merged.append(kept)
            return merged

        state = self._movement.forward(meet, [no_parts(part, v) for part in queries], (k, v))
        out, lse = zip(*state)
        return jnp.concatenate(out, 1).astype(q.dtype), jnp.concatenate(lse, 2)

    def _backward(
        self, q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array
    ) -> tuple[Array, Array, Array]:
        queries, outs, douts = (self._runs(x, self.q_slots) for x in (q, out, dout))
        rows = [lse[:, :, n * self.q_slots.size : (n + 1) * self.q_slots.size] for n in range(self.q_slots.runs)]
        wide = lse.dtype

        def meet(state: Any, pair: Any, source: Any) -> Any:
            def block(n: int, m: int, kept: Any, seen: Any) -> Any:
                k, v = keys[m]
                parts = block_backward(queries[n], k, v, (outs[n], rows[n], douts[n]), seen, self._rule)
                return tuple(total + part for total, part in zip(kept, parts))

            keys = list(zip(*(self._runs(x, self.kv_slots) for x in pair)))
            grads = [[jnp.zeros(x.shape, wide) for x in key_run] for key_run in keys]
            dqs = []
            for n, dq in enumerate(state):
                for m in range(len(keys)):
                    dq, *grads[m] = self._if_seen(n, source, m, block, (dq, *grads[m]))
                dqs.append(dq)
            return dqs, tuple(jnp.concatenate(of_runs, 1) for of_runs in zip(*grads))

        zeros = [jnp.zeros(part.shape, wide) for part in queries]
        home = tuple(jnp.zeros(x.shape, wide) for x in (k, v))
        state, (dk, dv) = self._movement.backward(meet, zeros, (k, v), home)
        return jnp.concatenate(state, 1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def _if_seen(self, n: int, source: Any, m: int, block: Callable[..., Any], kept: Any) -> Any:
        """Return `block(n, m, kept, seen)` for query run n and key run m of a device, or `kept` if all is hidden."""
        seen, any_seen = self._seen(n, source, m)
        if any_seen is None:
            return block(n, m, kept, seen)
        return jax.lax.cond(any_seen, lambda kept: block(n, m, kept, seen), lambda kept: kept, kept)

    def _seen(self, n: int, source: Any, m: int) -> tuple[Any, Any]:
        """Return the visible pairs of query run n and key run m of a device, and whether any is; None, None if all."""
        if not (self.problem.causal or self.q_slots.has_empty or self.kv_slots.has_empty):
            return None, None
        rows = self.q_slots.positions(jax.lax.axis_index(AXIS), n, jnp)
        keys = self.kv_slots.positions(source, m, jnp)
        seen = (rows[:, None] < EMPTY) & (keys[None, :] < EMPTY)
        if not self.problem.causal:
            return seen, keys[0] < EMPTY
        shift = self.problem.shift
        last = jnp.where(rows < EMPTY, rows, -1).max()
        return seen & (keys[None, :] <= rows[:, None] + shift), keys[0] <= last + shift

    def _runs(self, array: Array, slots: Slots) -> list[Array]:
        return [array[:, n * slots.size : (n + 1) * slots.size] for n in range(slots.runs)]


def mesh_of(devices: list[Any]) -> Mesh:
    """Return a mesh of one axis; the axis is Auto, since only then shard_map takes inputs with any sharding."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
