"""jax.tokamax-*: `tokamax.dot_product_attention` with exactly one named implementation, so that nothing falls back.

The interface and its traps are those of jax.nn (top-left causal, mean of V on rows without keys), and two more: padded
query rows are not zero, and the soft cap is applied after the bias. float64 is true float64 under xla and xla_chunked.
"""

from __future__ import annotations

from typing import Any

from attnbench.frameworks.jax.plain import rows_that_see, zero_blind_rows
from attnbench.impls import conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.jax._libraries import FINITE_MASK, import_beside_torch, mask_arguments
from attnbench.spec import Array, Call, Config, Environment, Implementation, Passes, Workload

SIXTEEN_BITS = ("float16", "bfloat16")
MASK_ROW_BYTES = 16
LARGEST_FLOAT16_LOGIT = 11.0
"""Soft cap above which mosaic and triton overflow in float16: up to 60 they do not subtract a row's maximum before the
exponential."""
INSTALL = "pip install tokamax (Python 3.12 or newer)"


DESCRIPTIONS = {
    "mosaic": "tokamax's attention by its Pallas Mosaic kernel for Hopper and newer; forward from Ampere on; 16 bits.",
    "triton": "tokamax's attention by its Pallas Triton kernel.",
    "cudnn": "tokamax's attention by cuDNN; 16 bits.",
    "xla": "tokamax's attention compiled by XLA; stores all scores.",
    "xla_chunked": "tokamax's attention compiled by XLA, in chunks that do not store all scores.",
}


class Tokamax(Implementation):
    """A named implementation of tokamax's dot_product_attention."""

    framework = "jax"
    process = "tokamax"
    untested = ("rocm", "tpu")

    def __init__(self, backend: str, devices: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
        self.backend = backend
        self.name = f"jax.tokamax-{backend.replace('_', '-')}"
        self.description = DESCRIPTIONS[backend]
        self.devices = devices
        self.dtypes = dtypes
        self.materialises_scores = backend == "xla"
        self.over_devices = "partitioned" if backend.startswith("xla") else "separate"

    def available(self, environment: Environment) -> str | None:
        return first_reason(conditions.needs_package("tokamax", INSTALL), self._device(environment))

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        capped_late = workload.softcap is not None and workload.visible_mask.weighted
        return first_reason(
            self._device(environment),
            conditions.needs_dtype(workload, *self.dtypes),
            "caps the logits after adding the mask's weights" if capped_late else None,
            conditions.needs_positive_scale(workload) if self.devices else None,
            self._backend_limits(workload, environment),
        )

    def _device(self, environment: Environment) -> str | None:
        return conditions.needs_device(environment, *self.devices) if self.devices else None

    def _backend_limits(self, workload: Workload, environment: Environment) -> str | None:
        softcap = workload.softcap
        overflows = workload.dtype == "float16" and softcap is not None and softcap > LARGEST_FLOAT16_LOGIT
        too_large = "computes exp(logit) in float16 under a soft cap, which overflows beyond a logit of 11"
        if self.backend == "mosaic":
            odd_rows = workload.kv_len % MASK_ROW_BYTES and mask_arguments(workload).needs_array
            return first_reason(
                conditions.needs_generation(environment, *((9, 10) if workload.needs_gradients else (8, 9, 10))),
                f"copies mask arrays in rows of {MASK_ROW_BYTES} keys, kv_len is {workload.kv_len}"
                if odd_rows
                else None,
                too_large if overflows else None,
            )
        if self.backend == "triton":
            uncapped = workload.needs_gradients and softcap is not None
            return first_reason(
                conditions.needs_at_least(environment, (8, 0)),
                "has no softcap in its backward pass" if uncapped else None,
                too_large if overflows else None,
            )
        if self.backend == "cudnn":
            array = mask_arguments(workload).needs_array
            return first_reason(
                conditions.needs_at_least(environment, (8, 0)),
                conditions.needs_no_softcap(workload),
                conditions.needs_equal_dims(workload),
                conditions.needs_cudnn_head_dim(workload, environment),
                "rounds the mask's weights to its dtype" if workload.visible_mask.weighted else None,
                "has no backward pass with a mask array" if array and workload.needs_gradients else None,
                FINITE_MASK if array and workload.dtype == "float16" else None,
            )
        return None

    def computes_hidden(self, workload: Workload, environment: Environment) -> bool:
        return self.materialises_scores or mask_arguments(workload).needs_array

    def build(self, workload: Workload, config: Config) -> Call:
        rows = rows_that_see(workload.visible_mask, workload.mask_shape)
        arguments = mask_arguments(workload)

        def call(q: Array, k: Array, v: Array) -> Array:
            tokamax: Any = import_beside_torch("tokamax")
            out = tokamax.dot_product_attention(
                q, k, v,
                scale=workload.softmax_scale,
                logits_soft_cap=workload.softcap,
                implementation=self.backend,
                **arguments.keywords(workload),
            )  # fmt: skip
            return zero_blind_rows(out, rows)

        return call

    def passes(self, workload: Workload, config: Config) -> Passes:
        """Return Mosaic's forward pass for full and causal masks, by the kernel behind the public function."""
        arguments = mask_arguments(workload)
        if self.backend != "mosaic" or not arguments.at_most_causal:
            return None, None
        mosaic: Any = import_beside_torch("tokamax._src.ops.attention.pallas_mosaic_gpu")
        kernel = mosaic.PallasMosaicGpuFlashAttention()
        words = {"logits_scale": workload.softmax_scale, "logits_soft_cap": workload.softcap}

        def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            import jax.numpy as jnp

            out, (top, total) = kernel(q, k, v, is_causal=arguments.is_causal, return_residuals=True, **words)
            return out, top + jnp.log(total)

        return forward, None


EVERY_DTYPE = ("float64", "float32", *SIXTEEN_BITS)
MOSAIC = Tokamax("mosaic", ("cuda",), SIXTEEN_BITS)
TRITON = Tokamax("triton", ("cuda", "rocm"), ("float32", *SIXTEEN_BITS))
CUDNN = Tokamax("cudnn", ("cuda",), SIXTEEN_BITS)
XLA = Tokamax("xla", (), EVERY_DTYPE)
XLA_CHUNKED = Tokamax("xla_chunked", (), EVERY_DTYPE)
