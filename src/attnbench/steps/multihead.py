"""The step `multihead`: x [b, s, e] -> projections to Q, K and V -> attention -> projection back, without biases.

Also its implementations by the multihead dilated modules of attnbench.nn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from attnbench import reference
from attnbench.impls.conditions import first_reason, needs_no_softcap
from attnbench.kernels.dilated.pieces import needs_dilated, problem_of
from attnbench.masks.cuts import split_blocks
from attnbench.spec import Array, Config, Environment, Workload
from attnbench.steps import Outputs, Rounded, StepImplementation, StepKind, Values


class Multihead(StepKind):
    """Projections and attention. `w_in` is [e, (heads + 2 kv_heads) * dim], Q, K and V side by side; `w_back` is [heads
    * dim, e]."""

    name = "multihead"
    gradient_outputs = ("dx", "d_in", "d_back")
    gradients_alone = True

    def draw(self, workload: Workload, seed: int) -> Values:
        """Return inputs and weights; weights of variance 1 / e keep every stage at variance 1."""
        w, rng = workload, np.random.default_rng(seed)
        width, kv_width = w.heads * w.head_dim, w.kv_heads * w.head_dim

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32)

        return {
            "x": normal(w.batch, w.q_len, width),
            "w_in": normal(width, width + 2 * kv_width) * width**-0.5,
            "w_back": normal(width, width) * width**-0.5,
            "dout": normal(w.batch, w.q_len, width),
        }

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        w = workload
        x, w_in, w_back, dout = (values[name].astype(np.float64) for name in ("x", "w_in", "w_back", "dout"))
        width, kv_width = w.heads * w.head_dim, w.kv_heads * w.head_dim
        parts = np.split(rounded(x @ w_in), [width, width + kv_width], axis=-1)
        q, k, v = (part.reshape(*part.shape[:2], -1, w.head_dim) for part in parts)
        attended, _ = reference.attention(w, q, k, v)
        attended = rounded(attended).reshape(*x.shape)
        outputs = {"out": rounded(attended @ w_back)}
        if not w.needs_gradients:
            return outputs
        d_attended = rounded(dout @ w_back.T)
        grads = reference.attention_gradients(w, q, k, v, d_attended.reshape(q.shape))
        d_projected = rounded(np.concatenate([grad.reshape(*x.shape[:2], -1) for grad in grads], axis=-1))
        outputs |= {
            "dx": rounded(d_projected @ w_in.T),
            "d_in": rounded(np.einsum("bse,bsf->ef", x, d_projected)),
            "d_back": rounded(np.einsum("bse,bsf->ef", attended, dout)),
        }
        return {name: outputs[name] for name in self.outputs(w)}


MULTIHEAD = Multihead()


class TorchMultiheadDilated(StepImplementation):
    """A multihead module with dilated attention and its projections."""

    framework = "torch"
    step = "multihead"
    untested = ("cuda",)

    def __init__(self, name: str, kind: str) -> None:
        self.name, self._kind = name, kind
        words = kind.replace("_", " ")
        self.description = f"Step multihead in PyTorch: the {words} dilated module with its projections."
        if "ring" in kind:
            self.by_name_only = (
                "on one rank it computes the same as the other dilated modules: torch.ring measures several ranks"
            )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        mask = workload.visible_mask
        blocks = "blocks" in mask.kinds
        if blocks != ("block_sparse" in self._kind):
            return "takes a dilated mask combined with blocks" if not blocks else "takes a dilated mask without blocks"
        if workload.q_len != workload.kv_len or workload.value_dim != workload.head_dim:
            return "takes self-attention with values as wide as keys"
        return first_reason(needs_dilated(_without_blocks(workload)), needs_no_softcap(workload))

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return (the module with these weights, x, the cotangent, the key lengths)."""
        from torch import nn

        from attnbench.nn import create_multihead_dilated_attention

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
    split = split_blocks(workload.visible_mask)
    return workload if split is None else msgspec.structs.replace(workload, mask=split[1])


DILATED = TorchMultiheadDilated("torch.multihead-dilated", "standard")
DILATED_IMPROVED = TorchMultiheadDilated("torch.multihead-dilated-improved", "improved")
DILATED_RING = TorchMultiheadDilated("torch.multihead-dilated-ring", "ring")
DILATED_BLOCK_SPARSE_RING = TorchMultiheadDilated("torch.multihead-dilated-block-sparse-ring", "block_sparse_ring")
