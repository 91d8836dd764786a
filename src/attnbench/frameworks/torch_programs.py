"""A call `(q, k, v) -> out` becomes the Programs of a pass: forward without a graph, backward alone, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from attnbench.frameworks.base import Inputs, Program, Programs
from attnbench.spec import Array, Call, Pass


@dataclass(frozen=True)
class ReplayableProgram(Program):
    """A Program whose `run` frees what it reads (a graph's saved tensors); `rerun` keeps it, for CUDA-graph capture."""

    rerun: Callable[[Any], tuple[Array, ...]] | None = None


def owned(value: Any) -> bool:
    """A plain, concrete tensor: no subclass (fake, lazy, functional), no meta device."""
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"


def make_programs(call: Call, pass_: Pass, example: Inputs) -> Programs:
    """`compile_ns` is the time of the first calls for a call that compiles, and 0 for an eager one."""
    output = _checked(call)
    forward = Program(run=lambda state: (output(*state),), prepare=_leaves)
    backward = ReplayableProgram(
        run=lambda state: _gradients(*state),
        # dO is made last, so that no work on it can be done in the forward pass, which is not timed.
        prepare=lambda inputs: (output(*(leaves := _leaves(inputs))), leaves, inputs.cotangent()),
        rerun=lambda state: _gradients(*state, keep=True),
    )
    if pass_ == "forward":
        main, parts = Program(run=_without_graph(output)), {}
    elif pass_ == "backward":
        main, parts = backward, {}
    else:
        main, parts = _train(output), {"forward": forward, "backward": backward}
    return Programs(main, _first_calls_ns(call, (main, *parts.values()), example), parts)


def _checked(call: Call) -> Call:
    def output(q: Array, k: Array, v: Array) -> Array:
        out = call(q, k, v)
        if not owned(out):
            raise TypeError(_not_owned(out))
        return out

    return output


def _not_owned(out: Any) -> str:
    import torch

    if not isinstance(out, torch.Tensor):
        return f"the call returned {type(out).__name__}, not a torch.Tensor: return the output alone."
    if out.device.type == "meta":
        return "the call returned a tensor of the meta device, which holds no values: return the computed output."
    return f"the call returned {type(out).__name__}, not a plain torch.Tensor: return one that holds its values itself."


def _without_graph(output: Call) -> Callable[[Inputs], tuple[Array, ...]]:
    import torch

    def run(inputs: Inputs) -> tuple[Array, ...]:
        with torch.no_grad():
            return (output(inputs.q, inputs.k, inputs.v),)

    return run


def _leaves(inputs: Inputs) -> tuple[Array, Array, Array]:
    q, k, v = (array.detach().requires_grad_() for array in (inputs.q, inputs.k, inputs.v))
    return q, k, v


def _gradients(out: Array, leaves: tuple[Array, ...], dout: Array, keep: bool = False) -> tuple[Array, ...]:
    import torch

    return torch.autograd.grad(out, leaves, dout, retain_graph=keep)


def _train(output: Call) -> Program:
    def run(state: tuple[tuple[Array, ...], Array]) -> tuple[Array, ...]:
        leaves, dout = state
        out = output(*leaves)
        return (out, *_gradients(out, leaves, dout))

    return Program(run=run, prepare=lambda inputs: (_leaves(inputs), inputs.cotangent()))


def _first_calls_ns(call: Call, programs: tuple[Program, ...], example: Inputs) -> int:
    if not getattr(call, "compiles", False):
        return 0
    start = perf_counter_ns()
    for program in programs:
        program.run(program.prepare(example))
    return perf_counter_ns() - start
