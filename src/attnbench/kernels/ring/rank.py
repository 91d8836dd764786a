"""`python -m attnbench.kernels.ring.rank WORLD DEVICE THREADS TIMEOUT STORE CONTROL FD...`: rank processes of a ring.

One process imports torch, forks the ranks (importing takes longer than starting) and then only waits for their ends,
which it tells line by line over the control socket. A rank serves its driver until that hangs up.
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
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from attnbench.errors import AttnBenchError
from attnbench.frameworks.base import Inputs
from attnbench.frameworks.torch.programs import kernel_names, synchronize
from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring.methods import METHODS, peak_of, program_of
from attnbench.kernels.ring.spans import Spans
from attnbench.processes import die_with_parent
from attnbench.spec import Pass

if TYPE_CHECKING:
    import torch

PRELOADED = ("torch.distributed",)
"""Modules that every rank has from its parent."""
LOOKS = 3
"""Passes that are timed in an inspection; the median is told."""
ROTATIONS: dict[Pass, tuple[bool, ...]] = {"forward": (False,), "backward": (True,), "train": (False, True)}
"""Each pass of K and V round the ring, and whether the sums of their gradients go with them."""


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
        """`store` is a file to meet at; None: by the variables that torchrun sets."""
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
        """One question, one answer with its arrays."""
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
        """Every rank does the same, so that none waits for a message that nobody sends."""
        method, inputs, kind = self._methods[question.number], Inputs(*given), self.device.type
        program = program_of(method, question.pass_)
        peak = peak_of(program, inputs, self.device)
        kernels, reason = kernel_names(program, inputs, kind)
        looks, rotations = [], []
        for _ in range(LOOKS):
            spans = Spans(kind)
            timed = program_of(method, question.pass_, spans)
            state = timed.prepare(inputs)
            self._together()
            timed.run(state)
            looks.append(spans.ns)
            start = self._together()
            apart = [method.rotate(inputs.k, inputs.v, gradients) for gradients in ROTATIONS[question.pass_]]
            rotations.append(self._now() - start if all(apart) else None)
        known = None not in rotations
        return m.Inspected(
            compute_ns=median(look["compute"] for look in looks) if known else None,
            waiting_ns=median(look["waiting"] for look in looks) if known else None,
            communication_ns=median(rotations) if known else None,
            peak_bytes=peak.bytes,
            peak_reason=peak.reason,
            peak_method=peak.method,
            kernels=kernels,
            kernels_reason=reason,
        )

    def _together(self) -> int:
        """All ranks are here and their devices idle: the time."""
        import torch.distributed as dist

        synchronize(self.device.type)
        dist.barrier()
        return time.monotonic_ns()

    def _now(self) -> int:
        synchronize(self.device.type)
        return time.monotonic_ns()


def serve(connection: Connection, start: tuple[Any, ...]) -> None:
    """Answer until the driver hangs up. What goes wrong is told; the driver decides whether the ring can go on."""
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
    """What went wrong, for the driver."""
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
        """What a driver that was killed cannot do itself."""
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
    with os.fdopen(os.dup(control), "w", buffering=1) as told:
        for rank, pid in sorted((rank, pid) for pid, rank in ranks.items()):
            told.write(f"pid {rank} {pid}\n")
        while ranks:
            pid, status = os.wait()
            told.write(f"end {ranks.pop(pid)} {os.waitstatus_to_exitcode(status)}\n")


def _become(rank: int, descriptors: list[int], start: tuple[Any, ...], control: int) -> None:
    """Never returns."""
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
