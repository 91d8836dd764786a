"""Base class of split masks in every framework: a few calls to one kernel, none of which needs a mask array."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from attnbench.impls.conditions import first_reason
from attnbench.masks.cuts import Piece, pieces
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

MOST = 8
"""Largest number of pieces of a mask. Each is a launch of its own, and in the backward pass an addition to dK and
dV."""


class Split(Implementation):
    """A mask cut into pieces, which `inner` computes one after another without a mask array; named `inner` plus
    `-split`."""

    def __init__(self, inner: Implementation) -> None:
        self.inner = inner
        self.name = f"{inner.name}-split"
        self.framework, self.layout = inner.framework, inner.layout
        self.materialises_scores, self.traceable = inner.materialises_scores, inner.traceable
        self.lse_gradient = inner.lse_gradient
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
        """Return None if the mask has at most MOST pieces, the kernel takes each without an array, and the whole mask
        needs one."""
        cut = pieces(workload.visible_mask, workload.mask_shape, MOST)
        if isinstance(cut, str):
            return cut
        if len(cut) == 1 and not self.needs_array(workload, environment):
            return f"has nothing to split: {self.inner.name} takes {workload.visible_mask.id} without an array"
        return first_reason(
            self.available(environment), *(self._refusal(one, part_of(workload, one), environment) for one in cut)
        )

    def _refusal(self, piece: Piece, part: Workload, environment: Environment) -> str | None:
        where = f"of queries {piece.start}-{piece.stop - 1} over keys {piece.first}-{piece.last - 1}"
        if self.needs_array(part, environment):
            return f"{self.inner.name} would need an array for {part.visible_mask.id} {where}"
        reason = self.inner.supports(part, environment)
        return reason and f"{self.inner.name} {reason} (the piece {where})"

    def build(self, workload: Workload, config: Config) -> Call:
        """Return a call that joins the outputs of the pieces."""
        cut = cut_of(workload)
        calls = [self.inner.build(part_of(workload, piece), config) for piece in cut]
        tokens = self.layout.index("s")

        def call(q: Array, k: Array, v: Array) -> Array:
            return self.join([one(*sliced(q, k, v, piece, tokens)) for one, piece in zip(calls, cut)], tokens)

        return call

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        """Return a call that joins outputs and LSE of the pieces; None if the kernel has no LSE for a piece."""
        cut = cut_of(workload)
        calls = [self.inner.build_lse(part_of(workload, piece), config) for piece in cut]
        able = [one for one in calls if one is not None]
        if len(able) < len(calls):
            return None
        tokens = self.layout.index("s")

        def call(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            found = [one(*sliced(q, k, v, piece, tokens)) for one, piece in zip(able, cut)]
            return self.join([out for out, _ in found], tokens), self.join([lse for _, lse in found], 2)

        return call


def part_of(workload: Workload, piece: Piece) -> Workload:
    """Return the workload of a piece."""
    size: Any = {"q_len": piece.stop - piece.start, "kv_len": piece.last - piece.first, "mask": piece.mask}
    return replace(workload, **size)


def cut_of(workload: Workload) -> list[Piece]:
    """Return the pieces of a supported workload."""
    found = pieces(workload.visible_mask, workload.mask_shape, MOST)
    assert not isinstance(found, str), found
    return found


def sliced(q: Array, k: Array, v: Array, piece: Piece, tokens: int) -> tuple[Array, Array, Array]:
    """Return the queries, keys and values of a piece."""
    before = (slice(None),) * tokens
    rows, keys = (*before, slice(piece.start, piece.stop)), (*before, slice(piece.first, piece.last))
    return q[rows], k[keys], v[keys]
