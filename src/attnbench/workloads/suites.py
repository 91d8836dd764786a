"""Suites by name or from a user's TOML file, and their capped versions for a quick run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from attnbench import masks
from attnbench.errors import BrokenFile, UnknownName
from attnbench.masks import AnyMask, Mask, MaskShape
from attnbench.masks.base import FrozenArray, freeze
from attnbench.spec import Workload
from attnbench.workloads.catalogue import BUILTIN
from attnbench.workloads.suite_file import Suite, read_suite

STEP_HEAD_DIM = 32


def names() -> list[str]:
    """Return the names of the built-in suites, the default first."""
    return list(BUILTIN)


def load(name_or_path: str | Path) -> Suite:
    """Return a built-in suite, or a file whose name ends in .toml."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise BrokenFile(path, None, "this is a folder, not a file." if path.is_dir() else "there is no such file.")
        return read_suite(path)
    name = str(name_or_path)
    if name not in BUILTIN:
        raise UnknownName("suite", name, BUILTIN, "attnbench list suites")
    description, make = BUILTIN[name]
    return Suite(name, description, tuple(make()))


def quicken(suite: Suite) -> Suite:
    """Return the suite with capped shapes (see `shrink`); workloads that become equal are kept once.

    Heads of a step become narrower too, because its weights grow with the square of their width.
    """
    small: dict[str, Workload] = {}
    for workload in map(shrink, suite.workloads):
        narrow = min(workload.head_dim, STEP_HEAD_DIM)
        capped = replace(workload, head_dim=narrow, v_head_dim=narrow) if workload.step else workload
        small.setdefault(capped.id, capped)
    return Suite(f"{suite.name}-quick", suite.description, tuple(small.values()))


TOKENS = 512
CACHED_TOKENS = 4096
BATCH = 2
HEADS = 8


def shrink(workload: Workload) -> Workload:
    """Return the workload with at most 512 tokens (4096 cached keys), batch 2, and 8 heads in the same grouping."""
    w = workload
    q_len, kv_len, longest = w.q_len, w.kv_len, max(w.q_len, w.kv_len)
    if q_len <= TOKENS and q_len < kv_len:
        kv_len = min(kv_len, CACHED_TOKENS)
    elif longest > TOKENS:
        q_len, kv_len = (max(1, tokens * TOKENS // longest) for tokens in (q_len, kv_len))
    group = min(w.group, HEADS)
    kv_heads = min(w.kv_heads, HEADS // group)
    shape = MaskShape(min(w.batch, BATCH), group * kv_heads, q_len, kv_len)
    if shape == w.mask_shape and kv_heads == w.kv_heads:
        return w
    sizes = {"batch": shape.batch, "heads": shape.heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    return replace(w, **sizes, mask=shrink_mask(w.visible_mask, w.mask_shape, shape))


def shrink_mask(mask: Mask, old: MaskShape, new: MaskShape) -> AnyMask:
    """Return the mask for smaller sizes: lengths scale with the tokens, arrays are thinned evenly."""
    match mask:
        case masks.Window():
            sides = [None if side is None else _scaled(side, old, new) for side in (mask.left, mask.right)]
            return masks.window(*sides, align=mask.align)
        case masks.Prefix():
            return masks.prefix(_scaled(mask.n, old, new), mask.align)
        case masks.BlockCausal() | masks.Documents():
            # q_ids default to the ids of the last keys; thinned keys need not end in them, so spell them out.
            implied = mask.q_ids is None and (old.q_len == old.kv_len or old[2:] == new[2:])
            queries = _resampled(freeze(mask.query_ids(old)), old, new, (0, 2))
            return type(mask)(_resampled(mask.ids, old, new, (0, 3)), None if implied else queries)
        case masks.Lengths():
            kept = mask.kv_lengths.array[: new.batch].astype(np.int64)
            scaled = -(-kept * new.kv_len // old.kv_len)
            return masks.lengths(np.where(kept == old.q_len, new.q_len, scaled))  # a prompt in a longer cache stays one
        case masks.Valid():
            return masks.Valid(_resampled(mask.keys, old, new, (0, 3)))
        case masks.Dilated():
            segments = tuple(_scaled(w, old, new) for w in mask.segment_lengths)
            return masks.dilated(segments, mask.dilation_rates, mask.offset)
        case masks.Blocks():
            kept = mask.block_mask.array
            counts = (new.batch, new.heads, *(-(-tokens // mask.block_size) for tokens in (new.q_len, new.kv_len)))
            kept = kept[tuple(slice(count) for count in counts[4 - kept.ndim :])]
            return masks.Blocks(freeze(kept), mask.block_size)
        case masks.Dense():
            axes = tuple(range(4 - len(mask.values.shape), 4))
            return masks.Dense(_resampled(mask.values, old, new, axes))
        case masks.Alibi():
            return masks.Alibi(_resampled(mask.slopes, old, new, (1,)), mask.align)
        case masks.Both():
            return masks.Both(tuple(shrink_mask(part, old, new) for part in mask.parts))  # pyright: ignore
        case _:  # full and causal have no sizes
            return mask  # pyright: ignore[reportReturnType]


def _scaled(length: int, old: MaskShape, new: MaskShape) -> int:
    """Return a length scaled to the new tokens and rounded up, so that nothing becomes empty."""
    return -(-length * new.kv_len // old.kv_len)


def _resampled(values: FrozenArray, old: MaskShape, new: MaskShape, axes: tuple[int, ...]) -> FrozenArray:
    """Return an array, axis n of which is axis axes[n] of the shape, for the new sizes.

    Tokens are picked evenly, batch rows and heads from the front.
    """
    array = values.array
    for axis, of in enumerate(axes):
        if array.shape[axis] > 1:
            picked = np.arange(new[of]) * (old[of] if of >= 2 else new[of]) // new[of]
            array = np.take(array, picked, axis)
    return freeze(array)
