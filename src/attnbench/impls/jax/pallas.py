"""jax.pallas-triton: `jax.experimental.pallas.ops.gpu.attention.mha`, the deprecated Triton kernel inside JAX.

Traps handled here: scale defaults to 1; grouped heads are silently wrong (K and V are repeated inside the call, at its
cost); lengths must be multiples of the block; causal is top-left and reads past the keys when q_len > kv_len; LSE is
base 2. On the CPU it runs interpreted, for verification only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from attnbench.impls import conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.jax._libraries import interpreted, interpreter_reason
from attnbench.impls.jax._masks import causal_alignment, one_documents_part, own_documents
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

LN_2 = math.log(2.0)
SMALLEST_BLOCK = 16
BACKWARD_BLOCK = 32


def power_of_two_divisor(length: int, largest: int) -> int:
    """Return the largest power of two that divides the length, at most `largest`, a power of two itself."""
    return min(length & -length, largest)


class PallasTriton(Implementation):
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
        """Return why lengths are not in blocks, head_dim is above 128 (256 exceeds shared memory), or another limit;
        None if all hold."""
        return first_reason(
            conditions.needs_device(environment, "cuda", "rocm", "cpu"),
            conditions.needs_at_least(environment, (8, 0)),
            conditions.needs_mask(workload, "full", "causal", "documents"),
            conditions.needs_dtype(workload, "float32", "float16", "bfloat16"),
            conditions.needs_equal_dims(workload),
            conditions.needs_head_dim(workload, 128),
            conditions.needs_no_softcap(workload),
            conditions.needs_positive_scale(workload),
            causal_alignment(workload),
            one_documents_part(workload),
            _whole_blocks(workload),
            _rectangles(workload),
        )

    def configs(self, workload: Workload) -> Sequence[Config]:
        """Return forward blocks; the backward blocks are the library's 32."""
        largest = 64 if workload.dtype == "float32" else 128
        return [{"block": size} for size in (largest, largest // 2)]

    def build(self, workload: Workload, config: Config) -> Call:
        return _call(workload, config, with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call:
        """Return a call whose LSE is converted from base 2 to natural log."""
        return _call(workload, config, with_lse=True)


def _whole_blocks(workload: Workload) -> str | None:
    for name, length in (("q_len", workload.q_len), ("kv_len", workload.kv_len)):
        if power_of_two_divisor(length, SMALLEST_BLOCK) < SMALLEST_BLOCK:
            return f"needs {name} in blocks of at least {SMALLEST_BLOCK}, not {length}"
    return None


def _rectangles(workload: Workload) -> str | None:
    if workload.q_len == workload.kv_len:
        return None
    if workload.needs_gradients:
        return "has a backward pass for q_len = kv_len only"
    if workload.q_len > workload.kv_len and "causal" in workload.visible_mask.kinds:
        return "reads past the keys when causal and q_len > kv_len"
    return None


def _call(workload: Workload, config: Config, with_lse: bool) -> Call:
    block = int(config.get("block", 64 if workload.dtype == "float32" else 128))
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
        found: Any = attention.mha(
            q, k, v,
            None if documents is None else jnp.asarray(documents),
            sm_scale=workload.softmax_scale,
            causal=causal,
            block_sizes=attention.BlockSizes(q_block, kv_block, q_back, kv_back, q_back, kv_back),
            interpret=interpreted("gpu"),
            return_residuals=with_lse,
        )  # fmt: skip
        return (found[0], found[1] * LN_2) if with_lse else found

    return call


TRITON = PallasTriton()
