"""Steps that attention is a part of: how inputs are drawn, how outputs are checked, and who computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from attnbench.errors import UnknownName, Unsupported
from attnbench.spec import Array, Call, Config, Implementation, Workload
from attnbench.workloads.suites import shrink

Values = Mapping[str, np.ndarray]
Rounded = Callable[[np.ndarray], np.ndarray]
Outputs = dict[str, np.ndarray]


class StepKind(ABC):
    """One kind of step: how inputs and weights are drawn, and the true outputs."""

    name: str
    forward_outputs: tuple[str, ...] = ("out",)
    """Names of what a forward pass returns, in order."""
    gradient_outputs: tuple[str, ...] = ()
    """Names of the gradients, in order; each begins with a d."""
    gradients_alone = False
    """Whether pass "backward" returns the gradients alone, not the forward outputs as well."""

    @abstractmethod
    def draw(self, workload: Workload, seed: int) -> Values:
        """Return inputs, weights and, if gradients are asked for, cotangents as float32; tokens as int32."""

    @abstractmethod
    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Return the outputs by name in float64.

        `rounded` is applied to whatever an implementation stores between operators: the identity gives the true
        outputs, rounding to the workload's dtype the error that a plain implementation may have.
        """

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """Return the names of what an implementation returns, in order."""
        if not workload.needs_gradients:
            return self.forward_outputs
        if workload.pass_ == "backward" and self.gradients_alone:
            return self.gradient_outputs
        return self.forward_outputs + self.gradient_outputs

    def small(self, workload: Workload) -> Workload:
        """Return the workload that is checked: the given one, with large sizes reduced."""
        return shrink(workload)


class StepImplementation(Implementation):
    """One way to compute a step."""

    step: str

    def build(self, workload: Workload, config: Config) -> Call:
        """Raise, because a step is not a function of q, k and v."""
        raise Unsupported(f"{self.name} computes the step {self.step}, not attention alone")

    @abstractmethod
    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return weights and inputs as the function takes them; this is not timed."""

    @abstractmethod
    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """Return the timed function, from the state to the outputs of the kind in its order. JAX compiles it."""


KINDS = {
    "multihead": "attnbench.steps.multihead:MULTIHEAD",
    "gemma-stack": "attnbench.steps.gemma:GEMMA_STACK",
    "pi0-attention": "attnbench.steps.pi0:PI0_ATTENTION",
    "pi0-block": "attnbench.steps.pi0:PI0_BLOCK",
    "pi0-model": "attnbench.steps.pi0:PI0_MODEL",
    "pi0-sampler": "attnbench.steps.pi0:PI0_SAMPLER",
    "pi0-fast-prefill": "attnbench.steps.pi0:PI0_FAST_PREFILL",
    "pi0-fast-decode": "attnbench.steps.pi0:PI0_FAST_DECODE",
}


def kind_of(name: str) -> StepKind:
    """Return how the step of that name is drawn and checked."""
    if name not in KINDS:
        raise UnknownName("step", name, list(KINDS), "attnbench.workloads.steps.STEPS")
    module, _, attribute = KINDS[name].partition(":")
    return getattr(import_module(module), attribute)
