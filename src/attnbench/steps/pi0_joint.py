"""The steps `pi0-attention` and `pi0-block`: two experts' tokens in and out, gradients of them and of all products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnbench.spec import Workload
from attnbench.steps import gemma_math
from attnbench.steps.base import Outputs, Rounded, StepKind, Values
from attnbench.steps.gemma_math import storing, tensors, visible
from attnbench.steps.gemma_weights import EXPERTS, NORMS, PROJECTIONS, WEIGHTS, drawn, normals, of_layer
from attnbench.steps.pi0_support import small_in_blocks
from attnbench.workloads.pi0_sizes import experts, parts

FORWARD = ("out", "out_1")


class Pi0Joint(StepKind):
    """One layer: weights are openpi's by name and shape, those of the action expert end in _1."""

    def __init__(self, name: str, products: Sequence[str], norms: Sequence[str], compute: Any) -> None:
        self.name, self._drawn, self._compute = name, (*products, *norms), compute
        weights = [f"{one}{end}" for end in EXPERTS for one in products]
        self._leaves = ("x", "x_1", *weights)
        self.gradients = ("dx", "dx_1", *(f"d_{name}" for name in weights))

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """Each expert's output; gradients of its tokens and products."""
        return FORWARD + self.gradients if workload.needs_gradients else FORWARD

    def small(self, workload: Workload) -> Workload:
        """Fewer heads and tokens, the same head_dim."""
        return small_in_blocks(workload)

    def draw(self, workload: Workload, seed: int) -> Values:
        """Tokens of variance 1; weights of variance 1 / fan-in."""
        w, normal = workload, normals(seed)
        prefix, state, actions = parts(w)
        values = {}
        for end, tokens, expert in zip(EXPERTS, (prefix, state + actions), experts(w)):
            values[f"x{end}"] = normal(w.batch, tokens, expert.width)
            values[f"dout{end}"] = normal(w.batch, tokens, expert.width)
            values |= drawn(normal, w, *expert, (), end, self._drawn)
        return values

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """In float64, both experts' tokens in one attention."""
        import torch

        arrays = tensors(values, self._leaves if workload.needs_gradients else ())
        xs, weights = [arrays[f"x{end}"] for end in EXPERTS], [of_layer(arrays, suffix=end) for end in EXPERTS]
        outs, _ = self._compute(xs, weights, visible(workload), storing(rounded))
        found = {name: out.detach().numpy() for name, out in zip(FORWARD, outs)}
        if not workload.needs_gradients:
            return found
        leaves = [arrays[name] for name in self._leaves]
        gradients = torch.autograd.grad(outs, leaves, [arrays[f"dout{end}"] for end in EXPERTS])
        return found | {name: rounded(one.numpy()) for name, one in zip(self.gradients, gradients)}


PI0_ATTENTION = Pi0Joint("pi0-attention", PROJECTIONS, (), gemma_math.joint_attention)
PI0_BLOCK = Pi0Joint("pi0-block", WEIGHTS, NORMS, gemma_math.joint_block)
