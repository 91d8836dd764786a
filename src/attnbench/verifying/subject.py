"""The subject of an examination: one built call with its compiled programs, on one device, with its inputs.

An examination is a subject whose outputs are right, and what was found about it so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnbench.frameworks import OUTPUTS, Framework, Inputs, Program, Programs
from attnbench.spec import Array, Call, Errors, Layout, Partial, VerifiedAt, Workload
from attnbench.verifying.draws import Draws, Heads, by_head
from attnbench.verifying.tolerance import BACKWARD_FACTOR, Limits

LONG_NAMES = {"out": "output", "dq": "gradient of Q", "dk": "gradient of K", "dv": "gradient of V"}


def run(program: Program, inputs: Inputs) -> tuple[Array, ...]:
    """Return the outputs of one untimed call."""
    return program.run(program.prepare(inputs))


class Wrong(Exception):
    """A wrong result; the message says what is wrong, `detail` where."""

    def __init__(self, reason: str, errors: Errors | None = None, detail: str = "") -> None:
        super().__init__(reason)
        self.errors, self.detail = errors, detail


@dataclass(frozen=True)
class Subject:
    """A built call with its programs and inputs."""

    framework: Framework
    device: str
    workload: Workload
    layout: Layout
    programs: Programs
    draws: Draws
    lse: Call | None = None
    declared_error: float | None = None
    lse_gradient: bool = False
    """Whether the LSE is declared to be differentiable."""

    @property
    def inputs(self) -> list[Inputs]:
        """Drawn input sets in the subject's layout."""
        return self.draws.inputs(self.layout)

    def outputs(self, inputs: Inputs | int | str) -> dict[str, Array]:
        """Return the finished outputs of one untimed call by name; inputs may be named as in `Draws.input_set`."""
        given = inputs if isinstance(inputs, Inputs) else self.draws.probe(inputs, self.layout)
        arrays = run(self.programs.main, given)
        self.framework.wait(arrays)
        return self.named(arrays)

    def named(self, arrays: tuple[Array, ...]) -> dict[str, Array]:
        """Return the outputs of a call by name."""
        return dict(zip(OUTPUTS[self.workload.pass_], arrays))

    def row(self, inputs: Inputs, batch: int) -> np.ndarray:
        """Return [tokens, heads, width] of one batch row of the main program's output, as NumPy."""
        out = run(self.programs.main, inputs)[0]
        self.framework.wait(out)
        row = self.framework.numpy(out[batch])
        return row if self.layout == "bshd" else row.transpose(1, 0, 2)

    def members(self, name: str, at: tuple[int, int]) -> slice:
        """Return the heads of an output that belong to a pair of batch row and key/value head: a group of query heads,
        or the one head of a gradient of K or V."""
        count = self.workload.group if name in ("out", "dq") else 1
        return slice(at[1] * count, (at[1] + 1) * count)

    def place(self, name: str, at: tuple[int, int], member: int = 0) -> str:
        """Return words for a head of an output, the member-th of a pair of batch row and key/value head."""
        kind = "head" if name in ("out", "dq") else "key/value head"
        return f"batch {at[0]}, {kind} {self.members(name, at).start + member}"

    def heads(self, name: str, array: Array, heads: Heads) -> Array:
        """Return [n, members, tokens, width] of an output, as in `by_head`."""
        return by_head(array, self.layout, self.workload.group if name in ("out", "dq") else 1, heads)

    def host(self, array: Array) -> np.ndarray:
        """Return a NumPy array of float64."""
        return (array if isinstance(array, np.ndarray) else self.framework.numpy(array)).astype(np.float64)

    def sampled(self, name: str, array: Array) -> list[np.ndarray]:
        """Return rows [members, rows, width] of each head whose truth is known in float64."""
        heads, rows = self.draws.known(gradients=name != "out")
        if not heads:
            return []
        own = self.heads(name, array, heads)
        return list(self.host(own[:, :, rows] if name == "out" else own))

    @property
    def wide(self) -> str:
        """Dtype in which outputs are compared with each other on their device."""
        return "float64" if self.workload.dtype == "float64" else "float32"

    @property
    def summed(self) -> int:
        """Number of terms of the longest sum in a result."""
        w = self.workload
        return max(w.kv_len, w.head_dim, w.q_len * w.group if w.needs_gradients else 1)

    @property
    def head_axis(self) -> int:
        """Axis of the heads in this layout."""
        return 2 if self.layout == "bshd" else 1


Build = Callable[[Workload], Call | None]


@dataclass(frozen=True)
class Findings:
    """Results of a right subject; `good` are its outputs on each input set, for checks between timings."""

    errors: Errors
    verified_at: VerifiedAt
    deterministic: bool
    good: list[tuple[Array, ...]]
    forward: Limits | None
    backward: Mapping[str, Limits] | None
    """Allowed errors of each gradient; as those of `forward`, None if they were not compared."""
    notes: tuple[str, ...] = ()
    """Faults that make no result of this cell wrong, for the reader of the record."""

    def limits(self, name: str, dtype: str) -> Limits:
        """Return the allowed errors of an output.

        Gradients that were too large to compare are allowed what follows from the output's limits.
        """
        known = (self.backward or {}).get(name) if name.startswith("d") else self.forward
        if known is not None:
            return known
        return Limits.of_rounding(dtype) if self.forward is None else self.forward.widened(BACKWARD_FACTOR)


@dataclass
class Examination:
    """A subject whose outputs are right on the drawn inputs, and the results of further checks."""

    subject: Subject
    found: Findings
    thorough: bool
    build: Build | None
    """Function that returns the implementation's call for another workload, or None."""
    partial: Callable[[], Partial | None] | None
    """Function that returns the implementation's partial form, or None."""
    noted: dict[str, Any] = field(default_factory=dict)
    """Fields of Errors that checks fill in: lse, stability, hidden_nan."""
    notes: list[str] = field(default_factory=list)
    """Notes of Findings."""

    @property
    def outputs(self) -> dict[str, Array]:
        """Verified outputs on the first input set, by name."""
        return self.subject.named(self.found.good[0])

    @property
    def limits(self) -> dict[str, Limits]:
        """Allowed errors of each output."""
        workload = self.subject.workload
        return {name: self.found.limits(name, workload.dtype) for name in OUTPUTS[workload.pass_]}
