"""How a cell over several ranks is built, timed and weighed: torch as ever, but the ranks speak for themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from attnbench.errors import UsageError
from attnbench.frameworks.base import Clock, Inputs, OwnClock, Peak, Program, Programs
from attnbench.frameworks.torch.framework import TorchFramework
from attnbench.kernels.ring import pool
from attnbench.kernels.ring.call import STEPS, RingCall
from attnbench.kernels.ring.messages import Inspected
from attnbench.kernels.ring.settings import balance, shard_bytes
from attnbench.kernels.ring.virtual import VirtualRing
from attnbench.kernels.ring.works import pairs_of
from attnbench.spec import Call, Pass, Ranks

TOGETHER = "torch's own ring does not part computation from communication: their times cannot be told apart"
VIRTUAL = (
    "virtual ranks, one after the other on one device: compute and memory per rank are measured, communication is not"
)


Number = TypeVar("Number", int, float)


class OverRanks:
    """A call over rank processes, or over virtual ones where one device has to do for all."""

    def __init__(self, processes: RingCall, virtual: VirtualRing | None = None) -> None:
        self.processes, self.virtual = processes, virtual

    def on(self, device: str) -> RingCall | VirtualRing:
        """Which of them a device gets."""
        if self.virtual is not None and is_virtual(device, self.processes.settings.world):
            return self.virtual
        return self.processes

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self.on(q.device.type)(q, k, v)


def is_virtual(device: str, world: int) -> bool:
    """One accelerator takes one rank of a process group, so more ranks than accelerators are virtual."""
    import torch

    return device != "cpu" and torch.get_device_module(device).device_count() < world


class RingApparatus(TorchFramework):
    """TorchFramework for one ring cell."""

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
        """Of the rank that needs the most."""
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
        """Asked once for each program."""
        if id(program) not in self._seen:
            call, pass_ = self._calls[id(program)]
            one = call.on(device)
            if isinstance(one, VirtualRing):
                self._seen[id(program)] = [_virtual(one, inputs, pass_, n) for n in range(one.settings.world)]
            else:
                self._seen[id(program)] = one.inspect(inputs, pass_)
        return self._seen[id(program)]


def _all(values: Iterable[Number | None]) -> tuple[Number, ...] | None:
    """A figure of every rank, or none."""
    known = tuple(values)
    return None if None in known else known  # pyright: ignore[reportReturnType]


def _virtual(ring: VirtualRing, inputs: Inputs, pass_: Pass, rank: int) -> Inspected:
    peak, compute_ns = ring.weigh(inputs, pass_, rank)
    return Inspected(
        compute_ns=compute_ns,
        waiting_ns=None,
        communication_ns=None,
        peak_bytes=peak.bytes,
        peak_reason=peak.reason,
        peak_method=peak.method,
        kernels=None,
        kernels_reason=None,
    )
