"""torch's own rings as a rank process computes them; shards are bshd outside and bhsd inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attnbench.kernels.ring.messages import Open
from attnbench.kernels.ring.spans import Spans

if TYPE_CHECKING:
    import torch


def _swap(*arrays: torch.Tensor) -> list[torch.Tensor]:
    return [array.transpose(1, 2).contiguous() for array in arrays]


def _world() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD


@contextmanager
def _balanced(wanted: bool) -> Iterator[None]:
    """torch keeps this choice in a module variable."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    before, options.enable_load_balance = options.enable_load_balance, wanted
    try:
        yield
    finally:
        options.enable_load_balance = before


class _Own:
    """What both share."""

    used: tuple[str, ...]

    def __init__(self, question: Open, rank: int, device: torch.device) -> None:
        self._causal, self._scale = question.problem.causal, question.shape.softmax_scale
        self._balance = question.problem.layout == "zigzag"
        self._question, self._device = question, device
        del rank

    def rotate(self, k: torch.Tensor, v: torch.Tensor, gradients: bool) -> bool:
        """torch does not part its communication from its computation."""
        return False


class Templated(_Own):
    """The private template over the CPU's flash operators."""

    used = ("_templated_ring_attention",)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, ...]:
        """(out, lse)."""
        import torch
        from torch.distributed.tensor.experimental._context_parallel import _attention

        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with torch.no_grad(), _balanced(self._balance):
            out, lse, *_ = _attention._templated_ring_attention(
                _world(), 2, op, *_swap(q, k, v), is_causal=self._causal, scale=self._scale
            )
        return out.transpose(1, 2).contiguous().to(q.dtype), lse.squeeze(-1).contiguous()

    def backward(
        self, inputs: Any, results: Any, dout: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv)."""
        import torch
        from torch.distributed.tensor.experimental._context_parallel import _attention

        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

        def op(query: Any, key: Any, value: Any, **given: Any) -> Any:
            whole = given["grad_out"], query, key, value, given["out"], given["logsumexp"], 0.0, given["is_causal"]
            return operator(*whole, attn_mask=None, scale=self._scale)

        out, lse, *_ = results
        arrays = dict(zip(("query", "key", "value", "out"), _swap(*inputs, out)))
        (grad_out,) = _swap(dout)
        with torch.no_grad(), _balanced(self._balance):
            dq, dk, dv, *_ = _attention._templated_ring_attention_backward(
                _world(),
                2,
                op,
                grad_out=grad_out,
                grad_out_name="grad_out",
                **arrays,
                logsumexp=lse,
                is_causal=self._causal,
            )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class ContextParallel(_Own):
    """The public context manager around scaled_dot_product_attention."""

    used = ("context_parallel",)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, ...]:
        """(out, zeros for the LSE, which is not to be had, output and inputs with their graph)."""
        import torch

        query, key, value = (x.detach().requires_grad_() for x in _swap(q, k, v))
        with torch.enable_grad(), self._patched():
            whole = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=self._causal, scale=self._scale, enable_gqa=q.shape[2] != k.shape[2]
            )
        out = whole.detach().transpose(1, 2).contiguous()
        return out, out.new_zeros(q.shape[0], q.shape[2], q.shape[1]), whole, query, key, value

    def backward(
        self, inputs: Any, results: Any, dout: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv)."""
        import torch

        _, _, whole, *leaves = results
        with self._patched():
            grads = torch.autograd.grad(whole, leaves, *_swap(dout), retain_graph=True)
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """The shards are in place already; the context manager insists on a buffer of the whole length to shard."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        buffer = torch.zeros(self._question.problem.q_len, device=self._device)
        with _balanced(self._balance), context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
            yield
