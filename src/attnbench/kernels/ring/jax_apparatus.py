"""How a cell over a mesh is built, timed and weighed: arrays are in place before the clock starts."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from attnbench.errors import UsageError
from attnbench.frameworks.base import OUTPUTS, Clock, Inputs, OwnClock, Peak, Program, Programs, Stopwatch
from attnbench.frameworks.jax.framework import JaxFramework, import_jax, precision_of
from attnbench.frameworks.jax.programs import Compiler
from attnbench.kernels.ring.jax_call import MeshCall
from attnbench.kernels.ring.schedule import pairs
from attnbench.kernels.ring.settings import balance, shard_bytes
from attnbench.spec import Array, Call, Pass, Ranks

ONE_PROGRAM = "XLA makes one program of computation and communication: their times cannot be told apart"


class MeshApparatus(JaxFramework):
    """JaxFramework for one cell over a mesh."""

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()
        self._calls: dict[int, MeshCall] = {}
        self._temp: dict[int, int | None] = {}

    def programs(self, call: Call, pass_: Pass, example: Inputs) -> Programs:
        if not isinstance(call, MeshCall):
            return Programs(Program(run=lambda x: (_whole(call, x),)), 0)
        with precision_of(example.q.dtype):
            placed = call.place(example)
        inner = Compiler(import_jax(), call.on(example.q).call(), placed, precision_of).programs(pass_)
        parts = {name: self._timed(call, one, name) for name, one in inner.parts.items()}
        main = self._timed(call, inner.main, pass_)
        self._calls[id(main)], self._temp[id(main)] = call, inner.temp_bytes
        return Programs(main, inner.compile_ns, parts, inner.temp_bytes)

    def _timed(self, call: MeshCall, inner: Program, pass_: Any) -> Program:
        def run(state: Any) -> tuple[Array, ...]:
            start = perf_counter_ns()
            results = inner.run(state[0])
            self.wait(results)
            self._stopwatch.ns += perf_counter_ns() - start
            return tuple(put(array) for put, array in zip(_homeward(call, state[1], pass_), results))

        def prepare(inputs: Inputs) -> Any:
            with precision_of(inputs.q.dtype):
                return inner.prepare(call.place(inputs.settled())), inputs.q

        return Program(run=run, prepare=prepare)

    def clocks(self, device: str) -> tuple[str, ...]:
        return (OwnClock.name,)

    def clock(self, name: str, device: str) -> Clock:
        if name != OwnClock.name:
            raise UsageError(f'a mesh has no clock "{name}", only "{OwnClock.name}".')
        return OwnClock(self, self._stopwatch)

    def peak(self, program: Program, inputs: Inputs, device: str, temp_bytes: int | None) -> Peak:
        if temp_bytes is None:
            return Peak(None, "the compiler did not say how much scratch memory the program needs")
        world = self._calls[id(program)].on(inputs.q).problem.world
        results = sum(leaf.nbytes for leaf in program.run(program.prepare(inputs)))
        return Peak(temp_bytes + results // world, method=f"xla compiled temp + outputs, of one of {world} devices")

    def ranks(self, program: Program, inputs: Inputs, device: str) -> Ranks | None:
        call = self._calls[id(program)]
        one = call.on(inputs.q)
        peak, work = self.peak(program, inputs, device, self._temp[id(program)]), pairs(one.problem)
        return Ranks(
            world=one.problem.world,
            how="devices of one process",
            layout=one.problem.layout,
            devices=1 if device == "cpu" else one.problem.world,
            tokens=one.problem.q_sizes(),
            pairs=work,
            shard_bytes=shard_bytes(call.workload, one.problem),
            peak_bytes=None if peak.bytes is None else (peak.bytes,) * one.problem.world,
            balance=balance(work),
            reason=ONE_PROGRAM,
        )


def _whole(call: Call, x: Inputs) -> Array:
    with precision_of(x.q.dtype):
        return call(x.q, x.k, x.v)


def _homeward(call: MeshCall, like: Array, pass_: Pass) -> list[Callable[[Array], Array]]:
    """For each result of a pass, what puts its tokens in order and on the device where the inputs were."""
    sharded, device = call.on(like), next(iter(like.devices()))

    def home(slots: Any) -> Callable[[Array], Array]:
        def put(array: Array) -> Array:
            with precision_of(array.dtype):
                return import_jax().device_put(slots.gathered(array), device)

        return put

    queries, keys = home(sharded.q_slots), home(sharded.kv_slots)
    return [keys if name in ("dk", "dv") else queries for name in OUTPUTS[pass_]]
