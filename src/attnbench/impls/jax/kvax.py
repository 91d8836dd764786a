"""jax.kvax: kvax's FlashAttention-2 in Triton, causal by position plus segments.

Traps handled here: scale defaults to 1; its block sizes know "H100" by name only, so they are given; it needs a mesh
and `attention_specs` even on one device; segment -1 means padding. kvax 0.1.0 needs two repairs: an attribute that
newer JAX dropped, and module constants that newer Triton wants as constexpr. It attends to every block between the
first and the last that a query block sees in full: the keys of a document, and those that are not padding, must lie
together. It pads lengths to whole blocks in the forward pass only and refuses them in the backward pass: they are
padded here. A scale of exactly 1 becomes a constant of jax-triton that its backward kernel cannot convert: a scale of
one half is passed with doubled queries.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np

from attnbench.impls import conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.jax._libraries import import_beside_torch, one_documents_part, own_documents
from attnbench.masks import Causal
from attnbench.masks.base import query_offset
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

HEAD_DIMS = (16, 32, 64, 128, 192, 256)
AXES = (None, None, None, None)


class Kvax(Implementation):
    """kvax's FlashAttention 2 in Triton: causal masks, alone or with documents of consecutive tokens, 16 bits."""

    name = "jax.kvax"
    framework = "jax"
    over_devices = "alone"
    process = "kvax"
    expects = (r"(?i)flash_attention",)
    tunables = {"block_q": 128, "block_kv": 128, "warps": 8, "stages": 3}

    def available(self, environment: Environment) -> str | None:
        return first_reason(
            conditions.needs_package("kvax", "pip install --no-deps kvax==0.1.0"),
            conditions.needs_package("jax_triton", "pip install jax-triton==0.3.1"),
            conditions.needs_package("triton", "pip install triton==3.6.0"),
            conditions.needs_device(environment, "cuda"),
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        causal = any(isinstance(part, Causal) for part in workload.visible_mask.split())
        dims = ", ".join(map(str, HEAD_DIMS))
        return first_reason(
            conditions.needs_device(environment, "cuda"),
            conditions.needs_at_least(environment, (8, 0)),
            conditions.needs_mask(workload, "causal", "documents"),
            None if causal else "is always causal",
            "cannot compute rows that see no key" if _positions(workload)[0].min() < 0 else None,
            conditions.needs_dtype(workload, "float16", "bfloat16"),
            conditions.needs_equal_dims(workload),
            conditions.needs_no_softcap(workload),
            conditions.needs_positive_scale(workload),
            None if workload.head_dim in HEAD_DIMS else f"takes head_dim {dims}, not {workload.head_dim}",
            one_documents_part(workload),
            _document_ids(workload),
        )

    def configs(self, workload: Workload) -> Sequence[Config]:
        """Return kvax's blocks for the H100, which also suit newer chips, and smaller ones for wide heads."""
        small = {"block_q": 64, "block_kv": 64, "warps": 4, "stages": 3}
        return (small, self.tunables) if workload.head_dim > 128 else (self.tunables, small)

    def build(self, workload: Workload, config: Config) -> Call:
        """Return a call that includes the mask tables, which kvax computes from positions and segments every time."""
        config = {**self.configs(workload)[0], **config}
        q_positions, kv_positions = _positions(workload)
        documents = own_documents(workload)
        q_segments, kv_segments = (
            np.zeros(p.shape, np.int32) if documents is None else documents.astype(np.int32)
            for p in (q_positions, kv_positions)
        )

        def call(q: Array, k: Array, v: Array) -> Array:
            return attend(
                q, k, v, (q_positions, q_segments, kv_positions, kv_segments),
                scale=workload.softmax_scale,
                config=config,
                gradients=workload.needs_gradients,
                sequential=workload.q_len == workload.kv_len,
            )  # fmt: skip

        return call


def attend(
    q: Array, k: Array, v: Array, tokens: tuple[Array, Array, Array, Array], *, scale: float, config: Config,
    gradients: bool, sequential: bool = False,
) -> Array:  # fmt: skip
    """Return kvax's attention; `tokens` are positions and segments of queries, then of keys, [b, tokens] each.

    A query sees the keys of its own segment whose position is at most its own; `sequential` promises that positions
    count up.
    """
    import jax
    import jax.numpy as jnp

    ops, utils = _import_kvax()
    q_block, kv_block, warps, stages = (int(config[name]) for name in ("block_q", "block_kv", "warps", "stages"))
    forward = utils.FlashAttentionParamsConfig(q_block, kv_block, warps, stages)
    # The backward pass has half the queries per block, as in kvax on the H100.
    q_block = max(q_block // 2, 16) if q_block > 64 else q_block
    backward = utils.FlashAttentionParamsConfig(q_block, kv_block, warps, stages)
    words = [jnp.asarray(x, jnp.int32) for x in tokens]
    q_len = q.shape[1]
    if scale == 1:
        q, scale = q * 2, 0.5
    if gradients:
        q, k, v, *words = _in_whole_blocks(max(forward.query_block_size, forward.kv_block_size), q, k, v, *words)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",))
    with utils.attention_specs(query_specs=AXES, kv_specs=AXES):
        tables = ops.create_attention_mask(
            *words, fwd_params=forward, bwd_params=backward, calc_bwd_mask=gradients, mesh=mesh
        )
        out = ops.flash_attention(
            q, _rounded_gradient(k), _rounded_gradient(v), *words, tables,
            scale=scale,
            fwd_params=forward,
            bwd_params=backward,
            assume_sequential_positions=sequential,
            permute_tokens_for_load_balance=False,
            mesh=mesh,
        )  # fmt: skip
    return out[:, :q_len]


def _in_whole_blocks(block: int, q: Array, k: Array, v: Array, *words: Array) -> list[Array]:
    """Return arrays padded to whole blocks: queries that see what the last one sees, keys that belong to no segment."""
    import jax.numpy as jnp

    def longer(array: Array, **how: Any) -> Array:
        return jnp.pad(array, [(0, 0), (0, -array.shape[1] % block), *[(0, 0)] * (array.ndim - 2)], **how)

    *others, kv_segments = words
    edges = (longer(x, mode="edge") for x in others)
    return [longer(q), longer(k), longer(v), *edges, longer(kv_segments, constant_values=-1)]


def _rounded_gradient(array: Array) -> Array:
    """Return the same array, whose gradient is rounded from kvax's float32 to the array's dtype."""
    return array.astype("float32").astype(array.dtype)


def _document_ids(workload: Workload) -> str | None:
    documents = own_documents(workload)
    if documents is None:
        return None
    if documents.min() < 0:
        return "treats negative document ids as padding"
    runs = 1 + np.count_nonzero(np.diff(documents, axis=1), axis=1)
    if any(len(np.unique(row)) < count for row, count in zip(documents, runs)):
        return "takes documents of consecutive tokens only: keys between two parts of a document are read too"
    return None


def _positions(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of queries and keys, [b, tokens] each; any alignment is an offset of the queries."""
    offsets = [
        query_offset(part.align, workload.mask_shape)
        for part in workload.visible_mask.split()
        if isinstance(part, Causal)
    ]
    q = np.arange(workload.q_len, dtype=np.int32) + min(offsets, default=0)
    kv = np.arange(workload.kv_len, dtype=np.int32)
    return np.tile(q, (workload.batch, 1)), np.tile(kv, (workload.batch, 1))


def _import_kvax() -> tuple[Any, Any]:
    """Return kvax.ops and kvax.utils after repairs of what newer JAX and Triton changed; `import *` fails."""
    shard_map = importlib.import_module("jax.experimental.shard_map")
    if not hasattr(shard_map, "Specs"):
        shard_map.Specs = typing.Any  # pyright: ignore[reportAttributeAccessIssue]
    ops, utils = import_beside_torch("kvax.ops"), import_beside_torch("kvax.utils")
    kernels = importlib.import_module("kvax.ops.flash_attention_triton")
    constexpr = importlib.import_module("triton.language").constexpr
    for name in ("LOG2_CONST", "NEG_INF"):
        value = getattr(kernels, name)
        if not isinstance(value, constexpr):
            setattr(kernels, name, constexpr(value))
    return ops, utils


KVAX = Kvax()
