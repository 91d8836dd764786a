"""torch.ring-templated: the ring inside torch's own context parallelism, to compare with, over gloo.

It calls the private function `_templated_ring_attention` with the CPU's flash operator. The public `context_parallel`
is not an implementation here: it has CUDA kernels only, and NCCL takes one rank per GPU. Shards must be equal, and
balance over ranks (zigzag) is for causal masks only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from attnbench.errors import Unsupported
from attnbench.impls.conditions import (
    first_reason,
    needs_device,
    needs_dtype,
    needs_equal_dims,
    needs_no_softcap,
    needs_positive_scale,
)
from attnbench.kernels.ring.engine import Spans
from attnbench.kernels.ring.messages import Open
from attnbench.kernels.ring.settings import BY_NAME_ONLY, TUNABLES, Settings, needs_dense_mask, problem_of
from attnbench.spec import Call, Config, Environment, Implementation, Workload

if TYPE_CHECKING:
    import torch


class Templated(Implementation):
    """Sequence split over ranks by PyTorch's own ring template, `torch.ring-templated[world=4,layout=contiguous]`."""

    name = "torch.ring-templated"
    framework = "torch"
    by_name_only = BY_NAME_ONLY
    tunables = {name: value for name, value in TUNABLES.items() if name != "inner"}

    def configured(self, config: Config) -> Self:
        Settings.of(config)
        return self

    def available(self, environment: Environment) -> str | None:
        return needs_device(environment, "cpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        lengths = "takes as many keys as queries" if workload.q_len != workload.kv_len else None
        return first_reason(
            self.available(environment),
            needs_dense_mask(workload),
            needs_dtype(workload, "float32", "bfloat16", "float16"),
            needs_equal_dims(workload),
            needs_no_softcap(workload),
            needs_positive_scale(workload),
            lengths,
        )

    def build(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=True)

    def apparatus(self, framework: Any, config: Config) -> Any:
        from attnbench.kernels.ring.torch_ring import RingApparatus

        return RingApparatus(Settings.of(config).world, can_be_virtual=False)

    def _call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        from attnbench.kernels.ring.torch_calls import RingCall
        from attnbench.kernels.ring.torch_ring import OverRanks

        settings = Settings.of(config)
        if not problem_of(workload, 1, "contiguous").causal and settings.layout == "zigzag":
            settings = settings._replace(layout="contiguous")
        if settings.layout == "striped":
            raise Unsupported("torch has no striped layout, only contiguous and (causal) zigzag")
        parts = settings.world * (2 if settings.layout == "zigzag" else 1)
        if workload.q_len % parts:
            raise Unsupported(f"takes sequences in {parts} equal parts, not {workload.q_len} tokens")
        return OverRanks(RingCall(workload, settings, "templated", with_lse))


class TemplatedRing:
    """The method of a rank process: the private template over the CPU's flash operators, bhsd inside."""

    used = ("_templated_ring_attention",)

    def __init__(self, question: Open, rank: int, device: torch.device) -> None:
        self._causal, self._scale = question.problem.causal, question.shape.softmax_scale
        self._balance = question.problem.layout == "zigzag"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, ...]:
        import torch
        import torch.distributed as dist

        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with torch.no_grad(), _template(self._balance) as template:
            out, lse, *_ = template._templated_ring_attention(
                dist.group.WORLD, 2, op, *_swap(q, k, v), is_causal=self._causal, scale=self._scale
            )
        return out.transpose(1, 2).contiguous().to(q.dtype), lse.squeeze(-1).contiguous()

    def backward(
        self, inputs: Any, results: Any, dout: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch
        import torch.distributed as dist

        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

        def op(query: Any, key: Any, value: Any, **given: Any) -> Any:
            whole = given["grad_out"], query, key, value, given["out"], given["logsumexp"], 0.0, given["is_causal"]
            return operator(*whole, attn_mask=None, scale=self._scale)

        out, lse, *_ = results
        arrays = dict(zip(("query", "key", "value", "out", "grad_out"), _swap(*inputs, out, dout)))
        with torch.no_grad(), _template(self._balance) as template:
            dq, dk, dv, *_ = template._templated_ring_attention_backward(
                dist.group.WORLD, 2, op, grad_out_name="grad_out", **arrays, logsumexp=lse, is_causal=self._causal
            )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def rotate(self, k: torch.Tensor, v: torch.Tensor, gradients: bool) -> bool:
        """Return False: torch does not separate its communication from its computation."""
        return False


def _swap(*arrays: torch.Tensor) -> list[torch.Tensor]:
    return [array.transpose(1, 2).contiguous() for array in arrays]


@contextmanager
def _template(balanced: bool) -> Iterator[Any]:
    """Give torch's private module, with its module-wide option for balance over ranks set in the meantime."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    before, options.enable_load_balance = options.enable_load_balance, balanced
    try:
        yield _attention
    finally:
        options.enable_load_balance = before


TEMPLATED = Templated()
