"""torch.triton-decode: few queries over a KV cache by our Triton kernels, which split the keys over the device.

The number of shares follows from shapes alone, their bounds from lengths on the device: nothing is read on the host, so
a CUDA graph can hold a call. Splitting matters where sequences and key heads are fewer than processors, as in every
batch of one. As an implementation of plain attention it takes whole arrays as a full cache. If TRITON_INTERPRET=1 is
set before Triton is first imported, the kernels run in its interpreter, on a CPU too: for verifying, never for timing.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from attnbench.errors import Unsupported
from attnbench.impls import AlwaysLse, conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.partial.torch_passes import dense_rows
from attnbench.impls.torch._masks import bounds, is_windowed, needs_bottom_right, needs_bounds
from attnbench.kernels.block_sparse.tiles import interpreted, mend_interpreter
from attnbench.spec import CacheCall, Call, Config, Environment, Workload

if TYPE_CHECKING:
    import torch

MOST_QUERIES = 64
"""Most queries of a sequence; more are better served by kernels that reuse keys among them."""
WIDEST = 256
TILE_BYTES = 16 << 10
"""Bytes of a tile of keys: six of them, of keys and values in three stages, fit the shared memory of every GPU."""
STAGES = (3, 5)
"""Stages of the loop over keys, contiguous and in pages: Triton counts the entry of the table as a stage of its own for
each tile on the way, so both have two tiles of keys and values under way."""
FEWEST_KEYS = 256
"""Least capacity of a share: merging shares costs as much as reading some hundred keys."""
MOST_SHARES = 128
WAVES = 2
"""Programs for each processor."""


class DecodeShape(NamedTuple):
    """Facts of a workload that the kernels are compiled for."""

    scale: float
    softcap: float | None
    left: int | None
    causal: bool


class TritonDecode(AlwaysLse):
    """Up to 64 queries over many keys, whole arrays or KV caches contiguous or in pages, by our Triton kernels."""

    name = "torch.triton-decode"
    framework = "torch"
    any_kv_len = True

    @property
    def verify_only(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "TRITON_INTERPRET=1 runs the kernels in Triton's interpreter" if interpreted() else ""

    @property
    def expects(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return () if interpreted() else ("decode_part",)

    def available(self, environment: Environment) -> str | None:
        missing = conditions.needs_package("triton", "pip install triton")
        if interpreted():
            return missing
        device = conditions.needs_device(environment, "cuda")
        return first_reason(
            f"{device}; TRITON_INTERPRET=1 verifies it in Triton's interpreter" if device else None,
            missing,
            conditions.needs_at_least(environment, (8, 0)),
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        left_out = workload.q_len > MOST_QUERIES
        unknown = interpreted() and workload.dtype == "bfloat16"
        imprecise = workload.softcap is not None and workload.dtype == "float32"
        return first_reason(
            self.available(environment),
            conditions.needs_forward(workload),
            f"takes up to {MOST_QUERIES} queries, not {workload.q_len}" if left_out else None,
            conditions.needs_dtype(workload, "float16", "bfloat16", "float32"),
            conditions.needs_head_dim(workload, WIDEST),
            needs_bounds(workload),
            needs_bottom_right(workload),
            "has only causal windows (right = 0)" if is_windowed(workload) and bounds(workload)[1] != 0 else None,
            "computes the hyperbolic tangent of a soft cap to about 22 bits, too few for float32"
            if imprecise
            else None,
            "Triton's interpreter cannot multiply bfloat16" if unknown else None,
        )

    def both(self, workload: Workload, config: Config) -> Call:
        shape = _shape_of(workload)
        return lambda q, k, v: run(dense_rows(q), dense_rows(k), dense_rows(v), None, None, shape)

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        shape = _shape_of(workload)
        return lambda q, k, v, lengths, table: run(q, k, v, lengths, table, shape)


def _shape_of(workload: Workload) -> DecodeShape:
    left, right = bounds(workload)
    return DecodeShape(workload.softmax_scale, workload.softcap, left, right == 0)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, table: torch.Tensor | None,
    shape: DecodeShape,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return out [b, n, h, e] and the LSE [b, h, n] of queries over a cache; without lengths all of it is there."""
    import torch
    import triton

    from attnbench.kernels.decode.triton_kernels import decode_merge, decode_part

    if interpreted():
        mend_interpreter()
    (batch, queries, heads, dim), (_, page, kv_heads, value_dim) = q.shape, v.shape
    capacity = page if table is None else table.shape[1] * page
    rows = queries * (heads // kv_heads)
    width, value_width = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    tokens = max(16, min(128, TILE_BYTES // (max(width, value_width) * q.element_size())))
    tile = max(16, min(64, tokens, triton.next_power_of_2(rows)))
    blocks = triton.cdiv(rows, tile)
    shares = _shares(batch * kv_heads * blocks, capacity, q.device)
    out = torch.empty((batch, queries, heads, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    parts, part_lse = out, lse
    if shares > 1:
        parts = torch.empty((shares, *out.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((shares, *lse.shape), dtype=torch.float32, device=q.device)
    try:
        with torch.cuda.device_of(q):
            decode_part[(batch * kv_heads, shares, blocks)](
                q, k, v, lengths, table, parts, part_lse, shape.scale, shape.softcap or 1.0, shape.left or 0, queries,
                kv_heads, capacity, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
                0 if table is None else table.stride(0), GROUP=heads // kv_heads, PAGE=0 if table is None else page,
                DIM=dim, V_DIM=value_dim, WIDTH=width, V_WIDTH=value_width, TILE_M=tile, TILE_N=tokens,
                CAUSAL=shape.causal, WINDOW=shape.left is not None, SOFTCAP=shape.softcap is not None,
                HAS_LENGTHS=lengths is not None, num_warps=4,
                num_stages=STAGES[table is not None],
            )  # fmt: skip
            if shares > 1:
                decode_merge[(batch * queries * heads,)](
                    parts, part_lse, out, lse, queries, heads, batch * queries * heads, shares,
                    V_DIM=value_dim, V_WIDTH=value_width, SHARES=triton.next_power_of_2(shares), num_warps=4,
                )  # fmt: skip
    except triton.runtime.errors.OutOfResources as error:
        raise Unsupported(f"torch.triton-decode needs more of this GPU than it has: {error}.") from error
    return out, lse


def _shares(programs: int, capacity: int, device: torch.device) -> int:
    """Return into how many shares the keys of a sequence are split, so that the whole device has work."""
    wanted = WAVES * _processors(device) // programs
    return max(1, min(wanted, -(-capacity // FEWEST_KEYS), MOST_SHARES))


@cache
def _processors(device: torch.device) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


TRITON_DECODE = TritonDecode()
