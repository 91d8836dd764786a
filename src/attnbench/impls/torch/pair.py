"""torch.pair: the forward pass of one library followed by the backward pass of another; see docs/pairs.md.

What a flash-type library keeps for its backward pass is (q, k, v, out, lse), and so does every other: with the LSE in
one convention (natural log, float32) either pass may be anyone's. The LSE has a gradient too. Arrays lie as the library
of a named backward pass has them when it is timed alone, since that pass is the longer one; without names, bshd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnbench import registry
from attnbench.frameworks.torch.plain import once_per_device
from attnbench.impls._pairing import AUTO, Pairing, Role
from attnbench.impls.partial.torch_choice import environment_of
from attnbench.spec import Array, Call, Config, Implementation, Partial, Workload

FORWARDS = (
    "torch.fa3", "torch.fa4", "torch.sdpa-cudnn", "torch.flash-attn", "torch.sdpa-flash", "torch.sdpa-efficient",
    "torch.eager",
)  # fmt: skip
BACKWARDS = ("torch.fa4", "torch.sdpa-cudnn", "torch.fa3", *FORWARDS[3:])
BACKWARDS_OF_WIDE_HEADS = ("torch.sdpa-cudnn", "torch.fa4", "torch.fa3", *FORWARDS[3:])
"""Order of a first measurement on an H200; `benchmarks/pairs.py` measures again."""
WIDE = 128


class TorchPair(Pairing):
    """Forward pass of one library, backward of another: `[forward=torch.fa3,backward=torch.fa4]`; by default the first
    that run."""

    name = "torch.pair"
    framework = "torch"

    def __init__(self, forward: str = AUTO, backward: str = AUTO) -> None:
        super().__init__(forward, backward)
        if backward != AUTO:
            self.layout = registry.get(backward).layout

    def order(self, role: Role, workload: Workload) -> Sequence[str]:
        if role == "forward":
            return FORWARDS
        return BACKWARDS_OF_WIDE_HEADS if workload.head_dim > WIDE else BACKWARDS

    def lse_call(self, part: Implementation, workload: Workload) -> Callable[..., tuple[Array, Array]] | None:
        import torch

        call, swap = part.build_lse(workload, {}), part.layout == "bhsd"
        if call is None:
            return None

        @torch.no_grad()
        def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = call(*(x.transpose(1, 2) if swap else x for x in (q, k, v)))
            return out.transpose(1, 2) if swap else out, lse

        return forward

    def build_lse(self, workload: Workload, config: Config) -> Call:
        from attnbench.impls.partial.torch_autograd import differentiable, turned

        pair = self.configured(config)

        def made(device: Any) -> Call:
            passes = pair.chosen(workload, environment_of(device.type))
            return differentiable(turned(passes) if self.layout == "bhsd" else passes, self.layout)

        calls = once_per_device(made)

        def call(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = calls(q.device)(q, k, v)
            return out, lse.float()

        return call

    def partial(self, workload: Workload, config: Config) -> Partial:
        """Return both passes in bshd without autograd, for graphs of torch.compile."""
        pair = self.configured(config)
        passes = once_per_device(lambda device: pair.chosen(workload, environment_of(device.type)))

        def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            return passes(q.device)[0](q, k, v)

        def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
            return passes(q.device)[1](q, k, v, out, lse, dout)

        return forward, backward


PAIR = TorchPair()
