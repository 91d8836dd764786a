"""torch.dilated (copies each branch's tokens) and torch.dilated-improved (strided views, fused merge).

Both take one mask, `dilated`, alone or with causal and lengths: each branch is a few dense calls of another kernel of
this registry. A row that no branch holds gives 0. The LSE's gradient costs a second backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.errors import UsageError
from attnbench.impls import AlwaysLse
from attnbench.impls.conditions import first_reason, needs_no_softcap
from attnbench.kernels.dilated.pieces import Task, needs_dilated, problem_of, readable
from attnbench.spec import Array, Call, Config, Environment, Partial, Workload


class DilatedTorch(AlwaysLse):
    """Dilated attention (LongNet) in PyTorch through dense kernels, by gathered copies or by strided views."""

    framework = "torch"
    lse_gradient = True
    untested = ("rocm", "xpu", "mps")

    def __init__(self, name: str, engine: str) -> None:
        self.name, self.engine = name, engine
        way = {"gathered": "copies of each branch's tokens", "strided": "strided views and a fused merge"}[engine]
        self.description = f"Dilated attention (LongNet) in PyTorch through dense kernels, on {way}."

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(needs_dilated(workload), needs_no_softcap(workload))

    def configs(self, workload: Workload) -> Sequence[Config]:
        """List other kernels for the pieces; and, for strided views, one call for each offset instead of diagonals."""
        kernels = ({}, {"kernel": "torch.sdpa-flash"})
        return (*kernels, {"diagonal": False}) if self.engine == "strided" else kernels

    def task(self, workload: Workload, config: Config) -> Task:
        """Read the workload as a task; raise UsageError for unknown options."""
        unknown = set(config) - {"kernel", "merge", "diagonal"}
        if unknown:
            raise UsageError(
                f"{self.name} has no setting {', '.join(sorted(unknown))}; its settings are kernel, merge and diagonal."
            )
        return Task(problem_of(workload), workload.softmax_scale)._replace(**config)

    def both(self, workload: Workload, config: Config) -> Call:
        from attnbench.kernels.dilated.torch_engines import dilated

        task = self.task(workload, config)
        return lambda q, k, v: dilated(q, k, v, self.engine, task)

    def partial(self, workload: Workload, config: Config) -> Partial:
        """Return (forward, backward) of the pattern over a part of the keys, which is again part of a whole."""
        import torch

        from attnbench.kernels.dilated.torch_engines import ENGINES

        task, engine = self.task(workload, config), ENGINES[self.engine]

        @torch.no_grad()
        def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse, _ = engine.forward(task, readable(q), readable(k), readable(v), False)
            return out, lse.transpose(1, 2)

        @torch.no_grad()
        def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
            whole, rows, cotangent = out.to(q.dtype).contiguous(), lse.transpose(1, 2).contiguous(), dout.contiguous()
            return engine.backward(task, readable(q), readable(k), readable(v), whole, rows, cotangent, ())

        return forward, backward


GATHERED = DilatedTorch("torch.dilated", "gathered")
STRIDED = DilatedTorch("torch.dilated-improved", "strided")
