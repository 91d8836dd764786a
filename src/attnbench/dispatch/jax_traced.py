"""`ab.attention` on traced JAX arrays: the forward pass's choice, or training's where the call is differentiated.

A trace does not say whether gradients will be asked, so the question is left to JAX: the call is a `custom_jvp`
function, whose rule JAX uses wherever it differentiates in either mode, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from attnbench.dispatch.choice import Decision, decide
from attnbench.dispatch.misses import report
from attnbench.dispatch.order import Demand
from attnbench.dispatch.plan import Plan, Words, built, bytes_kept, demand_of
from attnbench.errors import Unsupported
from attnbench.spec import Array


def planned(q: Array, k: Array, v: Array, words: Words) -> Plan:
    """What a traced call runs; each of the two is built when JAX comes to it."""
    demands = [demand_of(q, k, v, words, train) for train in (False, True)]
    settle = choices(words.impl, *demands)

    def call(train: bool) -> Callable[..., Any]:
        decision, demand = settle(train)
        try:
            pick = decision.taken(words.impl, demand)
        except Unsupported:
            if train or words.impl == "auto":
                raise
            decision, demand = settle(True)  # one for training alone: `grad(jit(f))` traces the forward pass first
            pick = decision.taken(words.impl, demand)
        return built(pick, decision, demand, words.layout)

    return Plan(by_pass(call), bytes_kept(demands[1]))


def choices(impl: str, forward: Demand, training: Demand) -> Callable[[bool], tuple[Decision, Demand]]:
    """Both choices, made now, by the policies in force; a miss is told when one is used.

    Where a policy speaks for training alone, the forward pass takes that choice too: `grad(jit(f))` traces it first.
    """
    demands = (forward, training)
    found = [decide(impl, demand) for demand in demands]
    first = found[0].evidence is None and found[1].evidence is not None

    def settle(train: bool) -> tuple[Decision, Demand]:
        at = train or first
        if impl == "auto":
            report(found[at], demands[at])
        return found[at], demands[at]

    return settle


def by_pass(make: Callable[[bool], Callable[..., Any]]) -> Callable[..., Any]:
    """A function of arrays that runs `make(False)`, and `make(True)` where it is differentiated; None is no array."""
    import jax
    from jax.custom_derivatives import SymbolicZero

    calls = lru_cache(make)

    @jax.custom_jvp
    def run(*arrays: Any) -> Any:
        return calls(False)(*arrays)

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        still = (type(None), SymbolicZero)
        moved = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, still)]

        def of_moved(*some: Any) -> Any:
            arrays = list(primals)
            for at, array in zip(moved, some):
                arrays[at] = array
            return calls(True)(*arrays)

        return jax.jvp(of_moved, tuple(primals[at] for at in moved), tuple(tangents[at] for at in moved))

    run.defjvp(rule, symbolic_zeros=True)
    return run
