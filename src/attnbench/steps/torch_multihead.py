"""The multihead dilated modules of `attnbench.nn` as implementations of the step `multihead`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from attnbench.impls.conditions import first_reason, needs_no_softcap
from attnbench.impls.dilated.conditions import needs_dilated, problem_of
from attnbench.spec import Array, Config, Environment, Workload
from attnbench.steps.base import StepImplementation
from attnbench.workloads.masks.block_layout import split_blocks


class TorchMultiheadDilated(StepImplementation):
    """A multihead dilated module, x in and x out."""

    framework = "torch"
    step = "multihead"
    untested = ("cuda",)

    def __init__(self, name: str, kind: str) -> None:
        self.name, self._kind = name, kind
        if "ring" in kind:
            self.by_name_only = "on one rank it only repeats the others: torch.ring measures several"

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """Self-attention over a dilated mask; the ring ones no lengths, and blocks where they are part of the kind."""
        mask = workload.visible_mask
        blocks = "blocks" in mask.kinds
        if blocks != ("block_sparse" in self._kind):
            return "takes a dilated mask met with blocks" if not blocks else "takes a dilated mask without blocks"
        if workload.q_len != workload.kv_len or workload.value_dim != workload.head_dim:
            return "takes self-attention with values as wide as keys"
        if "ring" in self._kind and "lengths" in mask.kinds:
            return "a ring takes no key lengths"
        return first_reason(needs_dilated(_without_blocks(workload)), needs_no_softcap(workload))

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """The module with these weights, x, and the cotangent."""
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
        """One call of the module, with the gradients of x and of both weights where they are asked."""
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
