"""jax.splash: the splash-attention TPU kernel inside JAX, one example at a time, mapped over the batch.

Traps handled here: no scale argument (q is scaled first, in float32 unless the scale is a power of two: rounded
to bfloat16 the LSE would be off by 4e-2), heads before tokens, keys in blocks of 128.
It compiles for TPU, where it was never run by us; on the CPU it runs interpreted, for verification only.
"""

from __future__ import annotations

import math
from typing import Any

from attnbench.frameworks.jax.plain import rows_that_see
from attnbench.impls.conditions import first_reason, needs_device, needs_dtype, needs_mask
from attnbench.impls.jax._libraries import interpreted, interpreter_reason
from attnbench.impls.jax._masks import one_documents_part, own_documents
from attnbench.impls.jax.pallas import power_of_two_divisor
from attnbench.masks import Causal, Documents, Full, Window
from attnbench.masks.base import query_offset
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

BLOCK = 128
SMALLEST_Q_BLOCK = 8


class Splash(Implementation):
    """JAX's splash-attention kernel for TPUs: full, causal, window and documents, with soft cap; elsewhere in an
    interpreter."""

    name = "jax.splash"
    framework = "jax"
    layout = "bhsd"
    untested = ("tpu",)

    @property
    def verify_only(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Reason without a TPU: the kernel runs in the interpreter."""
        return interpreter_reason("tpu")

    def available(self, environment: Environment) -> str | None:
        if environment.device in ("cpu", "tpu"):
            return None
        return f"is a TPU kernel, this is {environment.device}"

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(
            needs_device(environment, "tpu", "cpu"),
            needs_mask(workload, "full", "causal", "window", "documents"),
            needs_dtype(workload, "float32", "bfloat16"),
            one_documents_part(workload),
            _whole_blocks(workload),
            _no_blind_rows(workload),
        )

    def build(self, workload: Workload, config: Config) -> Call:
        return _call(workload, with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call:
        return _call(workload, with_lse=True)


def _whole_blocks(workload: Workload) -> str | None:
    if workload.kv_len % BLOCK:
        return f"needs kv_len in blocks of {BLOCK}, not {workload.kv_len}"
    least = BLOCK if "documents" in workload.visible_mask.kinds else SMALLEST_Q_BLOCK
    return f"needs q_len in blocks of {least}, not {workload.q_len}" if workload.q_len % least else None


def _no_blind_rows(workload: Workload) -> str | None:
    if rows_that_see(workload.visible_mask, workload.mask_shape) is not None:
        return "is undefined on rows that see no key"
    return None


def _splash_mask(workload: Workload) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    size = (workload.q_len, workload.kv_len)
    found: Any = masks.FullMask(size)
    for part in workload.visible_mask.split():
        if isinstance(part, Full | Documents):
            continue
        assert isinstance(part, Causal | Window)
        offset = query_offset(part.align, workload.mask_shape)
        one = (
            masks.CausalMask(size, offset=offset)
            if isinstance(part, Causal)
            else masks.LocalMask(size, (part.left, part.right), offset)
        )
        found = one if isinstance(found, masks.FullMask) else masks.LogicalAnd(found, one)
    return masks.MultiHeadMask([found] * workload.heads)


def _call(workload: Workload, with_lse: bool) -> Call:
    documents = own_documents(workload)
    q_block = power_of_two_divisor(workload.q_len, BLOCK)

    def call(q: Array, k: Array, v: Array) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        kernel = splash.make_splash_mha_single_device(
            _splash_mask(workload),
            block_sizes=splash.BlockSizes(q_block, BLOCK, BLOCK, q_block, BLOCK, BLOCK, q_block, BLOCK),
            attn_logits_soft_cap=workload.softcap,
            save_residuals=with_lse,
            interpret=interpreted("tpu"),
        )
        scaled = q.astype(jnp.float32) * workload.softmax_scale
        if math.frexp(workload.softmax_scale)[0] == 0.5:
            scaled = scaled.astype(q.dtype)
        arguments: list[Any] = [scaled, k, v]
        if documents is not None:
            ids = jnp.asarray(documents)
            arguments.append(splash.SegmentIds(ids, ids))
        found: Any = jax.vmap(kernel)(*arguments)
        return (found[0].astype(q.dtype), found[1][0]) if with_lse else found.astype(q.dtype)

    return call


SPLASH = Splash()
