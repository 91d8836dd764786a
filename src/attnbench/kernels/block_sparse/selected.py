"""torch.block-sparse-dynamic and -learned: blocks chosen by content, then attention over them alone. Approximate.

Both estimate the attention mass of blocks from pooled Q and K and keep, in each row of blocks, the fewest that reach a
threshold, which is calibrated to a mean sparsity on structured draws of its own. `dynamic` pools only; `learned` has a
gate trained on such draws. Their errors are declared for structured inputs: on random ones there is nothing to find.
The gate knows the signs of its channels, which every timed call changes: it is verified, never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnbench.frameworks.torch.plain import once_per_device
from attnbench.impls.conditions import (
    first_reason,
    needs_device,
    needs_dtype,
    needs_equal_dims,
    needs_forward,
    needs_head_dim,
    needs_no_softcap,
    needs_package,
)
from attnbench.kernels.block_sparse.triton_interpreter import interpreted
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

LONGEST_TRAINED = 4096
SPARSITY, BLOCK_SIZE = 0.5, 64


class Selected(Implementation):
    """Choose, then attend."""

    framework = "torch"
    lse_gradient = True
    layout = "bhsd"
    approximate = True
    untested = ("cuda",)

    def __init__(self, learned: bool) -> None:
        self.learned = learned
        self.name = "torch.block-sparse-learned" if learned else "torch.block-sparse-dynamic"
        # Measured by benchmarks/block_sparse_quality.py at this sparsity, with room for other draws.
        self.declared_error, self.declared_recall = (0.4, 0.85) if learned else (0.6, 0.8)
        self.verify_only = (
            "a trained gate knows the signs of its channels, and timed calls change them" if learned else ""
        )

    def available(self, environment: Environment) -> str | None:
        on_gpu = environment.device == "cuda" and not interpreted()
        return first_reason(
            needs_device(environment, "cpu", "cuda"),
            needs_package("triton", "pip install triton") if on_gpu else None,
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        mask, long = workload.visible_mask, self.learned and max(workload.q_len, workload.kv_len) > LONGEST_TRAINED
        unfit = mask.weighted or mask.interval(workload.mask_shape) is None
        kinds = ("float32", "bfloat16", "float16", *(("float64",) if environment.device == "cpu" else ()))
        return first_reason(
            self.available(environment),
            None if workload.inputs == "structured" else "declares its error for structured inputs only",
            needs_forward(workload),
            f"chooses under masks of one run of keys a row, not under {mask.id}" if unfit else None,
            f"trains its gate when built, which is kept to {LONGEST_TRAINED} tokens" if long else None,
            needs_dtype(workload, *kinds),
            needs_equal_dims(workload),
            needs_head_dim(workload, 256, 8),
            needs_no_softcap(workload),
        )

    def configs(self, workload: Workload) -> Sequence[Config]:
        return [{"sparsity": sparsity, "block_size": BLOCK_SIZE} for sparsity in (SPARSITY, 0.75, 0.9)]

    def build(self, workload: Workload, config: Config) -> Call:
        call = self.build_lse(workload, config)
        return lambda q, k, v: call(q, k, v)[0]

    def build_lse(self, workload: Workload, config: Config) -> Call:
        from attnbench.kernels.block_sparse.attend import attend

        select = self._selector(workload, config)
        scale = workload.softmax_scale

        def call(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            return attend(q, k, v, select(q, k)[0], scale)

        return call

    def quality(self, workload: Workload, config: Config) -> Callable[[Array, Array, Array], dict[str, float]]:
        from attnbench.kernels.block_sparse.select import POOL
        from attnbench.masks import blocks

        select, mask, shape = self._selector(workload, config), workload.visible_mask, workload.mask_shape

        def figures(q: Array, k: Array, v: Array) -> dict[str, float]:
            tables, sparsity = select(q, k)
            computed = (mask & blocks(tables.kept, tables.block_size)).pairs(shape) / mask.pairs(shape)
            return {"sparsity": sparsity, "work": computed + 0.5 / POOL**2}  # the estimate, of QK^T alone

        return figures

    def _selector(self, workload: Workload, config: Config) -> Callable[[Array, Array], Any]:
        """`(q, k) -> (tables, sparsity)`; calibrated (and trained) at the first call on a device."""
        from attnbench.kernels.block_sparse.content import selector

        sparsity, size = float(config.get("sparsity", SPARSITY)), int(config.get("block_size", BLOCK_SIZE))
        made = once_per_device(lambda device: selector(workload, device, sparsity, size, self.learned))
        return lambda q, k: made(q.device)(q, k)


DYNAMIC = Selected(learned=False)
LEARNED = Selected(learned=True)
