"""Fresh random inputs of one workload on one device, and the truth about a sample of their outputs.

All implementations of a workload in one worker share the draws, so that the float64 reference is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import array_api_compat
import msgspec
import numpy as np

from attnbench import reference
from attnbench.frameworks import Framework, Inputs
from attnbench.measuring.truths import Shelf, Truth
from attnbench.spec import Array, Layout, Workload
from attnbench.workloads import inputs as drawing
from attnbench.workloads.masks.block_layout import split_blocks

SETS = 2
FORWARD_FLOPS = {"cpu": 4e8}
BACKWARD_FLOPS = {"cpu": 3e9}
DEVICE_FLOPS = 2e13
HOST_HEAD_FLOPS = 2e10
"""What the reference may cost per input set: NumPy on a CPU, the float64 port on an accelerator."""
DEVICE_PAIRS = 1 << 32
"""Pairs of all sampled heads there: the many passes over a mask of several parts cost more than the products."""
MAX_HEADS, MAX_ROWS = 4, 16
"""Sampled heads; of masks that differ between batch rows, so many rows are looked into."""
ALL_HEADS = {"cpu": 64}
DEVICE_BLOCK_PAIRS = 1 << 27
HOST_VALUES = 1 << 26
"""Of each input, what the host draws for an accelerator at most."""
PROOF = 8
EDGE_ROWS = (0, 1, 63, 64, 127, 128)


class Sample(NamedTuple):
    """Which (batch, key/value head) pairs and which query rows are compared."""

    heads: tuple[tuple[int, int], ...]
    rows: np.ndarray
    share: float


class Draws:
    """Input sets of one workload; arrays are made per layout on demand."""

    def __init__(
        self, framework: Framework, device: str, workload: Workload, seed: int, shared: Path | None = None
    ) -> None:
        self.framework, self.device, self.workload, self.seed = framework, device, workload, seed
        self._shelf = Shelf(shared)
        self._arrays: dict[Layout, list[Inputs]] = {}
        self._sums: dict[Layout, list[bytes]] = {}
        """Checksums of the arrays, from when they were made."""
        self._truths: dict[tuple[int, bool], list[Truth]] = {}
        self._runs: dict[tuple[bool, bool], Callable[..., tuple[Array, ...]]] = {}

    def inputs(self, layout: Layout) -> list[Inputs]:
        """The input sets in a layout."""
        if layout not in self._arrays:
            self._arrays[layout] = [
                Inputs(*(self.framework.transpose(x, "bshd", layout) for x in inputs)) for inputs in self._canonical
            ]
            self._sums.setdefault(layout, self._checksums(self._arrays[layout]))
        return self._arrays[layout]

    def scaled(self, layout: Layout, scale: float) -> Inputs:
        """The first set with Q, K and V multiplied."""
        fw, first = self.framework, self.inputs(layout)[0]
        q, k, v = (fw.multiply(x, np.array(scale)) for x in (first.q, first.k, first.v))
        return Inputs(q, k, v, first.dout)

    def _put(self, values: np.ndarray, layout: Layout) -> Array:
        array = self.framework.array(values, self.workload.dtype, self.device)
        return self.framework.transpose(array, "bshd", layout)

    @cached_property
    def _canonical(self) -> list[Inputs]:
        drawn = [self._drawn(SETS * self.seed + n) for n in range(SETS)]
        self._sums["bshd"] = self._checksums(drawn)
        return drawn

    def _checksums(self, sets: list[Inputs]) -> list[bytes]:
        fw = self.framework
        return [fw.checksum(array) for inputs in sets for array in inputs] if fw.overwrites else []

    def intact(self, layout: Layout) -> bool:
        """Whether the input sets in a layout, and as they were drawn, still hold what they held at first."""
        layouts: set[Layout] = {"bshd", layout}
        return all(self._checksums(self.inputs(one)) == self._sums[one] for one in layouts)

    def _drawn(self, seed: int) -> Inputs:
        """One input set. On an accelerator the host draws one stretch of tokens only: the others are the same numbers,
        each turned by an offset of its own, since drawing and sending gigabytes takes longer than all else."""
        w = self.workload
        q_len, kv_len = (min(n, max(1, HOST_VALUES // width)) for n, width in zip((w.q_len, w.kv_len), _widths(w)))
        whole = w.batch == 1 and (q_len, kv_len) == (w.q_len, w.kv_len)
        if self.device == "cpu" or whole or w.inputs != "normal" or w.dtype == "float64":
            return Inputs(*(self._put(x, "bshd") for x in drawing.draw(w, seed)))
        drawn = drawing.draw(msgspec.structs.replace(w, batch=1, q_len=q_len, kv_len=kv_len, mask=None), seed)
        rng = np.random.default_rng(seed)
        return Inputs(*(self._turned(*one, rng) for one in zip(drawn, (w.q_len, w.kv_len, w.kv_len, w.q_len))))

    def _turned(self, stretch: np.ndarray, tokens: int, rng: np.random.Generator) -> Array:
        """[batch, tokens, ...] of one stretch of tokens: its flat values again and again, begun at random places."""
        fw, size, batch = self.framework, stretch.size, self.workload.batch
        flat = fw.array(stretch.ravel(), self.workload.dtype, self.device)
        places = fw.array(np.arange(size), "int32", self.device)
        whole, rest = divmod(tokens * (size // stretch.shape[1]), size)
        lengths = [*[size] * whole, *([rest] if rest else [])] * batch
        starts = fw.array(rng.integers(size, size=len(lengths)), "int32", self.device)
        pieces = [flat[(places[:length] + starts[n]) % size] for n, length in enumerate(lengths)]
        return array_api_compat.array_namespace(flat).concat(pieces).reshape(batch, tokens, *stretch.shape[2:])

    @cached_property
    def sample(self) -> Sample:
        """Random heads and rows within the forward budget; everything when that fits."""
        w, rng = self.workload, np.random.default_rng(self.seed)
        heads = _choose_heads(w, rng, MAX_ROWS if w.visible_mask.per_batch and w.batch > MAX_HEADS else MAX_HEADS)
        budget = FORWARD_FLOPS.get(self.device, DEVICE_FLOPS)
        per_row = 2 * (w.head_dim + w.value_dim) * w.kv_len * w.group
        if self._few_heads and per_row * w.q_len * w.batch * w.kv_heads <= budget:
            heads = [(b, g) for b in range(w.batch) for g in range(w.kv_heads)]
        most = min(budget / per_row, DEVICE_PAIRS / (w.kv_len * w.group))
        count = max(1, int(most / len(heads)))
        rows = np.arange(w.q_len)
        if count < w.q_len:
            edges = {row for row in (*EDGE_ROWS, w.q_len // 2, w.q_len - 1) if row < w.q_len}
            rows = np.sort(np.array(list(edges | set(rng.choice(w.q_len, size=count, replace=False).tolist()))))
        return Sample(tuple(heads), rows, len(heads) * len(rows) / (w.batch * w.kv_heads * w.q_len))

    @property
    def _few_heads(self) -> bool:
        """Whether all heads may be compared: each costs a round trip to the device."""
        return self.workload.batch * self.workload.kv_heads <= ALL_HEADS.get(self.device, MAX_HEADS)

    @cached_property
    def gradient_heads(self) -> tuple[tuple[int, int], ...]:
        """Heads whose gradients are compared in full; empty when not even one fits the budget."""
        w = self.workload
        per_head = 10 * (w.head_dim + w.value_dim) * w.kv_len * w.q_len * w.group
        budget = BACKWARD_FLOPS.get(self.device, DEVICE_FLOPS)
        if self._few_heads and per_head * w.batch * w.kv_heads <= budget:
            return tuple((b, g) for b in range(w.batch) for g in range(w.kv_heads))
        most = min(MAX_HEADS, budget // per_head, DEVICE_PAIRS // (w.kv_len * w.q_len * w.group))
        return tuple(_choose_heads(w, np.random.default_rng(self.seed), int(most)))

    def truths(self, which: int, gradients: bool) -> list[Truth]:
        """Truth of each head of the sample (or of `gradient_heads`) for one input set."""
        key = (which, gradients)
        if key not in self._truths:
            heads = self.gradient_heads if gradients else self.sample.heads
            rows = np.arange(self.workload.q_len) if gradients else self.sample.rows
            inputs = self._canonical[which]
            self._truths[key] = self._shelf.get(
                f"{self.device}-{self.seed}-{which}-{gradients}",
                np.stack([self._first_values(inputs, head) for head in heads]),
                lambda: [self._truth(inputs, head, rows, gradients) for head in heads],
            )
        return self._truths[key]

    def truths_of(self, inputs: Inputs) -> list[Truth]:
        """Truth of each head of the sample for other inputs, bshd."""
        return [self._truth(inputs, head, self.sample.rows, gradients=False) for head in self.sample.heads]

    @cached_property
    def without_blocks(self) -> Draws | None:
        """The same inputs and sample under the mask without its `blocks` part; None when it has not exactly one."""
        split = split_blocks(self.workload.visible_mask)
        if split is None:
            return None
        other = Draws(self.framework, self.device, msgspec.structs.replace(self.workload, mask=split[1]), self.seed)
        other._canonical = self._canonical
        return other

    def _first_values(self, inputs: Inputs, at: tuple[int, int]) -> np.ndarray:
        """A few numbers of each input, to tell whether another worker drew the same."""
        group = self.workload.group
        corners = [x[at[0], :1, at[1] * n, :PROOF] for x, n in zip(inputs, (group, 1, 1, group))]
        return np.concatenate([self.framework.numpy(corner).ravel() for corner in corners])

    def _truth(self, inputs: Inputs, at: tuple[int, int], rows: np.ndarray, gradients: bool) -> Truth:
        exact = self._compute(inputs, at, rows, gradients, plain=False)
        plain = self._compute(inputs, at, rows, gradients, plain=True)
        cancelling = exact[5] if gradients else None
        return Truth(exact[0], exact[1], plain[0], plain[1], exact[2:5] or None, plain[2:5] or None, cancelling)

    def _compute(
        self, inputs: Inputs, at: tuple[int, int], rows: np.ndarray, gradients: bool, plain: bool
    ) -> tuple[np.ndarray, ...]:
        """(out, lse[, *Gradients]) of one head, in float64 (NumPy on a CPU, else on the device) or in its own dtype."""
        fw, on_host = self.framework, not plain and self._exact_on_host(len(rows), gradients)
        group = self.workload.group
        narrow = [x[at[0]][:, at[1] * n : (at[1] + 1) * n] for x, n in zip(inputs, (group, 1, 1, group))]
        if on_host:
            arrays = [fw.numpy(x).astype(np.float64) for x in narrow]
            return _head_results(self.workload, arrays, at, rows, gradients, np, np.float64, terms=True)
        run = self._compiled(rows, gradients, plain)
        return tuple(fw.numpy(x).astype(np.float64) for x in run(*at, *narrow))

    def _exact_on_host(self, rows: int, gradients: bool) -> bool:
        """NumPy on a CPU, and for a small head where compiling the port would take longer than NumPy does."""
        w = self.workload
        flops = (10 if gradients else 2) * (w.head_dim + w.value_dim) * w.kv_len * rows * w.group
        return self.device == "cpu" or (self.framework.compiles and flops < HOST_HEAD_FLOPS)

    def _compiled(self, rows: np.ndarray, gradients: bool, plain: bool) -> Callable[..., tuple[Array, ...]]:
        """The same computation for every head, so that a framework that compiles does it once."""
        fw, key = self.framework, (gradients, plain)
        wide = "float32" if plain and self.workload.dtype != "float64" else "float64"

        def compute(batch: Array, index: Array, *own: Array) -> tuple[Array, ...]:
            arrays = own if plain else [fw.cast(x, "float64") for x in own]
            namespace, at = fw.namespace(self.device), (batch, index)
            return _head_results(self.workload, arrays, at, rows, gradients, namespace, fw.dtype(wide), terms=not plain)

        if key not in self._runs:
            self._runs[key] = fw.exact(compute)
        return self._runs[key]


def _widths(w: Workload) -> tuple[int, int]:
    """Values per token: of Q or dO, whichever has more, and of K or V."""
    dim = max(w.head_dim, w.value_dim)
    return w.heads * dim, w.kv_heads * dim


def _choose_heads(workload: Workload, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """(batch, key/value head) pairs, no two of one batch row while there are others."""
    w = workload
    if count <= w.batch:
        rows, heads = rng.permutation(w.batch)[:count], rng.integers(w.kv_heads, size=count)
    else:
        total = w.batch * w.kv_heads
        rows, heads = np.divmod(rng.choice(total, size=min(count, total), replace=False), w.kv_heads)
    return sorted((int(row), int(head)) for row, head in zip(rows, heads))


def _head_results(workload, arrays, at, rows, gradients, namespace, wide, terms):  # noqa: ANN001, ANN202
    """Forward of the rows, and gradients over all, with `terms` what cancels in dq.

    q [t, g, d], k [s, 1, d], v [s, 1, e], dout [t, g, e]
    """
    q, k, v, dout = arrays
    xp = array_api_compat.array_namespace(q)
    head = reference.Head(xp.permute_dims(q, (1, 0, 2)), k[:, 0], v[:, 0], *at)
    on_host = isinstance(q, np.ndarray)
    blocks = reference.row_blocks(workload, rows, reference.BLOCK_PAIRS if on_host else DEVICE_BLOCK_PAIRS)
    parts = [reference.forward_rows(workload, head, block, namespace, wide) for block in blocks]
    out, lse = (xp.concat([part[n] for part in parts], axis=1) for n in range(2))
    if not gradients:
        return out, lse
    own = xp.permute_dims(dout, (1, 0, 2))
    pieces = [reference.backward_rows(workload, head, own, block, namespace, wide, terms) for block in blocks]
    dq, *cancelling = (xp.concat([piece[n] for piece in pieces], axis=1) for n in ((0, 3) if terms else (0,)))
    dk, dv = pieces[0].dk, pieces[0].dv
    for piece in pieces[1:]:
        dk, dv = dk + piece.dk, dv + piece.dv
    return out, lse, dq, dk, dv, *cancelling
