"""Messages between the driver of a ring and its rank processes: a message, then the arrays that it announces.

This module imports torch.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from attnbench.kernels.ring.schedule import RingProblem
from attnbench.spec import Pass, Workload


class OpenProblem(Struct, tag="open"):
    """Plan a problem and choose its kernels; later messages refer to it by the number."""

    number: int
    problem: RingProblem
    shape: Workload
    inner: str
    method: str = "ring"


class Forward(Struct, tag="forward"):
    """Compute; q, k, v follow. `kept` is the number under which the state is kept for a backward pass, or -1."""

    number: int
    kept: int = -1


class Backward(Struct, tag="backward"):
    """Compute gradients from a kept state; dout follows."""

    kept: int


class Forget(Struct, tag="forget"):
    """Drop kept states that no backward pass will need."""

    kept: list[int]


class Inspect(Struct, tag="inspect"):
    """Measure memory, kernels, and the times of computation and communication; q, k, v and dout follow."""

    number: int
    pass_: Pass


Question = OpenProblem | Forward | Backward | Forget | Inspect


class Ready(Struct, tag="ready"):
    """Done; `inner` names the kernels that were chosen."""

    inner: list[str] = []


class Stepped(Struct, tag="stepped"):
    """Computed between these times of the machine's monotonic clock; results follow."""

    start_ns: int
    end_ns: int


class Inspected(Struct, tag="inspected", kw_only=True):
    """Figures of one rank; None if they could not be measured."""

    compute_ns: float | None
    waiting_ns: float | None = None
    communication_ns: float | None = None
    peak_bytes: int | None
    peak_reason: str | None
    peak_method: str
    kernels: list[str] | None = None
    kernels_reason: str | None = None


class Broke(Struct, tag="broke"):
    """The rank raised; `kind` is "unsupported", "out_of_memory" or "failed"."""

    kind: str
    reason: str
    detail: str = ""


Answer = Ready | Stepped | Inspected | Broke


class Envelope(Struct):
    """A message and the dtypes and shapes of the arrays that follow it."""

    message: Question | Answer
    arrays: list[tuple[str, tuple[int, ...]]]


_decode = msgspec.msgpack.Decoder(Envelope).decode


def post(connection: Connection, message: Question | Answer, arrays: tuple[Tensor, ...] = ()) -> None:
    """Send a message and its arrays, from any device."""
    plain = [array.detach().cpu().contiguous() for array in arrays]
    forms = [(str(array.dtype).rpartition(".")[2], tuple(array.shape)) for array in plain]
    connection.send_bytes(msgspec.msgpack.encode(Envelope(message, forms)))
    for array in plain:
        if array.numel():
            connection.send_bytes(array.view(-1).view(torch.uint8).numpy().data)


def fetch(connection: Connection) -> tuple[Any, list[Tensor]]:
    """Receive the next message, and its arrays on the CPU."""
    envelope = _decode(connection.recv_bytes())
    arrays = []
    for dtype, shape in envelope.arrays:
        array = torch.empty(shape, dtype=getattr(torch, dtype))
        if array.numel():
            connection.recv_bytes_into(array.view(-1).view(torch.uint8).numpy())
        arrays.append(array)
    return envelope.message, arrays
