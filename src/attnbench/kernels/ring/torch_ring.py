"""torch.ring: full, causal and dilated attention over a sequence that is sharded over several ranks; see docs/ring.md.

On a CPU, and if there is a GPU for each rank, ranks are processes over gloo or NCCL that this process starts and
drives; they time themselves, without the transfer of whole arrays. On fewer GPUs they are virtual.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self, TypeVar

from attnbench.errors import UsageError
from attnbench.frameworks.base import Clock, Inputs, OwnClock, Peak, Program, Programs
from attnbench.frameworks.torch.framework import TorchFramework
from attnbench.impls.conditions import first_reason, needs_device
from attnbench.kernels.ring import pool
from attnbench.kernels.ring.dilated_work import pairs_of
from attnbench.kernels.ring.messages import Inspected
from attnbench.kernels.ring.settings import (
    BY_NAME_ONLY,
    TUNABLES,
    Settings,
    balance,
    check_inner,
    needs_ring_mask,
    shard_bytes,
)
from attnbench.kernels.ring.torch_calls import STEPS, RingCall, VirtualRing
from attnbench.spec import Call, Config, Environment, Implementation, Pass, Ranks, Workload

TOGETHER = "torch's own ring does not separate computation from communication: their times cannot be told apart"
VIRTUAL = (
    "virtual ranks, one after the other on one device: compute and memory per rank are measured, communication is not"
)
Number = TypeVar("Number", int, float)


class OverRanks:
    """A call over rank processes, or over virtual ranks if there are fewer accelerators than ranks."""

    def __init__(self, processes: RingCall, virtual: VirtualRing | None = None) -> None:
        self.processes, self.virtual = processes, virtual

    def on(self, device: str) -> RingCall | VirtualRing:
        """Return the call that a device gets."""
        if self.virtual is not None and is_virtual(device, self.processes.settings.world):
            return self.virtual
        return self.processes

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self.on(q.device.type)(q, k, v)


def is_virtual(device: str, world: int) -> bool:
    """Return whether ranks are virtual: one accelerator takes one rank of a process group, so more ranks are."""
    import torch

    return device != "cpu" and torch.get_device_module(device).device_count() < world


class RingApparatus(TorchFramework):
    """TorchFramework for one cell over several ranks: clocks, memory and kernels are those of the ranks."""

    def __init__(self, world: int, can_be_virtual: bool = True) -> None:
        self._world, self._can_be_virtual = world, can_be_virtual
        self._calls: dict[int, tuple[OverRanks, Pass]] = {}
        self._seen: dict[int, list[Inspected]] = {}

    def programs(self, call: Call, pass_: Pass, example: Inputs) -> Programs:
        programs = super().programs(call, pass_, example)
        if isinstance(call, OverRanks):
            self._calls[id(programs.main)] = (call, pass_)
        return programs

    def _virtual(self, device: str) -> bool:
        return self._can_be_virtual and is_virtual(device, self._world)

    def clocks(self, device: str) -> tuple[str, ...]:
        return super().clocks(device) if self._virtual(device) else (OwnClock.name,)

    def clock(self, name: str, device: str) -> Clock:
        if self._virtual(device):
            return super().clock(name, device)
        if name != OwnClock.name:
            raise UsageError(f'ranks time themselves: there is no clock "{name}" for them, only "{OwnClock.name}".')
        return OwnClock(self, STEPS)

    def peak(self, program: Program, inputs: Inputs, device: str, temp_bytes: int | None) -> Peak:
        """Return the peak of the rank that needs the most memory."""
        facts = self._facts(program, inputs, device)
        known = [one.peak_bytes for one in facts if one.peak_bytes is not None]
        if len(known) < len(facts):
            return Peak(None, next(one.peak_reason for one in facts if one.peak_bytes is None))
        return Peak(max(known), method=f"the largest of {len(facts)} ranks; {facts[0].peak_method}")

    def kernels(self, program: Program, inputs: Inputs, device: str) -> tuple[list[str] | None, str | None]:
        if self._virtual(device):
            return super().kernels(program, inputs, device)
        facts = self._facts(program, inputs, device)
        names = [name for one in facts for name in one.kernels or ()]
        return (list(dict.fromkeys(names)), None) if names else (None, facts[0].kernels_reason)

    def ranks(self, program: Program, inputs: Inputs, device: str) -> Ranks | None:
        call, _ = self._calls[id(program)]
        one, facts = call.on(device), self._facts(program, inputs, device)
        virtual = isinstance(one, VirtualRing)
        backend = "gloo" if device == "cpu" else "nccl"
        compute = _all(fact.compute_ns for fact in facts)
        work = pairs_of(one.workload, one.problem)
        reason = VIRTUAL if virtual else TOGETHER if compute is None else None
        return Ranks(
            world=one.settings.world,
            how="virtual" if virtual else f"processes over {backend}{', by torchrun' if pool.adopted() else ''}",
            layout=one.settings.layout,
            inner=one.inner,
            devices=1 if device == "cpu" or virtual else one.settings.world,
            tokens=one.problem.q_sizes(),
            pairs=work,
            shard_bytes=shard_bytes(one.workload, one.problem),
            peak_bytes=_all(fact.peak_bytes for fact in facts),
            compute_ns=compute,
            waiting_ns=_all(fact.waiting_ns for fact in facts),
            communication_ns=_all(fact.communication_ns for fact in facts),
            balance=balance(compute or work),
            reason=reason,
        )

    def _facts(self, program: Program, inputs: Inputs, device: str) -> list[Inspected]:
        """Return the figures of each rank, measured once for each program."""
        if id(program) not in self._seen:
            call, pass_ = self._calls[id(program)]
            self._seen[id(program)] = call.on(device).inspect(inputs, pass_)
        return self._seen[id(program)]


def _all(values: Iterable[Number | None]) -> tuple[Number, ...] | None:
    """Return a figure of every rank, or None if one is missing."""
    known = tuple(values)
    return None if None in known else known  # pyright: ignore[reportReturnType]


class Ring(Implementation):
    """Sequence split over ranks, keys sent around a ring: `torch.ring[world=4,layout=striped,inner=torch.eager]`."""

    name = "torch.ring"
    framework = "torch"
    tunables = TUNABLES
    by_name_only = BY_NAME_ONLY

    def configured(self, config: Config) -> Self:
        check_inner(Settings.of(config).inner)
        return self

    def available(self, environment: Environment) -> str | None:
        return needs_device(environment, "cpu", "cuda")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(self.available(environment), needs_ring_mask(workload))

    def build(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=True)

    def apparatus(self, framework: Any, config: Config) -> Any:
        return RingApparatus(Settings.of(config).world)

    def _call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        settings = Settings.of(config)
        processes = RingCall(workload, settings, with_lse=with_lse)
        return OverRanks(processes, VirtualRing(workload, settings, with_lse))


RING = Ring()
