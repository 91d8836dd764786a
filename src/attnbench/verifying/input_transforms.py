"""Inputs of timed calls: one of the drawn sets under a random transform, another one for every call.

A fresh transform gives the channels of Q, K, V and dO random signs, each array its own, and rolls the tokens of dO.
The distribution of the inputs stays the same (a normal number is as likely as its negative), but every logit changes,
so nothing that was stored in an earlier call helps with it; its result is checked against the reference.

A known transform leaves the logits as they are, bit for bit: signs that Q and K share, and per batch row and key/value
head a factor of V (a sign, and a power of two if the format has the range), which multiplies the output and the
gradients of Q and K exactly, and one of dO, which multiplies all gradients. Its whole result is compared with the
verified one.

Structured inputs would lose their structure under signs of their own. Their fresh transform shares the signs of Q and K
and adds a little noise to Q, whose channels have signs of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import array_api_compat
import numpy as np

from attnbench.frameworks import Framework, Inputs
from attnbench.spec import Array, Layout, Workload

NOISE = 0.25
"""Standard deviation of the noise added to structured queries, whose elements are of size 1."""
SIGNS = np.array([-1, 1], np.float32)


class Transform(NamedTuple):
    """Factors of Q, K, V and dO, broadcast over tokens, in the layout of the inputs."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    roll: int = 0
    """Tokens by which dO is rolled towards the front."""
    noise: np.ndarray | None = None
    """Factors of the noise on Q, or None if there is none."""
    known: bool = False
    """Whether the result follows from the verified one."""


class Transforms:
    """Draws transforms for one workload and layout, and applies them."""

    def __init__(
        self, framework: Framework, device: str, workload: Workload, layout: Layout, rng: np.random.Generator
    ) -> None:
        self._framework, self._device, self._workload, self.rng = framework, device, workload, rng
        self._head_axis, self._token_axis = (2, 1) if layout == "bshd" else (1, 2)
        # Halving a float16 back may meet subnormal numbers, which would cost bits.
        self._factors = SIGNS if workload.dtype == "float16" else np.array([-2, -1, 1, 2], np.float32)

    def fresh(self) -> Transform:
        """Draw a transform that changes every logit."""
        w = self._workload
        q, k = self._signs(w.heads, w.head_dim), self._signs(w.kv_heads, w.head_dim)
        v, dout = self._signs(w.kv_heads, w.value_dim), self._signs(w.heads, w.value_dim)
        roll = int(self.rng.integers(w.q_len))
        if w.inputs != "structured":
            return Transform(q, k, v, dout, roll)
        return Transform(self._per_query_head(k), k, v, dout, roll, NOISE * q)

    def known(self) -> Transform:
        """Draw a transform whose result follows from that of the inputs as they are."""
        w = self._workload
        channels = self._signs(w.kv_heads, w.head_dim)
        values, cotangents = (self.rng.choice(self._factors, self._shape(w.kv_heads, 1)) for _ in range(2))
        per_query_head = self._per_query_head
        return Transform(per_query_head(channels), channels, values, per_query_head(cotangents), known=True)

    def _signs(self, heads: int, width: int) -> np.ndarray:
        bits = np.frombuffer(self.rng.bytes(self._workload.batch * heads * width), np.int8)
        return SIGNS[bits & 1].reshape(self._shape(heads, width))

    def _shape(self, heads: int, width: int) -> tuple[int, ...]:
        return (self._workload.batch, *((1, heads) if self._head_axis == 2 else (heads, 1)), width)

    def _per_query_head(self, factors: np.ndarray) -> np.ndarray:
        return np.repeat(factors, self._workload.group, axis=self._head_axis)

    def apply(self, inputs: Inputs, transform: Transform) -> Inputs:
        """Return transformed inputs; dO is made only when it is asked for, after a forward pass that precedes it."""
        multiply = self._framework.multiply
        return Inputs(
            self.queries(inputs.q, transform.q, transform.noise),
            multiply(inputs.k, transform.k),
            multiply(inputs.v, transform.v),
            lambda: multiply(self._rolled(inputs.cotangent(), transform.roll), transform.dout),
        )

    def _rolled(self, array: Array, by: int) -> Array:
        if not by:
            return array
        order = np.roll(np.arange(array.shape[self._token_axis]), -by)
        index = self._framework.namespace(self._device).asarray(order)
        return array_api_compat.array_namespace(array).take(array, index, axis=self._token_axis)

    def queries(
        self, array: Array, factors: np.ndarray, noise: np.ndarray | None, rows: np.ndarray | None = None
    ) -> Array:
        """Transform Q, or these rows of it."""
        array = self._framework.multiply(array, factors)
        if noise is None:
            return array
        own = self._noise
        if rows is not None:
            index = self._framework.namespace(self._device).asarray(rows)
            own = array_api_compat.array_namespace(own).take(own, index, axis=self._token_axis)
        return array + self._framework.multiply(own, noise)

    @cached_property
    def _noise(self) -> Array:
        """Normal numbers that all batch rows and heads share; their factors differ."""
        shape = [1, 1, 1, self._workload.head_dim]
        shape[self._token_axis] = self._workload.q_len
        drawn = self.rng.standard_normal(tuple(shape), np.float32)
        return self._framework.array(drawn, self._workload.dtype, self._device)

    def undo(self, name: str, array: Array, transform: Transform) -> Array:
        """Turn an output (out, dq, dk or dv) of a call with a known transform into that of the inputs as they are."""
        assert transform.known
        first = [slice(None)] * 4
        first[self._head_axis] = slice(None, None, self._workload.group)
        per_key = transform.k / transform.v / transform.dout[tuple(first)]
        back = {
            "out": self._per_query_head(1 / transform.v),
            "dq": self._per_query_head(per_key),
            "dk": per_key,
            "dv": 1 / transform.dout[tuple(first)],
        }
        return self._framework.multiply(array, back[name])


class CallInputs:
    """Inputs of the calls of one visit: item n is made anew, with another transform, whenever it is asked for."""

    def __init__(self, sets: Sequence[Inputs], transforms: Transforms, calls: int, first: int) -> None:
        self._sets, self._transforms, self._calls, self._first = sets, transforms, calls, first
        self.known = range(0)
        """Calls that get a known transform."""
        self.used: dict[int, tuple[int, Transform]] = {}
        """Input set and transform of each call, as they were last made."""

    @property
    def mixed(self) -> bool:
        """Whether some calls get a known transform and others a fresh one."""
        return 0 < len(self.known) < self._calls

    def __len__(self) -> int:
        return self._calls

    def __getitem__(self, call: int) -> Inputs:
        which = (self._first + call) % len(self._sets)
        transform = self._transforms.known() if call in self.known else self._transforms.fresh()
        self.used[call] = which, transform
        return self._transforms.apply(self._sets[which], transform)
