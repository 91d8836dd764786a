"""Random inputs of one workload on one device, and the truth about samples of the outputs.

All implementations of a workload in one worker share the draws, so that the float64 reference is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import array_api_compat
import msgspec
import numpy as np

from attnbench import reference
from attnbench.frameworks import Framework, Inputs
from attnbench.masks.cuts import split_blocks
from attnbench.spec import DTYPE_BYTES, Array, Layout, Workload
from attnbench.verifying import probes
from attnbench.verifying.truths import DEVICE_BLOCK_PAIRS, SharedResults, Truth, Whole, reached, results_of_heads
from attnbench.workloads import inputs as drawing

SETS = 2
FORWARD_FLOPS = {"cpu": 4e8}
BACKWARD_FLOPS = {"cpu": 3e9}
DEVICE_FLOPS = 2e13
HOST_HEAD_FLOPS = 2e10
"""Budgets of the reference per input set, in floating-point operations: NumPy on a CPU, the float64 port on an
accelerator, and a head that NumPy computes beside an accelerator."""
DEVICE_PAIRS = 1 << 32
"""Most pairs of all sampled heads on an accelerator: the many passes over a mask of several parts cost more than the
products."""
MAX_HEADS, MAX_ROWS = 4, 16
"""Most sampled heads; for masks that differ between batch rows, the most batch rows."""
ALL_HEADS = {"cpu": 64}
COMPARED_VALUES = 1 << 22
"""Most values of an accelerator's output that are compared in float64 on the host, besides the first head; all values
are compared on the device."""
HOST_VALUES = 1 << 26
"""Most values of each input that the host draws for an accelerator."""
WHOLE_PAIRS = {"cpu": (1 << 28, 1 << 27)}
DEVICE_WHOLE_PAIRS = 1 << 34, 1 << 33
"""Most pairs of a query and a key per input set in the comparison of whole outputs and of whole gradients: a few
seconds in NumPy, on a device about as long as one call of a plain implementation. Half of that in float64."""
PROOF = 8
SCALED = "scaled by "
"""Beginning of the name of a probe that is the first input set with Q, K and V multiplied by the number that
follows."""
EDGE_ROWS = (0, 1, 63, 64, 127, 128)
Heads = tuple[tuple[int, int], ...]
"""Pairs of batch row and key/value head."""
Mode = Literal["exact", "plain", "wide"]
"""Precision in which a head is computed: float64; that of a plain implementation in the dtype under test; or for whole
outputs, float32 if that is exact compared with 16 bits, else float64."""


Result = TypeVar("Result")


class Sample(NamedTuple):
    """The pairs of batch row and key/value head, and the query rows, that are compared."""

    heads: Heads
    rows: np.ndarray
    share: float


class Draws:
    """Input sets of one workload, in any layout."""

    def __init__(
        self, framework: Framework, device: str, workload: Workload, seed: int, shared: Path | None = None
    ) -> None:
        self.framework, self.device, self.workload, self.seed = framework, device, workload, seed
        self._shared = SharedResults(shared)
        self._sums: dict[Layout, list[bytes]] = {}
        """Checksums of the arrays, from when they were made."""
        self._kept: dict[tuple[Any, ...], Any] = {}

    def _keep(self, key: tuple[Any, ...], compute: Callable[[], Result]) -> Result:
        """Return what is kept under a key, which begins with what it is; compute it the first time."""
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def inputs(self, layout: Layout) -> list[Inputs]:
        """Return the input sets in a layout."""
        made = self._keep(("inputs", layout), lambda: [self._laid_out(inputs, layout) for inputs in self._canonical])
        if layout not in self._sums:
            self._sums[layout] = self._checksums(made)
        return made

    def _laid_out(self, inputs: Inputs, layout: Layout) -> Inputs:
        return Inputs(*(self.framework.transpose(x, "bshd", layout) for x in inputs))

    @cached_property
    def _canonical(self) -> list[Inputs]:
        drawn = [self._drawn(SETS * self.seed + n) for n in range(SETS)]
        self._sums["bshd"] = self._checksums(drawn)
        return drawn

    def input_set(self, which: int | str) -> Inputs:
        """Return an input set in layout bshd.

        A number below SETS means one of the drawn sets; a larger number, other queries and another dO for the keys and
        values of normal inputs; a string, the probe of that name.
        """
        if isinstance(which, str):  # held on a CPU; elsewhere only as long as it is used
            make = partial(self._made_probe, which)
            return self._keep(("probe", which), make) if self.device == "cpu" else make()
        if which < SETS:
            return self._canonical[which]
        rng, w, like = np.random.default_rng([self.seed, 15, which]), self.workload, self._normal
        drawn = (rng.standard_normal((w.batch, w.q_len, w.heads, n), np.float32) for n in (w.head_dim, w.value_dim))
        q, dout = (self.framework.array(x, w.dtype, self.device) for x in drawn)
        return Inputs(q, like.k, like.v, dout)

    @cached_property
    def _normal(self) -> Inputs:
        """The first input set, or one of normal numbers if that is of another kind."""
        if self.workload.inputs == "normal":
            return self._canonical[0]
        return self._drawn(SETS * self.seed, msgspec.structs.replace(self.workload, inputs="normal"))

    def _checksums(self, sets: list[Inputs]) -> list[bytes]:
        fw = self.framework
        return [fw.checksum(array) for inputs in sets for array in inputs] if fw.overwrites else []

    def intact(self, layout: Layout) -> bool:
        """Return whether the input sets still hold what was drawn, in a layout and in bshd."""
        layouts: set[Layout] = {"bshd", layout}
        return all(self._checksums(self.inputs(one)) == self._sums[one] for one in layouts)

    def _drawn(self, seed: int, workload: Workload | None = None) -> Inputs:
        """Return one newly drawn input set.

        For an accelerator the host draws one stretch of tokens only, and the others are the same numbers rolled by
        random offsets, since drawing and sending gigabytes takes longer than all else.
        """
        w = workload or self.workload
        dim = max(w.head_dim, w.value_dim)
        q_len, kv_len = (
            min(tokens, max(1, HOST_VALUES // (heads * dim)))
            for tokens, heads in ((w.q_len, w.heads), (w.kv_len, w.kv_heads))
        )
        whole = w.batch == 1 and (q_len, kv_len) == (w.q_len, w.kv_len)
        if self.device == "cpu" or whole or w.inputs != "normal" or w.dtype == "float64":
            return Inputs(*(self.framework.array(x, w.dtype, self.device) for x in drawing.draw(w, seed)))
        drawn = drawing.draw(msgspec.structs.replace(w, batch=1, q_len=q_len, kv_len=kv_len, mask=None), seed)
        rng = np.random.default_rng(seed)
        tokens = (w.q_len, w.kv_len, w.kv_len, w.q_len)
        return Inputs(*(self._tiled(stretch, count, rng) for stretch, count in zip(drawn, tokens)))

    def _tiled(self, stretch: np.ndarray, tokens: int, rng: np.random.Generator) -> Array:
        """Return [batch, tokens, ...] made of one stretch of tokens, repeated from random places."""
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
        """Random heads and rows within the forward budget; everything if that fits."""
        w, rng = self.workload, np.random.default_rng(self.seed)
        heads = _choose_heads(w, rng, MAX_ROWS if w.visible_mask.per_batch and w.batch > MAX_HEADS else MAX_HEADS)
        budget = FORWARD_FLOPS.get(self.device, DEVICE_FLOPS)
        per_row = 2 * (w.head_dim + w.value_dim) * w.kv_len * w.group
        if self._few_heads and per_row * w.q_len * w.batch * w.kv_heads <= budget:
            heads = self._every_head
        values = self._compared_values / (w.group * w.value_dim)
        most = min(budget / per_row, DEVICE_PAIRS / (w.kv_len * w.group), values)
        count = max(1, int(most / len(heads)))
        rows = np.arange(w.q_len)
        if count < w.q_len:
            edges = {row for row in (*EDGE_ROWS, w.q_len // 2, w.q_len - 1) if row < w.q_len}
            rows = np.sort(np.array(list(edges | set(rng.choice(w.q_len, size=count, replace=False).tolist()))))
        return Sample(tuple(heads), rows, len(heads) * len(rows) / (w.batch * w.kv_heads * w.q_len))

    @property
    def _every_head(self) -> Heads:
        return tuple(product(range(self.workload.batch), range(self.workload.kv_heads)))

    @property
    def _few_heads(self) -> bool:
        """Whether all heads may be compared, since each costs a round trip to the device."""
        return self.workload.batch * self.workload.kv_heads <= ALL_HEADS.get(self.device, MAX_HEADS)

    @property
    def _compared_values(self) -> int:
        return 1 << 62 if self.device == "cpu" else COMPARED_VALUES

    @cached_property
    def gradient_heads(self) -> Heads:
        """Heads whose gradients are compared in full; empty if not even one fits the budget."""
        w = self.workload
        per_head = 10 * (w.head_dim + w.value_dim) * w.kv_len * w.q_len * w.group
        budget = BACKWARD_FLOPS.get(self.device, DEVICE_FLOPS)
        if self._few_heads and per_head * w.batch * w.kv_heads <= budget:
            return self._every_head
        most = min(MAX_HEADS, budget // per_head, DEVICE_PAIRS // (w.kv_len * w.q_len * w.group))
        most = min(most, max(1, self._compared_values // (w.q_len * w.group * max(w.head_dim, w.value_dim))))
        return tuple(_choose_heads(w, np.random.default_rng(self.seed), int(most)))

    def known(self, gradients: bool) -> tuple[Heads, np.ndarray]:
        """Return the heads and query rows with a truth in float64: sampled ones, or whole heads for gradients."""
        if gradients:
            return self.gradient_heads, np.arange(self.workload.q_len)
        return self.sample.heads, self.sample.rows

    def truths(self, which: int | str, gradients: bool) -> list[Truth]:
        """Return the truth of each head of `known`, on an input set or a probe."""
        return self._keep(("truths", which, gradients), lambda: self._shared_truths(which, gradients))

    def _shared_truths(self, which: int | str, gradients: bool) -> list[Truth]:
        (heads, rows), inputs = self.known(gradients), self.input_set(which)
        return self._shared.get(
            f"{self.device}-{self.seed}-{which}-{gradients}-sampled",
            np.stack([self._first_values(inputs, head) for head in heads]),
            lambda: self._truths_of(inputs, heads, rows, gradients),
        )

    def logit_gaps(self, which: int | str) -> tuple[np.ndarray, np.ndarray]:
        """Return for the sampled rows of an input set how far the largest logit is above the second, and the largest
        size of a logit; [heads, members, rows] each, without a soft cap."""
        return self._keep(("gaps", which), lambda: self._logit_gaps(which))

    def _logit_gaps(self, which: int | str) -> tuple[np.ndarray, np.ndarray]:
        fw, w, sample = self.framework, self.workload, self.sample
        wide = "float64" if w.dtype == "float64" else "float32"
        q, k = (by_head(x, "bshd", n, sample.heads) for x, n in zip(self.input_set(which), (w.group, 1)))
        namespace: Any = np if self.device == "cpu" else fw.namespace(self.device)
        cast = (lambda x: fw.numpy(x).astype(wide)) if self.device == "cpu" else (lambda x: fw.cast(x, wide))
        at = [namespace.asarray(x) for x in np.array(sample.heads, np.int64).T]

        def compute(q: Array, k: Array) -> list[tuple[Array, Array]]:
            head = reference.Head(cast(q), cast(k)[:, 0], k[:, 0], *at)
            blocks = reference.row_blocks(w, sample.rows, self._block_pairs, len(sample.heads))
            return [reference.logit_gaps(w, head, some, namespace, reached(w, self.reach, some)) for some in blocks]

        found = (compute if self.device == "cpu" else fw.exact(compute))(q, k)
        gaps, sizes = (np.concatenate(self._in_float64(parts), axis=2) for parts in zip(*found))
        return gaps, sizes

    @property
    def _block_pairs(self) -> int:
        return reference.BLOCK_PAIRS if self.device == "cpu" else DEVICE_BLOCK_PAIRS

    def probe(self, which: int | str, layout: Layout) -> Inputs:
        """Return an input set, or the probe of that name, to call with.

        Arrays that are kept for the truth are copied, so that a call that writes into its inputs changes no truth.
        """
        made = tuple(self.framework.transpose(x, "bshd", layout) for x in self.input_set(which))
        return Inputs(*(self.framework.snapshot(made) if self.device == "cpu" and self.framework.overwrites else made))

    def _made_probe(self, name: str) -> Inputs:
        """Make the input set of attnbench.verifying.probes with that name."""
        first = self._canonical[0]
        if name.startswith(SCALED):
            scale = np.array(float(name.removeprefix(SCALED)))
            return Inputs(*[*(self.framework.multiply(x, scale) for x in first[:3]), first.dout])
        if name in ("counted", "shifted"):
            shifted = name == "shifted"
            return probes.counted(self.framework, self.device, self.workload, first, self.seed, shifted)
        if name == "steep":
            return probes.steep(self.framework, self.device, self.workload, self.seed)
        if name == "counted_pairs":
            return probes.counted_pairs(self.framework, self.device, self.workload, self.reached_keys, self.seed)
        if name == "sinks":
            return probes.sinks(self.framework, self.device, self.workload, self._normal, self.seed)
        if name == "zeros":
            return probes.zeros(self.framework, self.workload, self._normal, self.seed)
        return probes.pointed(self.framework, self.device, self.workload, self._normal, self.seed)

    def covered(self, gradients: bool) -> Sample:
        """Return the heads and rows of the comparison of whole outputs that fit the budget; for gradients whole heads
        only."""
        return self._keep(("covered", gradients), lambda: self._fitting(gradients))

    def _fitting(self, gradients: bool) -> Sample:
        w, rng = self.workload, np.random.default_rng([self.seed, 13])
        per_head = max(1, int(self.reached_keys.sum())) * w.group
        pairs = WHOLE_PAIRS.get(self.device, DEVICE_WHOLE_PAIRS)[gradients] // (1 if DTYPE_BYTES[w.dtype] == 2 else 2)
        most = pairs // per_head
        rows, total = np.arange(w.q_len), w.batch * w.kv_heads
        if most >= total:
            return self.covered(False) if gradients else Sample(self._every_head, rows, 1.0)
        if not most and gradients:
            return Sample((), rows, 0.0)
        if not most:
            rows = np.sort(rng.permutation(w.q_len)[: max(1, int(pairs / per_head * w.q_len))])
        heads = tuple(_choose_heads(w, rng, max(1, most)))
        return Sample(heads, rows, len(heads) * len(rows) / (total * w.q_len))

    def whole(self, name: str, gradients: bool) -> Iterator[tuple[Heads, Whole]]:
        """Yield some heads of `covered` at a time with their right results, for the first input set ("first") or a
        probe.

        Results are NumPy arrays on a CPU, else arrays of the device.
        """
        sample = self.covered(gradients)
        inputs = self.input_set(0 if name == "first" else name)
        chunks = self._chunks(sample.heads, len(sample.rows))
        own, pieces, mask = sample.heads, chunks, self.workload.visible_mask
        if name == "steep":  # for each head the first one that has the same result
            own = tuple((b if mask.per_batch else 0, g if mask.per_head else g % 2) for b, g in own)
            pieces = self._chunks(tuple(dict.fromkeys(own)), len(sample.rows))
        results = (self._results(inputs, heads, sample.rows, gradients, "wide") for heads in pieces)
        found = (Whole(x[0], x[1], x[2], x[3:6] or None, x[6:] or None) for x in results)
        if self.device == "cpu" and sample.heads:
            place = f"{self.device}-{self.seed}-{name}-{gradients}"
            proof = np.stack([self._first_values(inputs, head) for head in sample.heads])
            known = self._keep((place,), lambda: self._shared.get(place, proof, lambda: list(found), Whole))
            found = iter(known)
        yield from zip(chunks, found) if name != "steep" else _repeated(chunks, own, list(found))

    def _chunks(self, heads: Heads, rows: int) -> list[Heads]:
        """Return the heads in pieces whose logits for so many rows stay small."""
        size = max(1, self._block_pairs // (self.workload.group * self.workload.kv_len * rows))
        return [heads[n : n + size] for n in range(0, len(heads), size)]

    def shifted(
        self, which: int | str, gradients: bool, step: float, parameter: str, value: float
    ) -> list[tuple[np.ndarray, ...]]:
        """Return the derivatives of sampled heads' exact (out, dq, dk, dv) by the logarithm of scale or softcap."""
        other = msgspec.structs.replace(self.workload, **{parameter: (1 + step) * value})
        heads, rows = self.known(gradients)

        def compute() -> list[tuple[np.ndarray, ...]]:
            results = self._in_float64(self._results(self.input_set(which), heads, rows, gradients, "exact", other))
            return [
                tuple((a - b) / step for a, b in zip(moved, (truth.out, *(truth.grads or ()))))
                for truth, *moved in zip(self.truths(which, gradients), results[0], *results[3:6])
            ]

        return self._keep(("shifted", which, gradients, step, parameter, value), compute)

    @cached_property
    def reach(self) -> tuple[np.ndarray, np.ndarray]:
        """First and end of the keys that a row sees in any batch row by parts of the mask with runs, [q_len] each."""
        w = self.workload
        low, high = np.zeros(w.q_len, np.int64), np.full(w.q_len, w.kv_len)
        for part in w.visible_mask.split():
            if (runs := part.runs(w.mask_shape)) is not None:
                low, high = np.maximum(low, runs[0].min(axis=0)), np.minimum(high, runs[1].max(axis=0))
        return low, np.maximum(low, high)

    @property
    def reached_keys(self) -> np.ndarray:
        """Number of keys that each row may see at most by `reach`, [q_len]."""
        low, high = self.reach
        return high - low

    @cached_property
    def without_blocks(self) -> Draws | None:
        """Draws of the same inputs under the mask without its `blocks` part; None if it has not exactly one."""
        split = split_blocks(self.workload.visible_mask)
        if split is None:
            return None
        other = Draws(self.framework, self.device, msgspec.structs.replace(self.workload, mask=split[1]), self.seed)
        other._canonical = self._canonical
        return other

    def _first_values(self, inputs: Inputs, at: tuple[int, int]) -> np.ndarray:
        """Return a few numbers of each input, to tell whether another worker drew the same."""
        group = self.workload.group
        corners = [x[at[0], :1, at[1] * n, :PROOF] for x, n in zip(inputs, (group, 1, 1, group))]
        return np.concatenate([self.framework.numpy(corner).ravel() for corner in corners])

    def _truths_of(self, inputs: Inputs, heads: Heads, rows: np.ndarray, gradients: bool) -> list[Truth]:
        exact, plain = (
            self._in_float64(self._results(inputs, heads, rows, gradients, mode)) for mode in ("exact", "plain")
        )
        return [
            Truth(
                exact[0][n], exact[1][n], plain[0][n], plain[1][n],
                tuple(x[n] for x in exact[3:6]) or None, tuple(x[n] for x in plain[3:6]) or None,
                tuple(x[n] for x in exact[6:]) or None,
            )
            for n in range(len(heads))
        ]  # fmt: skip

    def _in_float64(self, found: Sequence[Array]) -> tuple[np.ndarray, ...]:
        """Return results as NumPy arrays of float64."""
        return tuple((x if isinstance(x, np.ndarray) else self.framework.numpy(x)).astype(np.float64) for x in found)

    def _results(
        self,
        inputs: Inputs,
        heads: Heads,
        rows: np.ndarray,
        gradients: bool,
        mode: Mode,
        workload: Workload | None = None,
    ) -> tuple[Array, ...]:
        """Return (out, lse, top[, *Gradients]), each with one entry per head, in NumPy or on the device; of another
        workload on the same inputs if one is given."""
        fw, w = self.framework, workload or self.workload
        group = self.workload.group
        narrow = [by_head(x, "bshd", n, heads) for x, n in zip(inputs, (group, 1, 1, group))]
        at = np.array(heads, np.int64).T
        exact_beside = {"exact": 0, "plain": 4, "wide": 2}[mode]
        wide = "float32" if DTYPE_BYTES[w.dtype] <= exact_beside else "float64"
        flops = (10 if gradients else 2) * (w.head_dim + w.value_dim) * w.kv_len * len(rows) * w.group
        small = mode == "exact" and fw.compiles and flops < HOST_HEAD_FLOPS  # compiling would take longer
        if mode != "plain" and (self.device == "cpu" or small):
            arrays = [fw.numpy(x).astype(wide) for x in narrow]
            return results_of_heads(w, arrays, at, rows, self.reach, gradients, np, np.dtype(wide), terms=True)
        place = fw.namespace(self.device).asarray
        return self._compiled(rows, gradients, mode, w, wide)(*map(place, at), *narrow)

    def _compiled(
        self, rows: np.ndarray, gradients: bool, mode: Mode, w: Workload, wide: str
    ) -> Callable[..., tuple[Array, ...]]:
        """Return the computation of a head, compiled once for all heads if the framework compiles."""
        fw, key = self.framework, ("compiled", gradients, mode, w.scale, w.softcap, rows.tobytes())

        def compute(batch: Array, index: Array, *own: Array) -> tuple[Array, ...]:
            arrays = own if mode == "plain" else [fw.cast(x, wide) for x in own]
            namespace, at, terms = fw.namespace(self.device), (batch, index), mode != "plain"
            return results_of_heads(w, arrays, at, rows, self.reach, gradients, namespace, fw.dtype(wide), terms)

        return self._keep(key, lambda: fw.exact(compute))


def _choose_heads(workload: Workload, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Draw pairs of batch row and key/value head, of different batch rows if there are enough."""
    w = workload
    if count <= w.batch:
        rows, heads = rng.permutation(w.batch)[:count], rng.integers(w.kv_heads, size=count)
    else:
        total = w.batch * w.kv_heads
        rows, heads = np.divmod(rng.choice(total, size=min(count, total), replace=False), w.kv_heads)
    return sorted((int(row), int(head)) for row, head in zip(rows, heads))


def _repeated(chunks: list[Heads], own: Heads, found: list[Whole]) -> Iterator[tuple[Heads, Whole]]:
    """Yield the heads of each piece with their right results, from those of the different heads of `own`."""
    places = {head: n for n, head in enumerate(dict.fromkeys(own))}
    index = np.array([places[head] for head in own])

    def joined(parts: Sequence[Any], piece: np.ndarray) -> Any:
        if parts[0] is None or isinstance(parts[0], tuple):
            return parts[0] and tuple(joined(some, piece) for some in zip(*parts))
        return (parts[0] if len(parts) == 1 else array_api_compat.array_namespace(parts[0]).concat(parts))[piece]

    start = 0
    for heads in chunks:
        piece = index[start : start + len(heads)]
        start += len(heads)
        yield heads, Whole(*(joined(parts, piece) for parts in zip(*found)))


def by_head(array: Array, layout: Layout, members: int, heads: Heads) -> Array:
    """Return [n, members, tokens, width] of pairs of batch row and key/value head, each with `members` heads."""
    batch, index = np.array(heads, np.int64).T
    if layout == "bshd":
        rows, tokens, count, width = array.shape
        return array.reshape(rows, tokens, count // members, members, width)[batch, :, index].swapaxes(1, 2)
    rows, count, tokens, width = array.shape
    return array.reshape(rows, count // members, members, tokens, width)[batch, index]
