"""Helpers of several JAX libraries: masks as arguments, and imports that leave torch's Triton cache alone.

The arguments are those of `jax.nn.dot_product_attention`, which tokamax shares.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from attnbench.frameworks.jax.plain import log_weight, rows_that_see, visible
from attnbench.masks import Causal, Documents, Full, Lengths, Mask, Window
from attnbench.masks.base import query_offset
from attnbench.masks.combine import both
from attnbench.masks.large_bias import has_large_bias
from attnbench.spec import Workload

FINITE_MASK = "hides keys of a mask array by adding -45,850, and logits of float16 may differ by more"
"""Refusal of what passes mask arrays to JAX's cuDNN in float16: beside logits of -30,000 hidden keys get weight."""


@dataclass(frozen=True)
class MaskArguments:
    """A mask as native arguments and a `rest`, which is passed as an array."""

    is_causal: bool = False
    window: tuple[int, int] | None = None
    kv_lengths: np.ndarray | None = None
    rest: Mask = field(default_factory=Full)
    shows_blind_rows: bool = False
    """Whether rows that see no key are shown all keys; their output is set to 0 outside.

    Fused kernels would give such rows NaN gradients (seen on cuDNN and tokamax).
    """

    @property
    def needs_array(self) -> bool:
        """Whether a part is left that needs an array of q_len x kv_len."""
        return not isinstance(self.rest, Full)

    @property
    def at_most_causal(self) -> bool:
        """Whether the mask is full or `is_causal`, without any other argument."""
        return not self.needs_array and self.window is None and self.kv_lengths is None

    def keywords(self, workload: Workload, full_pairs: bool = False) -> dict[str, Any]:
        """Return keyword arguments inside a traced function; `full_pairs` broadcasts arrays to all rows and heads."""
        import jax.numpy as jnp

        words: dict[str, Any] = {}
        if self.is_causal:
            words["is_causal"] = True
        if self.window is not None:
            words["local_window_size"] = self.window
        if self.kv_lengths is not None:
            words["key_value_seq_lengths"] = jnp.asarray(self.kv_lengths, jnp.int32)
        if not self.needs_array:
            return words
        shape = workload.mask_shape
        seen = visible(self.rest, shape)
        if self.shows_blind_rows:
            seen = seen | ~seen.any(-1, keepdims=True)
        words["mask"] = jnp.broadcast_to(seen, tuple(shape)) if full_pairs else seen
        weight = log_weight(self.rest, shape, jnp.promote_types(workload.dtype, jnp.float32))
        if weight is not None:
            words["bias"] = jnp.broadcast_to(weight, (*weight.shape[:2], shape.q_len, shape.kv_len))
        return words


def mask_arguments(workload: Workload) -> MaskArguments:
    """Return the mask split into native arguments and a rest.

    `is_causal` and `local_window_size` align query 0 with key 0. A window is native only with right = 0, and then
    always with is_causal: see jax.cudnn. With a large bias the mask stays whole: the largest bias that a row sees
    depends on all of the mask.
    """
    shape = workload.mask_shape
    blind_rows = workload.needs_gradients and rows_that_see(workload.visible_mask, shape) is not None
    if blind_rows or has_large_bias(workload.visible_mask):
        return MaskArguments(rest=workload.visible_mask, shows_blind_rows=blind_rows)
    causal, window, lengths = False, None, None
    rest: Mask = Full()
    for part in workload.visible_mask.split():
        if isinstance(part, Causal) and not query_offset(part.align, shape):
            causal = True
        elif isinstance(part, Window) and part.right == 0 and window is None and not query_offset(part.align, shape):
            left = shape.q_len if part.left is None else part.left
            causal, window = True, (left, 0)
        elif isinstance(part, Lengths) and lengths is None:
            lengths = part.kv_lengths.array
        else:
            rest = both(rest, part)
    return MaskArguments(causal, window, lengths, rest)


def own_documents(workload: Workload) -> np.ndarray | None:
    """Return the document ids [b, tokens] of queries and keys; None if the mask has no documents part."""
    for part in workload.visible_mask.split():
        if isinstance(part, Documents):
            return np.broadcast_to(part.ids.array, (workload.batch, workload.kv_len))
    return None


def one_documents_part(workload: Workload) -> str | None:
    """Return why documents cannot be passed to a library with one id per token; None if they can."""
    documents = [part for part in workload.visible_mask.split() if isinstance(part, Documents)]
    if len(documents) > 1:
        return "takes one set of documents, not several"
    if not documents:
        return None
    if workload.q_len != workload.kv_len or documents[0].q_ids is not None:
        return "takes documents of self-attention only (one id per token, q_len = kv_len)"
    return None


def causal_alignment(workload: Workload) -> str | None:
    """Return why a causal or window part does not start at key 0; None if all do."""
    for part in workload.visible_mask.split():
        if isinstance(part, Causal | Window) and query_offset(part.align, workload.mask_shape):
            return f"aligns {part.kinds[0]} top-left only, not bottom-right of {workload.q_len} x {workload.kv_len}"
    return None


CACHE = "TRITON_CACHE_DIR"


def import_beside_torch(name: str) -> ModuleType:
    """Import a module and restore TRITON_CACHE_DIR, which jax-triton empties for the whole process.

    With an empty TRITON_CACHE_DIR torch compiles no Triton kernel any more ("Could not create or locate cache dir").
    """
    before = os.environ.get(CACHE)
    try:
        return importlib.import_module(name)
    finally:
        if before is None:
            os.environ.pop(CACHE, None)
        else:
            os.environ[CACHE] = before
