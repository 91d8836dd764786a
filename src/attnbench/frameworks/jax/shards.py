"""Attention of JAX arrays that are sharded over devices.

Batch rows and heads do not depend on each other. If only these two axes are sharded, every device computes attention of
its own shards, whose shapes a choice is made for, and any kernel can run. Of arrays that are sharded otherwise, XLA
partitions the program, which it can do with some implementations only (`Implementation.over_devices`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attnbench.masks import AnyMask
from attnbench.spec import Array


class Shards(NamedTuple):
    """Shardings of q, k and v over the devices of one mesh."""

    mesh: Any
    specs: tuple[tuple[Any, ...], ...]
    """Names of mesh axes, or None, for each axis of q, k and v."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the shards."""
    separate: bool
    """Whether each device can compute attention of its own shards: only batch and heads are sharded, for all alike."""


def sharding_of(array: Array) -> Any:
    """Return the sharding of an array; that of a traced one names the axes of a mesh only if they are explicit."""
    import jax
    from jax.core import Tracer

    traced = isinstance(array, Tracer | jax.ShapeDtypeStruct)
    return jax.typeof(array).sharding if traced else array.sharding


def _over_several(array: Array) -> Any:
    """Return the sharding of an array that is divided among devices; None for any other."""
    import jax

    sharding = sharding_of(array)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding if any(name is not None for name in sharding.spec) else None
    return None if sharding.num_devices == 1 or sharding.is_fully_replicated else sharding


def shards_of(q: Array, k: Array, v: Array, layout: str, mask: AnyMask | None) -> Shards | None:
    """Return how q, k and v are sharded; None if each of them lies on one device, or whole on every device."""
    import jax

    shardings = [_over_several(array) for array in (q, k, v)]
    known: Any = next((one for one in shardings if one is not None), None)
    if known is None:
        return None
    shapes = tuple(
        tuple(array.shape) if one is None else one.shard_shape(array.shape) for one, array in zip(shardings, (q, k, v))
    )
    named = [one for one in shardings if isinstance(one, jax.sharding.NamedSharding)]
    if len(named) < sum(one is not None for one in shardings) or any(one.mesh != known.mesh for one in named):
        return Shards(None, (), shapes, False)
    specs = tuple(
        (*(() if one is None else one.spec), *(None,) * array.ndim)[: array.ndim]
        for one, array in zip(shardings, (q, k, v))
    )
    separate = layout in ("bshd", "bhsd") and _separate(specs, shapes, 2 if layout == "bshd" else 1, mask)
    return Shards(known.mesh, specs, shapes, separate)


def _separate(specs: tuple[Any, ...], shapes: tuple[Any, ...], heads: int, mask: AnyMask | None) -> bool:
    """Return whether only batch and heads are sharded, for q, k and v alike, and all shards have the same mask."""
    of_q, of_k, of_v = specs
    tokens = 3 - heads
    if any(spec[tokens] is not None or spec[3] is not None for spec in specs) or of_k != of_v or of_q[0] != of_k[0]:
        return False
    one_kv_head = shapes[1][heads] == 1 and of_k[heads] is None  # which every query head belongs to
    if of_q[heads] != of_k[heads] and not one_kv_head:
        return False
    varies = mask is not None and (
        (of_q[0] is not None and mask.per_batch) or (of_q[heads] is not None and mask.per_head)
    )
    return not varies


def on_each_device(call: Callable[..., Any], shards: Shards, layout: str, with_lse: bool) -> Callable[..., Any]:
    """Return a function of sharded arrays that runs a call for single shards on every device."""
    import jax

    spec = jax.sharding.PartitionSpec
    of_q = shards.specs[0]
    out = spec(*of_q)
    lse = spec(of_q[0], of_q[2 if layout == "bshd" else 1])
    return jax.shard_map(
        call,
        mesh=shards.mesh,
        in_specs=tuple(spec(*one) for one in shards.specs),
        out_specs=(out, lse) if with_lse else out,
        check_vma=False,  # kernels do not say over which axes their results vary
    )
