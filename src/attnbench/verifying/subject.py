"""The subject of an examination: one built call with its compiled programs, on one device, with its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnbench.frameworks import Framework, Inputs, Program, Programs
from attnbench.spec import Array, Call, Errors, Layout, Workload
from attnbench.verifying.draws import Draws


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

    def head_rows(self, array: Array, batch: int, heads: slice, rows: np.ndarray | None) -> np.ndarray:
        """Return [heads, rows, width] of one batch row as float64, from any layout."""
        part = array[batch]
        part = part[:, heads] if self.layout == "bshd" else part[heads]
        values = self.framework.numpy(part).astype(np.float64)
        values = values.transpose(1, 0, 2) if self.layout == "bshd" else values
        return values if rows is None else values[:, rows]

    def output(self, inputs: Inputs, batch: int) -> np.ndarray:
        """Return [tokens, heads, width] of one batch row of the main program's output, as NumPy."""
        out = run(self.programs.main, inputs)[0]
        self.framework.wait(out)
        row = self.framework.numpy(out[batch])
        return row if self.layout == "bshd" else row.transpose(1, 0, 2)

    @property
    def summed(self) -> int:
        """Number of terms of the longest sum in a result."""
        w = self.workload
        return max(w.kv_len, w.head_dim, w.q_len * w.group if w.needs_gradients else 1)

    @property
    def head_axis(self) -> int:
        """Axis of the heads in this layout."""
        return 2 if self.layout == "bshd" else 1
