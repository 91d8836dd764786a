"""The steps `multihead` and `gemma-stack` in PyTorch, by the modules of attnbench.nn and attnbench.models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.impls.conditions import first_reason, needs_no_softcap
from attnbench.kernels.dilated.pieces import needs_dilated, problem_of
from attnbench.masks.cuts import split_blocks
from attnbench.spec import Array, Config, Environment, Workload
from attnbench.steps import StepImplementation
from attnbench.steps.gemma import NORMS, WEIGHTS, why_no_stack
from attnbench.workloads.steps import GEMMA_DEPTH, STEPS, gemma_width


class TorchGemmaStack(StepImplementation):
    """Gemma blocks with the weights of the JAX models, each recomputed in the backward pass."""

    framework = "torch"
    step = "gemma-stack"
    untested = ("cuda",)

    def __init__(self, name: str, impl: str) -> None:
        self.name, self._impl, self.materialises_scores = name, impl, impl == "standard"
        way = {"standard": "plain operators", "sdpa": "torch.sdpa", "auto": "what attnbench picks"}[impl]
        self.description = f"Step gemma-stack in PyTorch: {STEPS['gemma-stack'].description}; attention by {way}."
        self.tunables = {"impl": impl} if impl == "auto" else {}

    def configured(self, config: Config) -> Self:
        """Return the implementation itself; raise for an attention that is not one of torch's."""
        impl = str(config.get("impl", self._impl))
        if impl not in ("standard", "sdpa", "auto"):
            chosen = registry.get(impl)
            if chosen.framework != "torch" or chosen.step:
                raise UsageError(f"{self.name} takes an attention of torch, not {impl}.")
        return self

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """Return why the workload is not causal or full self-attention; None if it is."""
        return why_no_stack(workload)

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return (the stack with these weights, x, the positions, the cotangent)."""
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
        """Return the function of one pass of the stack."""
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


class TorchMultiheadDilated(StepImplementation):
    """A multihead module with dilated attention and its projections."""

    framework = "torch"
    step = "multihead"
    untested = ("cuda",)

    def __init__(self, name: str, kind: str) -> None:
        self.name, self._kind = name, kind
        module = kind.replace("_", " ")
        self.description = f"Step multihead in PyTorch: the {module} dilated module with its projections."
        if "ring" in kind:
            self.by_name_only = "on one rank it only repeats the others: torch.ring measures several"

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """Return why the workload is not self-attention over a dilated mask (with blocks if the kind has them); None if
        it is."""
        mask = workload.visible_mask
        blocks = "blocks" in mask.kinds
        if blocks != ("block_sparse" in self._kind):
            return "takes a dilated mask met with blocks" if not blocks else "takes a dilated mask without blocks"
        if workload.q_len != workload.kv_len or workload.value_dim != workload.head_dim:
            return "takes self-attention with values as wide as keys"
        return first_reason(needs_dilated(_without_blocks(workload)), needs_no_softcap(workload))

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return the module with these weights, x, and the cotangent."""
        from torch import nn

        from attnbench.nn.factory import create_multihead_dilated_attention

        problem = problem_of(_without_blocks(workload))
        blocks = split_blocks(workload.visible_mask)
        module = create_multihead_dilated_attention(
            self._kind,
            workload.heads * workload.head_dim,
            workload.heads,
            problem.pattern.segment_lengths,
            problem.pattern.dilation_rates,
            num_kv_heads=workload.kv_heads,
            causal=problem.causal,
            bias=False,
            offset=problem.pattern.offset,
            scale=workload.scale,
            device="meta",
            **({"block_mask": blocks[0]} if blocks else {}),
        )
        for part, name in ((module.in_proj, "w_in"), (module.out_proj, "w_back")):
            part.weight = nn.Parameter(arrays[name].T.contiguous())  # pyright: ignore[reportAttributeAccessIssue]
        lengths = None if problem.lengths is None else list(problem.lengths)
        return module, arrays["x"], arrays["dout"], lengths

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """Return the function of one call, with the gradients of x and of both weights if they are asked for."""
        import torch

        def run(state: Any) -> tuple[Array, ...]:
            module, x, dout, lengths = state
            if not workload.needs_gradients:
                with torch.no_grad():
                    return (module(x, kv_lengths=lengths),)
            x = x.detach().requires_grad_()
            out = module(x, kv_lengths=lengths)
            dx, d_in, d_back = torch.autograd.grad(out, (x, module.in_proj.weight, module.out_proj.weight), dout)
            gradients = (dx, d_in.T, d_back.T)
            return gradients if workload.pass_ == "backward" else (out.detach(), *gradients)

        return run


def _without_blocks(workload: Workload) -> Workload:
    found = split_blocks(workload.visible_mask)
    return workload if found is None else msgspec.structs.replace(workload, mask=found[1])


DILATED = TorchMultiheadDilated("torch.multihead-dilated", "standard")
DILATED_IMPROVED = TorchMultiheadDilated("torch.multihead-dilated-improved", "improved")
DILATED_RING = TorchMultiheadDilated("torch.multihead-dilated-ring", "ring")
DILATED_BLOCK_SPARSE_RING = TorchMultiheadDilated("torch.multihead-dilated-block-sparse-ring", "block_sparse_ring")
