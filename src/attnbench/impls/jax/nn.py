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
from msgspec.structs import replace

from attnbench.frameworks.jax.device_masks import (
    JAX_NAMESPACE,
    packed_again,
    padded_batch,
    plain_values_call,
    values_call,
)
from attnbench.frameworks.jax.plain import (
    cache_arrays,
    plain_call,
    plain_decode,
    plain_lse,
    row_tops,
    rows_that_see,
    whole_lse,
    zero_blind_rows,
)
from attnbench.impls import WithLse, conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.jax._libraries import FINITE_MASK, MaskArguments, mask_arguments
from attnbench.masks import Causal, Full
from attnbench.masks.base import query_offset
from attnbench.masks.device import PACKED, MaskForm
from attnbench.masks.packed import places
from attnbench.spec import (
    Array,
    CacheCall,
    Call,
    Config,
    Environment,
    Implementation,
    Partial,
    Passes,
    ValuesCall,
    Workload,
)


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

    def supports_values(self, workload: Workload, form: MaskForm, environment: Environment) -> str | None:
        return conditions.needs_small_bias(form)

    def build_values(self, workload: Workload, form: MaskForm, config: Config, with_lse: bool) -> ValuesCall:
        return plain_values_call(workload, form, with_lse)

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        from attnbench.impls.partial.jax_passes import plain_passes

        return plain_passes(workload)

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        return plain_decode(workload)


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

    def supports_values(self, workload: Workload, form: MaskForm, environment: Environment) -> str | None:
        return first_reason(
            self.supports(replace(workload, mask=Full()), environment), conditions.needs_small_bias(form)
        )

    def build_values(self, workload: Workload, form: MaskForm, config: Config, with_lse: bool) -> ValuesCall | None:
        def attend(q: Array, k: Array, v: Array, seen: Array, weight: Any) -> tuple[Array, None]:
            return nn_with_arrays(self.backend, workload.softmax_scale, q, k, v, seen, weight), None

        return None if with_lse else values_call(workload, form, False, attend)


def nn_with_arrays(backend: str, scale: float, q: Array, k: Array, v: Array, seen: Array, bias: Array | None) -> Array:
    """Return attention by a backend of jax.nn under arrays that broadcast to [b, h, q, kv]; every row sees a key."""
    import jax
    import jax.numpy as jnp

    pairs = (q.shape[1], k.shape[1])
    wide = (*q.shape[:3:2], *pairs) if backend == "cudnn" else (*seen.shape[:2], *pairs)
    words: Any = {"mask": jnp.broadcast_to(seen, wide), "implementation": backend}
    if bias is not None:
        words["bias"] = jnp.broadcast_to(bias, (*bias.shape[:2], *pairs))
    return jax.nn.dot_product_attention(q, k, v, scale=scale, **words)


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

    def supports_values(self, workload: Workload, form: MaskForm, environment: Environment) -> str | None:
        odd = workload.needs_gradients and not form.packed and (workload.q_len % 2 or workload.kv_len % 2)
        arrays = None if cudnn_lengths(workload, form) else FINITE_MASK
        packed = "takes full and causal masks of packed sequences with one set of offsets"
        return first_reason(
            super().supports_values(workload, form, environment),
            f"takes its bias in {workload.dtype}, which rounds the mask's weights" if form.fixed.weighted else None,
            "trains on even lengths only under a mask on the device" if odd else None,
            packed if form.packed and arrays else None,
            arrays if workload.dtype == "float16" else None,
        )

    def build_values(self, workload: Workload, form: MaskForm, config: Config, with_lse: bool) -> ValuesCall | None:
        if with_lse or not cudnn_lengths(workload, form):
            return super().build_values(workload, form, config, with_lse)
        return _packed_by_lengths(workload, form) if form.packed else _by_lengths(workload, form)

    def _needs_array(self, workload: Workload) -> bool:
        arguments = mask_arguments(workload)
        odd = workload.needs_gradients and (workload.q_len % 2 or workload.kv_len % 2)
        return arguments.needs_array or bool(odd and arguments.window is not None)

    def passes(self, workload: Workload, config: Config) -> Passes:
        """Return cuDNN's passes for full and causal masks."""
        from attnbench.impls.partial.jax_passes import cudnn_passes

        return cudnn_passes(workload) or (None, None)

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        """Return a call for one query of each sequence, of which cuDNN takes the number of keys; LSEs are computed
        apart."""
        if workload.visible_mask.kinds != ("full",):
            return "takes the lengths of sequences for one query without a window"
        plain = plain_decode(workload)

        def call(q: Array, k: Array, v: Array, lengths: Array, table: Array | None) -> tuple[Array, Array]:
            import jax.numpy as jnp
            from jax.nn import dot_product_attention

            keys, values, _ = cache_arrays(q, k, v, lengths, table)
            out = dot_product_attention(
                q, keys, values, scale=workload.softmax_scale, implementation="cudnn",
                key_value_seq_lengths=jnp.maximum(lengths, 1),
            )  # fmt: skip
            return jnp.where((lengths > 0)[:, None, None, None], out, 0), plain(q, k, v, lengths, table)[1]

        return call


def cudnn_lengths(workload: Workload, form: MaskForm) -> bool:
    """Return whether the mask is one of lengths, beside which cuDNN needs no array: full, or causal from key 0 on."""
    fixed = form.fixed
    if isinstance(fixed, Causal):
        plain = form.same_offsets if form.packed else not query_offset(fixed.align, workload.mask_shape)
    else:
        plain = isinstance(fixed, Full)
    return plain and [part.kind for part in form.parts] in ([PACKED], ["lengths"])


def _by_lengths(workload: Workload, form: MaskForm) -> ValuesCall:
    """Return a call (q, k, v, lengths). A row without keys is shown one, since its gradients would be NaN."""

    def call(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        import jax.numpy as jnp

        out = _cudnn(workload, form, q, k, v, key_value_seq_lengths=_at_least_one(lengths))
        return jnp.where((lengths > 0)[:, None, None, None], out, jnp.zeros((), out.dtype))

    return call


def _packed_by_lengths(workload: Workload, form: MaskForm) -> ValuesCall:
    """Return a call of packed sequences, which become a batch padded to an even length."""

    def call(q: Array, k: Array, v: Array, *values: Any) -> Array:
        import jax.numpy as jnp

        *offsets, q_longest, k_longest = values
        ends = (offsets[0], offsets[0 if form.same_offsets else 1])
        longest = (q_longest + q_longest % 2, k_longest + k_longest % 2)
        q_lengths, k_lengths = (end[1:] - end[:-1] for end in ends)
        out = _cudnn(
            workload, form, *padded_batch((q, k, v), ends, longest),
            query_seq_lengths=_at_least_one(q_lengths), key_value_seq_lengths=_at_least_one(k_lengths),
        )  # fmt: skip
        places_of_q = places(ends[0], q.shape[0], JAX_NAMESPACE)
        seen = places_of_q.inside & (k_lengths > 0)[places_of_q.sequence]
        return jnp.where(seen[:, None, None], packed_again(out, places_of_q), jnp.zeros((), out.dtype))

    return call


def _at_least_one(lengths: Array) -> Array:
    import jax.numpy as jnp

    return jnp.maximum(lengths, 1).astype(jnp.int32)


def _cudnn(workload: Workload, form: MaskForm, q: Array, k: Array, v: Array, **lengths: Array) -> Array:
    from jax.nn import dot_product_attention

    causal = isinstance(form.fixed, Causal)
    return dot_product_attention(
        q, k, v, scale=workload.softmax_scale, is_causal=causal, implementation="cudnn", **lengths
    )


EINSUM = JaxEinsum()
XLA = Xla()
CUDNN = Cudnn()
