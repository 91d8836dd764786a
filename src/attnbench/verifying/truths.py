"""Right results of a workload: their computation, and a folder in which the worker that comes first leaves them."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import array_api_compat
import numpy as np

from attnbench import reference
from attnbench.files import draft_of
from attnbench.spec import Array, Workload


class Truth(NamedTuple):
    """Exact and plain results of one sampled head, all float64 NumPy; `grads` are (dq, dk, dv) or None."""

    out: np.ndarray
    lse: np.ndarray
    plain_out: np.ndarray
    plain_lse: np.ndarray
    grads: tuple[np.ndarray, ...] | None
    plain_grads: tuple[np.ndarray, ...] | None
    cancelling_grads: tuple[np.ndarray, ...] | None = None
    """Sizes of the terms that cancel in each row of dq and of dk, see `reference.Gradients`."""

    def exact(self, name: str) -> np.ndarray:
        """Return the exact output or gradient of that name, [members, rows, width]."""
        return named((self.out, *(self.grads or ())), name)

    def plain(self, name: str) -> np.ndarray:
        """Return the output or gradient of a plain implementation, [members, rows, width]."""
        return named((self.plain_out, *(self.plain_grads or ())), name)

    def cancelling(self, name: str) -> np.ndarray | None:
        """Return the sizes of the terms that cancel in each row of dq or dk; None for other outputs or if unknown."""
        return {"dq": grads[0], "dk": grads[1]}.get(name) if (grads := self.cancelling_grads) else None


def named(results: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Return one of (out, dq, dk, dv) of a key/value head, [members, rows, width]."""
    array = results[("out", "dq", "dk", "dv").index(name)]
    return array if name in ("out", "dq") else array[None]


class Whole(NamedTuple):
    """Near-exact results of some heads of a whole output, the first axis: NumPy on a CPU, else arrays of the device."""

    out: Any
    lse: Any
    top: Any
    """Largest weight of one key, of each row."""
    grads: tuple[Any, ...] | None
    cancelling_grads: tuple[Any, ...] | None = None
    """Sizes of the terms that cancel in each row of dq and of dk."""


DEVICE_BLOCK_PAIRS = 1 << 27
"""Most pairs of a query and a key that an accelerator computes at a time."""


def results_of_heads(workload, arrays, at, rows, reach, gradients, namespace, wide, terms):  # noqa: ANN001, ANN201
    """Return (out, lse, top) of the rows of n heads, with gradients also dq, dk, dv, and with `terms` what cancels in
    them.

    The arrays are q [n, g, t, d], k [n, 1, s, d], v [n, 1, s, e], dout [n, g, t, e], at ([n], [n]); `reach` bounds the
    keys that each row may see.
    """
    q, k, v, dout = arrays
    xp = array_api_compat.array_namespace(q)
    head = reference.Head(q, k[:, 0], v[:, 0], *at)
    pairs = reference.BLOCK_PAIRS if isinstance(q, np.ndarray) else DEVICE_BLOCK_PAIRS
    blocks = reference.row_blocks(workload, rows, pairs, len(q))
    keys = [reached(workload, reach, block) for block in blocks]
    parts = [reference.forward_rows(workload, head, block, namespace, wide, some) for block, some in zip(blocks, keys)]
    found = tuple(xp.concat([part[n] for part in parts], axis=2) for n in range(3))
    if not gradients:
        return found
    pieces = [
        reference.backward_rows(workload, head, dout, block, namespace, wide, terms, some)
        for block, some in zip(blocks, keys)
    ]
    dq, *cancelling = (xp.concat([piece[n] for piece in pieces], axis=2) for n in ((0, 3) if terms else (0,)))
    sums = [xp.zeros_like(head.k), xp.zeros_like(head.v), *([xp.zeros_like(head.k[..., 0])] if terms else [])]
    for piece, some in zip(pieces, keys):
        sums = [_added(xp, whole, part, some) for whole, part in zip(sums, (piece.dk, piece.dv, piece.key_terms))]
    dk, dv, *key_terms = sums
    return *found, dq, dk, dv, *cancelling, *(xp.sqrt(x) for x in key_terms)


def reached(workload: Workload, reach: tuple[np.ndarray, np.ndarray], rows: np.ndarray) -> slice:
    """Return the range of keys that any of the rows may see, at least one key."""
    low = min(int(reach[0][rows].min()), workload.kv_len - 1)
    return slice(low, max(int(reach[1][rows].max()), low + 1))


def _added(xp: Any, whole: Array, part: Array, keys: slice) -> Array:
    if isinstance(whole, np.ndarray):
        whole[:, keys] += part
        return whole
    before, behind = whole[:, : keys.start], whole[:, keys.stop :]
    return xp.concat([before, whole[:, keys] + part, behind], axis=1)


Kind = TypeVar("Kind", Truth, Whole)


class SharedResults:
    """A folder of right results that the workers of a workload share; without one each worker computes its own."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(
        self,
        key: str,
        proof: np.ndarray,
        compute: Callable[[], list[Kind]],
        kind: type[Kind] = Truth,  # pyright: ignore[reportArgumentType]
    ) -> list[Kind]:
        """Return the results under a key, if they were computed from inputs with this `proof`; else compute them."""
        if self._folder is None:
            return compute()
        path = self._folder / f"{key}.npz"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # free again if this process dies
            if path.exists():
                with np.load(path) as stored:
                    if np.array_equal(stored["proof"], proof):
                        return _unpacked(stored, kind)
                return compute()
            truths = compute()
            with draft_of(path) as draft, draft.open("wb") as file:
                np.savez(file, **_packed(truths, proof))  # pyright: ignore[reportArgumentType]
            return truths


def _packed(truths: Sequence[Truth | Whole], proof: np.ndarray) -> dict[str, np.ndarray]:
    arrays = {"proof": proof}
    for number, truth in enumerate(truths):
        for name, value in truth._asdict().items():
            for part, array in enumerate(value if isinstance(value, tuple) else (value,)):
                if array is not None:
                    arrays[f"{number}/{name}/{part}"] = array
    return arrays


def _unpacked(stored: np.lib.npyio.NpzFile, kind: type[Kind]) -> list[Kind]:
    found: dict[int, dict[str, list[np.ndarray]]] = {}
    for key in stored.files:
        if key != "proof":
            number, name, _ = key.split("/")
            found.setdefault(int(number), {}).setdefault(name, []).append(stored[key])
    results: list[Kind] = []
    for _, fields in sorted(found.items()):
        values = {name: tuple(arrays) if name.endswith("grads") else arrays[0] for name, arrays in fields.items()}
        results.append(kind(*(values.get(name) for name in kind._fields)))  # pyright: ignore[reportArgumentType]
    return results
