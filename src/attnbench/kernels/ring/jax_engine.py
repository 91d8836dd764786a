"""Attention over a sequence that is sharded over a JAX mesh, by `shard_map`, with both passes written out.

Blocks that no query of a run can see are skipped, by each device for itself; no softmax ever sees an empty slot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from attnbench.impls.partial.jax_passes import Rule, block_backward, block_forward, merge_parts, no_parts
from attnbench.kernels.ring.jax_movement import AXIS, Gather, Travel
from attnbench.kernels.ring.jax_slots import EMPTY, Slots
from attnbench.kernels.ring.schedule import Problem
from attnbench.spec import Array


class Sharded:
    """One problem over one mesh."""

    def __init__(self, problem: Problem, rule: Rule, mesh: Any, movement: Travel | Gather) -> None:
        problem.check()
        self.problem, self.mesh, self._rule, self._movement = problem, mesh, rule, movement
        self.q_slots = Slots(problem.layout, problem.q_len, problem.world)
        self.kv_slots = Slots(problem.layout, problem.kv_len, problem.world)

    def call(self, with_lse: bool = False) -> Callable[..., Any]:
        """`(q, k, v) -> out [b, slots, h, d]`, or (out, lse [b, h, slots]); differentiable, all in slot order."""
        import jax

        tokens, rows = self.specs
        options = {"mesh": self.mesh, "check_vma": False}
        ahead = jax.shard_map(self._forward, in_specs=(tokens,) * 3, out_specs=(tokens, rows), **options)
        given = (tokens, tokens, tokens, tokens, rows, tokens)
        back = jax.shard_map(self._backward, in_specs=given, out_specs=(tokens,) * 3, **options)
        attend = jax.custom_vjp(lambda q, k, v: ahead(q, k, v))

        def keep(q: Array, k: Array, v: Array) -> Any:
            results = ahead(q, k, v)
            return results, (q, k, v, *results)

        def pull_back(kept: Any, cotangents: Any) -> Any:
            q, k, v, out, lse = kept
            return back(q, k, v, out, lse, cotangents[0])

        attend.defvjp(keep, pull_back)
        return attend if with_lse else lambda q, k, v: attend(q, k, v)[0]

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """`(q, k, v) -> (out, lse)`, compiled once for each shape."""
        import jax

        return jax.jit(self.call(with_lse=True))

    @property
    def specs(self) -> tuple[Any, Any]:
        """How [b, slots, h, d] and [b, h, slots] are spread."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(None, AXIS), PartitionSpec(None, None, AXIS)

    def _forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """One device's queries over everybody's keys."""
        import jax.numpy as jnp

        queries = self._runs(q, self.q_slots)

        def meet(state: Any, pair: Any, source: Any) -> Any:
            def block(kept: Any, n: int, keys: Any, seen: Any) -> Any:
                part = block_forward(queries[n], keys[0], keys[1], seen, self._rule)
                return merge_parts(kept[0], kept[1], *part)

            keys = [self._runs(x, self.kv_slots) for x in pair]
            return [self._fold(kept, n, list(zip(*keys)), source, block) for n, kept in enumerate(state)]

        state = self._movement.forward(meet, [no_parts(part, v) for part in queries], (k, v))
        out, lse = zip(*state)
        return jnp.concatenate(out, 1).astype(q.dtype), jnp.concatenate(lse, 2)

    def _backward(
        self, q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array
    ) -> tuple[Array, Array, Array]:
        """Gradients of one device's tokens."""
        import jax.numpy as jnp

        queries, outs, douts = (self._runs(x, self.q_slots) for x in (q, out, dout))
        rows = [lse[:, :, n * self.q_slots.size : (n + 1) * self.q_slots.size] for n in range(self.q_slots.runs)]
        wide = lse.dtype

        def meet(state: Any, pair: Any, source: Any) -> Any:
            keys = list(zip(*(self._runs(x, self.kv_slots) for x in pair)))
            grads = [tuple(jnp.zeros(x.shape, wide) for x in one) for one in keys]
            new = []
            for n, dq in enumerate(state):
                for m, one in enumerate(keys):

                    def block(kept: Any, n: int, keys: Any, seen: Any) -> Any:
                        whole = (outs[n], rows[n], douts[n])
                        found = block_backward(queries[n], keys[0], keys[1], whole, seen, self._rule)
                        return tuple(a + b for a, b in zip(kept, found))

                    dq, *mine = self._fold((dq, *grads[m]), n, [one], source, block, m)
                    grads[m] = tuple(mine)
                new.append(dq)
            return new, tuple(jnp.concatenate(one, 1) for one in zip(*grads))

        zeros = [jnp.zeros(part.shape, wide) for part in queries]
        home = tuple(jnp.zeros(x.shape, wide) for x in (k, v))
        state, (dk, dv) = self._movement.backward(meet, zeros, (k, v), home)
        return jnp.concatenate(state, 1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def _fold(self, kept: Any, n: int, keys: Any, source: Any, block: Any, first: int = 0) -> Any:
        """`kept` after query run n has met these key runs of a device; what it cannot see is not computed."""
        import jax

        for m, one in enumerate(keys, first):
            seen, any_seen = self._seen(n, source, m)
            if any_seen is None:
                kept = block(kept, n, one, seen)
            else:
                kept = jax.lax.cond(any_seen, lambda x, one=one, seen=seen: block(x, n, one, seen), lambda x: x, kept)
        return kept

    def _seen(self, n: int, source: Any, m: int) -> tuple[Any, Any]:
        """Which pairs of query run n and key run m of a device see each other, and whether any: None for all."""
        import jax
        import jax.numpy as jnp

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
