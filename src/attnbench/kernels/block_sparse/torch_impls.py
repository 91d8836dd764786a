"""Block-sparse attention as implementations, and `attend` for tables of blocks that are made at run time.

torch.block-sparse computes the kept blocks alone, on a CPU. It takes a mask with one `blocks` part, alone or with parts
that leave each row one run of keys (causal, window, prefix, lengths, sorted documents). Dropped blocks are neither read
nor computed, in both passes. Layout is bhsd, as in all of these.

torch.block-sparse-triton takes the same masks and computes them with Triton kernels, for NVIDIA GPUs. The lists of
blocks are made at the first call on a device, which is not timed. If TRITON_INTERPRET=1 is set before Triton is first
imported, the kernels run in its interpreter, on a CPU too: for verifying, never for timing. Softmax is in float32;
float32 inputs are multiplied in float32, not TF32.

torch.block-sparse-dynamic and torch.block-sparse-learned choose blocks by content, then attend to them alone; they are
approximate. They estimate the attention mass of blocks from pooled Q and K and keep, in each row of blocks, the fewest
that reach a threshold, which is calibrated to a mean sparsity on structured draws of its own. `dynamic` pools only;
`learned` has a gate trained on such draws. Their errors are declared for structured inputs: in random inputs there is
no structure to find. The gate depends on the signs of its channels, which every timed call changes, so it is verified
and never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attnbench.errors import Unsupported
from attnbench.frameworks.torch.plain import once_per_device
from attnbench.impls import AlwaysLse, conditions
from attnbench.impls._arguments import workload_of
from attnbench.impls.torch._compile import CompiledCall
from attnbench.kernels.block_sparse import tiles
from attnbench.masks.cuts import block_layout, split_blocks
from attnbench.spec import Array, Call, Config, Environment, Partial, Workload

if TYPE_CHECKING:
    import torch

    from attnbench.kernels.block_sparse.tables import BlockTables

LONGEST_TRAINED = 4096
"""Longest sequence for which a gate is trained when the implementation is built."""
SPARSITY, BLOCK_SIZE = 0.5, 64


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the blocks of tables: q [b, h, t, d], k and v [b, g, s, d] -> out, lse [b, h, t] in float32.

    Differentiable in q, k and v, on cpu and cuda.
    """
    from attnbench.impls.partial.torch_autograd import differentiable

    kind = q.device.type
    if kind == "cpu":
        from attnbench.kernels.block_sparse import cpu

        plan = cpu.plan(tables, k.shape[1], q.shape[3])
        pair = cpu.pair(lambda _: plan, scale)
    elif kind == "cuda":
        from attnbench.kernels.block_sparse import triton_call

        workload = workload_of(q, k, v, scale=scale, layout="bhsd")
        if (reason := tiles.beyond_the_kernels(workload, tables.block_size)) is not None:
            raise Unsupported(f"block-sparse attention on cuda {reason}.")
        triton_plan = triton_call.plan(tables, q.shape[1] // k.shape[1])
        pair = triton_call.pair(lambda _: triton_plan, scale, *tiles.read_config(workload, {}))
    else:
        raise Unsupported(f"block-sparse attention runs on cpu and cuda, not on {kind}.")
    out, lse = differentiable(pair, "bhsd")(q, k, v)
    return out, lse.float()


def needs_blocks(workload: Workload) -> str | None:
    """Refuse every mask but one `blocks` part, alone or with parts that leave each row one run of keys."""
    mask = workload.visible_mask
    split = split_blocks(mask)
    if split is None:
        several = mask.kinds.count("blocks") > 1
        return f"takes a mask with one blocks part; this mask has {'several' if several else 'none'}"
    if split[1].weighted or split[1].interval(workload.mask_shape) is None:
        return f"combines blocks only with masks that leave each row one run of keys, not with {split[1].id}"
    return None


def block_tables(workload: Workload, device: Any) -> BlockTables:
    """Return the blocks of a workload that `needs_blocks` accepts, on a device."""
    from attnbench.kernels.block_sparse.tables import tables_of

    layout = block_layout(workload.visible_mask, workload.mask_shape)
    assert layout is not None
    return tables_of(layout, workload.mask_shape, device)


class BlockSparse(AlwaysLse):
    """Block-sparse masks on a CPU: kept blocks are gathered, and rows with equal counts computed together."""

    name = "torch.block-sparse"
    framework = "torch"
    lse_gradient = True
    layout = "bhsd"
    expects = (r"_scaled_dot_product_flash_attention_for_cpu",)

    def available(self, environment: Environment) -> str | None:
        return conditions.needs_device(environment, "cpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return conditions.first_reason(
            self.available(environment),
            needs_blocks(workload),
            conditions.needs_equal_dims(workload),
            conditions.needs_no_softcap(workload),
        )

    def both(self, workload: Workload, config: Config) -> Call:
        from attnbench.impls.partial.torch_autograd import differentiable

        return differentiable(self._pair(workload, config), "bhsd")

    def partial(self, workload: Workload, config: Config) -> Partial:
        from attnbench.impls.partial.torch_autograd import turned

        return turned(self._pair(workload, config))

    def _pair(self, workload: Workload, config: Config) -> Partial:
        from attnbench.kernels.block_sparse import cpu

        plans = once_per_device(
            lambda device: cpu.plan(block_tables(workload, device), workload.kv_heads, workload.head_dim)
        )
        return cpu.pair(plans, workload.softmax_scale)


class BlockSparseTriton(BlockSparse):
    """Block-sparse masks by our Triton kernels over rows and columns of kept blocks."""

    name = "torch.block-sparse-triton"
    tunables = tiles.candidates(Workload(batch=1, q_len=128, heads=1, head_dim=128, dtype="bfloat16", pass_="train"))[0]

    @property
    def verify_only(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "TRITON_INTERPRET=1 runs the kernels in Triton's interpreter" if tiles.interpreted() else ""

    @property
    def expects(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return () if tiles.interpreted() else (r"block_sparse_(forward|key_gradients)",)

    def available(self, environment: Environment) -> str | None:
        missing = conditions.needs_package("triton", "pip install triton")
        if tiles.interpreted():
            return missing
        device = conditions.needs_device(environment, "cuda")
        return conditions.first_reason(
            f"{device}; TRITON_INTERPRET=1 verifies it in Triton's interpreter" if device else None,
            missing,
            conditions.needs_capability(environment, (9, 0)),  # tiles fill the shared memory of a Hopper SM
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        split = split_blocks(workload.visible_mask)
        unknown = tiles.interpreted() and workload.dtype == "bfloat16"
        return conditions.first_reason(
            self.available(environment),
            needs_blocks(workload),
            tiles.beyond_the_kernels(workload, split[0].block_size) if split is not None else None,
            "Triton's interpreter cannot multiply bfloat16" if unknown else None,
        )

    def configs(self, workload: Workload) -> Sequence[Config]:
        return tiles.candidates(workload)

    def build(self, workload: Workload, config: Config) -> Call:
        return CompiledCall(super().build(workload, config))

    def _pair(self, workload: Workload, config: Config) -> Partial:
        from attnbench.kernels.block_sparse import triton_call

        if tiles.interpreted():
            tiles.mend_interpreter()
        shapes, atomic = tiles.read_config(workload, config)
        plans = once_per_device(lambda device: triton_call.plan(block_tables(workload, device), workload.group))
        return triton_call.pair(plans, workload.softmax_scale, shapes, atomic)


class Selected(AlwaysLse):
    """`torch.block-sparse-dynamic` and `torch.block-sparse-learned`: choose blocks, then attend to them."""

    framework = "torch"
    lse_gradient = True
    layout = "bhsd"
    approximate = True
    untested = ("cuda",)

    def __init__(self, learned: bool) -> None:
        self.learned = learned
        self.name = "torch.block-sparse-learned" if learned else "torch.block-sparse-dynamic"
        way = "a learned gate" if learned else "pooled queries and keys"
        self.description = f"Approximate attention over blocks of keys that are selected by {way}."
        # Measured by benchmarks/block_sparse_quality.py at this sparsity, with room for other draws.
        self.declared_error, self.declared_recall = (0.4, 0.85) if learned else (0.6, 0.8)
        self.verify_only = (
            "a trained gate depends on the signs of its channels, and timed calls change them" if learned else ""
        )

    def available(self, environment: Environment) -> str | None:
        on_gpu = environment.device == "cuda" and not tiles.interpreted()
        return conditions.first_reason(
            conditions.needs_device(environment, "cpu", "cuda"),
            conditions.needs_package("triton", "pip install triton") if on_gpu else None,
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        mask, long = workload.visible_mask, self.learned and max(workload.q_len, workload.kv_len) > LONGEST_TRAINED
        unfit = mask.weighted or mask.interval(workload.mask_shape) is None
        kinds = ("float32", "bfloat16", "float16", *(("float64",) if environment.device == "cpu" else ()))
        return conditions.first_reason(
            self.available(environment),
            None if workload.inputs == "structured" else "declares its error for structured inputs only",
            conditions.needs_forward(workload),
            f"takes masks that leave each row one run of keys, not {mask.id}" if unfit else None,
            f"trains its gate when it is built, for at most {LONGEST_TRAINED} tokens" if long else None,
            conditions.needs_dtype(workload, *kinds),
            conditions.needs_equal_dims(workload),
            conditions.needs_head_dim(workload, 256, 8),
            conditions.needs_no_softcap(workload),
        )

    def configs(self, workload: Workload) -> Sequence[Config]:
        return [{"sparsity": sparsity, "block_size": BLOCK_SIZE} for sparsity in (SPARSITY, 0.75, 0.9)]

    def both(self, workload: Workload, config: Config) -> Call:
        select, scale = self._selector(workload, config), workload.softmax_scale
        return lambda q, k, v: attend(q, k, v, select(q, k)[0], scale)

    def quality(self, workload: Workload, config: Config) -> Callable[[Array, Array, Array], dict[str, float]]:
        from attnbench.kernels.block_sparse.selection import POOL
        from attnbench.masks import blocks

        select, mask, shape = self._selector(workload, config), workload.visible_mask, workload.mask_shape

        def figures(q: Array, k: Array, v: Array) -> dict[str, float]:
            tables, sparsity = select(q, k)
            computed = (mask & blocks(tables.kept, tables.block_size)).pairs(shape) / mask.pairs(shape)
            return {"sparsity": sparsity, "work": computed + 0.5 / POOL**2}  # the estimate, of QK^T alone

        return figures

    def _selector(self, workload: Workload, config: Config) -> Callable[[Array, Array], Any]:
        """Return `(q, k) -> (tables, sparsity)`, calibrated (and trained) at the first call on a device."""
        from attnbench.kernels.block_sparse.selection import selector

        sparsity, size = float(config.get("sparsity", SPARSITY)), int(config.get("block_size", BLOCK_SIZE))
        made = once_per_device(lambda device: selector(workload, device, sparsity, size, self.learned))
        return lambda q, k: made(q.device)(q, k)


BLOCK_SPARSE = BlockSparse()
BLOCK_SPARSE_TRITON = BlockSparseTriton()
DYNAMIC = Selected(learned=False)
LEARNED = Selected(learned=True)
