"""KV caches: keys and values of sequences of unequal lengths, in one array each or in pages, and appending to them.

A cache holds the caller's own arrays, and copies none of them. `lengths` stays on the device, so that a graph of CUDA,
torch.compile or jax.jit serves every length. Page tables are those of vLLM and FlashAttention: row b lists the pages of
sequence b in order, and entries behind the sequence's end are never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from attnbench import frameworks
from attnbench.errors import InvalidWorkload
from attnbench.impls._arguments import dtype_name
from attnbench.spec import Array

Cache = TypeVar("Cache", bound="KvCache")


@dataclass(frozen=True, eq=False)
class KvCache:
    """Base of contiguous and paged caches, which `ab.decode` takes."""

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array | None]:
        """Keys, values, lengths and the block table, which a contiguous cache does not have."""
        raise NotImplementedError

    @property
    def page_size(self) -> int | None:
        """Number of tokens of a page; None for a contiguous cache."""
        return None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        raise NotImplementedError

    @property
    def capacity(self) -> int:
        """Largest number of tokens of a sequence."""
        raise NotImplementedError

    @property
    def framework(self) -> str:
        """Framework of the arrays."""
        if not hasattr(self.arrays[0], "dtype"):
            raise InvalidWorkload(f"a cache is made of arrays of torch, JAX or NumPy, not of {self.arrays[0]!r}.")
        return "torch" if hasattr(self.arrays[0], "requires_grad") else frameworks.of(self.arrays[0])


@dataclass(frozen=True, eq=False)
class ContiguousCache(KvCache):
    """Keys and values of each sequence in one piece: k and v are [batch, capacity, kv_heads, dim].

    `lengths` is the number of tokens of each sequence: an integer array [batch] on the device of k, which is kept as it
    is, or a whole number or list of them, which becomes such an array.
    """

    k: Array
    v: Array
    lengths: Any

    def __post_init__(self) -> None:
        framework = self.framework
        object.__setattr__(self, "lengths", _lengths_of(self.lengths, self.k, self.k.shape[0], framework))
        _check(self)

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array | None]:
        return self.k, self.v, self.lengths, None

    @property
    def batch(self) -> int:
        return self.k.shape[0]

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    def append(self, k: Array, v: Array) -> ContiguousCache:
        """Store the next tokens of every sequence, k and v [batch, tokens, kv_heads, dim]; return the longer cache.

        In torch and NumPy the arrays of this cache are written in place, lengths included, and the result is this
        cache; in JAX the result is a new one. Sequences must have room: only on a CPU outside of graphs is that
        checked.
        """
        _check_new(self, k, v)
        at = _positions(self, k.shape[1])
        rows = _whole_numbers(self.batch, at)[:, None]
        return _stored(self, (rows, at), k, v)


@dataclass(frozen=True, eq=False)
class PagedCache(KvCache):
    """Keys and values in pages, which sequences may share: k_pages and v_pages are [pages, page_size, kv_heads, dim].

    Token t of sequence b is token t % page_size of page `block_table[b, t // page_size]`; block_table is
    [batch, most pages of a sequence], int32. `lengths` as in ContiguousCache.
    """

    k_pages: Array
    v_pages: Array
    block_table: Any
    lengths: Any

    def __post_init__(self) -> None:
        framework = self.framework
        if not hasattr(self.block_table, "shape") or len(self.block_table.shape) != 2:
            raise InvalidWorkload("block_table must be an array [batch, pages of a sequence] of whole numbers (int32).")
        if framework == "jax":
            object.__setattr__(self, "block_table", _in_jax(self.block_table))
        batch = self.block_table.shape[0]
        object.__setattr__(self, "lengths", _lengths_of(self.lengths, self.k_pages, batch, framework))
        _check(self)

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array | None]:
        return self.k_pages, self.v_pages, self.lengths, self.block_table

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]

    @property
    def batch(self) -> int:
        return self.block_table.shape[0]

    @property
    def capacity(self) -> int:
        return self.block_table.shape[1] * self.page_size

    def append(self, k: Array, v: Array) -> PagedCache:
        """Store the next tokens of every sequence, as ContiguousCache.append does, in the pages of the block table.

        The pages that they fall into must be in the table, and must not be shared with another sequence.
        """
        _check_new(self, k, v)
        at = _positions(self, k.shape[1])
        rows = _whole_numbers(self.batch, at)[:, None]
        return _stored(self, (self.block_table[rows, at // self.page_size], at % self.page_size), k, v)


@cache
def _register_trees() -> None:
    """Let caches be arguments and results of JAX's transformations, which also fill them with what is no array."""
    import jax

    def rebuild(kind: type, names: list[str], fields: Any) -> Any:
        made = object.__new__(kind)
        for name, field in zip(names, fields):
            object.__setattr__(made, name, field)
        return made

    for kind in (ContiguousCache, PagedCache):
        names = list(kind.__dataclass_fields__)
        jax.tree_util.register_pytree_with_keys(
            kind,
            lambda one, names=names: ([(jax.tree_util.GetAttrKey(n), getattr(one, n)) for n in names], None),
            lambda _, fields, kind=kind, names=names: rebuild(kind, names, fields),
            lambda one, names=names: ([getattr(one, n) for n in names], None),
        )


def _lengths_of(lengths: Any, k: Array, batch: int, framework: str) -> Array:
    """Return lengths as an array on the device of k; an array stays the same object."""
    if hasattr(lengths, "shape") and hasattr(lengths, "dtype") and len(lengths.shape) == 1:
        return _in_jax(lengths) if framework == "jax" else lengths
    if framework == "torch":
        import torch

        if isinstance(lengths, int):
            return torch.full((batch,), lengths, dtype=torch.int32, device=k.device)
        return torch.as_tensor(lengths, dtype=torch.int32, device=k.device).reshape(-1).expand(batch).contiguous()
    if framework == "jax":
        import jax.numpy as xp
    else:
        import numpy as xp
    return xp.full((batch,), lengths, xp.int32)


def _in_jax(array: Array) -> Array:
    """Return an array of NumPy as one of JAX, which may be indexed inside a program; others as they are."""
    import jax.numpy as jnp

    return jnp.asarray(array) if frameworks.of(array) == "numpy" else array


def _check(cache: KvCache) -> None:
    """Raise InvalidWorkload if the arrays of a cache do not go together."""
    k, v, lengths, table = cache.arrays
    if cache.framework == "jax":
        _register_trees()
    shapes = f"k {tuple(k.shape)}, v {tuple(v.shape)}, lengths {tuple(lengths.shape)}"
    shapes += "" if table is None else f", block_table {tuple(table.shape)}"
    if len(k.shape) != 4 or len(v.shape) != 4 or k.shape[:3] != v.shape[:3] or 0 in k.shape:
        axes = "[batch, capacity, kv_heads, dim]" if table is None else "[pages, page_size, kv_heads, dim]"
        raise InvalidWorkload(f"keys and values of a cache are {axes} and none of their axes is empty: {shapes}.")
    if tuple(lengths.shape) != (cache.batch,) or cache.batch == 0 or cache.capacity == 0:
        raise InvalidWorkload(f"a cache has one length for each of its sequences, at least one: {shapes}.")
    if dtype_name(k) != dtype_name(v):
        raise InvalidWorkload(f"keys and values must have one dtype, not {k.dtype} and {v.dtype}.")
    for name, array in (("lengths", lengths), ("block_table", table)):
        if array is not None and str(array.dtype).rpartition(".")[2] not in ("int32", "int64"):
            raise InvalidWorkload(f"{name} must be int32 (or int64), not {array.dtype}.")
    if cache.framework != "torch":
        return
    for name, array in (("v", v), ("lengths", lengths), ("block_table", table)):
        if array is not None and getattr(array, "device", None) != k.device:
            place = getattr(array, "device", type(array).__name__)
            raise InvalidWorkload(
                f"{name} must be on the device of the keys, {k.device}, not on {place}: move it once."
            )
    if any(x.stride(3) != 1 and x.shape[3] > 1 for x in (k, v)):
        raise InvalidWorkload("the numbers of a key must lie side by side in memory (the last axis has stride 1).")


def _check_new(cache: KvCache, k: Array, v: Array) -> None:
    """Raise InvalidWorkload if tokens do not fit into a cache, as far as that can be told without waiting for it."""
    have, have_v, lengths, _ = cache.arrays
    for name, new, old in (("k", k, have), ("v", v, have_v)):
        if len(new.shape) != 4 or new.shape[0] != cache.batch or new.shape[2:] != old.shape[2:]:
            wanted = (cache.batch, "tokens", *old.shape[2:])
            raise InvalidWorkload(f"new {name} must be {wanted}, not {tuple(new.shape)}.")
        if new.dtype != old.dtype:
            raise InvalidWorkload(f"new {name} must have the dtype of the cache, {old.dtype}, not {new.dtype}.")
    if k.shape[1] != v.shape[1] or k.shape[1] > cache.capacity:
        raise InvalidWorkload(f"{k.shape[1]} new keys and {v.shape[1]} new values: the cache holds {cache.capacity}.")
    if not _is_readable(lengths):
        return
    if int(lengths.max()) + k.shape[1] > cache.capacity:
        raise InvalidWorkload(
            f"a sequence of {int(lengths.max())} tokens has no room for {k.shape[1]} more: the cache holds "
            f"{cache.capacity} of each. Make it longer (torch.cat, or more columns of the block table)."
        )


def _is_readable(lengths: Array) -> bool:
    """Return whether lengths can be read without waiting for a device, and are numbers at all."""
    if hasattr(lengths, "requires_grad"):
        import torch

        from attnbench.tracing import is_fake

        return not torch.compiler.is_compiling() and lengths.device.type == "cpu" and not is_fake(lengths)
    return frameworks.of(lengths) == "numpy"


def _whole_numbers(count: int, like: Array) -> Array:
    """Return 0, 1, ... as an array of the framework, dtype and device of another."""
    if hasattr(like, "requires_grad"):
        import torch

        return torch.arange(count, dtype=like.dtype, device=like.device)
    if frameworks.of(like) == "jax":
        import jax.numpy as xp
    else:
        import numpy as xp
    return xp.arange(count, dtype=like.dtype)


def _positions(cache: KvCache, tokens: int) -> Array:
    """Return the positions [batch, tokens] of the next tokens of every sequence."""
    lengths = cache.arrays[2]
    return lengths[:, None] + _whole_numbers(tokens, lengths)


def _stored(cache: Cache, place: tuple[Array, Array], k: Array, v: Array) -> Cache:
    """Return the cache with new tokens at their places and longer by them; only JAX's arrays are not changed."""
    keys, values, lengths, _ = cache.arrays
    if cache.framework != "jax":
        new = (k.detach(), v.detach()) if cache.framework == "torch" else (k, v)
        keys[place], values[place] = new
        lengths += k.shape[1]
        return cache
    names = list(cache.__dataclass_fields__)
    changed = {names[0]: keys.at[place].set(k), names[1]: values.at[place].set(v), "lengths": lengths + k.shape[1]}
    return replace(cache, **changed)
