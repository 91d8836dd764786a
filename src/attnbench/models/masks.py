"""Masks in a few numbers per token, whose arrays may exist only inside jit.

`attnbench.masks` hold concrete numbers and become part of a workload's name; a model under jit has its padding as a
traced array. A TokenMask separates the two: the structure of the sequence (`runs`) is static, the padding is arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from attnbench.errors import InvalidWorkload
from attnbench.frameworks.jax.plain import rows_that_see, visible
from attnbench.masks import AnyMask, MaskShape

Runs = tuple[tuple[int, int], ...]


class WrongMaskShape(InvalidWorkload, ValueError):
    """A mask whose sizes differ from those of the queries and keys."""


class KnownMask(NamedTuple):
    """A mask of `attnbench.masks` with its number of queries."""

    mask: AnyMask
    q_len: int

    def shape(self, kv_len: int) -> MaskShape:
        """Return the sizes of the mask, which is equal for all batch rows and heads."""
        return MaskShape(1, 1, self.q_len, kv_len)


@struct.dataclass
class TokenMask:
    """Visible pairs by runs, ids or a known mask, if query and key are valid. No field has T x S values."""

    kv_len: int = struct.field(pytree_node=False)
    runs: Runs | None = struct.field(pytree_node=False, default=None)
    """(queries, keys) in the order of the queries: these queries see the first `keys` keys. For pi0 (816, 816), (1,
    817), (50, 867)."""
    packed: int = struct.field(pytree_node=False, default=0)
    """Number of first keys among which all valid ones are known to stand before the others."""
    known: KnownMask | None = struct.field(pytree_node=False, default=None)
    """A structure given as one of `attnbench.masks`, instead of runs or ids."""
    sees_itself: bool = struct.field(pytree_node=False, default=False)
    """Whether every valid query is one of the valid keys that it sees."""
    ids: Array | None = None
    """Ids of the keys [B, S], used without runs: a query sees the keys whose id is at most its own."""
    q_ids: Array | None = None
    """Ids of the queries, [B, T]."""
    valid: Array | None = None
    """Valid keys, [B, S]; None if all are."""
    q_valid: Array | None = None
    """Valid queries, [B, T]; None if all are."""
    order: Array | None = None
    """Order of the keys [B, S]: all valid ones, then the others; see `with_order`."""

    @property
    def q_len(self) -> int:
        if self.known is not None:
            return self.known.q_len
        if self.runs is not None:
            return sum(queries for queries, _ in self.runs)
        assert self.q_ids is not None
        return self.q_ids.shape[1]

    @property
    def key_limits(self) -> np.ndarray:
        """Number of keys that each query's run reaches, [T]."""
        assert self.runs is not None
        return np.repeat([keys for _, keys in self.runs], [queries for queries, _ in self.runs])

    def array(self) -> Array:
        """Return booleans [B or 1, 1, T, S], made of comparisons that XLA fuses into their use."""
        return self.rows(0, self.q_len, self.kv_len)

    def rows(self, start: int, stop: int, keys: int) -> Array:
        """Return the booleans of the queries start:stop and the first `keys` keys."""
        if self.known is not None:
            seen = visible(self.known.mask, self.known.shape(self.kv_len))[:, 0, start:stop, :keys]
        elif self.runs is not None:
            seen = jnp.arange(keys)[None, None, :] < jnp.asarray(self.key_limits[start:stop])[None, :, None]
        else:
            assert self.ids is not None
            assert self.q_ids is not None
            seen = self.ids[:, None, :keys] <= self.q_ids[:, start:stop, None]
        if self.valid is not None:
            seen = seen & self.valid[:, None, :keys]
        if self.q_valid is not None:
            seen = seen & self.q_valid[:, start:stop, None]
        return seen[:, None]

    def rows_that_see(self) -> Array | None:
        """Return [B, T] whether a query sees a key; None if all are known to."""
        if self.sees_itself:
            return self.q_valid
        if self.known is not None and self.valid is None and self.q_valid is None:
            rows = rows_that_see(self.known.mask, self.known.shape(self.kv_len))
            return None if rows is None else jnp.asarray(rows)[..., 0]
        if self.runs is None:
            return self.array().any(-1)[:, 0]
        limits = self.key_limits
        if self.valid is not None:
            reached = jnp.pad(jnp.cumsum(self.valid, axis=1), ((0, 0), (1, 0)))[:, limits] > 0
        elif limits.all():
            return self.q_valid
        else:
            reached = jnp.asarray(limits > 0)[None]
        return reached if self.q_valid is None else reached & self.q_valid

    def with_order(self) -> TokenMask:
        """Return the mask with `order` computed, once for all layers."""
        if self.order is not None or self.valid is None:
            return self
        return self.replace(order=jnp.argsort(~truths("valid", self.valid), axis=1, stable=True))  # pyright: ignore[reportAttributeAccessIssue]

    def valid_keys(self, keys: int) -> Array:
        """Return how many of the first `keys` keys are valid, [B]."""
        assert self.valid is not None
        return self.valid[:, :keys].sum(axis=1, dtype=jnp.int32)

    def positions_of_kvax(self) -> tuple[Array, Array]:
        """Return numbers of queries [B or 1, T] and keys [B or 1, S]; a key is visible if its number is at most the
        query's."""
        if self.runs is None:
            assert self.q_ids is not None
            assert self.ids is not None
            return self.q_ids, self.ids
        return jnp.asarray(self.key_limits - 1)[None], jnp.arange(self.kv_len)[None]


def in_blocks(
    sizes: Sequence[int],
    valid: Array | None = None,
    *,
    queries_from: int = 0,
    kv_len: int | None = None,
    packed: int = 0,
) -> TokenMask:
    """Return the mask of blocks that see themselves and all earlier blocks: `mask_ar` = 1 at each block's first token.

    Queries are the tokens from `queries_from` on, keys all; `kv_len` counts empty cache slots; `valid` is [B, tokens].
    """
    ends = np.cumsum(sizes, dtype=int).tolist()
    if not ends or min(sizes) < 0 or not 0 <= queries_from < ends[-1]:
        raise InvalidWorkload(f"blocks of {tuple(sizes)} tokens have no queries from token {queries_from} on.")
    starts = [max(start, queries_from) for start in (0, *ends)]
    runs = tuple((end - start, end) for start, end in zip(starts, ends) if end > start)
    slots = _slots(ends[-1], kv_len)
    mask = TokenMask(kv_len=slots, runs=runs, packed=packed, sees_itself=True)
    if valid is None:
        return mask
    valid = truths("valid", valid)
    _check_rows("valid", valid, ends[-1])
    padded = jnp.pad(valid, ((0, 0), (0, slots - ends[-1])))
    return mask.replace(valid=padded, q_valid=valid[:, queries_from:])  # pyright: ignore[reportAttributeAccessIssue]


def block_causal(mask_ar: Array, valid: Array, kv_len: int | None = None) -> TokenMask:
    """Return the mask of openpi's `make_attn_mask` for a structure that is itself an array ([B, T] or [T])."""
    return up_to_own_id(jnp.cumsum(jnp.atleast_2d(mask_ar).astype(jnp.int32), axis=1), valid, kv_len)


def up_to_own_id(ids: Array, valid: Array, kv_len: int | None = None) -> TokenMask:
    """Return the mask of tokens that see ids up to their own ([B, T]); `kv_len` counts empty cache slots."""
    valid = truths("valid", valid)
    _check_rows("valid", valid, ids.shape[-1])
    slots = _slots(valid.shape[1], kv_len)
    room = ((0, 0), (0, slots - valid.shape[1]))
    keys, there = jnp.pad(ids, room), jnp.pad(valid, room)
    return TokenMask(kv_len=slots, sees_itself=True, ids=keys, q_ids=ids, valid=there, q_valid=valid)


def known(mask: AnyMask, q_len: int, kv_len: int | None = None) -> TokenMask:
    """Return the TokenMask of one of `attnbench.masks` that is equal for all rows and heads, such as `causal()`."""
    if mask.per_batch or mask.per_head or mask.weighted:
        raise InvalidWorkload(
            f"a known mask must be the same for every row and head and have no weights, unlike {mask.id}."
        )
    mask.check(MaskShape(1, 1, q_len, kv_len or q_len))
    return TokenMask(kv_len=kv_len or q_len, known=KnownMask(mask, q_len))


def make_attn_mask(input_mask: Array, mask_ar: Array) -> Array:
    """Return openpi's dense mask, booleans [B, T, T]."""
    return block_causal(jnp.asarray(mask_ar), jnp.asarray(input_mask)).array()[:, 0]


def truths(what: str, array: Array) -> Array:
    """Return booleans, or whole numbers that stand for them (0 and 1), as booleans."""
    array = jnp.asarray(array)
    if array.dtype != bool and not jnp.issubdtype(array.dtype, jnp.integer):
        raise InvalidWorkload(f"{what} must be an array of booleans, or of 0 and 1, not of {array.dtype}.")
    return array.astype(bool)


def fitted(attn_mask: Array | TokenMask, batch: int, q_len: int, kv_len: int) -> Array | TokenMask:
    """Return the mask with arrays for the whole batch; raise for other lengths or a dtype that is not boolean."""
    if isinstance(attn_mask, TokenMask):
        covered, wanted = (attn_mask.q_len, attn_mask.kv_len), (q_len, kv_len)
    else:
        covered, wanted = tuple(attn_mask.shape), (batch, 1, q_len, kv_len)
        if attn_mask.dtype != bool:
            raise InvalidWorkload(f"an attention mask must be boolean, not {attn_mask.dtype}.")
    if covered != wanted:
        raise WrongMaskShape(f"the attention mask covers {covered}, but queries and keys are {wanted}.")
    return _for_batch(attn_mask, batch) if isinstance(attn_mask, TokenMask) else attn_mask


def _for_batch(mask: TokenMask, batch: int) -> TokenMask:
    """Return the mask without empty runs and with arrays [B, ...] instead of [1, ...]."""
    arrays = {}
    for name in ("ids", "q_ids", "valid", "q_valid", "order"):
        array = getattr(mask, name)
        if array is None:
            continue
        length = mask.q_len if name.startswith("q_") else mask.kv_len
        _check_rows(name, array, length, batch)
        arrays[name] = jnp.broadcast_to(truths(name, array) if "valid" in name else array, (batch, length))
    if mask.runs is not None:
        if any(not 0 <= keys <= mask.kv_len for _, keys in mask.runs):
            raise WrongMaskShape(f"runs must reach 0 to {mask.kv_len} keys, not {mask.runs}.")
        arrays["runs"] = tuple(run for run in mask.runs if run[0])
    return mask.replace(**arrays)  # pyright: ignore[reportAttributeAccessIssue]


def _check_rows(name: str, array: Array, length: int, batch: int | None = None) -> None:
    shape = tuple(array.shape)
    if len(shape) != 2 or shape[1] != length or (batch is not None and shape[0] not in (1, batch)):
        rows = "batch" if batch is None else batch
        raise WrongMaskShape(f"{name} of the attention mask must be [{rows} or 1, {length}], not {list(shape)}.")


def _slots(tokens: int, kv_len: int | None) -> int:
    if kv_len is not None and kv_len < tokens:
        raise WrongMaskShape(
            f"kv_len must be at least the {tokens} tokens of the mask (the rest are empty slots), not {kv_len}."
        )
    return tokens if kv_len is None else kv_len


def prepared(mask: Array | TokenMask, for_flash: bool) -> Array | TokenMask:
    """Return what all layers share: an array as [B, 1, T, S] (also from [B, T, S]), a TokenMask with its order of
    keys."""
    if isinstance(mask, TokenMask):
        return mask.with_order() if for_flash else mask
    array = jnp.asarray(mask)
    return array[:, None] if array.ndim == 3 else array
