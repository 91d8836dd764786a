"""jax.flash-attn: flash-attn-jax's binding of FlashAttention 2.

Traps handled here: only a bare assertion guards its dtypes and nothing its head groups; the scale must be a Python
float; no mask array, no LSE. To which corner its causal mask is aligned if q_len != kv_len was never tested, so that
case is refused. Its binary holds code for sm_80 only: newer GPUs compile it at load and get FlashAttention 2's speed.
"""

from __future__ import annotations

from attnbench.impls import conditions
from attnbench.impls.conditions import first_reason
from attnbench.masks import Causal, Window
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

NO_BOUND = -1


class FlashAttn(Implementation):
    """FlashAttention 2 through the package flash-attn-jax: full, causal or one window, 16 bits."""

    name = "jax.flash-attn"
    framework = "jax"
    process = "flash_attn_jax"
    expects = (r"(?i)flash",)
    untested = ("cuda",)

    def available(self, environment: Environment) -> str | None:
        return first_reason(
            conditions.needs_package("flash_attn_jax", "pip install flash-attn-jax einops (needs libcudart.so.12)"),
            conditions.needs_device(environment, "cuda"),
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        parts = workload.visible_mask.split()
        rectangular = workload.q_len != workload.kv_len and any(isinstance(part, Causal | Window) for part in parts)
        return first_reason(
            conditions.needs_device(environment, "cuda"),
            conditions.needs_capability(environment, (8, 0)),
            conditions.needs_dtype(workload, "float16", "bfloat16"),
            conditions.needs_mask(workload, "full", "causal", "window"),
            "takes causal or window, not both" if len(parts) > 1 else None,
            "has an unknown alignment for q_len != kv_len" if rectangular else None,
            conditions.needs_equal_dims(workload),
            conditions.needs_head_dim(workload, 256, multiple_of=8),
            conditions.needs_room_for_gradients(workload, environment),
            conditions.needs_no_softcap(workload),
            conditions.needs_positive_scale(workload),
        )

    def build(self, workload: Workload, config: Config) -> Call:
        (part,) = workload.visible_mask.split()
        sides = (part.left, part.right) if isinstance(part, Window) else (None, None)
        left, right = (NO_BOUND if side is None else side for side in sides)
        scale, causal = float(workload.softmax_scale), isinstance(part, Causal)

        def call(q: Array, k: Array, v: Array) -> Array:
            from flash_attn_jax import flash_mha

            return flash_mha(q, k, v, softmax_scale=scale, is_causal=causal, window_size=(left, right))

        return call


FLASH_ATTN = FlashAttn()
