"""jax.einsum, jax.xla and jax.cudnn: attention that JAX itself offers.

jax.einsum is the grouped einsum of openpi's Gemma: float32 logits and softmax, probabilities in the input dtype. Unlike
openpi's, a row that sees no key is 0 and not the mean of V. It stores the T x S scores.

jax.xla and jax.cudnn are `jax.nn.dot_product_attention` with a named implementation, never None.
Traps handled here: its causal mask is top-left (bottom-right is passed as an array); a row without visible keys gives
the mean of V (set to 0 outside); softmax is float32 even for float64 (refused); the LSE is rounded to the input dtype,
so it is offered for float32 only, and no gradient flows through it, so in training it is computed apart. cuDNN's left
window without `is_causal` sees all later keys: the two are always passed together.

cuDNN trains on even lengths only: JAX 0.10 and 0.11 take the empty array that stands for "no bias" as a bias when they
check what cuDNN can train, and refuse odd lengths with any mask. So odd lengths get one more query, and one more key
that nobody sees. The added query sees a key, since a row without keys would have NaN gradients; its output is cut off
and has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnbench.frameworks.jax.plain import plain_call, plain_lse, row_tops, rows_that_see, whole_lse, zero_blind_rows
from attnbench.impls import WithLse, conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.jax._libraries import FINITE_MASK, MaskArguments, mask_arguments
from attnbench.spec import Array, Call, Config, Environment, Implementation, Partial, Passes, Workload


class JaxEinsum(WithLse):
    """Grouped einsum as in openpi's Gemma: any mask and dtype on any device; stores all scores."""

    name = "jax.einsum"
    framework = "jax"
    over_devices = "partitioned"
    lse_gradient = True
    materialises_scores = True
    untested = ("rocm", "tpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return None

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        return plain_call(workload, with_lse)

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        from attnbench.impls.partial.jax_passes import plain_passes

        return plain_passes(workload)


@dataclass(frozen=True)
class Evened:
    """A workload with `queries` and `keys` (0 or 1) added at the ends."""

    workload: Workload
    queries: int
    keys: int

    def arrays(self, q: Array, k: Array, v: Array) -> list[Array]:
        import jax.numpy as jnp

        added = zip((q, k, v), (self.queries, self.keys, self.keys))
        return [jnp.pad(x, ((0, 0), (0, tokens), (0, 0), (0, 0))) if tokens else x for x, tokens in added]

    def keywords(self, arguments: MaskArguments, full_pairs: bool) -> dict[str, Any]:
        """Return the keyword arguments; a window is passed as an array, as the added query might see no key of it."""
        import jax.numpy as jnp

        if arguments.window is not None:
            arguments = MaskArguments(rest=self.workload.visible_mask)
        words = arguments.keywords(self.workload, full_pairs)
        if "mask" in words:
            seen = jnp.pad(words["mask"], ((0, 0), (0, 0), (0, self.queries), (0, self.keys)))
            words["mask"] = seen.at[..., self.workload.q_len :, 0].set(True)
        elif self.keys and "key_value_seq_lengths" not in words:
            words["key_value_seq_lengths"] = jnp.asarray(np.full(self.workload.batch, self.workload.kv_len), jnp.int32)
        return words


class JaxNn(Implementation):
    """Base of the backends of `jax.nn.dot_product_attention`."""

    framework = "jax"
    over_devices = "partitioned"
    backend: str
    full_pairs = False
    """Whether array masks must be broadcast to every batch row and head first."""
    trains_even_only = False

    def _call(self, workload: Workload, with_lse: bool) -> Call:
        rows, tops = rows_that_see(workload.visible_mask, workload.mask_shape), row_tops(workload) if with_lse else None
        arguments = mask_arguments(workload)
        odd = workload.q_len % 2, workload.kv_len % 2
        padded = Evened(workload, *odd) if any(odd) and self.trains_even_only and workload.needs_gradients else None
        apart = with_lse and workload.needs_gradients
        fixed = {"implementation": self.backend, "scale": workload.softmax_scale}

        def call(q: Array, k: Array, v: Array) -> Any:
            from jax.nn import dot_product_attention

            if with_lse and not apart:
                words = arguments.keywords(workload, self.full_pairs)
                out, lse = dot_product_attention(q, k, v, return_residual=True, **fixed, **words)
                return zero_blind_rows(out, rows), whole_lse(lse.transpose(0, 2, 1), rows, tops)
            if padded is not None:
                words = padded.keywords(arguments, self.full_pairs)
                out = dot_product_attention(*padded.arrays(q, k, v), **fixed, **words)[:, : workload.q_len]
            else:
                out = dot_product_attention(q, k, v, **fixed, **arguments.keywords(workload, self.full_pairs))
            out = zero_blind_rows(out, rows)
            return (out, plain_lse(workload, q, k, rows)) if apart else out

        return call

    def computes_hidden(self, workload: Workload, environment: Environment) -> bool:
        return self.materialises_scores or mask_arguments(workload).needs_array

    def build(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, with_lse=False)


class Xla(JaxNn):
    """`jax.nn.dot_product_attention` compiled by XLA; stores all scores."""

    name = "jax.xla"
    backend = "xla"
    materialises_scores = True
    lse_gradient = True
    untested = ("rocm", "tpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        half_on_cpu = workload.dtype == "float16" and environment.device == "cpu"
        return first_reason(
            conditions.needs_dtype(workload, "float32", "float16", "bfloat16"),
            "asks for a float16 product with float32 sums, which XLA does not compile for the CPU"
            if half_on_cpu
            else None,
            conditions.needs_equal_dims(workload),
            conditions.needs_no_softcap(workload),
        )

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        """Return a call for float32 only: the library rounds other LSEs. In training the LSE is computed apart."""
        return self._call(workload, with_lse=True) if workload.dtype == "float32" else None


class Cudnn(JaxNn):
    """cuDNN's flash attention through `jax.nn.dot_product_attention`, 16 bits."""

    name = "jax.cudnn"
    backend = "cudnn"
    full_pairs = True
    trains_even_only = True
    expects = (r"(?i)cudnn|flash|sdpa|fprop|bprop",)

    def available(self, environment: Environment) -> str | None:
        """Return None on CUDA; whether cuDNN itself is installed shows at compilation."""
        return conditions.needs_device(environment, "cuda") or conditions.needs_at_least(environment, (8, 0))

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        rounded = f"takes its bias in {workload.dtype}, which rounds the mask's weights"
        return first_reason(
            self.available(environment),
            conditions.needs_dtype(workload, "float16", "bfloat16"),
            conditions.needs_equal_dims(workload),
            conditions.needs_cudnn_head_dim(workload, environment),
            conditions.needs_no_softcap(workload),
            conditions.needs_positive_scale(workload),
            rounded if workload.visible_mask.weighted else None,
            FINITE_MASK if workload.dtype == "float16" and self._needs_array(workload) else None,
        )

    def _needs_array(self, workload: Workload) -> bool:
        arguments = mask_arguments(workload)
        odd = workload.needs_gradients and (workload.q_len % 2 or workload.kv_len % 2)
        return arguments.needs_array or bool(odd and arguments.window is not None)

    def passes(self, workload: Workload, config: Config) -> Passes:
        """Return cuDNN's passes for full and causal masks."""
        from attnbench.impls.partial.jax_passes import cudnn_passes

        return cudnn_passes(workload) or (None, None)


EINSUM = JaxEinsum()
XLA = Xla()
CUDNN = Cudnn()
