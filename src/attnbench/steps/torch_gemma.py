"""The step `gemma-stack` by `attnbench.models.gemma_torch`: openpi's einsum attention, torch's own, or a chosen one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.spec import Array, Config, Environment, Workload
from attnbench.steps.base import StepImplementation
from attnbench.steps.gemma_weights import NORMS, WEIGHTS
from attnbench.steps.jax_gemma import unsupported
from attnbench.workloads.steps import GEMMA_DEPTH, gemma_width


class TorchGemmaStack(StepImplementation):
    """The same blocks as in JAX, each recomputed in the backward pass."""

    framework = "torch"
    step = "gemma-stack"
    untested = ("cuda",)

    def __init__(self, name: str, impl: str) -> None:
        self.name, self._impl, self.materialises_scores = name, impl, impl == "standard"
        self.tunables = {"impl": impl} if impl == "auto" else {}

    def configured(self, config: Config) -> Self:
        """Itself; raises for an attention that is none of torch's."""
        impl = str(config.get("impl", self._impl))
        if impl not in ("standard", "sdpa", "auto"):
            chosen = registry.get(impl)
            if chosen.framework != "torch" or chosen.step:
                raise UsageError(f"{self.name} takes an attention of torch, not {impl}.")
        return self

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """Causal or full self-attention."""
        return unsupported(workload)

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """(the stack with these weights, x, the cotangent)"""
        import torch
        from torch import nn

        from attnbench.models.gemma_config import Config as Sizes
        from attnbench.models.gemma_torch import Stack

        width = gemma_width(workload)
        sizes = Sizes(width, GEMMA_DEPTH, 8 * width, workload.heads, workload.kv_heads, workload.head_dim)
        causal = "causal" in workload.visible_mask.kinds
        with torch.device("meta"):
            stack = Stack(sizes, causal=causal, impl=str(config.get("impl", self._impl)), device="meta")
        for number, layer in enumerate(stack.layers):
            for name in (*WEIGHTS, *NORMS):
                setattr(layer, name, nn.Parameter(arrays[name][number]))
        stack.final_norm = nn.Parameter(arrays["final_norm"])
        positions = torch.arange(workload.q_len, device=arrays["x"].device).expand(workload.batch, -1)
        return stack, arrays["x"], positions, arrays["dout"]

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """One pass of the stack."""
        import torch

        def run(state: Any) -> tuple[Array, ...]:
            stack, x, positions, dout = state
            if not workload.needs_gradients:
                with torch.no_grad():
                    return (stack(x, positions),)
            x = x.detach().requires_grad_()
            out = stack(x, positions)
            weights = [getattr(layer, name) for name in WEIGHTS for layer in stack.layers]
            dx, *found = torch.autograd.grad(out, (x, *weights), dout)
            depth = len(stack.layers)
            stacked = [torch.stack(found[n * depth : (n + 1) * depth]) for n in range(len(WEIGHTS))]
            return (dx, *stacked) if workload.pass_ == "backward" else (out.detach(), dx, *stacked)

        return run


STANDARD = TorchGemmaStack("torch.gemma-stack", "standard")
SDPA = TorchGemmaStack("torch.gemma-stack-sdpa", "sdpa")
AUTO = TorchGemmaStack("torch.gemma-stack-auto", "auto")
