"""FlexAttention, always compiled.

Uncompiled it ignores the block table and is tens of times slower, and past Dynamo's recompile limit it would silently
run uncompiled; see _compile.py. Layout is bhsd. On a CPU there is no backward, no LSE and no float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnbench.errors import Unsupported
from attnbench.frameworks.torch.plain import mask_tensors, once_per_device
from attnbench.impls.conditions import (
    first_reason,
    needs_bfloat16,
    needs_device,
    needs_dtype,
    needs_forward,
)
from attnbench.impls.torch._compile import COMPILED_GRAPH, CompiledCall, compile_fresh, needs_compiler
from attnbench.impls.torch._masks import block_mask, score_mod
from attnbench.masks.cuts import split_blocks
from attnbench.masks.large_bias import has_large_bias
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

SMALLEST_GPU_DIM = 16


class Flex(Implementation):
    """PyTorch's FlexAttention, compiled: any mask as a table of blocks, with log-weights and soft cap."""

    name = "torch.flex"
    framework = "torch"
    lse_gradient = True
    layout = "bhsd"
    traceable = True
    compiles_each_plan = True
    untested = ("rocm", "xpu", "mps")
    expects = (COMPILED_GRAPH,)
    forbids = (r"^aten::_(safe_)?softmax", r"^aten::bmm", r"cunn_SoftMax")
    tunables = {"block_size": 128}

    def available(self, environment: Environment) -> str | None:
        return first_reason(needs_device(environment, "cpu", "cuda", "rocm", "xpu"), needs_compiler(environment))

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        on_cpu = environment.device == "cpu"
        narrow = min(workload.head_dim, workload.value_dim)
        too_narrow = f"takes head_dim {SMALLEST_GPU_DIM} or more on a GPU, not {narrow}"
        return first_reason(
            needs_dtype(workload, "float32", "bfloat16", "float16"),
            needs_bfloat16(workload, environment),
            needs_forward(workload) and "has no backward pass on a CPU" if on_cpu else None,
            too_narrow if not on_cpu and narrow < SMALLEST_GPU_DIM else None,
        )

    def configs(self, workload: Workload) -> Sequence[Config]:
        return tuple({"block_size": size} for size in _block_sizes(workload))

    def build(self, workload: Workload, config: Config) -> Call:
        return _attend(workload, config, lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        import torch

        return _attend(workload, config, lse=True) if torch.accelerator.is_available() else None


def _block_sizes(workload: Workload) -> tuple[int, ...]:
    # The backward kernels' own blocks are 128 wide, which a table of 64 does not allow.
    sizes = (128,) if workload.needs_gradients else (128, 64)
    split = split_blocks(workload.visible_mask)
    # Blocks larger than the mask's own would undo its sparsity.
    return sizes[::-1] if split is not None and split[0].block_size % 128 else sizes


def _attend(workload: Workload, config: Config, lse: bool) -> Call:
    block_size = int(config.get("block_size", _block_sizes(workload)[0]))
    compiled = once_per_device(lambda device: _compile(workload, device, block_size, lse), constant=False)

    def call(q: Array, k: Array, v: Array) -> Any:
        if lse and q.device.type == "cpu":
            raise Unsupported("torch.flex returns no LSE on a CPU: use torch.eager or torch.sdpa-flash.")
        return compiled(q.device)(q, k, v)

    return CompiledCall(call, prepare=compiled)


def _compile(workload: Workload, device: Any, block_size: int, lse: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    table = block_mask(workload, device, block_size)
    modify = score_mod(workload, device)
    scale, grouped = workload.softmax_scale, workload.group > 1
    options = _kernel_options(block_size, device)
    wanted: Any = AuxRequest(lse=True) if lse else None

    def body(q: Array, k: Array, v: Array, table: Any) -> Any:
        return flex_attention(
            q, k, v, modify, table, scale, enable_gqa=grouped, kernel_options=options, return_aux=wanted
        )

    compiled = compile_fresh(body)
    if not lse:
        return lambda q, k, v: compiled(q, k, v, table)

    top = mask_tensors(workload, device).top if has_large_bias(workload.visible_mask) else None

    def with_lse(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, aux = compiled(q, k, v, table)
        return out, aux.lse if top is None else aux.lse + top

    return with_lse


def _kernel_options(block_size: int, device: Any) -> Any:
    """Return options under which the kernel's blocks divide those of the table."""
    return {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64} if block_size < 128 and device.type != "cpu" else None


FLEX = Flex()
