"""Rank processes of a ring: `python -m attnbench.kernels.ring.rank WORLD DEVICE THREADS TIMEOUT STORE CONTROL FD...`.

One process imports torch, forks the ranks (importing takes longer than starting) and then only waits for their ends,
which it reports line by line over the control socket. A rank serves its driver until the driver closes the connection:
it computes with a method, our ring or the one in torch, which takes shards and returns shards.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from attnbench.errors import AttnBenchError
from attnbench.frameworks.base import Inputs, Peak, Program
from attnbench.frameworks.torch.programs import accelerator_peak, cpu_peak, kernel_names, synchronize
from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring.dilated_work import pattern_of, work_of
from attnbench.kernels.ring.engine import Engine, Spans, transport_of
from attnbench.kernels.ring.torch_own import TemplatedRing
from attnbench.kernels.ring.work import Kernels
from attnbench.processes import die_with_parent
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
        """Return (out, lse) of the rank's own rows, then whatever else `backward` needs."""
        ...

    def backward(
        self, inputs: Arrays, results: Arrays, dout: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv) of the rank's own tokens."""
        ...

    def rotate(self, k: torch.Tensor, v: torch.Tensor, gradients: bool) -> bool:
        """Run the communication alone; return False if it cannot be separated from the computation."""
        ...


class Ours:
    """The engine of this package over one transport."""

    def __init__(self, engine: Engine, transport: Any) -> None:
        self.used = engine.work.kernels.used
        self._engine, self._transport = engine, transport

    @classmethod
    def open(cls, question: m.Open, rank: int, device: torch.device) -> Ours:
        """Open a problem in a rank process, over the default process group."""
        problem, kernels = question.problem, Kernels(question.shape, question.inner, device)
        work = work_of(problem, rank, kernels, pattern_of(question.shape))
        work.prepare(device)
        return cls(Engine(problem, rank, work), transport_of(problem, None))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, ...]:
        return self._engine.forward(q, k, v, self._transport, spans)

    def backward(
        self, inputs: Arrays, results: Arrays, dout: torch.Tensor, spans: Spans | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._engine.backward(inputs, results, dout, self._transport, spans)

    def rotate(self, k: torch.Tensor, v: torch.Tensor, gradients: bool) -> bool:
        self._engine.rotate(k, v, self._transport, gradients)
        return True


METHODS: dict[str, Callable[[m.Open, int, Any], Method]] = {
    "ring": Ours.open,
    "templated": TemplatedRing,
}


def program_of(method: Method, pass_: Pass, spans: Spans | None = None) -> Program:
    """Return a rank's part of a pass as a program; its time is added to the spans."""

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
    """Measure the extra memory at the peak of a rank's part."""
    if device.type == "cpu":
        return cpu_peak(program, inputs)
    return accelerator_peak(program, inputs, str(device))


PRELOADED = ("torch.distributed",)
"""Modules that the parent imports before the ranks are forked."""
TIMED_PASSES = 3
"""Passes that are timed in an inspection; the median is reported."""
ROTATIONS: dict[Pass, tuple[bool, ...]] = {"forward": (False,), "backward": (True,), "train": (False, True)}
"""Journeys of K and V round the ring in each pass: True if the sums of their gradients travel with them."""


class Rank:
    """One member of the ring."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: str,
        threads: int | None,
        timeout_s: float,
        store: str | None,
        local_rank: int | None = None,
    ) -> None:
        """Join the process group: by the file `store`, or, if that is None, by the variables that torchrun sets."""
        import torch
        import torch.distributed as dist

        if threads is not None:
            torch.set_num_threads(threads)
        place = rank if local_rank is None else local_rank
        self.device = torch.device("cpu") if device == "cpu" else torch.device(device, place)
        if device != "cpu":
            torch.get_device_module(device).set_device(self.device)
        backend = "gloo" if device == "cpu" else "nccl"
        found = None if store is None else dist.FileStore(store, world)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=found, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        self._rank, self._methods, self._kept = rank, {}, {}

    def answer(self, question: m.Question, arrays: list[torch.Tensor]) -> tuple[m.Answer, tuple[torch.Tensor, ...]]:
        """Answer one question; return the answer and its arrays."""
        given = [array.to(self.device) for array in arrays]
        if isinstance(question, m.Open):
            return self._open(question), ()
        if isinstance(question, m.Forward):
            return self._forward(question, given)
        if isinstance(question, m.Backward):
            return self._backward(question, given[0])
        if isinstance(question, m.Inspect):
            return self._inspect(question, given), ()
        for number in question.kept:
            self._kept.pop(number, None)
        return m.Ready(), ()

    def _open(self, question: m.Open) -> m.Ready:
        method = METHODS[question.method](question, self._rank, self.device)
        self._methods[question.number] = method
        return m.Ready(list(method.used))

    def _forward(self, question: m.Forward, given: list[torch.Tensor]) -> tuple[m.Answer, tuple[torch.Tensor, ...]]:
        method = self._methods[question.number]
        start = self._together()
        results = method.forward(*given)
        end = self._now()
        if question.kept >= 0:
            self._kept[question.kept] = (method, given, results)
        return m.Stepped(start, end), results[:2]

    def _backward(self, question: m.Backward, dout: torch.Tensor) -> tuple[m.Answer, tuple[torch.Tensor, ...]]:
        method, given, results = self._kept[question.kept]
        start = self._together()
        grads = method.backward(given, results, dout)
        return m.Stepped(start, self._now()), grads

    def _inspect(self, question: m.Inspect, given: list[torch.Tensor]) -> m.Inspected:
        """Measure a pass; every rank takes the same steps, so that none waits for a message that nobody sends."""
        method, inputs, kind = self._methods[question.number], Inputs(*given), self.device.type
        program = program_of(method, question.pass_)
        peak = peak_of(program, inputs, self.device)
        kernels, reason = kernel_names(program, inputs, kind)
        spent, rotations = [], []
        for _ in range(TIMED_PASSES):
            spans = Spans(kind)
            timed = program_of(method, question.pass_, spans)
            state = timed.prepare(inputs)
            self._together()
            timed.run(state)
            spent.append(spans.ns)
            start = self._together()
            apart = [method.rotate(inputs.k, inputs.v, gradients) for gradients in ROTATIONS[question.pass_]]
            rotations.append(self._now() - start if all(apart) else None)
        known = None not in rotations
        return m.Inspected(
            compute_ns=median(ns["compute"] for ns in spent) if known else None,
            waiting_ns=median(ns["waiting"] for ns in spent) if known else None,
            communication_ns=median(rotations) if known else None,
            peak_bytes=peak.bytes,
            peak_reason=peak.reason,
            peak_method=peak.method,
            kernels=kernels,
            kernels_reason=reason,
        )

    def _together(self) -> int:
        """Wait until all ranks are here and their devices idle; return the time."""
        import torch.distributed as dist

        synchronize(self.device.type)
        dist.barrier()
        return time.monotonic_ns()

    def _now(self) -> int:
        synchronize(self.device.type)
        return time.monotonic_ns()


def serve(connection: Connection, start: tuple[Any, ...]) -> None:
    """Answer until the driver closes the connection. Errors are answers too: the driver decides what follows."""
    die_with_parent(connection.fileno())
    rank: Rank | None = None
    while True:
        try:
            message, arrays = m.fetch(connection)
        except EOFError:
            return
        try:
            rank = rank or Rank(*start)
            answer, results = rank.answer(m.decode_question(message), arrays)
        except Exception as error:
            answer, results = broke(error), ()
        m.post(connection, answer, results)


def broke(error: Exception) -> m.Broke:
    """Describe an error for the driver."""
    from attnbench import frameworks

    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
    if isinstance(error, NotImplementedError | AttnBenchError):
        return m.Broke("unsupported", str(error), traceback.format_exc()[-4000:])
    kind = "out_of_memory" if frameworks.get("torch").is_out_of_memory(error) else "failed"
    return m.Broke(kind, reason, traceback.format_exc()[-4000:])


def main() -> None:
    """Fork the ranks, then report how each of them ends."""
    world, device, threads, timeout_s, store = sys.argv[1:6]
    control, *descriptors = map(int, sys.argv[6:])
    for module in PRELOADED:
        importlib.import_module(module)
    faulthandler.enable()
    ranks = {}
    for rank in range(len(descriptors)):
        pid = os.fork()
        if not pid:
            _become(rank, descriptors, (rank, int(world), device, int(threads), float(timeout_s), store), control)
        ranks[pid] = rank
    for descriptor in descriptors:
        os.close(descriptor)

    def end() -> None:
        """Kill the ranks and delete the store, which a driver that was killed cannot do itself."""
        for pid in list(ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(Path(store).parent, ignore_errors=True)

    die_with_parent(control, end)
    try:
        _report(ranks, control)
    finally:
        end()


def _report(ranks: dict[int, int], control: int) -> None:
    with os.fdopen(os.dup(control), "w", buffering=1) as lines:
        for rank, pid in sorted((rank, pid) for pid, rank in ranks.items()):
            lines.write(f"pid {rank} {pid}\n")
        while ranks:
            pid, status = os.wait()
            lines.write(f"end {ranks.pop(pid)} {os.waitstatus_to_exitcode(status)}\n")


def _become(rank: int, descriptors: list[int], start: tuple[Any, ...], control: int) -> None:
    """Serve as one rank and exit; this function never returns."""
    os.close(control)
    for other, descriptor in enumerate(descriptors):
        if other != rank:
            os.close(descriptor)
    code = 0
    try:
        serve(Connection(descriptors[rank]), start)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
