"""Tile sizes of the Triton kernels: as text in a config, and cut down to the blocks of a mask; Triton's interpreter."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import msgspec

from attnbench.errors import UsageError
from attnbench.impls.conditions import first_reason, needs_dtype, needs_head_dim, needs_no_softcap, needs_positive_scale
from attnbench.spec import Config, Workload

SMALLEST = 16
"""Smallest side of a tile that tensor cores take."""
WIDEST = 256
"""Largest head dimension."""
_FORM = re.compile(r"(\d+)x(\d+)w(\d+)s(\d+)(-late)?")


class TileShape(NamedTuple):
    """Query rows by keys, warps, and stages of the software pipeline: `128x64w4s2`.

    `-late` takes the forward's product with V during the next step's softmax.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    late: bool = False

    def fitted(self, block_size: int) -> TileShape:
        """Cut the sides down so that they divide the block."""
        widest = largest_tile(block_size)
        return self._replace(rows=min(self.rows, widest), keys=min(self.keys, widest))


def largest_tile(block_size: int) -> int:
    """Return the largest power of two that divides a block size."""
    return block_size & -block_size


def read_tile(text: str) -> TileShape:
    """Read a tile from text such as `128x64w4s2`; raise UsageError for other forms."""
    match = _FORM.fullmatch(text)
    numbers = [int(number) for number in match.groups()[:4]] if match else [0, 0, 0, 0]
    if any(side < SMALLEST or side & (side - 1) for side in numbers[:2]) or not all(numbers[2:]):
        raise UsageError(
            f'tile "{text}" is not of the form ROWSxKEYSwWARPSsSTAGES[-late], such as 128x64w4s2; ROWS and KEYS are '
            f"powers of two, at least {SMALLEST}."
        )
    return TileShape(*numbers, late=match is not None and match[5] is not None)


def beyond_the_kernels(workload: Workload, block_size: int) -> str | None:
    """Return why the kernels cannot compute a workload whose mask has blocks of this size; None if they can."""
    tiled = largest_tile(block_size) >= SMALLEST
    return first_reason(
        None if tiled else f"needs a block size that is a multiple of {SMALLEST} tokens, not {block_size}",
        needs_dtype(workload, "float32", "bfloat16", "float16"),
        needs_head_dim(workload, WIDEST, 4 if workload.dtype == "float32" else 8),
        needs_no_softcap(workload),
        needs_positive_scale(workload),
    )


def candidates(workload: Workload) -> list[dict[str, str]]:
    """List configs to try, the default first: the tiles of each kernel, and how dQ is computed.

    Tiles for head_dim 128 either fill a Hopper SM with one program of two warp groups (w8), or are small enough for
    two programs that hide each other's loads and softmax (w4); in the order of their times on an H200.
    """
    width = max(workload.head_dim, workload.value_dim)
    if workload.dtype == "float32":
        return [{"forward": "64x32w4s2", "query": "64x32w4s2", "key": "32x64w4s2", "dq": "rows"}]
    if width > 128:
        forwards, queries, keys = (
            ["128x64w8s2", "128x64w8s2-late", "64x64w4s2"],
            ["64x64w8s2", "64x32w4s2"],
            ["32x64w8s1", "64x64w8s1"],
        )
    elif width > 64:
        forwards = ["128x64w4s2", "128x128w8s2", "128x128w8s2-late", "128x64w8s3-late"]
        queries, keys = ["128x64w8s3", "64x64w4s2", "128x64w8s2"], ["64x64w4s2", "64x128w8s3", "64x128w8s2"]
    else:
        forwards = ["128x128w8s3-late", "128x64w4s3", "128x128w8s3"]
        queries, keys = ["128x64w4s3", "128x128w8s2"], ["64x128w8s3", "128x128w8s2"]
    if not workload.needs_gradients:
        return [{"forward": tile} for tile in forwards]
    default = {"forward": forwards[0], "query": queries[0], "key": keys[0], "dq": "rows"}
    return [
        default,
        *(default | {"forward": tile} for tile in forwards[1:]),
        *(default | {"query": tile} for tile in queries[1:]),
        *(default | {"key": tile} for tile in keys[1:]),
        *(default | {"key": tile, "dq": "atomic"} for tile in keys),
    ]


def read_config(workload: Workload, config: Config) -> tuple[dict[str, TileShape], bool]:
    """Return the tiles of each kernel by name, defaults filled in, and whether dQ is added up atomically."""
    defaults = candidates(msgspec.structs.replace(workload, pass_="train"))[0]
    unknown = [name for name in config if name not in defaults]
    if unknown:
        raise UsageError(
            f"torch.block-sparse-triton has no tunable {unknown[0]}; its tunables are {', '.join(defaults)}."
        )
    chosen = defaults | {name: str(value) for name, value in config.items()}
    way = chosen.pop("dq")
    if way not in ("rows", "atomic"):
        raise UsageError(f'dq must be "rows" (summed by rows of blocks, deterministic) or "atomic", not "{way}".')
    return {name: read_tile(text) for name, text in chosen.items()}, way == "atomic"


def interpreted() -> bool:
    """Return whether Triton kernels of this process run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def mend_interpreter() -> None:
    """Patch Triton's interpreter before 3.9 for NumPy 2.4, whose int() refuses loop bounds of one-element arrays."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "mended", False):
        return

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_and_mend.mended = True  # pyright: ignore[reportFunctionMemberAccess]
    interpreter._patch_lang_tensor = patch_and_mend
