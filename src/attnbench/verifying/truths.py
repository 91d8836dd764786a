"""Right results of a workload, computed by whichever worker comes first and read by the others."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np


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


class Whole(NamedTuple):
    """Near-exact results of some heads of a whole output, the first axis: NumPy on a CPU, else arrays of the device."""

    out: Any
    lse: Any
    top: Any
    """Largest weight of one key, of each row."""
    grads: tuple[Any, ...] | None
    cancelling_grads: tuple[Any, ...] | None = None
    """Sizes of the terms that cancel in each row of dq and of dk."""


Kind = TypeVar("Kind", Truth, Whole)


class Shelf:
    """A folder of right results that the workers of one workload share; without a folder each worker computes its
    own."""

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
        with self._alone(key):
            if path.exists():
                with np.load(path) as stored:
                    if np.array_equal(stored["proof"], proof):
                        return _unpacked(stored, kind)
                return compute()
            truths = compute()
            half_done = path.with_suffix(".part")
            with half_done.open("wb") as file:
                np.savez(file, **({"proof": proof} | _packed(truths)))  # pyright: ignore[reportArgumentType]
            os.replace(half_done, path)
            return truths

    @contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """Hold a lock on a key; the lock of a process that dies is free again."""
        assert self._folder is not None
        with (self._folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _packed(truths: Sequence[Truth | Whole]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
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
    return [
        kind(*(_field(name, found[number].get(name)) for name in kind._fields))  # pyright: ignore[reportArgumentType]
        for number in sorted(found)
    ]


def _field(name: str, arrays: list[np.ndarray] | None) -> np.ndarray | tuple[np.ndarray, ...] | None:
    if arrays is None:
        return None
    return tuple(arrays) if name.endswith("grads") else arrays[0]
