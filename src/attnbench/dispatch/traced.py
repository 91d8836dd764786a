"""`ab.attention` inside torch.compile: one graph, no break.

Dynamo follows `attention` here and sees plain values only. The choice is made from the shapes while it traces, by a
function that it calls and does not follow; then it looks into the call that was built, or, where the implementation
is not `traceable`, writes one operator into the graph. Where a size is dynamic nothing can be chosen yet: the graph
gets an operator that chooses when it runs, unless a named implementation could not be trained that way.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from attnbench import registry
from attnbench.dispatch.choice import Decision
from attnbench.dispatch.order import Demand
from attnbench.dispatch.plan import Words, built, chosen, demand_of, next_choice
from attnbench.errors import Unsupported
from attnbench.masks.combine import literal, mask_of
from attnbench.spec import Array, Call, Implementation, Workload
from attnbench.tracing import constant_when_traced


class Outline(NamedTuple):
    """As much of a tensor as a choice depends on."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Any,
    scale: float | None,
    softcap: float | None,
    impl: str,
    layout: str,
    heads: int | tuple[int, int] | None,
    return_lse: bool,
) -> Any:
    """The same as `attnbench.attention`."""
    import torch
    from torch.fx.experimental.symbolic_shapes import has_static_value

    train = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    words = specialised((literal(mask), scale, softcap, impl, layout, heads, return_lse))
    known = all(has_static_value(size) for x in (q, k, v) for size in x.shape)
    if known or (train and must_be_looked_into(impl)):
        outlines = tuple([(specialised(tuple(x.shape)), x.dtype, x.device) for x in (q, k, v)])
        name = chosen_now(outlines, train, *words)
    else:
        name = chosen_when_run(train, *words)
    return getattr(CALLS, name)(q, k, v)


def specialised(value: Any) -> Any:
    """The same with plain numbers, which dynamo guards on, for those that it made symbols of."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    if isinstance(value, tuple):
        return tuple([specialised(one) for one in value])
    return guard_scalar(value) if isinstance(value, (int, float)) else value


class Calls:
    """What traced code runs, by attribute: what dynamo finds at a place of its own it can look into and guard.

    Nothing is ever dropped: compiled code is guarded by what it found here, holds no reference to it, and tells nobody
    when it is thrown away. So it grows by one entry for each call that differs in what a choice depends on
    (shapes, dtypes, device, gradients, words, mask, pick), and by none for a call that is traced again.
    """

    def keep(self, call: Call, *what: Any) -> str:
        """Its name; the first of a name stays, because compiled code is guarded by it."""
        name = f"call_{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}"
        self.__dict__.setdefault(name, call)
        return name


CALLS = Calls()
ANY = Workload(batch=1, q_len=128, heads=4, head_dim=64, pass_="train")
"""Whoever has a partial form has one for this."""


@constant_when_traced
def chosen_now(outlines: tuple[Any, ...], train: bool, mask: Any, *rest: Any) -> str:
    """Name of what the traced call runs, in its own layout."""
    from attnbench.dispatch.torch_operator import as_operator

    words = Words(mask_of(mask), *rest)
    q, k, v = (Outline(*one) for one in outlines)
    demand = demand_of(q, k, v, words, train, "traced", "torch")
    pick, decision = chosen(words.impl, demand)
    while words.impl == "auto" and (error := _refusal(pick, decision, demand, words.layout, (q, k, v))):
        pick, decision = next_choice(pick.name, decision.config, demand, error)
    if pick.traceable:
        call = built(pick, decision, demand, words.layout, q.device)
    else:
        call = as_operator(words, train, (pick.name, decision.config))
    return CALLS.keep(call, outlines, train, mask, rest, pick.name, decision.config, registry.generation())


def without_numbers(q: Array, k: Array, v: Array, words: Words, train: bool) -> Call:
    """Return what a call with meta or fake tensors runs: what tells their shapes, and traces into a graph.

    As inside torch.compile: an implementation that is not `traceable` is one operator, and so is one for sizes that are
    symbols, which is chosen when the graph runs.
    """
    from attnbench.dispatch.torch_operator import as_operator

    symbols = any(not isinstance(size, int) for x in (q, k, v) for size in x.shape)
    if symbols and not (train and must_be_looked_into(words.impl)):
        return as_operator(words, train)
    demand = demand_of(q, k, v, words, train, "traced", "torch")
    pick, decision = chosen(words.impl, demand)
    if pick.traceable:
        return built(pick, decision, demand, words.layout)
    return as_operator(words, train, (pick.name, decision.config))


def _refusal(
    pick: Implementation, decision: Decision, demand: Demand, layout: str, outlines: tuple[Outline, ...]
) -> Unsupported | None:
    """Return what an implementation that is about to be traced raises, found with tensors that have no numbers.

    Inside the graph its error could not be caught. What compiles by itself is not tried.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not pick.traceable or pick.compiles_each_plan:
        return None
    try:
        call = built(pick, decision, demand, layout)  # another one: masks of this one would have no numbers
        with FakeTensorMode(allow_non_fake_inputs=True):
            train = demand.workload.needs_gradients
            call(*[torch.empty(x.shape, dtype=x.dtype, device=x.device, requires_grad=train) for x in outlines])
    except Unsupported as error:
        return error
    except Exception:  # nothing that the next candidate would mend: whoever traces it will tell
        return None
    return None


@constant_when_traced
def must_be_looked_into(impl: str) -> bool:
    """Whether a named implementation can be part of a graph and has no backward pass that an operator could call: then
    each shape has a graph of its own."""
    if impl == "auto":
        return False
    name, config = registry.asked(impl)
    implementation = registry.get(name)
    return implementation.traceable and implementation.partial(ANY, config) is None


@constant_when_traced
def chosen_when_run(train: bool, mask: Any, *rest: Any) -> str:
    """Name of an operator for any sizes."""
    from attnbench.dispatch.torch_operator import as_operator

    return CALLS.keep(as_operator(Words(mask_of(mask), *rest), train), train, mask, rest)
