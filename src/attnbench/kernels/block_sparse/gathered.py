"""torch.block-sparse: attention over the kept blocks alone, on a CPU.

Takes a mask with one `blocks` part, alone or with parts that leave each row one run of keys (causal, window, prefix,
lengths, sorted documents). Dropped blocks are neither read nor computed, in the backward pass neither. Layout is bhsd.
"""

from __future__ import annotations

from typing import Any

from attnbench.frameworks.torch.plain import once_per_device
from attnbench.impls.conditions import first_reason, needs_device, needs_equal_dims, needs_no_softcap
from attnbench.kernels.block_sparse import cpu
from attnbench.kernels.block_sparse.tables import BlockTables, tables_of
from attnbench.masks.cuts import block_layout, split_blocks
from attnbench.spec import Array, Call, Config, Environment, Implementation, Partial, Workload


def needs_blocks(workload: Workload) -> str | None:
    """One `blocks` part, and beside it only parts that leave each row one run of keys."""
    mask = workload.visible_mask
    split = split_blocks(mask)
    if split is None:
        several = mask.kinds.count("blocks") > 1
        return f"takes a mask with one blocks part, and this one has {'several' if several else 'none'}"
    if split[1].weighted or split[1].interval(workload.mask_shape) is None:
        return f"combines blocks with masks of one run of keys a row, not with {split[1].id}"
    return None


def block_tables(workload: Workload, device: Any) -> BlockTables:
    """The workload's blocks on a device; `needs_blocks` has said that it has them."""
    layout = block_layout(workload.visible_mask, workload.mask_shape)
    assert layout is not None
    return tables_of(layout, workload.mask_shape, device)


class BlockSparse(Implementation):
    """Gathered blocks, batched by equal counts, through torch's fused CPU operator."""

    name = "torch.block-sparse"
    framework = "torch"
    lse_gradient = True
    layout = "bhsd"
    expects = (r"_scaled_dot_product_flash_attention_for_cpu",)

    def available(self, environment: Environment) -> str | None:
        return needs_device(environment, "cpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(
            self.available(environment),
            needs_blocks(workload),
            needs_equal_dims(workload),
            needs_no_softcap(workload),
        )

    def build(self, workload: Workload, config: Config) -> Call:
        call = self.build_lse(workload, config)
        return lambda q, k, v: call(q, k, v)[0]

    def build_lse(self, workload: Workload, config: Config) -> Call:
        from attnbench.impls.partial.torch_autograd import differentiable

        call = differentiable(self._pair(workload), "bhsd")

        def with_lse(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = call(q, k, v)
            return out, lse.float()

        return with_lse

    def partial(self, workload: Workload, config: Config) -> Partial:
        from attnbench.impls.partial.torch_autograd import turned

        return turned(self._pair(workload))

    def _pair(self, workload: Workload) -> Partial:
        scale = workload.softmax_scale
        plans = once_per_device(
            lambda device: cpu.plan(block_tables(workload, device), workload.kv_heads, workload.head_dim)
        )
        return (
            lambda q, k, v: cpu.forward(q, k, v, plans(q.device), scale),
            lambda q, k, v, out, lse, dout: cpu.backward(q, k, v, out, lse, dout, plans(q.device), scale),
        )


BLOCK_SPARSE = BlockSparse()
