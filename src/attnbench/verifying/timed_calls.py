"""Checks of timed calls: some calls of a visit are drawn at random, and their outputs are judged when its clock is
over.

Of a call with a fresh transform a few rows of one head are copied as soon as its sample is timed, and compared with the
float64 reference of the call's own inputs. One call of a visit is held as a whole until the visit is over: if the visit
has calls with a known transform, one of those, and its whole result is compared with the verified one. The gradients of
K and V, whose rows depend on all queries, are checked by sums that hold for any attention, and, in as many visits as
the budget allows, compared with the reference over a whole head, which is drawn when the visit is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from attnbench import reference
from attnbench.frameworks import Framework
from attnbench.frameworks.base import Watch
from attnbench.spec import ONLY_TIMED, Array, Layout, Workload
from attnbench.verifying.input_transforms import CallInputs, Transform, Transforms
from attnbench.verifying.invariants import OVERWRITES
from attnbench.verifying.subject import Findings, Wrong
from attnbench.verifying.tolerance import (
    SLACK,
    Apart,
    apart,
    first_over,
    rounded_terms,
    row_errors,
    row_limits,
    spot,
    typical_row,
)

LOOKS = 16
"""Calls of a visit that are looked at if it has fewer samples, of several calls each."""
ROWS, PAIRS = 64, 1 << 15
"""Most rows of a visit that are compared, and most pairs of a query and a key that they may have together."""
COPIED = ("out", "dq")
"""Outputs whose rows depend on one query each."""


class Box(NamedTuple):
    """Tokens of one key/value head, or of the query heads that share it."""

    batch: int
    head: int
    row: int
    rows: int


class Look(NamedTuple):
    """Copied rows of one call's outputs; `which` is its input set."""

    which: int
    transform: Transform
    box: Box
    parts: Mapping[str, Array]


class Held(NamedTuple):
    """Outputs of one call, and rows that were copied from them when its sample was timed, if any."""

    which: int
    transform: Transform
    outputs: Mapping[str, Array]
    look: Look | None


class Boxes:
    """Functions that cut boxes out of arrays of one layout."""

    def __init__(self, framework: Framework, workload: Workload, layout: Layout) -> None:
        self.framework, self.workload = framework, workload
        self.layout: Layout = layout
        self.token_axis, self.head_axis = (1, 2) if layout == "bshd" else (2, 1)

    def cut(self, array: Array, box: Box, of_keys: bool = False) -> Array:
        """Copy a box of an input or output, in its layout."""
        group = 1 if of_keys else self.workload.group
        heads, tokens = (box.head * group, group), (box.row, box.rows)
        order = (tokens, heads) if self.token_axis == 1 else (heads, tokens)
        starts, sizes = zip((box.batch, 1), *order, (0, array.shape[-1]))
        return self.framework.part(array, starts, sizes)

    def rows(self, array: Array, at: tuple[int, int], rows: np.ndarray, device: str) -> Array:
        """Copy rows, in any order, of the query heads that share a key/value head."""
        box, group = Box(*at, 0, array.shape[self.token_axis]), self.workload.group
        heads = slice(box.head * group, (box.head + 1) * group)
        if self.framework.overwrites:  # then a slice costs nothing
            array = array[box.batch : box.batch + 1]
            head = array[:, :, heads] if self.head_axis == 2 else array[:, heads]
        else:
            head = self.cut(array, box)
        index = self.framework.namespace(device).asarray(rows)
        return array_api_compat.array_namespace(head).take(head, index, axis=self.token_axis)

    def row_factors(self, each: Sequence[np.ndarray], at: tuple[int, int], rows: int, of_keys: bool = False) -> Array:
        """Cut the factors of a head out of those of several calls, and repeat each for `rows` rows of its call."""
        group = 1 if of_keys else self.workload.group
        heads = slice(at[1] * group, (at[1] + 1) * group)
        cut = [one[at[0], :, heads] if self.head_axis == 2 else one[at[0], heads] for one in each]
        return np.repeat(np.concatenate(cut, axis=self.token_axis - 1), rows, axis=self.token_axis - 1)[None]

    def host(self, box: Array) -> np.ndarray:
        """Return [heads, tokens, width] in float64."""
        one = box if isinstance(box, np.ndarray) else self.framework.numpy(box)
        return (one[0].transpose(1, 0, 2) if self.head_axis == 2 else one[0]).astype(np.float64)


def most_rows(workload: Workload) -> int:
    """Return how many rows may be compared after each visit."""
    return max(1, min(ROWS, PAIRS // (workload.kv_len * workload.group)))


class TimedCalls(Watch):
    """Looks at the calls of one visit."""

    def __init__(
        self,
        boxes: Boxes,
        names: Sequence[str],
        inputs: CallInputs,
        samples: int,
        several: bool,
        rng: np.random.Generator,
    ) -> None:
        self._boxes, self._names, self._inputs, self._rng, workload = boxes, names, inputs, rng, boxes.workload
        self.at = int(rng.integers(workload.batch)), int(rng.integers(workload.kv_heads))
        """Batch row and key/value head whose rows are compared."""
        self._per_sample = max(1, LOOKS // samples) if several else 1
        looks = samples * min(self._per_sample, max(1, len(inputs) // samples))
        self._rows = max(1, min(most_rows(workload) // looks, workload.q_len))
        self._hold_at, self._seen = int(rng.integers(looks)), 0
        self._starts = rng.integers(workload.q_len - self._rows + 1, size=looks).tolist()
        self.looks: list[Look] = []
        self.held: Held | None = None

    def pick(self, calls: int) -> Sequence[int]:
        if calls <= self._per_sample:
            return range(calls)
        return sorted(self._rng.choice(calls, self._per_sample, replace=False).tolist())

    def look(self, call: int, output: tuple[Array, ...]) -> None:
        which, transform = self._inputs.used[call]
        outputs, look = dict(zip(self._names, output)), None
        if not transform.known:
            box = Box(*self.at, self._starts[self._seen % len(self._starts)], self._rows)
            parts = {name: self._boxes.cut(array, box) for name, array in outputs.items() if name in COPIED}
            look = Look(which, transform, box, parts)
            self.looks.append(look)
        if transform.known if self._inputs.mixed else self._seen == self._hold_at:
            self.held = Held(which, transform, outputs, look)
        self._seen += 1


MANY_ROWS = 16
"""Number of rows from which on their error as a whole is judged too."""
NOTHING_LIKE = 0.9
"""Relative error that no approximation may have, whatever it declares: zeros have 1."""
TYPICAL_ROWS = 1024
"""Rows of the verified output that tell how large a row is."""
BLOCK_VALUES = 1 << 24
"""Values of one array that are summed at once."""
KEY_PAIRS, MOST_KEY_PAIRS, DEVICE_FASTER = 1 << 17, 1 << 25, 1 << 6
"""Pairs of a query and a key from which gradients of K and V are computed: per visit on average after the first one,
and at most for a head; then the factor that an accelerator affords."""
DEVICE_BLOCK_PAIRS = 1 << 24


class TimedChecks:
    """Judge of the timed calls of one cell; raises Wrong."""

    def __init__(
        self,
        boxes: Boxes,
        device: str,
        sets: Sequence[Any],
        findings: Findings,
        names: Sequence[str],
        transforms: Transforms,
    ) -> None:
        self._framework, self._workload = boxes.framework, boxes.workload
        self.boxes, self._device, self._sets, self._names = boxes, device, sets, names
        self._findings, self._transforms, self._rng = findings, transforms, transforms.rng
        self._on_host = device in ("cpu", "mps") or self._framework.compiles
        self._namespace: Any = np if self._on_host else self._framework.namespace(device)
        self._float64: Any = np.float64 if self._on_host else self._framework.dtype("float64")
        """Library that computes the truth: NumPy, or the framework on its device."""
        self._typical: dict[str, float] = {}
        self._keys_compared: set[bool] = set()
        """Whether gradients of K and V were compared with the reference, of the main program and of a part."""
        self.repeats = True
        """Whether every call of the main program that was compared whole gave the same bits."""

    def judge(self, calls: TimedCalls, main: bool = True) -> None:
        """Check what was kept of a visit to the main program, or to a part of it."""
        held = calls.held
        if held is not None and held.look is not None:
            for name, part in held.look.parts.items():
                if not self._framework.same_bits(part, self.boxes.cut(held.outputs[name], held.look.box)):
                    raise Wrong(OVERWRITES)
        for which in sorted({look.which for look in calls.looks}):
            self._compare_rows(which, calls.at, [look for look in calls.looks if look.which == which])
        if held is None:
            return
        if held.transform.known:
            self.compare_whole(held.which, held.transform, held.outputs, main)
        elif "dk" in held.outputs:
            self._compare_sums(held, calls.at)
            if self._wants_keys(main):
                self._compare_keys(held)

    def compare_whole(self, which: int, transform: Transform, outputs: Mapping[str, Array], main: bool = True) -> None:
        """Compare all outputs of a call with a known transform with the verified ones."""
        for name, array in outputs.items():
            same, differs = self._differs(which, name, self._transforms.undo(name, array, transform))
            self.repeats = self.repeats and (same or not main)
            if differs is not None:
                raise _wrong(name, spot(differs, self.boxes.layout), differs.share, differs.allowed)

    def compare_first(self, outputs: Mapping[str, Array]) -> None:
        """Compare the outputs of the first call, on the first input set, with those of later calls, which are right."""
        for name, array in outputs.items():
            _, differs = self._differs(0, name, array)
            if differs is not None:
                raise Wrong(
                    f"wrong in the first call only, {name}: {spot(differs, self.boxes.layout)} differs by "
                    f"{differs.share:.1e}, {differs.allowed:.1e} allowed"
                )

    def _differs(self, which: int, name: str, found: Array) -> tuple[bool, Apart | None]:
        """Return whether an output has the bits of the verified one, and where it is further apart than allowed."""
        good = dict(zip(self._names, self._findings.good[which]))[name]
        if self._framework.same_bits(found + 0.0, good + 0.0):
            return True, None
        limits = self._findings.limits(name, self._workload.dtype)
        limits = limits._replace(relative=min(limits.relative, NOTHING_LIKE / SLACK))
        return False, apart(self._framework, found, good, limits, self._workload.dtype)

    def _compare_rows(self, which: int, at: tuple[int, int], looks: Sequence[Look]) -> None:
        """Compare copied rows of calls on one input set with the truth.

        The signs of K and V are moved to the queries and the results, so that all these calls share K and V, and their
        rows are one computation.
        """
        most = max(1, most_rows(self._workload) // looks[0].box.rows)
        if len(looks) > most:
            looks = [looks[n] for n in self._rng.choice(len(looks), most, replace=False)]
        size = looks[0].box.rows
        rows = np.concatenate([look.box.row + np.arange(size) for look in looks])
        transforms, names, dout = [look.transform for look in looks], looks[0].parts, None
        signs = {
            "dq": self.boxes.host(self.boxes.row_factors([one.k for one in transforms], at, size, of_keys=True)),
            "out": self.boxes.host(self.boxes.row_factors([one.v for one in transforms], at, size, of_keys=True)),
        }
        q = self.boxes.host(self._queries(which, transforms, at, rows)) * signs["dq"]
        if "dq" in names:
            dout = self.boxes.host(self._cotangents(which, transforms, at, rows)) * signs["out"]
        for name, (right, least) in self._truth(which, at, rows, q, dout, "out" in names).items():
            got = np.concatenate([self.boxes.host(look.parts[name]) for look in looks], axis=1) * signs[name]
            self._require_rows(name, got, right, least, at, rows)

    def _truth(
        self, which: int, at: tuple[int, int], rows: np.ndarray, q: np.ndarray, dout: np.ndarray | None, forward: bool
    ) -> dict[str, tuple[np.ndarray, np.ndarray | float]]:
        """Return output and dQ [g, rows, width] of queries [g, rows, d], and what rounding may leave in each row."""
        w, whole = self._workload, Box(*at, 0, self._workload.kv_len)
        k, v = (self.boxes.cut(x, whole, of_keys=True) for x in (self._sets[which].k, self._sets[which].v))
        namespace, wide = self._namespace, self._float64
        head = reference.Head(self._put(q), self._wide(k)[0], self._wide(v)[0], *at)
        truth: dict[str, tuple[np.ndarray, np.ndarray | float]] = {}
        if forward:
            truth["out"] = self._number(reference.forward_rows(w, head, rows, namespace, wide, cut=True)[0]), 0.0
        if dout is not None:
            own = self._put(dout)
            found = reference.backward_rows(w, head, own, rows, namespace, wide, terms=True, cut=True)
            truth["dq"] = self._number(found.dq), rounded_terms(self._number(found.cancelling), w.dtype, w.head_dim)
        return truth

    def _put(self, values: np.ndarray) -> Array:
        return values if self._on_host else self._framework.array(values, "float64", self._device)

    def _number(self, array: Array) -> np.ndarray:
        return np.asarray(array) if self._on_host else self._framework.numpy(array)

    def _wide(self, box: Array) -> Array:
        """Return [heads, tokens, width] in float64, where the truth is computed."""
        if self._on_host:
            return self.boxes.host(box)
        one = self._framework.cast(box[0], "float64")
        swap = self.boxes.head_axis == 2
        return array_api_compat.array_namespace(one).permute_dims(one, (1, 0, 2)) if swap else one

    def _queries(self, which: int, transforms: Sequence[Transform], at: tuple[int, int], rows: np.ndarray) -> Array:
        """Return rows of Q as the calls got them, the same number of each call."""
        each, noise = len(rows) // len(transforms), None
        if transforms[0].noise is not None:
            noise = self.boxes.row_factors([one.noise for one in transforms if one.noise is not None], at, each)
        factors = self.boxes.row_factors([one.q for one in transforms], at, each)
        q = self.boxes.rows(self._sets[which].q, at, rows, self._device)
        return self._transforms.queries(q, factors, noise, rows)

    def _cotangents(self, which: int, transforms: Sequence[Transform], at: tuple[int, int], rows: np.ndarray) -> Array:
        """Return rows of dO as the calls got them, the same number of each call."""
        each = len(rows) // len(transforms)
        rolled = (rows + np.repeat([one.roll for one in transforms], each)) % self._workload.q_len
        factors = self.boxes.row_factors([one.dout for one in transforms], at, each)
        dout = self.boxes.rows(self._sets[which].cotangent(), at, rolled, self._device)
        return self._framework.multiply(dout, factors)

    def _require_rows(
        self,
        name: str,
        got: np.ndarray,
        right: np.ndarray,
        least: np.ndarray | float,
        at: tuple[int, int],
        rows: np.ndarray,
    ) -> None:
        limits = self._findings.limits(name, self._workload.dtype).widened(SLACK)
        off, size = (np.linalg.norm(x, axis=-1) for x in (got - right, right))
        typical = self._typical_row(name)
        share = row_errors(off, size, least, self._workload.dtype, typical)
        if differs := first_over(share, row_limits(size, limits.row, typical)):
            member, index = differs.place
            head = f"head {at[1] * self._workload.group + member}" if name in COPIED else f"key/value head {at[1]}"
            raise _wrong(name, f"batch {at[0]}, {head}, row {rows[index]}", differs.share, differs.allowed)
        if name == "out" and off.size >= MANY_ROWS:
            relative, most = float(np.linalg.norm(off) / (np.linalg.norm(size) or 1.0)), limits.relative
            if not relative <= min(most, NOTHING_LIKE):
                raise _wrong(name, f"batch {at[0]}, the whole of {off.size} rows,", relative, most)

    def _typical_row(self, name: str) -> float:
        """Return the norm of a typical row of the verified output, from the middle of one head."""
        if name not in self._typical:
            of_keys = name not in COPIED
            tokens = self._workload.kv_len if of_keys else self._workload.q_len
            rows = min(tokens, TYPICAL_ROWS)
            box = Box(0, 0, (tokens - rows) // 2, rows)
            good = self.boxes.cut(dict(zip(self._names, self._findings.good[0]))[name], box, of_keys)
            self._typical[name] = typical_row(np.linalg.norm(self.boxes.host(good), axis=-1))
        return self._typical[name]

    def _compare_sums(self, held: Held, at: tuple[int, int]) -> None:
        """Compare sums over all tokens of a head that must agree.

        K^T dK is dQ^T Q, because both are the sum of dS[i, j] k[j] q[i]^T over all pairs; in the same way V^T dV is O^T
        dO. Without an output, dV summed over the keys is dO summed over the queries that see a key.
        """
        w, outputs, of = self._workload, held.outputs, held.transform
        keys, queries, values, cotangents = (_Sum(self._number) for _ in range(4))
        runs = w.visible_mask.runs(w.mask_shape)
        seen = None if runs is None else np.broadcast_to(runs[1] > runs[0], (w.batch, w.q_len))[at[0]]
        for box in _blocks(at, w.kv_len, max(w.head_dim, w.value_dim)):
            dk, dv = (self._wide(self.boxes.cut(outputs[name], box, of_keys=True)) for name in ("dk", "dv"))
            k, v = self._keys_and_values(held, box)
            keys.add_outer(k, dk)
            values.add_outer(v, dv) if "out" in outputs else values.add(dv)
        for box in _blocks(at, w.q_len, max(w.head_dim, w.value_dim) * w.group):
            rows = np.arange(box.row, box.row + box.rows)
            dq, q = self.boxes.cut(outputs["dq"], box), self._queries(held.which, [of], at, rows)
            queries.add_outer(self._wide(dq), self._wide(q))
            dout = self._wide(self._cotangents(held.which, [of], at, rows))
            if "out" in outputs:
                cotangents.add_outer(self._wide(self.boxes.cut(outputs["out"], box)), dout)
            elif seen is not None:
                cotangents.add(dout, seen[box.row : box.row + box.rows, None])
        self._require_sum("dk", keys, queries, at)
        if "out" in outputs or seen is not None:
            self._require_sum("dv", values, cotangents, at)

    def _keys_and_values(self, held: Held, box: Box) -> tuple[Array, Array]:
        """Return a box of K and V in float64, as a held call got them."""
        given, of = self._sets[held.which], held.transform
        k, v = (
            self._framework.multiply(
                self.boxes.cut(array, box, of_keys=True),
                self.boxes.row_factors([factors], (box.batch, box.head), 1, of_keys=True),
            )
            for array, factors in ((given.k, of.k), (given.v, of.v))
        )
        return self._wide(k), self._wide(v)

    def _wants_keys(self, main: bool) -> bool:
        """Return whether a visit's gradients of K and V are compared with the reference: first, then at random."""
        w, faster = self._workload, 1 if self._on_host else DEVICE_FASTER
        pairs = w.q_len * w.group * w.kv_len
        if pairs > MOST_KEY_PAIRS * faster:
            return False
        first = main not in self._keys_compared
        self._keys_compared.add(main)
        return first or self._rng.random() < KEY_PAIRS * faster / pairs

    def _compare_keys(self, held: Held) -> None:
        """Compare all rows of dK and dV of a random head with the truth."""
        w = self._workload
        at = int(self._rng.integers(w.batch)), int(self._rng.integers(w.kv_heads))
        rows, box = np.arange(w.q_len), Box(*at, 0, w.kv_len)
        k, v = self._keys_and_values(held, box)
        q, dout = (
            self._wide(make(held.which, [held.transform], at, rows)) for make in (self._queries, self._cotangents)
        )
        head, found = reference.Head(q, k[0], v[0], *at), list[Any]([0.0, 0.0, 0.0])
        size = reference.BLOCK_PAIRS if self._on_host else DEVICE_BLOCK_PAIRS
        for some in reference.row_blocks(w, rows, size):
            part = reference.backward_rows(w, head, dout, some, self._namespace, self._float64, terms=True)
            found = [whole + one for whole, one in zip(found, (part.dk, part.dv, part.key_terms))]
        dk, dv, terms = (self._number(x)[None] for x in found)
        least = {"dk": rounded_terms(np.sqrt(terms), w.dtype, w.head_dim), "dv": 0.0}
        for name, right in (("dk", dk), ("dv", dv)):
            got = self.boxes.host(self.boxes.cut(held.outputs[name], box, of_keys=True))
            self._require_rows(name, got, right, least[name], at, np.arange(w.kv_len))

    def _require_sum(self, name: str, found: _Sum, right: _Sum, at: tuple[int, int]) -> None:
        size = found.squares**0.5 + right.squares**0.5 + float(np.linalg.norm(right.total))
        share = float(np.linalg.norm(found.total - right.total)) / (size or 1.0)
        most = min(SLACK * self._findings.limits(name, self._workload.dtype).relative, NOTHING_LIKE)
        if not share <= most:
            raise _wrong(name, f"batch {at[0]}, key/value head {at[1]}, the sum over its tokens,", share, most)


class _Sum:
    """A sum of many terms, and the sum of their squares, which tells the size of a sum of unlike terms."""

    def __init__(self, number: Callable[[Array], np.ndarray]) -> None:
        self._number = number
        self.total, self.squares = np.zeros(()), 0.0

    def add(self, rows: Array, weights: np.ndarray | float = 1.0) -> None:
        """Add the rows of an array [heads, tokens, width]; weights [tokens, 1]."""
        terms = self._number(rows.sum(0)) * weights
        self.total, self.squares = self.total + terms.sum(0), self.squares + float((terms * terms).sum())

    def add_outer(self, a: Array, b: Array) -> None:
        """Add the outer products of the rows of two arrays [heads, tokens, width]."""
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
        self.total = self.total + self._number(a.T @ b)
        self.squares += float(self._number(((a * a).sum(-1) * (b * b).sum(-1)).sum()))


def _blocks(at: tuple[int, int], tokens: int, width: int) -> Iterator[Box]:
    step = max(1, BLOCK_VALUES // width)
    return (Box(*at, row, min(step, tokens - row)) for row in range(0, tokens, step))


def _wrong(name: str, where: str, share: float, allowed: float) -> Wrong:
    return Wrong(f"{ONLY_TIMED} {name}, right when checked: {where} differs by {share:.1e}, {allowed:.1e} allowed")
