"""What a rank process can be asked to compute: our ring, or the one in torch. Each takes shards and returns shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attnbench.frameworks.base import Inputs, Peak, Program
from attnbench.frameworks.torch.programs import accelerator_peak, cpu_peak
from attnbench.kernels.ring.engine import Engine
from attnbench.kernels.ring.kernels import Kernels
from attnbench.kernels.ring.messages import Open
from attnbench.kernels.ring.spans import Spans
from attnbench.kernels.ring.torch_own_methods import ContextParallel, Templated
from attnbench.kernels.ring.transport import GroupTransport
from attnbench.kernels.ring.works import work_of
from attnbench.spec import Pass

if TYPE_CHECKING:
    import torch

Arrays = Sequence["torch.Tensor"]


class Method(Protocol):
    """One way to attend over a sharded sequence, as a rank sees it."""

    @property
    def used(self) -> Iterable[str]:
        """Names of the kernels."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, ...]:
        """(out, lse) of the rank's own rows, and what else its backward wants."""
        ...

    def backward(
        self, inputs: Arrays, results: Arrays, dout: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of the rank's own tokens."""
        ...

    def rotate(self, k: torch.Tensor, v: torch.Tensor, gradients: bool) -> bool:
        """The communication alone; False where it cannot be had by itself (nor the computation)."""
        ...


class Ours:
    """The engine of this package over one transport."""

    def __init__(self, engine: Engine, transport: Any) -> None:
        self.used = engine.work.kernels.used
        self._engine, self._transport = engine, transport

    @classmethod
    def open(cls, question: Open, rank: int, device: torch.device) -> Ours:
        """In a rank process."""
        work = work_of(question.shape, question.problem, rank, Kernels(question.shape, question.inner, device))
        work.prepare(device)
        transport = GroupTransport(None) if question.problem.world > 1 else None
        return cls(Engine(question.problem, rank, work), transport)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Through the engine."""
        return self._engine.forward(q, k, v, self._transport, spans)

    def backward(
        self, inputs: Arrays, results: Arrays, dout: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Through the engine."""
        return self._engine.backward(inputs, results, dout, self._transport, spans)

    def rotate(self, k: torch.Tensor, v: torch.Tensor, gradients: bool) -> bool:
        """Through the engine."""
        self._engine.rotate(k, v, self._transport, gradients)
        return True


METHODS: dict[str, Callable[[Open, int, Any], Method]] = {
    "ring": Ours.open,
    "templated": Templated,
    "context-parallel": ContextParallel,
}


def program_of(method: Method, pass_: Pass, spans: Spans | None = None) -> Program:
    """A rank's part of a pass, its time sorted into spans."""

    def ahead(x: Inputs, spans: Spans | None = None) -> Any:
        return x, method.forward(x.q, x.k, x.v, spans)

    def back(state: Any) -> tuple[torch.Tensor, ...]:
        x, results = state
        return method.backward((x.q, x.k, x.v), results, x.dout, spans)

    if pass_ == "forward":
        return Program(run=lambda x: ahead(x, spans)[1])
    if pass_ == "backward":
        return Program(run=back, prepare=ahead)
    return Program(run=lambda x: back(ahead(x, spans)))


def peak_of(program: Program, inputs: Inputs, device: torch.device) -> Peak:
    """Extra memory of a rank's part."""
    if device.type == "cpu":
        return cpu_peak(program, inputs)
    return accelerator_peak(program, inputs, str(device))
