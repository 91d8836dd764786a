"""torch.block-sparse-triton: our own kernels over the kept blocks, forward and backward, for NVIDIA GPUs.

Same masks as torch.block-sparse. The lists of blocks are made at the first call on a device, which is not timed. With
TRITON_INTERPRET=1 set before Triton is first imported the kernels run in its interpreter, on a CPU too: for verifying,
never for timing. Layout is bhsd. Softmax in float32; float32 inputs are multiplied in float32, not TF32.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.frameworks.torch.plain import once_per_device
from attnbench.impls.conditions import first_reason, needs_capability, needs_device, needs_package
from attnbench.impls.torch._compile import CompiledCall
from attnbench.kernels.block_sparse.gathered import block_tables, needs_blocks
from attnbench.kernels.block_sparse.tiles import beyond_the_kernels, candidates, read_config
from attnbench.kernels.block_sparse.triton_interpreter import interpreted, mend
from attnbench.masks.cuts import split_blocks
from attnbench.spec import Call, Config, Environment, Implementation, Partial, Workload


class BlockSparseTriton(Implementation):
    """Rows and columns of kept blocks, each program owning what it writes."""

    name = "torch.block-sparse-triton"
    framework = "torch"
    lse_gradient = True
    layout = "bhsd"
    tunables = candidates(Workload(batch=1, q_len=128, heads=1, head_dim=128, dtype="bfloat16", pass_="train"))[0]

    @property
    def verify_only(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "TRITON_INTERPRET=1 runs the kernels in Triton's interpreter" if interpreted() else ""

    @property
    def expects(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return () if interpreted() else (r"block_sparse_(forward|key_gradients)",)

    def available(self, environment: Environment) -> str | None:
        missing = needs_package("triton", "pip install triton")
        if interpreted():
            return missing
        device = needs_device(environment, "cuda")
        return first_reason(
            f"{device}; TRITON_INTERPRET=1 verifies it in Triton's interpreter" if device else None,
            missing,
            needs_capability(environment, (9, 0)),  # tiles fill the shared memory of a Hopper SM
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        split = split_blocks(workload.visible_mask)
        unknown = interpreted() and workload.dtype == "bfloat16"
        return first_reason(
            self.available(environment),
            needs_blocks(workload),
            beyond_the_kernels(workload, split[0].block_size) if split is not None else None,
            "Triton's interpreter multiplies no bfloat16" if unknown else None,
        )

    def configs(self, workload: Workload) -> Sequence[Config]:
        return candidates(workload)

    def build(self, workload: Workload, config: Config) -> Call:
        call = self.build_lse(workload, config)
        return CompiledCall(lambda q, k, v: call(q, k, v)[0])

    def build_lse(self, workload: Workload, config: Config) -> Call:
        from attnbench.impls.partial.torch_autograd import differentiable

        return differentiable(self._pair(workload, config), "bhsd")

    def partial(self, workload: Workload, config: Config) -> Partial:
        from attnbench.impls.partial.torch_autograd import turned

        return turned(self._pair(workload, config))

    def _pair(self, workload: Workload, config: Config) -> Partial:
        from attnbench.kernels.block_sparse import triton_call

        if interpreted():
            mend()
        tiles, atomic = read_config(workload, config)
        plans = once_per_device(lambda device: triton_call.plan(block_tables(workload, device), workload.group))
        return triton_call.pair(plans, workload.softmax_scale, tiles, atomic)


BLOCK_SPARSE_TRITON = BlockSparseTriton()
