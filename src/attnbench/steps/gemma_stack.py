"""The step `gemma-stack`: four Gemma blocks and a final norm, x [b, s, e] in and out; gradients of x and all products.

Sizes follow the workload: e = heads * head_dim (2048 of Gemma-2B's 8 x 256), the feed-forward is 8 e wide, as there.
The reference is float64 by torch's autograd (`gemma_math`), written apart from the models.
"""

from __future__ import annotations

import msgspec

from attnbench.spec import Workload
from attnbench.steps.base import Outputs, Rounded, StepKind, Values
from attnbench.steps.gemma_math import joint_block, normed, storing, tensors, visible
from attnbench.steps.gemma_weights import WEIGHTS, drawn, normals, of_layer
from attnbench.workloads.steps import GEMMA_DEPTH, gemma_width

FORWARD, GRADIENTS = ("out",), ("dx", *(f"d_{name}" for name in WEIGHTS))
CHECKED_TOKENS, CHECKED_GROUP = 64, 2


class GemmaStack(StepKind):
    """Weights are openpi's by name and shape, stacked over the layers."""

    name = "gemma-stack"

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """The output; gradients of x and of the five products of the layers."""
        return {"forward": FORWARD, "backward": GRADIENTS, "train": FORWARD + GRADIENTS}[workload.pass_]

    def small(self, workload: Workload) -> Workload:
        """Fewer heads and tokens, the same head_dim: that is what kernels differ by."""
        kv_heads = 1 if workload.group > 1 else min(workload.kv_heads, CHECKED_GROUP)
        heads = kv_heads * min(workload.group, CHECKED_GROUP)
        tokens = min(workload.q_len, CHECKED_TOKENS)
        sizes = {"batch": min(workload.batch, 2), "q_len": tokens, "kv_len": tokens}
        return msgspec.structs.replace(workload, **sizes, heads=heads, kv_heads=kv_heads)

    def draw(self, workload: Workload, seed: int) -> Values:
        """Weights of variance 1 / fan-in, norms near 1."""
        w, normal, width = workload, normals(seed), gemma_width(workload)
        return {
            "x": normal(w.batch, w.q_len, width),
            **drawn(normal, w, width, 8 * width, (GEMMA_DEPTH,)),
            "final_norm": normal(width, fan_in=100),
            "dout": normal(w.batch, w.q_len, width),
        }

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Layer by layer in float64."""
        import torch

        leaves = ("x", *WEIGHTS) if workload.needs_gradients else ()
        arrays = tensors(values, leaves)
        store, seen, xs = storing(rounded), visible(workload), [arrays["x"]]
        for layer in range(GEMMA_DEPTH):
            xs, _ = joint_block(xs, [of_layer(arrays, layer)], seen, store)
        out = store(normed(xs[0], arrays["final_norm"]))
        found = {"out": out.detach().numpy()}
        if not workload.needs_gradients:
            return found
        gradients = torch.autograd.grad(out, [arrays[name] for name in leaves], arrays["dout"])
        found |= {name: rounded(one.numpy()) for name, one in zip(GRADIENTS, gradients)}
        return found if workload.pass_ == "train" else {name: found[name] for name in GRADIENTS}


GEMMA_STACK = GemmaStack()
