"""Shapes as a policy distinguishes them: axes that must agree, and the distance of two shapes in all other axes."""

from __future__ import annotations

from functools import lru_cache
from math import hypot, log2
from typing import get_args

import numpy as np
from msgspec import Struct, field

from attnbench.masks import AnyMask, MaskShape
from attnbench.masks.base import Mask, pairs
from attnbench.masks.combine import Part
from attnbench.spec import DTYPE_BYTES, Pass, Workload

REACH = 2.0
"""Largest distance, in octaves, at which a measured shape covers another: four times as many tokens."""
PARALLEL_WEIGHT = 0.5
"""Weight of an octave of batch x heads: twice the rows change the choice less than twice the tokens."""
GROUP_WEIGHT = 1.0
"""Weight of an octave of query heads per key/value head: grouped heads run other kernels."""
VISIBLE_WEIGHT = 0.5
"""Weight of an octave of the visible share: twice the pairs are twice the work, twice the tokens four times."""
FEW_BLOCKS = 8
"""Most blocks of queries that see the same keys for which a mask is like as many calls without a mask."""
MANY_BLOCKS = "block_causal (many blocks)"
TOP_LEFT = "{} (top-left)"
"""Kind of a part that is aligned to the top left: where the lengths differ it shows other pairs, and other kernels run
it."""
KINDS = {
    MANY_BLOCKS,
    *(str(part.__struct_config__.tag) for part in get_args(Part)),
    *(TOP_LEFT.format(part.__struct_config__.tag) for part in get_args(Part) if "align" in part.__struct_fields__),
}
"""Names that a part of a mask may have."""
KNOWN_BY_LENGTHS = ("full", "causal", TOP_LEFT.format("causal"))
"""Kinds of mask whose visible share follows from the lengths."""


class Shape(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sizes, dtype, mask and pass of a measured workload."""

    pass_: Pass = field(name="pass")
    dtype: str
    mask: str
    """Kinds of the mask's parts, such as causal or causal&lengths; their sizes count by `visible` alone. Where the
    lengths differ a part without "(top-left)" is aligned to the bottom right."""
    head_dim: int
    v_head_dim: int = 0
    """Dimension of the values; 0 if it is head_dim."""
    softcap: bool = False
    heads: int
    kv_heads: int
    batch: int
    q_len: int
    kv_len: int
    visible: float | None = None
    """Visible share of the query-key pairs, to three digits; null if it follows from the lengths, or is not known
    (files of an attnbench that did not write it)."""

    def __post_init__(self) -> None:
        sizes = ("head_dim", "heads", "kv_heads", "batch", "q_len", "kv_len")
        wrong = [name for name in sizes if getattr(self, name) < 1] + ["v_head_dim"] * (self.v_head_dim < 0)
        if wrong:
            raise ValueError(f"{wrong[0]} must be at least 1, not {getattr(self, wrong[0])}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f'dtype "{self.dtype}" is not one of {", ".join(DTYPE_BYTES)}')
        if wrong := _wrong_mask(self.mask):
            raise ValueError(wrong)
        if self.visible is not None and not 0 <= self.visible <= 1:
            raise ValueError(f"visible must be a fraction from 0 to 1, not {self.visible}")

    @property
    def hard(self) -> dict[str, str | int | bool]:
        """Axes that must agree before one shape may cover another."""
        return {
            "pass": self.pass_,
            "dtype": self.dtype,
            "mask": self.mask,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim or self.head_dim,
            "softcap": self.softcap,
        }

    def exceeds(self, other: Shape) -> bool:
        """Return whether any size is larger than that of a shape of the same hard axes, so that more memory may be
        needed."""
        sizes = ("batch", "heads", "kv_heads", "q_len", "kv_len")
        return any(getattr(self, name) > getattr(other, name) for name in sizes)

    @property
    def share(self) -> float:
        """Visible share of the query-key pairs; 1 of a mask whose share a file of an older attnbench does not say."""
        if self.visible is not None or self.mask not in KNOWN_BY_LENGTHS or self.mask == "full":
            return 1.0 if self.visible is None else self.visible
        corner, edge = min(self.q_len, self.kv_len), abs(self.kv_len - self.q_len)
        pairs = corner * (corner + 1) / 2
        if self.q_len < self.kv_len:
            pairs += 0 if self.mask != "causal" else corner * edge  # bottom-right: earlier keys are seen by all
        elif self.mask != "causal":
            pairs += corner * edge  # top-left: later queries see every key
        return pairs / (self.q_len * self.kv_len)

    @property
    def layout(self) -> str:
        """MHA, GQA or MQA."""
        if self.heads == self.kv_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def title(self) -> str:
        """One line of text for messages and tables."""
        tokens = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len} x {self.kv_len}"
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads}"
        dims = f"{self.head_dim}/{self.v_head_dim}" if self.v_head_dim else f"{self.head_dim}"
        mask = self.mask if self.visible is None else f"{self.mask} ({self.visible:.2g} visible)"
        facts = [f"{self.batch} x {tokens} tokens", f"{heads} heads of {dims}", mask, self.dtype, self.pass_]
        return " · ".join(facts + ["softcap"] * self.softcap)

    @property
    def order(self) -> tuple[str | int | float | bool, ...]:
        """Sort key: by class, then by size, as in a file."""
        sizes = (self.heads, self.kv_heads, self.batch, self.kv_len, self.q_len, self.visible or 0.0)
        return (self.pass_, self.dtype, self.mask, self.head_dim, self.v_head_dim, self.softcap, *sizes)


def shape_of(workload: Workload) -> Shape:
    """Return the shape of a workload; scale and inputs do not matter for the choice."""
    w = workload
    kind, visible = mask_kind(w), None
    if kind not in KNOWN_BY_LENGTHS:
        share = _pairs(w.visible_mask, w.mask_shape) / (w.batch * w.heads * w.q_len * w.kv_len)
        visible = float(f"{share:.3g}")
    return Shape(
        pass_=w.pass_,
        dtype=w.dtype,
        mask=kind,
        head_dim=w.head_dim,
        v_head_dim=0 if w.value_dim == w.head_dim else w.value_dim,
        softcap=w.softcap is not None,
        heads=w.heads,
        kv_heads=w.kv_heads,
        batch=w.batch,
        q_len=w.q_len,
        kv_len=w.kv_len,
        visible=visible,
    )


def mask_kind(workload: Workload) -> str:
    """Return the kinds of the mask's parts in alphabetical order; `full` if every query sees every key.

    A block-causal mask of many blocks is a kind of its own, and so is a part aligned to the top left if the lengths
    differ.
    """
    mask, shape = workload.visible_mask, workload.mask_shape
    kinds = sorted({part_kind(part, shape) for part in mask.split()} - {"full"})
    everything = shape.batch * shape.heads * shape.q_len * shape.kv_len
    if not kinds or (not mask.weighted and _pairs(mask, shape) == everything):
        return "full"
    if "block_causal" in kinds and _blocks(workload) > FEW_BLOCKS:
        kinds[kinds.index("block_causal")] = MANY_BLOCKS
    return "&".join(kinds)


def part_kind(part: Mask, shape: MaskShape) -> str:
    """Return the kind of a part without looking at its blocks."""
    kind = part.kinds[0]
    aligned = shape.q_len == shape.kv_len or getattr(part, "align", "bottom-right") == "bottom-right"
    return kind if aligned else TOP_LEFT.format(kind)


@lru_cache(256)
def _wrong_mask(mask: str) -> str:
    """Return why no mask can have this kind; empty if one can."""
    parts = mask.split("&")
    if unknown := [part for part in parts if part not in KINDS]:
        return f'mask "{unknown[0]}" is not one of {", ".join(sorted(KINDS))}'
    kinds = sorted(set(parts) - {"full"}) or ["full"]
    return "" if parts == kinds else f'mask "{mask}" must be written {"&".join(kinds)}'


def _blocks(workload: Workload) -> int:
    """Count runs of queries that see the same keys, in the batch row with most; 1 if visible keys may have gaps."""
    edges = workload.visible_mask.interval(workload.mask_shape)
    if edges is None:
        return 1
    low, high = (np.broadcast_to(edge, (len(edge), workload.q_len)) for edge in edges)
    return 1 + int(((np.diff(low) != 0) | (np.diff(high) != 0)).sum(axis=-1).max())


def distance(a: Shape, b: Shape) -> float:
    """Return the octaves between two shapes whose hard axes agree; doubling queries and keys together is one."""
    queries, keys = log2(a.q_len / b.q_len), log2(a.kv_len / b.kv_len)
    parallel = PARALLEL_WEIGHT * log2(a.batch * a.heads / (b.batch * b.heads))
    group = GROUP_WEIGHT * log2(a.heads * b.kv_heads / (a.kv_heads * b.heads))
    known = a.visible is not None and b.visible is not None
    seen = VISIBLE_WEIGHT * log2(_share(a) / _share(b)) if known else 0.0
    return hypot(queries / 2**0.5, keys / 2**0.5, parallel, group, seen)


def _share(shape: Shape) -> float:
    """Return the visible share; a mask that shows nothing counts as half a pair."""
    return shape.visible or 0.5 / (shape.batch * shape.heads * shape.q_len * shape.kv_len)


def _pairs(mask: AnyMask, shape: MaskShape) -> int:
    """Count the visible pairs of a mask; cached, except for dense masks, whose arrays would be kept."""
    return mask.pairs(shape) if "dense" in mask.kinds else pairs(mask, shape)
