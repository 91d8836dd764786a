"""What a step is to the rest of the package: numbers to draw, outputs to check, a function to time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnbench.errors import Unsupported
from attnbench.spec import Array, Call, Config, Implementation, Workload
from attnbench.workloads.shrink import shrink

Values = Mapping[str, np.ndarray]
Rounded = Callable[[np.ndarray], np.ndarray]
Outputs = dict[str, np.ndarray]


class StepKind(ABC):
    """One kind of step: its inputs and weights, and the truth about its outputs."""

    name: str

    @abstractmethod
    def draw(self, workload: Workload, seed: int) -> Values:
        """Inputs, weights and, where gradients are asked, cotangents, as float32; tokens as int32."""

    @abstractmethod
    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Name -> output in float64. `rounded` is applied to whatever an implementation stores between operators: the
        identity gives the truth, rounding to the workload's dtype the error that a plain implementation may make."""

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """What an implementation returns, in order; gradients begin with a d."""
        del workload
        return ("out",)

    def small(self, workload: Workload) -> Workload:
        """The workload that is checked: the same one, made small where it is large."""
        return shrink(workload)


class StepImplementation(Implementation):
    """One way to compute a step."""

    step: str

    def build(self, workload: Workload, config: Config) -> Call:
        """A step is no function of q, k and v."""
        raise Unsupported(f"{self.name} computes the step {self.step}, not attention alone")

    @abstractmethod
    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Weights and inputs as the function takes them; outside of what is timed."""

    @abstractmethod
    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """state -> the outputs of the kind, in its order; what is timed. JAX compiles it."""
