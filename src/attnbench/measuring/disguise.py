"""Inputs that nobody has met, with an answer that is known exactly: every timed call gets its own.

Signs that Q and K share (per batch row, key/value head and channel) leave the logits as they are, bit for bit. A factor
of V (per batch row and key/value head: a sign, and a power of two where the format has the range) multiplies the output
and the gradients of Q and K exactly, and leaves the gradient of V alone; a factor of dO multiplies all three gradients.
So whatever an implementation has stored, under a pointer or a hash of the content, does not fit, and its result can
still be compared with the verified one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attnbench.frameworks import Framework, Inputs, Program
from attnbench.spec import Array, Layout, Workload


class Disguise(NamedTuple):
    """Factors in the layout of K and V: `channels` of Q and K, `values` of V, `cotangents` of dO."""

    channels: np.ndarray
    values: np.ndarray
    cotangents: np.ndarray


class Wardrobe:
    """Draws disguises for one workload and layout, and remembers which one each input set wore last."""

    def __init__(self, framework: Framework, workload: Workload, layout: Layout, rng: np.random.Generator) -> None:
        self._framework, self._workload, self._rng = framework, workload, rng
        self._trains = workload.needs_gradients
        self._head_axis = 2 if layout == "bshd" else 1
        self._worn: dict[int, Disguise] = {}
        # Halving a float16 back may meet subnormal numbers, which would cost bits.
        self._factors = np.array([-1, 1] if workload.dtype == "float16" else [-2, -1, 1, 2], np.float32)

    def disguised(self, program: Program) -> Program:
        """The same program, dressing its inputs anew each time they are prepared; that is outside the timed region."""
        return Program(run=program.run, prepare=lambda inputs: program.prepare(self._dress(inputs)))

    def _dress(self, inputs: Inputs) -> Inputs:
        worn = self._worn[id(inputs.q)] = self._draw()
        multiply = self._framework.multiply
        return Inputs(
            multiply(inputs.q, self._per_query_head(worn.channels)),
            multiply(inputs.k, worn.channels),
            multiply(inputs.v, worn.values),
            multiply(inputs.dout, self._per_query_head(worn.cotangents)) if self._trains else inputs.dout,
        )

    def _draw(self) -> Disguise:
        w = self._workload
        heads = (w.batch, 1, w.kv_heads) if self._head_axis == 2 else (w.batch, w.kv_heads, 1)
        signs = self._rng.choice(np.array([-1, 1], np.float32), (*heads, w.head_dim))
        return Disguise(signs, *(self._rng.choice(self._factors, (*heads, 1)) for _ in range(2)))

    def _per_query_head(self, factors: np.ndarray) -> np.ndarray:
        return np.repeat(factors, self._workload.group, axis=self._head_axis)

    def undressed(self, name: str, array: Array, inputs: Inputs) -> Array:
        """An output (out, dq, dk or dv) of the call that last used these inputs, as if they had worn nothing."""
        worn = self._worn[id(inputs.q)]
        per_key = worn.channels / worn.values / worn.cotangents
        back = {
            "out": self._per_query_head(1 / worn.values),
            "dq": self._per_query_head(per_key),
            "dk": per_key,
            "dv": 1 / worn.cotangents,
        }
        return self._framework.multiply(array, back[name])
