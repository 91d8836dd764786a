"""jax.pallas-triton and jax.splash: the attention kernels in Pallas that are part of JAX, for GPUs and for TPUs.

Traps of `jax.experimental.pallas.ops.gpu.attention.mha`, the deprecated Triton kernel: scale defaults to 1; grouped
heads are silently wrong (K and V are repeated inside the call, at its cost); lengths must be multiples of the block;
causal is top-left and reads past the keys when q_len > kv_len; LSE is base 2.

Traps of splash attention, which computes one example at a time and is mapped over the batch: no scale argument (q is
scaled first, in float32 unless the scale is a power of two: rounded to bfloat16 the LSE would be off by 4e-2), heads
before tokens, keys in blocks of 128. It compiles for TPU, on which it was never run for this project.

On the CPU both run interpreted, for verification only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from attnbench.frameworks.jax.plain import rows_that_see
from attnbench.impls import WithLse, conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.jax._libraries import causal_alignment, one_documents_part, own_documents
from attnbench.masks import Causal, Documents, Full, Window
from attnbench.masks.base import query_offset
from attnbench.spec import Array, Call, Config, Environment, Workload

SMALLEST_BLOCK = 16
BACKWARD_BLOCK = 32
SPLASH_BLOCK = 128
SMALLEST_SPLASH_Q_BLOCK = 8


def interpreted(platform: str) -> bool:
    """Return whether JAX's default device is not the platform that a kernel compiles for ("gpu" or "tpu")."""
    import jax

    return jax.default_backend() != platform


def interpreter_reason(platform: str) -> str:
    """Return why the kernel may be verified here, but never timed; empty if it compiles. Imports JAX: for workers."""
    reason = f"Pallas runs this kernel only on {platform}; here it runs in its interpreter"
    return reason if interpreted(platform) else ""


def power_of_two_divisor(length: int, largest: int) -> int:
    """Return the largest power of two that divides the length, at most `largest`, a power of two itself."""
    return min(length & -length, largest)


def _whole_blocks(workload: Workload, q_block: int, kv_block: int) -> str | None:
    for name, length, block in (("q_len", workload.q_len, q_block), ("kv_len", workload.kv_len, kv_block)):
        if length % block:
            return f"needs {name} in blocks of {block}, not {length}"
    return None


class PallasTriton(WithLse):
    """JAX's own (deprecated) Triton kernel in Pallas: full, causal and documents on CUDA; elsewhere in an
    interpreter."""

    name = "jax.pallas-triton"
    framework = "jax"
    expects = (r"mha_forward|mha_backward",)
    untested = ("rocm",)
    tunables = {"block": 128}

    @property
    def verify_only(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Reason without a GPU: the kernel runs in the interpreter."""
        return interpreter_reason("gpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        rectangle = None
        if workload.q_len != workload.kv_len and workload.needs_gradients:
            rectangle = "has a backward pass for q_len = kv_len only"
        elif workload.q_len > workload.kv_len and "causal" in workload.visible_mask.kinds:
            rectangle = "reads past the keys when causal and q_len > kv_len"
        return first_reason(
            conditions.needs_device(environment, "cuda", "rocm", "cpu"),
            conditions.needs_at_least(environment, (8, 0)),
            conditions.needs_mask(workload, "full", "causal", "documents"),
            conditions.needs_dtype(workload, "float32", "float16", "bfloat16"),
            conditions.needs_equal_dims(workload),
            conditions.needs_head_dim(workload, 128),  # 256 exceeds shared memory
            conditions.needs_no_softcap(workload),
            conditions.needs_positive_scale(workload),
            causal_alignment(workload),
            one_documents_part(workload),
            _whole_blocks(workload, SMALLEST_BLOCK, SMALLEST_BLOCK),
            rectangle,
        )

    def configs(self, workload: Workload) -> Sequence[Config]:
        """Return forward blocks; the backward blocks are the library's 32."""
        largest = 64 if workload.dtype == "float32" else 128
        return [{"block": size} for size in (largest, largest // 2)]

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        block = int({**self.configs(workload)[0], **config}["block"])
        documents = own_documents(workload)
        causal = "causal" in workload.visible_mask.kinds

        def call(q: Array, k: Array, v: Array) -> Any:
            import jax.numpy as jnp

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # it points at tokamax, which is measured beside it
                from jax.experimental.pallas.ops.gpu import attention

            k, v = (jnp.repeat(x, workload.group, axis=2) if workload.group > 1 else x for x in (k, v))
            q_block, kv_block = (power_of_two_divisor(x.shape[1], block) for x in (q, k))
            q_back, kv_back = min(q_block, BACKWARD_BLOCK), min(kv_block, BACKWARD_BLOCK)
            result: Any = attention.mha(
                q, k, v,
                None if documents is None else jnp.asarray(documents),
                sm_scale=workload.softmax_scale,
                causal=causal,
                block_sizes=attention.BlockSizes(q_block, kv_block, q_back, kv_back, q_back, kv_back),
                interpret=interpreted("gpu"),
                return_residuals=with_lse,
            )  # fmt: skip
            return (result[0], result[1] * math.log(2)) if with_lse else result

        return call


TRITON = PallasTriton()


class Splash(WithLse):
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
        q_block = SPLASH_BLOCK if "documents" in workload.visible_mask.kinds else SMALLEST_SPLASH_Q_BLOCK
        blind_rows = rows_that_see(workload.visible_mask, workload.mask_shape) is not None
        return first_reason(
            conditions.needs_device(environment, "tpu", "cpu"),
            conditions.needs_mask(workload, "full", "causal", "window", "documents"),
            conditions.needs_dtype(workload, "float32", "bfloat16"),
            one_documents_part(workload),
            _whole_blocks(workload, q_block, SPLASH_BLOCK),
            "is undefined on rows that see no key" if blind_rows else None,
        )

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        documents = own_documents(workload)
        q_block, block = power_of_two_divisor(workload.q_len, SPLASH_BLOCK), SPLASH_BLOCK

        def call(q: Array, k: Array, v: Array) -> Any:
            import jax
            import jax.numpy as jnp
            from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

            kernel = splash.make_splash_mha_single_device(
                _splash_mask(workload),
                block_sizes=splash.BlockSizes(q_block, block, block, q_block, block, block, q_block, block),
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
            result: Any = jax.vmap(kernel)(*arguments)
            return (result[0].astype(q.dtype), result[1][0]) if with_lse else result.astype(q.dtype)

        return call


def _splash_mask(workload: Workload) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    size = (workload.q_len, workload.kv_len)
    whole: Any = masks.FullMask(size)
    for part in workload.visible_mask.split():
        if isinstance(part, Full | Documents):
            continue
        assert isinstance(part, Causal | Window)
        offset = query_offset(part.align, workload.mask_shape)
        if isinstance(part, Causal):
            mask = masks.CausalMask(size, offset=offset)
        else:
            mask = masks.LocalMask(size, (part.left, part.right), offset)
        whole = mask if isinstance(whole, masks.FullMask) else masks.LogicalAnd(whole, mask)
    return masks.MultiHeadMask([whole] * workload.heads)


SPLASH = Splash()
