"""Parts that every mask has: which pairs see each other, their exact number, arrays, and text for a workload's id.

A mask is data. Its predicate `(b, h, q, kv) -> bool` uses only comparisons, `&` and indexing, so the same code serves
NumPy, JAX and FlexAttention: `predicate(shape, namespace)` takes the namespace whose arrays it captures. Arrays inside
a mask are frozen, so that masks can be hashed, compared and written to JSON.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import Struct

from attnbench.errors import InvalidWorkload
from attnbench.tracing import being_traced

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class FrozenArray(Struct, frozen=True):
    """A NumPy array as bytes (booleans packed to bits), so that a mask can be hashed, compared and written to JSON."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes

    @property
    def array(self) -> np.ndarray:
        """A new copy of the array."""
        if self.dtype == "bool":
            bits = np.unpackbits(np.frombuffer(self.data, np.uint8), count=int(np.prod(self.shape)))
            return bits.astype(bool).reshape(self.shape)
        return np.frombuffer(self.data, self.dtype).reshape(self.shape).copy()

    @property
    def digest(self) -> str:
        """Eight hex digits over the content, for ids."""
        return hashlib.sha256(repr((self.shape, self.dtype)).encode() + self.data).hexdigest()[:8]


def freeze(array: np.ndarray) -> FrozenArray:
    """Copy an array into a FrozenArray."""
    array = np.ascontiguousarray(array)
    data = np.packbits(array).tobytes() if array.dtype == bool else array.tobytes()
    return FrozenArray(array.shape, str(array.dtype), data)


def to_numpy(values: Any, what: str) -> np.ndarray:
    """Return a list, a NumPy or JAX array, or a torch tensor on any device as a NumPy array."""
    if hasattr(values, "detach"):
        if being_traced():
            raise InvalidWorkload(f"{what} must be known before torch.compile traces: build masks from arrays outside.")
        values = values.detach().cpu()
        values = values.float() if values.dtype.is_floating_point and values.dtype.itemsize < 4 else values
    try:
        array = np.asarray(values)
    except Exception as error:
        raise InvalidWorkload(
            f"{what} must be concrete numbers (build masks outside jit), not {type(values).__name__}."
        ) from error
    if array.dtype.name == "bfloat16":  # JAX's own NumPy type, which NumPy does not count as floating
        array = array.astype(np.float32)
    if array.dtype == object:
        raise InvalidWorkload(f"{what} must be a rectangular array of numbers.")
    return array


def check_constant(values: Any, what: str, instead: str = "") -> None:
    """Refuse a torch tensor that requires gradients while gradients are recorded: they would be lost silently."""
    if getattr(values, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise InvalidWorkload(
            f"{what} is a constant without gradients, but this tensor requires gradients: pass it with .detach()"
            f"{instead}."
        )


def whole_number(value: Any, what: str, least: int | None = None) -> int:
    """Return a whole number of Python, NumPy or the like as an int; floats, text and booleans are refused, and numbers
    below `least` or beyond the sizes that an axis may have."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            value = index(value)
    if type(value) is not int or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise InvalidWorkload(f"{what} must be a whole number{bound}, not {value!r}.")
    if abs(value) > LARGEST_SIZE:
        raise InvalidWorkload(f"{what} can be {LARGEST_SIZE} at most, not {value}.")
    return value


def integers(values: Any, what: str, ndim: tuple[int, ...]) -> FrozenArray:
    """Return whole numbers frozen as int32, of one of the given numbers of axes."""
    array = to_numpy(values, what)
    if array.dtype.kind not in "iub" or array.ndim not in ndim or array.size == 0:
        axes = " or ".join(str(n) for n in ndim)
        raise InvalidWorkload(f"{what} must be whole numbers with {axes} axes, not {array.dtype} with {array.ndim}.")
    if array.dtype.kind != "b" and (array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min):
        raise InvalidWorkload(f"{what} must fit in 32 bits.")
    return freeze(array.astype(np.int32))


Align = Literal["bottom-right", "top-left"]
Predicate = Callable[[Any, Any, Any, Any], Any]
COUNT_BLOCK = 1 << 24
"""Number of pairs that are counted at a time if no closed form exists."""
LARGEST_SIZE = (1 << 31) - 1
"""Largest size of an axis: array libraries index with 32 bits."""


class MaskShape(NamedTuple):
    """The sizes over which a mask is evaluated."""

    batch: int
    heads: int
    q_len: int
    kv_len: int


class Namespace(Protocol):
    """The three framework functions that a predicate needs; NumPy and jax.numpy have them already."""

    def asarray(self, array: np.ndarray, /) -> Any: ...
    def log(self, x: Any, /) -> Any: ...
    def where(self, condition: Any, x: Any, y: Any, /) -> Any: ...


class Mask(Struct, frozen=True, tag_field="mask", omit_defaults=True):
    """Base class of all masks; the functions of `attnbench.masks` make the instances."""

    name_and_fields: ClassVar[tuple[str, ...]] = ()
    """Name of the class and of its fields, in a form that torch.compile can read."""

    @property
    def id(self) -> str:
        """Readable and stable text, part of the workload's id."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """Text for people: the id, or the mask's sizes if they are short."""
        return self.id

    def split(self) -> tuple[Mask, ...]:
        """Return the masks that `&` joined; the mask itself if it is a single one."""
        return (self,)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the parts, such as ("causal", "lengths"): what `supports` looks at."""
        return (str(type(self).__struct_config__.tag),)

    @property
    def weighted(self) -> bool:
        """Whether visible pairs carry log-weights, which a boolean array cannot express."""
        return False

    @property
    def per_batch(self) -> bool:
        """Whether batch rows may differ."""
        return False

    @property
    def per_head(self) -> bool:
        """Whether heads may differ."""
        return False

    @property
    def per_block(self) -> bool:
        """Whether a whole block of pairs can be tested without looking at each pair."""
        return True

    def check(self, shape: MaskShape) -> None:
        """Raise InvalidWorkload if the mask's data does not fit the shape."""

    def predicate(self, shape: MaskShape, namespace: Namespace) -> Predicate:
        """Return a function `(b, h, q, kv) -> bool`; with torch's namespace it serves as a FlexAttention mask_mod."""
        raise NotImplementedError

    def log_weight(self, shape: MaskShape, namespace: Namespace) -> Predicate | None:
        """Return a function `(b, h, q, kv) -> float` that is added to visible logits; None for an unweighted mask."""
        return None

    def interval(self, shape: MaskShape) -> tuple[Int[np.ndarray, "b q"], Int[np.ndarray, "b q"]] | None:
        """Return first and end of each row's visible keys ([b or 1, q]); None unless every row sees one run of keys."""
        return None

    def key_filter(self, shape: MaskShape) -> Bool[np.ndarray, "b kv"] | None:
        """Return the visible keys ([b or 1, kv]) of a mask that depends on the key alone; None for other masks."""
        return None

    def keys_of_heads(self, shape: MaskShape) -> Bool[np.ndarray, "b h kv"]:
        """Return the keys that some query of a head sees, [b or 1, h or 1, kv]; it may name more for a combination."""
        keys = self.key_filter(shape)
        return np.ones((1, 1, shape.kv_len), bool) if keys is None else keys[:, None]

    def runs(self, shape: MaskShape) -> tuple[Int[np.ndarray, "b q"], Int[np.ndarray, "b q"]] | None:
        """Return `interval` within 0 ... kv_len; first and end are equal in a row that sees no key."""
        if (interval := self.interval(shape)) is None:
            return None
        low, high = (np.clip(edge, 0, shape.kv_len) for edge in np.broadcast_arrays(*interval))
        return low, np.maximum(low, high)

    def pairs(self, shape: MaskShape) -> int:
        """Return the exact number of visible pairs over all batch rows and heads."""
        low, high = np.zeros((1, shape.q_len), np.int64), np.full((1, shape.q_len), shape.kv_len)
        keys: np.ndarray | None = None
        rest: list[Mask] = []
        for part in self.split():
            if (runs := part.runs(shape)) is not None:
                low, high = np.maximum(low, runs[0]), np.minimum(high, runs[1])
            elif (seen := part.key_filter(shape)) is not None:
                keys = seen if keys is None else keys & seen
            else:
                rest.append(part)
        high = np.maximum(low, high)
        if rest:
            counted = rest[0]._count_in(shape, low, high) if len(rest) == 1 and keys is None else None
            return self._count_all(shape) if counted is None else counted
        counts = high - low
        if keys is not None:
            before = np.pad(np.cumsum(keys, axis=1), ((0, 0), (1, 0)))
            counts = np.take_along_axis(before, high, 1) - np.take_along_axis(before, low, 1)
        return int(counts.sum()) * (shape.batch // len(counts)) * shape.heads

    def _count_in(self, shape: MaskShape, low: np.ndarray, high: np.ndarray) -> int | None:
        """Return the number of visible pairs whose key lies in the row's run, [b or 1, q]; None without a formula."""
        return None

    def _count_all(self, shape: MaskShape) -> int:
        """Count visible pairs by looking at each of them."""
        visible, (b, h, q, kv) = self.predicate(shape, np), self.indices(shape)
        step, total = max(1, COUNT_BLOCK // (b.size * h.size * kv.size)), 0
        for start in range(0, shape.q_len, step):
            rows = q[:, :, start : start + step]
            seen = np.broadcast_to(visible(b, h, rows, kv), (b.size, h.size, rows.size, kv.size))
            total += int(np.count_nonzero(seen))
        return total * (shape.batch // b.size) * (shape.heads // h.size)

    def indices(self, shape: MaskShape, rows: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Return broadcastable index arrays b, h, q, kv; batch and head axes have size 1 if the mask ignores them."""
        b = np.arange(shape.batch if self.per_batch else 1).reshape(-1, 1, 1, 1)
        h = np.arange(shape.heads if self.per_head else 1).reshape(1, -1, 1, 1)
        q = (np.arange(shape.q_len) if rows is None else np.asarray(rows)).reshape(1, 1, -1, 1)
        return b, h, q, np.arange(shape.kv_len).reshape(1, 1, 1, -1)

    def array(self, shape: MaskShape, rows: np.ndarray | None = None) -> Bool[np.ndarray, "b h q kv"]:
        """Return all or the given rows as booleans; batch and head axes have size 1 if the mask ignores them."""
        index = self.indices(shape, rows)
        return np.broadcast_to(self.predicate(shape, np)(*index), np.broadcast_shapes(*(i.shape for i in index)))

    def bias(self, shape: MaskShape, rows: np.ndarray | None = None) -> Float[np.ndarray, "b h q kv"]:
        """Return the additive float64 array: the log-weight of visible pairs, -inf elsewhere."""
        visible = self.array(shape, rows)
        weight = self.log_weight(shape, np)
        value = 0.0 if weight is None else np.asarray(weight(*self.indices(shape, rows)), np.float64)
        return np.where(visible, value, -np.inf)

    def __and__(self, other: Mask) -> Mask:
        from attnbench.masks.combine import both

        return both(self, other)


def query_offset(align: Align, shape: MaskShape) -> int:
    """Return the number that is added to a query's row number to get its position among the keys."""
    return shape.kv_len - shape.q_len if align == "bottom-right" else 0


def check_align(align: str) -> None:
    """Refuse anything but "bottom-right" and "top-left"."""
    if align not in ("bottom-right", "top-left"):
        raise InvalidWorkload(f'align must be "bottom-right" or "top-left", not "{align}".')


MOST_COUNTS = 4096
"""Number of counts that are kept before all are forgotten."""


def _remembered(count: Callable[..., int]) -> Callable[..., int]:
    """Cache counts by a digest of the mask: a cache of large masks themselves would keep them in memory."""
    known: dict[tuple[Any, ...], int] = {}

    @wraps(count)
    def run(mask: Mask, shape: MaskShape, *more: int) -> int:
        key = hashlib.sha256(msgspec.msgpack.encode(mask)).digest(), shape, *more
        found = known.get(key)
        if found is None:
            if len(known) >= MOST_COUNTS:
                known.clear()
            found = known[key] = count(mask, shape, *more)
        return found

    return run


@_remembered
def pairs(mask: Mask, shape: MaskShape) -> int:
    """Return the exact number of visible pairs, cached because a sweep asks for the same masks many times."""
    return mask.pairs(shape)


@_remembered
def seen_keys(mask: Mask, shape: MaskShape, kv_heads: int = 1) -> int:
    """Return the number of (batch row, key/value head, key) places that some query sees, so that they must be read.

    Exact but for combinations of which a part is neither one run of keys per row nor a filter of keys: a key that each
    part shows to some query counts, though no query may see it.
    """
    low, high = np.zeros((1, shape.q_len), np.int64), np.full((1, shape.q_len), shape.kv_len)
    seen: Any = np.ones((1, 1, shape.kv_len), bool)
    for part in mask.split():
        if (runs := part.runs(shape)) is not None:
            low, high = np.maximum(low, runs[0]), np.minimum(high, runs[1])
        else:
            seen = seen & part.keys_of_heads(shape)
    # A key lies in some row's run if more runs begin up to it than end there.
    changes, rows = np.zeros((len(low), shape.kv_len + 1), np.int64), np.arange(len(low))[:, None]
    for edge, change in ((low, 1), (np.maximum(low, high), -1)):
        np.add.at(changes, (rows, edge), change)
    seen = seen & (np.cumsum(changes, axis=1)[:, None, : shape.kv_len] > 0)
    if seen.shape[1] > 1:  # the query heads of a key/value head lie side by side
        seen = seen.reshape(len(seen), kv_heads, -1, shape.kv_len).any(axis=2)
    return int(seen.sum()) * (shape.batch // len(seen)) * (kv_heads // seen.shape[1])
