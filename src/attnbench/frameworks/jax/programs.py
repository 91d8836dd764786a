"""Compiled JAX programs of each pass of a call. Whatever the call captured is handed over as an argument too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns
from typing import Any

from attnbench.errors import UsageError
from attnbench.frameworks.base import Inputs, Program, Programs
from attnbench.spec import Array, Call, Pass

Precision = Callable[[Any], AbstractContextManager[None]]


class Compiler:
    """One call at one shape. Compiled objects reject any other shape, so nothing can be compiled again while timed."""

    def __init__(self, jax: Any, call: Call, example: Inputs, precision: Precision) -> None:
        self._jax = jax
        self._example = example
        self._in_precision = lambda: precision(example.q.dtype)
        self._compile_ns = 0
        start = perf_counter_ns()
        with self._in_precision():
            closed = jax.make_jaxpr(call)(*example[:3])
        if len(closed.out_avals) != 1:
            raise UsageError(f"the call must return one array, the output; it returned {len(closed.out_avals)}.")
        # An array captured by closure would be folded at compile time, leaving nothing to time.
        self._captured = jax.device_put(list(closed.consts), next(iter(example.q.devices())))
        self._function = lambda captured, *qkv: jax.core.eval_jaxpr(closed.jaxpr, captured, *qkv)[0]
        self._compile_ns += perf_counter_ns() - start

    def programs(self, pass_: Pass) -> Programs:
        """Return the main program of the pass, and for train its two halves."""
        if pass_ == "forward":
            main, temp = self._forward()
            return Programs(main, self._compile_ns, temp_bytes=temp)
        if pass_ == "backward":
            _, main, temp = self._halves()
            return Programs(main, self._compile_ns, temp_bytes=temp)
        main, temp = self._train()
        compile_ns = self._compile_ns
        forward, backward, _ = self._halves()
        return Programs(main, compile_ns, {"forward": forward, "backward": backward}, temp)

    def _forward(self) -> tuple[Program, int | None]:
        compiled = self._compile(self._function, self._captured, *self._example[:3])
        return Program(run=lambda x: (compiled(self._captured, x.q, x.k, x.v),)), _temp_bytes(compiled)

    def _train(self) -> tuple[Program, int | None]:
        def both(captured: Any, q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
            out, pull_back = self._jax.vjp(lambda *qkv: self._function(captured, *qkv), q, k, v)
            return (out, *pull_back(dout))

        compiled = self._compile(both, self._captured, *self._example)
        main = Program(run=lambda x: tuple(compiled(self._captured, *x)), prepare=Inputs.settled)
        return main, _temp_bytes(compiled)

    def _halves(self) -> tuple[Program, Program, int | None]:
        """Forward that keeps what backward needs, and backward from what was kept (a pytree, so it crosses jit)."""

        def keep(captured: Any, q: Array, k: Array, v: Array) -> Any:
            return self._jax.vjp(lambda *qkv: self._function(captured, *qkv), q, k, v)

        forward, (_, kept) = self._without_copies(keep, self._captured, *self._example[:3])
        backward = self._compile(lambda pull_back, dout: pull_back(dout), kept, self._example.dout)

        def prepare(x: Inputs) -> tuple[Any, Array]:
            # dO is made last, so that no work on it can be done in the forward pass, which is not timed.
            return forward(self._captured, x.q, x.k, x.v)[1], x.cotangent()

        return (
            Program(run=lambda x: (forward(self._captured, x.q, x.k, x.v)[0],)),
            Program(run=lambda state: tuple(backward(*state)), prepare=prepare),
            _temp_bytes(backward),
        )

    def _without_copies(self, function: Callable[..., Any], *arguments: Any) -> tuple[Callable[..., Any], Any]:
        """Return a compiled function and the shapes of its results, without copies of inputs that it returns.

        XLA would copy an output that is an input (Q, K and V, kept for the backward pass), and the copy would be timed;
        so it is handed through outside.
        """
        tree = self._jax.tree_util
        with self._in_precision():
            traced = self._jax.jit(function).trace(*arguments)
        jaxpr, constants = traced.jaxpr.jaxpr, traced.jaxpr.consts
        place = {id(variable): n for n, variable in enumerate(jaxpr.invars)}
        through = {n: place[id(v)] for n, v in enumerate(jaxpr.outvars) if id(v) in place}
        made = [n for n in range(len(jaxpr.outvars)) if n not in through]
        shapes, structure = tree.tree_flatten(traced.out_info)

        def compute(*flat: Array) -> list[Array]:
            results = self._jax.core.eval_jaxpr(jaxpr, constants, *flat)
            return [results[n] for n in made]

        compiled = self._compile(compute, *tree.tree_leaves(arguments))

        def run(*given: Any) -> Any:
            flat = tree.tree_leaves(given)
            results = dict(zip(made, compiled(*flat))) | {n: flat[m] for n, m in through.items()}
            return tree.tree_unflatten(structure, [results[n] for n in range(len(shapes))])

        return run, traced.out_info

    def _compile(self, function: Callable[..., Any], *arguments: Any) -> Any:
        start = perf_counter_ns()
        with self._in_precision(), _no_persistent_cache(self._jax):
            compiled = self._jax.jit(function).trace(*arguments).lower().compile()
        self._compile_ns += perf_counter_ns() - start
        return compiled


def compile_step(jax: Any, function: Callable[[Any], tuple[Array, ...]], state: Any) -> Programs:
    """Compile a function from a pytree of arrays to a tuple of arrays, for these shapes."""
    start = perf_counter_ns()
    with _no_persistent_cache(jax):
        compiled = jax.jit(function).trace(state).lower().compile()
    spent = perf_counter_ns() - start
    return Programs(Program(run=lambda given: tuple(compiled(given))), spent, temp_bytes=_temp_bytes(compiled))


def _temp_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


@contextmanager
def _no_persistent_cache(jax: Any) -> Iterator[None]:
    """Disable JAX's persistent cache, since a compile time read back from disk is none.

    JAX asks only once whether there is a cache, so it is made to ask again.
    """
    if not jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        yield
        return
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
