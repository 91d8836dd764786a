"""Rank processes of a ring: `python -m attnbench.kernels.ring.rank WORLD DEVICE THREADS TIMEOUT STORE CONTROL FD...`.

One process imports torch, forks the ranks (importing takes longer than starting) and then only waits for their ends,
which it reports line by line over the control socket. A rank serves its driver until the driver closes the connection:
it computes with a method, our ring or the one in torch, which takes shards and returns shards. Imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnbench.errors import AttnBenchError
from attnbench.frameworks.base import Inputs, Program
from attnbench.frameworks.torch.framework import FRAMEWORK
from attnbench.frameworks.torch.programs import synchronize
from attnbench.kernels.ring import messages as m
from attnbench.kernels.ring.engine import RingEngine, Spans, transport_of
from attnbench.kernels.ring.work import Grads, TileKernels, pattern_of, work_of
from attnbench.processes import die_with_parent
from attnbench.spec import Pass

TIMED_PASSES = 3
"""Passes that are timed in an inspection; the median is reported."""
ROTATIONS: dict[Pass, tuple[bool, ...]] = {"forward": (False,), "backward": (True,), "train": (False, True)}
"""Rounds of K and V in each pass: True if the sums of their gradients travel with them."""
Arrays = Sequence[Tensor]


class OwnRing:
    """The engine of this package over one transport."""

    def __init__(self, engine: RingEngine, transport: Any) -> None:
        self.used = engine.work.kernels.used
        """Names of the kernels."""
        self._engine, self._transport = engine, transport

    @classmethod
    def open(cls, question: m.OpenProblem, rank: int, device: torch.device) -> OwnRing:
        """Open a problem in a rank process, over the default process group."""
        problem, kernels = question.problem, TileKernels(question.shape, question.inner, device)
        work = work_of(problem, rank, kernels, pattern_of(question.shape))
        work.prepare()
        return cls(RingEngine(problem, rank, work), transport_of(problem, None))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans | None = None) -> tuple[Tensor, ...]:
        """Return (out, lse) of the rank's own rows, then whatever else `backward` needs."""
        return self._engine.forward(q, k, v, self._transport, spans)

    def backward(self, inputs: Arrays, results: Arrays, dout: Tensor, spans: Spans | None = None) -> Grads:
        return self._engine.backward(inputs, results, dout, self._transport, spans)

    def rotate(self, k: Tensor, v: Tensor, gradients: bool) -> bool:
        """Run the communication alone; return False if it cannot be separated from the computation."""
        self._engine.rotate(k, v, self._transport, gradients)
        return True


class TemplatedRing:
    """The ring inside torch's own context parallelism, over gloo and the CPU's flash operators, bhsd inside.

    It calls torch's private function, since the public `context_parallel` has CUDA kernels only.
    """

    used = ("_templated_ring_attention",)

    def __init__(self, question: m.OpenProblem, rank: int, device: torch.device) -> None:
        self._causal, self._scale = question.problem.causal, question.shape.softmax_scale
        self._balance = question.problem.layout == "zigzag"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans | None = None) -> tuple[Tensor, ...]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with torch.no_grad(), _template(self._balance) as template:
            out, lse, *_ = template._templated_ring_attention(
                dist.group.WORLD, 2, op, *_swap(q, k, v), is_causal=self._causal, scale=self._scale
            )
        return out.transpose(1, 2).contiguous().to(q.dtype), lse.squeeze(-1).contiguous()

    def backward(
        self, inputs: Any, results: Any, dout: Tensor, spans: Spans | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

        def op(query: Any, key: Any, value: Any, **given: Any) -> Any:
            whole = given["grad_out"], query, key, value, given["out"], given["logsumexp"], 0.0, given["is_causal"]
            return operator(*whole, attn_mask=None, scale=self._scale)

        out, lse, *_ = results
        arrays = dict(zip(("query", "key", "value", "out", "grad_out"), _swap(*inputs, out, dout)))
        with torch.no_grad(), _template(self._balance) as template:
            dq, dk, dv, *_ = template._templated_ring_attention_backward(
                dist.group.WORLD, 2, op, grad_out_name="grad_out", **arrays, logsumexp=lse, is_causal=self._causal
            )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def rotate(self, k: Tensor, v: Tensor, gradients: bool) -> bool:
        """Return False: torch does not separate its communication from its computation."""
        return False


def _swap(*arrays: Tensor) -> list[Tensor]:
    return [array.transpose(1, 2).contiguous() for array in arrays]


@contextlib.contextmanager
def _template(balanced: bool) -> Iterator[Any]:
    """Yield torch's private module with its global load-balancing option set; restore the option afterwards."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    before, options.enable_load_balance = options.enable_load_balance, balanced
    try:
        yield _attention
    finally:
        options.enable_load_balance = before


Method = OwnRing | TemplatedRing


def program_of(method: Method, pass_: Pass, spans: Spans | None = None) -> Program:
    """Return a rank's part of a pass as a program; its time is added to the spans."""

    def ahead(x: Inputs, spans: Spans | None = None) -> Any:
        return x, method.forward(x.q, x.k, x.v, spans)

    def back(state: Any) -> tuple[Tensor, ...]:
        x, results = state
        return method.backward((x.q, x.k, x.v), results, x.dout, spans)

    if pass_ == "forward":
        return Program(run=lambda x: ahead(x, spans)[1])
    if pass_ == "backward":
        return Program(run=back, prepare=ahead)
    return Program(run=lambda x: back(ahead(x, spans)))


class Rank:
    """One member of the ring."""

    def __init__(
        self, rank: int, world: int, device: str, threads: int | None, timeout_s: float, store: str | None,
        local_rank: int | None = None,
    ) -> None:  # fmt: skip
        """Join the process group: by the file `store`, or, if that is None, by the variables that torchrun sets."""
        if threads is not None:
            torch.set_num_threads(threads)
        place = rank if local_rank is None else local_rank
        self.device = torch.device("cpu") if device == "cpu" else torch.device(device, place)
        if device != "cpu":
            torch.get_device_module(device).set_device(self.device)
        backend = "gloo" if device == "cpu" else "nccl"
        file = None if store is None else dist.FileStore(store, world)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=file, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        self._rank, self._methods, self._kept = rank, {}, {}

    def answer(self, question: m.Question, arrays: list[Tensor]) -> tuple[m.Answer, tuple[Tensor, ...]]:
        given = [array.to(self.device) for array in arrays]
        if isinstance(question, m.OpenProblem):
            open_method = TemplatedRing if question.method == "templated" else OwnRing.open
            method = self._methods[question.number] = open_method(question, self._rank, self.device)
            return m.Ready(list(method.used)), ()
        if isinstance(question, m.Forward):
            method = self._methods[question.number]
            start = self._together()
            results = method.forward(*given)
            end = self._now()
            if question.kept >= 0:
                self._kept[question.kept] = (method, given, results)
            return m.Stepped(start, end), results[:2]
        if isinstance(question, m.Backward):
            method, inputs, results = self._kept[question.kept]
            start = self._together()
            grads = method.backward(inputs, results, given[0])
            return m.Stepped(start, self._now()), grads
        if isinstance(question, m.Inspect):
            return self._inspect(question, given), ()
        for number in question.kept:
            self._kept.pop(number, None)
        return m.Ready(), ()

    def _inspect(self, question: m.Inspect, given: list[Tensor]) -> m.Inspected:
        """Measure a pass; every rank takes the same steps, so that none waits for a message that nobody sends."""
        method, inputs, kind = self._methods[question.number], Inputs(*given), self.device.type
        program = program_of(method, question.pass_)
        peak = FRAMEWORK.peak(program, inputs, kind, None)
        kernels, reason = FRAMEWORK.kernels(program, inputs, kind)
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
            question, arrays = m.fetch(connection)
        except EOFError:
            return
        try:
            rank = rank or Rank(*start)
            answer, results = rank.answer(question, arrays)
        except Exception as error:
            answer, results = broke(error), ()
        m.post(connection, answer, results)


def broke(error: Exception) -> m.Broke:
    """Describe an error for the driver."""
    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
    if isinstance(error, NotImplementedError | AttnBenchError):
        return m.Broke("unsupported", str(error), traceback.format_exc()[-4000:])
    kind = "out_of_memory" if FRAMEWORK.is_out_of_memory(error) else "failed"
    return m.Broke(kind, reason, traceback.format_exc()[-4000:])


def main() -> None:
    """Fork the ranks, then report how each of them ends."""
    world, device, threads, timeout_s, store = sys.argv[1:6]
    control, *descriptors = map(int, sys.argv[6:])
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
        with os.fdopen(os.dup(control), "w", buffering=1) as lines:
            for rank, pid in sorted((rank, pid) for pid, rank in ranks.items()):
                lines.write(f"pid {rank} {pid}\n")
            while ranks:
                pid, status = os.wait()
                lines.write(f"end {ranks.pop(pid)} {os.waitstatus_to_exitcode(status)}\n")
    finally:
        end()


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
