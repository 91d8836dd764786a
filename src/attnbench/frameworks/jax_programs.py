"""A call -> compiled JAX programs for each pass. Whatever the call captured is handed over as an argument too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
        start = time.perf_counter_ns()
        with self._in_precision():
            closed = jax.make_jaxpr(call)(*example[:3])
        if len(closed.out_avals) != 1:
            raise UsageError(f"the call must return one array, the output; it returned {len(closed.out_avals)}.")
        # An array captured by closure would be folded at compile time, leaving nothing to time.
        self._captured = jax.device_put(list(closed.consts), next(iter(example.q.devices())))
        self._function = lambda captured, *qkv: jax.core.eval_jaxpr(closed.jaxpr, captured, *qkv)[0]
        self._compile_ns += time.perf_counter_ns() - start

    def programs(self, pass_: Pass) -> Programs:
        """The main program of the pass, and for train its two halves."""
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
        return Program(run=lambda x: tuple(compiled(self._captured, *x))), _temp_bytes(compiled)

    def _halves(self) -> tuple[Program, Program, int | None]:
        """Forward that keeps what backward needs, and backward from what was kept (a pytree, so it crosses jit)."""

        def keep(captured: Any, q: Array, k: Array, v: Array) -> Any:
            return self._jax.vjp(lambda *qkv: self._function(captured, *qkv), q, k, v)

        forward = self._compile(keep, self._captured, *self._example[:3])
        _, kept = forward.out_info
        backward = self._compile(lambda pull_back, dout: pull_back(dout), kept, self._example.dout)

        def prepare(x: Inputs) -> tuple[Any, Array]:
            return forward(self._captured, x.q, x.k, x.v)[1], x.dout

        return (
            Program(run=lambda x: (forward(self._captured, x.q, x.k, x.v)[0],)),
            Program(run=lambda state: tuple(backward(*state)), prepare=prepare),
            _temp_bytes(backward),
        )

    def _compile(self, function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter_ns()
        with self._in_precision(), _no_persistent_cache(self._jax):
            compiled = self._jax.jit(function).trace(*arguments).lower().compile()
        self._compile_ns += time.perf_counter_ns() - start
        return compiled


def _temp_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


@contextmanager
def _no_persistent_cache(jax: Any) -> Iterator[None]:
    """A compile time read back from disk is none. JAX asks only once whether there is a cache: make it ask again."""
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
