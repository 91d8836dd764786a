"""Masks cut into a few calls to one kernel, none of which needs a mask array: `torch.sdpa-flash-split` and others.

pi0's training mask (816 prefix tokens, a state token, 50 actions) is three calls: the queries of a block see exactly
the keys up to its end. cuDNN then needs no bias, whose array would cover every batch row and head in JAX. A causal
piece that does not start at its first key (the text after pi0-FAST's prefix) would need an array in
`jax.nn.dot_product_attention`, so it is refused there.

If a JAX kernel offers its passes, the keys that all queries see are one call (`common_passes`) that copies no rows, and
the few other pairs are computed beside it; both parts are joined by their LSE, and both backward passes use the output
and the LSE of the whole. `[sequences=8]` computes eight sequences of the batch at a time, which bounds the memory
beside inputs, output and gradients to that of eight.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from attnbench.errors import UsageError
from attnbench.impls.conditions import first_reason
from attnbench.impls.jax import nn
from attnbench.impls.jax._libraries import mask_arguments
from attnbench.impls.partial.jax_passes import by_turns, common_passes, differentiable
from attnbench.impls.torch import sdpa
from attnbench.masks.cuts import MaskPiece, pieces
from attnbench.spec import Array, Call, Config, Environment, Implementation, Partial, Workload

MOST = 8
"""Largest number of pieces of a mask: each is a launch, and in the backward pass an addition to dK and dV."""
TOKENS, LSE_TOKENS = 1, 2
"""Axes of tokens in bshd, and in an LSE."""


class Split(Implementation):
    """A mask cut into pieces, which `inner` computes one after another without a mask array; named `inner` plus
    `-split`."""

    def __init__(self, inner: Implementation) -> None:
        self.inner = inner
        self.name = f"{inner.name}-split"
        self.description = f"Masks of a few blocks as calls of {inner.name} without a mask array."
        self.framework, self.layout = inner.framework, inner.layout
        self.materialises_scores, self.traceable = inner.materialises_scores, inner.traceable
        self.lse_gradient, self.over_devices = inner.lse_gradient, inner.over_devices
        self.expects, self.forbids = inner.expects, inner.forbids
        self.switches, self.not_deterministic = inner.switches, inner.not_deterministic

    @abstractmethod
    def needs_array(self, part: Workload, environment: Environment) -> bool:
        """Return whether the kernel would need the mask of this piece as an array."""

    @abstractmethod
    def join(self, parts: Sequence[Array], axis: int) -> Array:
        """Return the arrays joined along an axis."""

    def available(self, environment: Environment) -> str | None:
        return self.inner.available(environment)

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """Return None if the mask needs an array, and has at most MOST pieces that the kernel takes without one."""
        cut = pieces(workload.visible_mask, workload.mask_shape, MOST)
        if isinstance(cut, str):
            return cut
        if len(cut) == 1 and not self.needs_array(workload, environment):
            return f"has nothing to split: {self.inner.name} takes {workload.visible_mask.id} without a mask array"
        if (reason := self.available(environment)) is not None:
            return reason
        for piece in cut:
            part = part_of(workload, piece)
            where = f"of queries {piece.start}-{piece.stop - 1} over keys {piece.first}-{piece.last - 1}"
            if self.needs_array(part, environment):
                return f"{self.inner.name} would need a mask array for {part.visible_mask.id} {where}"
            if (reason := self.inner.supports(part, environment)) is not None:
                return f"{self.inner.name} {reason} (the piece {where})"
        return None

    def build(self, workload: Workload, config: Config) -> Call:
        """Return a call that joins the outputs of the pieces."""
        parts = [(self.inner.build(part_of(workload, piece), config), piece) for piece in cut_of(workload)]
        tokens = self.layout.index("s")
        return lambda q, k, v: self.join([run(*sliced(q, k, v, piece, tokens)) for run, piece in parts], tokens)

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        """Return a call that joins outputs and LSE of the pieces; None if the kernel has no LSE for a piece."""
        cut = cut_of(workload)
        builds = ((self.inner.build_lse(part_of(workload, piece), config), piece) for piece in cut)
        parts = [(run, piece) for run, piece in builds if run is not None]
        if len(parts) < len(cut):
            return None
        tokens = self.layout.index("s")

        def call(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = zip(*(run(*sliced(q, k, v, piece, tokens)) for run, piece in parts))
            return self.join(out, tokens), self.join(lse, LSE_TOKENS)

        return call


def part_of(workload: Workload, piece: MaskPiece) -> Workload:
    """Return the workload of a piece."""
    size: Any = {"q_len": piece.stop - piece.start, "kv_len": piece.last - piece.first, "mask": piece.mask}
    return replace(workload, **size)


def cut_of(workload: Workload) -> list[MaskPiece]:
    """Return the pieces of a supported workload."""
    cut = pieces(workload.visible_mask, workload.mask_shape, MOST)
    assert not isinstance(cut, str), cut
    return cut


def sliced(q: Array, k: Array, v: Array, piece: MaskPiece, tokens: int) -> tuple[Array, Array, Array]:
    """Return the queries, keys and values of a piece."""
    before = (slice(None),) * tokens
    rows, keys = (*before, slice(piece.start, piece.stop)), (*before, slice(piece.first, piece.last))
    return q[rows], k[keys], v[keys]


class TorchSplit(Split):
    """A mask split into calls of a backend of scaled_dot_product_attention without a mask array.

    block_causal and documents masks become calls without a mask. The causal part of a prefix mask is torch's
    lower-right bias, which only the flash kernel of a GPU takes without an array; on a CPU, and with cuDNN, such a
    piece is refused.
    """

    def __init__(self, inner: sdpa.Sdpa, never_on: tuple[str, ...] = ()) -> None:
        super().__init__(inner)
        self.untested = (*never_on, *inner.untested)

    def needs_array(self, part: Workload, environment: Environment) -> bool:
        return self.inner.computes_hidden(part, environment)

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        import torch

        return torch.cat(list(parts), dim=axis)


TORCH_FLASH_SPLIT = TorchSplit(sdpa.FLASH, never_on=("cuda",))
TORCH_CUDNN_SPLIT = TorchSplit(sdpa.CUDNN)


class JaxSplit(Split):
    """A mask split into calls of `jax.nn` without an array, for the whole batch (`sequences=0`) or some sequences at a
    time."""

    tunables = {"sequences": 0}

    def __init__(self, inner: Implementation, untested: tuple[str, ...], sequences: int = 0) -> None:
        super().__init__(inner)
        self.untested, self._sequences = untested, sequences

    def configs(self, workload: Workload) -> Sequence[Config]:
        """Return the whole batch at once, and an eighth and a quarter of a large batch at a time."""
        parts = [workload.batch // share for share in (8, 4) if workload.batch >= 2 * share]
        able = [size for size in parts if self._cannot_part(workload, size) is None]
        return ({}, *({"sequences": size} for size in able))

    def configured(self, config: Config) -> JaxSplit:
        sequences = config.get("sequences", self._sequences)
        if not isinstance(sequences, int) or sequences < 0:
            raise UsageError(f"{self.name}: sequences must be a whole number (0: all at once), not {sequences!r}.")
        return JaxSplit(self.inner, self.untested, sequences) if sequences != self._sequences else self

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(super().supports(workload, environment), self._cannot_part(workload, self._sequences))

    def _cannot_part(self, workload: Workload, size: int) -> str | None:
        if size and workload.batch % size:
            return f"cannot compute a batch of {workload.batch} by {size} sequences at a time: use a divisor of it"
        if 0 < size < workload.batch and workload.visible_mask.per_batch:
            return f"computes {size} sequences at a time only if all sequences have the same mask"
        return None

    def build(self, workload: Workload, config: Config) -> Call:
        """Return a call that uses the kernel's own passes if they are available; else every turn keeps copies."""
        size = self.configured(config)._sequences
        common = common_passes(self.inner, workload, cut_of(workload), size)
        if common is not None:
            return differentiable(common, with_lse=False)
        turn = replace(workload, batch=size or workload.batch)
        passes = split_passes(self.inner, turn, cut_of(turn)) if size and workload.needs_gradients else None
        if passes is None:
            return by_turns(super().build(turn, {}), size)
        forward, backward = passes
        return differentiable((by_turns(forward, size), by_turns(backward, size)), with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        """Return a call for all sequences at once; None for some at a time."""
        return None if self.configured(config)._sequences else super().build_lse(workload, {})

    def needs_array(self, part: Workload, environment: Environment) -> bool:
        return mask_arguments(part).needs_array

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        import jax.numpy as jnp

        return jnp.concatenate(parts, axis=axis)


def split_passes(inner: Implementation, workload: Workload, cut: Sequence[MaskPiece]) -> Partial | None:
    """Return passes [b, s, h, d] of the whole, joined from those of the pieces; None if the kernel hides a pass of a
    piece.

    The backward pass keeps q, k, v, output and LSE of the whole, not copies for every piece.
    """
    offered = ((*inner.passes(part_of(workload, piece), {}), piece) for piece in cut)
    parts = [(run, back, piece) for run, back, piece in offered if run is not None and back is not None]
    if len(parts) < len(cut):
        return None

    def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        import jax.numpy as jnp

        out, lse = zip(*(run(*sliced(q, k, v, piece, TOKENS)) for run, _, piece in parts))
        return jnp.concatenate(out, TOKENS), jnp.concatenate(lse, LSE_TOKENS)

    def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
        import jax.numpy as jnp

        dqs, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        for _, back, piece in parts:
            rows, keys = slice(piece.start, piece.stop), slice(piece.first, piece.last)
            qkv = sliced(q, k, v, piece, TOKENS)
            dq, more_dk, more_dv = back(*qkv, out[:, rows], lse[..., rows], dout[:, rows])
            dqs.append(dq)
            dk, dv = dk.at[:, keys].add(more_dk), dv.at[:, keys].add(more_dv)
        return jnp.concatenate(dqs, TOKENS), dk.astype(k.dtype), dv.astype(v.dtype)

    return forward, backward


JAX_CUDNN_SPLIT = JaxSplit(nn.CUDNN, ())
JAX_XLA_SPLIT = JaxSplit(nn.XLA, ("cuda", "rocm", "tpu"))
