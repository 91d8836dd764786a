"""jax.dilated: dilated attention as one pure function of jax.numpy, for jit, grad and vmap.

Each branch is a reshape to [segments, kept, rate], a static choice of one residue for each head, and dense attention in
blocks of at most `BLOCK_PAIRS` logits; several blocks are recomputed in the backward pass. Grouped K, V are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.frameworks.jax.plain import in_usual_promotion
from attnbench.impls import AlwaysLse
from attnbench.impls._arguments import check_causal, check_mix_grad, kind_of, workload_of
from attnbench.impls.conditions import first_reason, needs_no_softcap
from attnbench.kernels.dilated.pieces import needs_dilated, problem_of
from attnbench.masks import Dilated
from attnbench.spec import Array, Call, Config, Environment, Workload

BLOCK_PAIRS = 1 << 27
"""Most logits that are computed at once."""


class _BranchCut(NamedTuple):
    """One branch's cut of n tokens: `segments` of `width`, of which each head keeps at most `kept`, one in `rate`."""

    segments: int
    width: int
    kept: int
    rate: int
    offsets: np.ndarray
    """First token of each head."""


def dilated_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    causal: bool = False,
    offset: Literal["mod", "group"] = "mod",
    scale: float | None = None,
    mix_grad: Literal["full", "detached"] = "full",
    kv_lengths: Array | Sequence[int] | None = None,
    return_lse: bool = False,
) -> Any:
    """Return the output [b, s, h, d], with `return_lse` also the float32 LSE [b, h, s]; k, v may have fewer heads."""
    import jax
    import jax.numpy as jnp
    from jax.core import Tracer

    for x in (q, k, v):
        if not (isinstance(x, jax.Array | np.ndarray) or hasattr(x, "__jax_array__")):
            raise UsageError(
                f"dilated_attention takes JAX arrays, not {kind_of(x)}: convert it with jax.numpy.from_dlpack(x)."
            )
    pattern = masks.dilated(segment_lengths, dilation_rates, offset)
    check_mix_grad(mix_grad)
    check_causal(causal)
    traced = isinstance(kv_lengths, Tracer)  # of traced lengths only their number is checked
    if traced and kv_lengths.shape != q.shape[:1]:
        raise UsageError(
            f"kv_lengths must have shape ({q.shape[0]},), one length for each batch row, not {kv_lengths.shape}."
        )
    asked = workload_of(q, k, v, mask=pattern, scale=None if isinstance(scale, Tracer) else scale)
    if kv_lengths is not None and not traced:
        masks.lengths(kv_lengths).check(asked.mask_shape)
    lengths = jnp.full(q.shape[0], q.shape[1]) if kv_lengths is None else jnp.asarray(kv_lengths)
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    compute = partial(_compute, pattern=pattern, causal=causal, factor=factor, mix_grad=mix_grad)
    mixed, lse = in_usual_promotion(partial(_on_any_mesh, compute))(q, k, v, lengths)
    return (mixed, lse) if return_lse else mixed


def _on_any_mesh(compute: Callable[..., Any], q: Array, *rest: Array) -> Any:
    """Run it; under a mesh with explicit axes, leave to XLA how what lies between is sharded, and shard as q is."""
    import jax
    from jax.sharding import AxisType, PartitionSpec

    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return compute(q, *rest)
    batch, tokens, heads, dim = (*jax.typeof(q).sharding.spec, None, None, None, None)[:4]
    out, lse = PartitionSpec(batch, tokens, heads, dim), PartitionSpec(batch, heads, tokens)
    return jax.sharding.auto_axes(compute, out_sharding=(out, lse))(q, *rest)


def _compute(
    q: Array, k: Array, v: Array, lengths: Array, *, pattern: Dilated, causal: bool, factor: float, mix_grad: str
) -> tuple[Array, Array]:
    """Return the output and the LSE [b, h, s] in float32."""
    import jax
    import jax.numpy as jnp

    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    tokens, heads = q.shape[1:3]
    results = []
    for segment_length, rate in zip(pattern.segment_lengths, pattern.dilation_rates):
        width = min(segment_length, tokens)
        offsets = np.asarray(pattern.head_offset(np.arange(heads), rate, heads))
        branch = _BranchCut(-(-tokens // width), width, -(-width // rate), rate, offsets)
        results.append(_attend(branch, q, k, v, lengths, causal, factor))
    out, lse = (jnp.stack(part) for part in zip(*results))
    top = jax.lax.stop_gradient(jnp.max(lse, axis=0))
    base = jnp.where(jnp.isfinite(top), top, 0.0)
    seen = lse > -jnp.inf
    # A gradient through exp(-inf - -inf) would be NaN even where it is not chosen.
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, lse - base, 0.0)), 0.0)
    total = jnp.sum(weights, axis=0)
    lse = jnp.where(total > 0, base + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    weights = weights / jnp.where(total > 0, total, 1.0)
    weights = jax.lax.stop_gradient(weights) if mix_grad == "detached" else weights
    mixed = jnp.sum(weights[..., None] * out, axis=0).astype(q.dtype)
    return mixed, lse.transpose(0, 2, 1).astype(jnp.float32)


def _attend(
    branch: _BranchCut, q: Array, k: Array, v: Array, lengths: Array, causal: bool, scale: float
) -> tuple[Array, Array]:
    """Return one branch's output [b, s, h, d] and LSE [b, s, h]; 0 and -inf for tokens that a head skips."""
    import jax
    import jax.numpy as jnp

    batch, tokens, heads, _ = q.shape
    inside = np.arange(branch.kept)[:, None] * branch.rate + branch.offsets
    place = np.arange(branch.segments)[:, None, None] * branch.width + inside
    exists = (inside < branch.width) & (place < tokens)
    real = jnp.asarray(exists) & (jnp.asarray(place) < lengths[:, None, None, None])

    def rows(x: Array) -> Array:
        """Reshape [b, segments, kept, h, ...] to [b * segments * h, kept, ...]."""
        return jnp.moveaxis(x, 3, 2).reshape(-1, branch.kept, *x.shape[4:])

    def attend_one(arrays: tuple[Array, ...]) -> tuple[Array, Array]:
        return _dense(*arrays, causal=causal, scale=scale)

    given = (*(rows(_kept(branch, x)) for x in (q, k, v)), rows(real))
    at_once = max(1, BLOCK_PAIRS // branch.kept**2)
    if given[0].shape[0] <= at_once:
        out, lse = jax.vmap(attend_one)(given)
    else:
        out, lse = jax.lax.map(jax.checkpoint(attend_one), given, batch_size=at_once)
    split = (batch, branch.segments, heads, branch.kept)
    out, lse = (jnp.moveaxis(x.reshape(*split, *x.shape[2:]), 2, 3) for x in (out, lse))
    lse = jnp.where(jnp.asarray(exists), lse, -jnp.inf)
    return _scattered(branch, out, tokens, 0.0), _scattered(branch, lse, tokens, -jnp.inf)


def _kept(branch: _BranchCut, x: Array) -> Array:
    """Pick [b, segments, kept, h, d] from [b, s, h, d], with zeros if a segment or the sequence ends early."""
    import jax.numpy as jnp

    batch, tokens, heads, dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, branch.segments * branch.width - tokens), (0, 0), (0, 0)))
    x = x.reshape(batch, branch.segments, branch.width, heads, dim)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, branch.kept * branch.rate - branch.width), (0, 0), (0, 0)))
    x = x.reshape(batch, branch.segments, branch.kept, branch.rate, heads, dim)
    return x[:, :, :, branch.offsets, np.arange(heads)]


def _scattered(branch: _BranchCut, x: Array, tokens: int, elsewhere: float) -> Array:
    """Put [b, segments, kept, h, ...] back into [b, s, h, ...], with `elsewhere` for tokens that a head skips."""
    import jax.numpy as jnp

    batch, segments, kept, heads, *rest = x.shape
    whole = jnp.full((batch, segments, kept, branch.rate, heads, *rest), elsewhere, x.dtype)
    whole = whole.at[:, :, :, branch.offsets, np.arange(heads)].set(x)
    whole = whole.reshape(batch, segments, kept * branch.rate, heads, *rest)[:, :, : branch.width]
    return whole.reshape(batch, segments * branch.width, heads, *rest)[:, :tokens]


def _dense(q: Array, k: Array, v: Array, real: Array, *, causal: bool, scale: float) -> tuple[Array, Array]:
    """Attend in one head of one segment: q, k [n, d], v [n, e], real [n] -> (out [n, e], lse [n]), both wide."""
    import jax
    import jax.numpy as jnp

    wide = jnp.promote_types(q.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    logits = jnp.matmul(q, k.T, precision=precision, preferred_element_type=wide) * jnp.asarray(scale, wide)
    seen = jnp.broadcast_to(real, logits.shape)
    if causal:
        n = logits.shape[0]
        seen = seen & (jnp.arange(n)[:, None] >= jnp.arange(n))
    sees_a_key = seen.any(-1)
    # Finite, so that a row without keys has gradients of 0 and not NaN.
    logits = jnp.where(seen, logits, -0.7 * float(jnp.finfo(wide).max))
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.where(seen, jnp.exp(logits - lse[:, None]), 0.0).astype(v.dtype)
    out = jnp.matmul(weights, v, precision=precision, preferred_element_type=wide)
    return jnp.where(sees_a_key[:, None], out, 0.0), jnp.where(sees_a_key, lse, -jnp.inf)


class DilatedJax(AlwaysLse):
    """Dilated attention (LongNet) in JAX, each branch by dense attention on its own tokens."""

    name = "jax.dilated"
    framework = "jax"
    over_devices = "partitioned"
    lse_gradient = True
    untested = ("cuda", "rocm", "tpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(needs_dilated(workload), needs_no_softcap(workload))

    def both(self, workload: Workload, config: Config) -> Call:
        problem = problem_of(workload)
        pattern = problem.pattern
        return partial(
            dilated_attention, segment_lengths=pattern.segment_lengths, dilation_rates=pattern.dilation_rates,
            causal=problem.causal, offset=pattern.offset, scale=workload.softmax_scale, kv_lengths=problem.lengths,
            return_lse=True,
        )  # fmt: skip


DILATED = DilatedJax()
