"""jax.xla and jax.cudnn: `jax.nn.dot_product_attention` with the implementation named, never None.

Traps handled here: its causal mask is top-left (bottom-right goes in as an array); a row without visible keys gives the
mean of V (zeroed outside); softmax is float32 even for float64 (refused); the LSE is rounded to the input dtype, so it
is offered for float32 only, and no gradient flows through it, so in training it is computed apart. cuDNN's left window
without `is_causal` sees the whole future: the two always go together. It trains on even lengths only: see jax_even.
"""

from __future__ import annotations

from typing import Any

from attnbench.frameworks.jax.plain import plain_lse, row_tops, rows_that_see, whole_lse, zero_blind_rows
from attnbench.impls.conditions import (
    first_reason,
    needs_at_least,
    needs_cudnn_head_dim,
    needs_device,
    needs_dtype,
    needs_equal_dims,
    needs_no_softcap,
    needs_positive_scale,
)
from attnbench.impls.jax._even_lengths import evened
from attnbench.impls.jax._masks import mask_arguments
from attnbench.spec import Array, Call, Config, Environment, Implementation, Passes, Workload


class JaxNn(Implementation):
    """What both backends share."""

    framework = "jax"
    backend: str
    full_pairs = False
    """Whether array masks must be broadcast to every batch and head first."""
    trains_even_only = False

    def _call(self, workload: Workload, with_lse: bool) -> Call:
        rows, tops = rows_that_see(workload.visible_mask, workload.mask_shape), row_tops(workload) if with_lse else None
        arguments = mask_arguments(workload)
        padded = evened(workload) if self.trains_even_only and workload.needs_gradients else None
        apart = with_lse and workload.needs_gradients
        fixed = {"implementation": self.backend, "scale": workload.softmax_scale}

        def library(q: Array, k: Array, v: Array) -> Any:
            import jax

            if padded is not None:
                words = padded.keywords(arguments, self.full_pairs)
                return padded.cut(jax.nn.dot_product_attention(*padded.arrays(q, k, v), **fixed, **words))
            words = arguments.keywords(workload, self.full_pairs)
            return jax.nn.dot_product_attention(q, k, v, return_residual=with_lse and not apart, **fixed, **words)

        def call(q: Array, k: Array, v: Array) -> Any:
            found = library(q, k, v)
            if not with_lse:
                return zero_blind_rows(found, rows)
            if apart:
                return zero_blind_rows(found, rows), plain_lse(workload, q, k, rows)
            out, lse = found
            return zero_blind_rows(out, rows), whole_lse(lse.transpose(0, 2, 1), rows, tops)

        return call

    def build(self, workload: Workload, config: Config) -> Call:
        """One library call."""
        return self._call(workload, with_lse=False)


class Xla(JaxNn):
    """Plain XLA; stores the scores."""

    name = "jax.xla"
    backend = "xla"
    materialises_scores = True
    lse_gradient = True
    untested = ("rocm", "tpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """All masks; no float64, softcap or narrower V."""
        return first_reason(
            needs_dtype(workload, "float32", "float16", "bfloat16"),
            _no_float16_on_cpu(workload, environment),
            needs_equal_dims(workload),
            needs_no_softcap(workload),
        )

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        """Float32 only: elsewhere the library rounds the LSE to 16 bits. In training it is computed apart."""
        return self._call(workload, with_lse=True) if workload.dtype == "float32" else None


def _no_float16_on_cpu(workload: Workload, environment: Environment) -> str | None:
    if workload.dtype == "float16" and environment.device == "cpu":
        return "asks for a float16 product with float32 sums, which XLA does not compile for the CPU"
    return None


class Cudnn(JaxNn):
    """cuDNN's flash attention."""

    name = "jax.cudnn"
    backend = "cudnn"
    full_pairs = True
    trains_even_only = True
    expects = (r"(?i)cudnn|flash|sdpa|fprop|bprop",)

    def available(self, environment: Environment) -> str | None:
        """CUDA only; whether cuDNN itself is found shows when it is compiled."""
        return needs_device(environment, "cuda") or needs_at_least(environment, (8, 0))

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """16-bit floats; masks that its flags or a boolean array can say."""
        return first_reason(
            self.available(environment),
            needs_dtype(workload, "float16", "bfloat16"),
            needs_equal_dims(workload),
            needs_cudnn_head_dim(workload, environment),
            needs_no_softcap(workload),
            needs_positive_scale(workload),
            _exact_bias(workload),
        )

    def passes(self, workload: Workload, config: Config) -> Passes:
        """Full and causal masks."""
        from attnbench.impls.partial.jax_passes import cudnn_passes

        return cudnn_passes(workload) or (None, None)


def _exact_bias(workload: Workload) -> str | None:
    if workload.visible_mask.weighted:
        return f"takes its bias in {workload.dtype}, which rounds the mask's weights"
    return None


XLA = Xla()
CUDNN = Cudnn()
