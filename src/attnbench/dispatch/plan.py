"""Plans: functions of (q, k, v) in the caller's layout, made once for everything that a call depends on, and kept.

A traced JAX call does not say whether gradients will be asked. So it becomes a `custom_jvp` function: the rule
that JAX uses if it differentiates the call, in either mode, runs the choice for training, and the function itself that
for the forward pass.

An LSE without a gradient may be read; asking for its gradient raises, since a loss made of it would learn nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from copy import copy
from functools import cache, lru_cache, partial
from threading import Lock, local
from typing import Any, NoReturn

import numpy as np

from attnbench.dispatch.choice import PickDecision, chosen, decide, next_choice, report
from attnbench.dispatch.demand import Demand, Words, demand_of, framework_of, to_layout
from attnbench.errors import Unsupported
from attnbench.frameworks.jax.plain import in_usual_promotion
from attnbench.frameworks.jax.shards import on_each_device
from attnbench.masks import AnyMask
from attnbench.masks.base import FrozenArray
from attnbench.registry import OURS, origin
from attnbench.spec import Array, Call, Config, Implementation, Workload
from attnbench.tracing import is_fake

MOST = 4096
MOST_BYTES = 1 << 30
"""Most bytes of the masks that plans keep: their own data, and the arrays that implementations make of them."""
BYTES_A_PAIR = {"torch": (5, 9), "jax": (1, 5), "numpy": (0, 0)}
"""Most bytes made of one query-key pair of a mask: of booleans, and of weights (a float beside each)."""


class Plans:
    """Plans by key, oldest forgotten first. Reading is one lookup without a lock. A plan keeps the mask of its key."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._found: dict[Hashable, Any] = {}
        self._sizes: dict[Hashable, int] = {}
        self._total = 0
        self._limits = (most, most_bytes)
        self._lock = Lock()
        self.get = self._found.get
        """Function from a key to what was kept for it, or None."""

    def __len__(self) -> int:
        return len(self._found)

    def put(self, key: Hashable, run: Any, size: int = 0) -> None:
        """Keep what a call runs, which holds `size` bytes of a mask; drop the oldest plans beyond the limits."""
        most, most_bytes = self._limits
        with self._lock:
            self._drop(key)
            self._found[key] = run
            if size:
                self._sizes[key] = size
                self._total += size
            while len(self._sizes) > 1 and self._total > most_bytes:
                self._drop(next(iter(self._sizes)))
            while len(self._found) > most:
                self._drop(next(iter(self._found)))

    def clear(self) -> None:
        """Forget all plans at once."""
        with self._lock:
            self._found.clear()
            self._sizes.clear()
            self._total = 0

    def _drop(self, key: Hashable) -> None:
        self._found.pop(key, None)
        self._total -= self._sizes.pop(key, 0)


PLANS = Plans()


class OwnRun(local):
    """Context around the run of an implementation, whose own calls of torch's functions are never redirected."""

    depth = 0
    """Number of implementations that the thread is inside of."""

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


OWN_RUN = OwnRun()


def planned(q: Array, k: Array, v: Array, words: Words, train: bool) -> tuple[Call, int]:
    """Choose an implementation, report a miss; return what the call runs, and how many bytes of a mask that keeps."""
    if train and framework_of(q, k, v) == "jax":
        return _traced_jax(q, k, v, words)
    if is_fake(q) or getattr(q, "is_meta", False):
        from attnbench.dispatch import torch_compile

        return torch_compile.without_numbers(q, k, v, words, train), 0
    demand = demand_of(q, k, v, words, train)
    run = running(words.impl, demand, words.layout)
    if demand.framework == "jax":  # measured times are those of compiled programs
        import jax

        run = jax.jit(run)
    return run, bytes_kept(demand)


def running(impl: str, demand: Demand, layout: str) -> Call:
    """Return what a call runs: the named implementation, or `auto`'s choice, which is replaced if it cannot run."""
    pick, decision = chosen(impl, demand)
    call = built(pick, decision.config, demand, layout)
    again = partial(built, demand=demand, layout=layout)
    return AutoChoice(call, decision, demand, again) if impl == "auto" else call


class AutoChoice:
    """The choice of `auto`. If it raises Unsupported when it runs, the next candidate replaces it from then on."""

    def __init__(
        self, call: Callable[..., Any], decision: PickDecision, demand: Demand,
        build: Callable[[Implementation, Config], Callable[..., Any]],
    ) -> None:  # fmt: skip
        self._call, self._decision, self._demand, self._build = call, decision, demand, build
        self._lock = Lock()

    def __call__(self, *arrays: Array | None) -> Any:
        while True:
            call = self._call
            try:
                return call(*arrays)
            except Unsupported as error:
                with self._lock:
                    if self._call is call:  # else another thread has replaced it already
                        failed = self._decision
                        assert failed.pick is not None
                        pick, decision = next_choice(failed.pick.name, failed.config, self._demand, error)
                        call = self._build(pick, decision.config)
                        self._call, self._decision = call, decision


def built(pick: Implementation, config: Config, demand: Demand, layout: str, prepare_for: Any = None) -> Call:
    """Return the call of an implementation in the caller's layout; its arrays are made now if a device is given."""
    workload = demand.workload
    if origin(pick.name) != OURS:
        pick = copy(pick)  # what its `build` writes into itself must not change calls that are kept for other shapes
    outside_traces: Any = nullcontext()
    if demand.framework == "jax":
        import jax

        outside_traces = jax.ensure_compile_time_eval()  # a call built inside jit is kept, so its arrays must be real
    native = pick.layout
    with outside_traces:
        if demand.values is not None:
            call = pick.build_values(workload, demand.values, config, demand.with_lse)
        elif demand.with_sinks and workload.needs_gradients and not pick.lse_gradient:
            call, native = _of_partial(pick, workload, config), "bshd"
        else:
            call = pick.build_lse(workload, config) if demand.with_lse else pick.build(workload, config)
    assert call is not None
    prepare = getattr(call, "prepare", None)
    call = in_usual_promotion(call) if demand.framework == "jax" else on_dense(call, demand.framework, pick.name)
    if demand.with_lse and workload.dtype == "float64":
        call = _lse_of_float64(call, pick.name, demand)
    if demand.with_lse and workload.needs_gradients and not pick.lse_gradient and not demand.with_sinks:
        call = _without_lse_gradient(call, pick.name, demand.framework)
    if prepare_for is not None and prepare is not None:
        prepare(prepare_for)
    packed = demand.values is not None and demand.values.packed
    run = call if packed else arranged(call, demand, layout, native)
    if demand.shards is not None and demand.shards.separate:
        run = on_each_device(run, demand.shards, layout, demand.with_lse)
    # Dynamo traces into the call of a graph, and what is traceable calls nothing that could be redirected.
    if demand.framework != "torch" or demand.form == "traced":
        return run

    def undisturbed(*arrays: Array) -> Any:
        with OWN_RUN:  # so that `redirect_sdpa` around it changes none of its own calls of torch's functions
            return run(*arrays)

    return undisturbed


def _of_partial(pick: Implementation, workload: Workload, config: Config) -> Call:
    """Return a call in bshd whose LSE has the gradient that the backward pass of the partial form gives."""
    pair = pick.partial(workload, config)
    assert pair is not None
    if pick.framework == "torch":
        from attnbench.impls.partial import torch_autograd

        return torch_autograd.differentiable(pair)
    from attnbench.impls.partial import jax_passes

    return jax_passes.differentiable(pair, with_lse=True)


def _lse_of_float64(call: Call, name: str, demand: Demand) -> Call:
    """Return a call whose LSE is float32 although its inputs are float64; float64 if attention sinks join the rows."""

    def run(q: Array, k: Array, v: Array, *values: Any) -> tuple[Array, Array]:
        out, lse = call(q, k, v, *values)
        if not demand.with_sinks:
            return out, lse.float() if demand.framework == "torch" else lse.astype("float32")
        if lse.dtype != out.dtype:
            raise Unsupported(f"{name} returns an LSE of {lse.dtype} for float64 inputs, too coarse for sinks.")
        return out, lse

    return run


def on_dense(call: Call, framework: str, name: str) -> Call:
    """Return the call of an implementation; of one that is not ours, a call that copies views into dense arrays.

    Kernels are verified on dense arrays, and one that reads memory without looking at strides would read a transposed
    view, or one cut out of joined projections, wrongly.
    """
    if origin(name) == OURS:
        return call
    if framework == "numpy":
        return lambda *arrays: call(*map(np.ascontiguousarray, arrays))
    return lambda q, k, v, *values: call(q.contiguous(), k.contiguous(), v.contiguous(), *values)


def arranged(call: Call, demand: Demand, layout: str, native: str) -> Call:
    """Return a call for arrays in `layout` from one for arrays in the layout `native`."""
    heads, kv_heads, with_lse = demand.workload.heads, demand.workload.kv_heads, demand.with_lse
    if layout == native:
        return call

    if demand.framework == "torch" and layout != "packed" and not with_lse:
        return lambda q, k, v, *values: call(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *values
        ).transpose(1, 2)

    def run(q: Array, k: Array, v: Array, *values: Array) -> Any:
        q = to_layout(q, layout, native, heads)
        k, v = to_layout(k, layout, native, kv_heads), to_layout(v, layout, native, kv_heads)
        if not with_lse:
            return to_layout(call(q, k, v, *values), native, layout)
        out, lse = call(q, k, v, *values)
        return to_layout(out, native, layout), lse

    return run


def bytes_kept(demand: Demand) -> int:
    """Return how many bytes of its mask a plan keeps at most: the mask's data, and the arrays made from that data."""
    workload, mask = demand.workload, demand.workload.visible_mask
    if demand.values is not None and demand.values.any_size:
        return 0  # its arrays are made at each call
    if mask.kinds == ("full",) or (mask.kinds == ("causal",) and workload.q_len == workload.kv_len):
        return 0
    rows = (workload.batch if mask.per_batch else 1) * (workload.heads if mask.per_head else 1)
    a_pair = BYTES_A_PAIR[demand.framework][mask.weighted]
    return data_bytes(mask) + a_pair * rows * workload.q_len * workload.kv_len


def data_bytes(mask: AnyMask) -> int:
    """Return the bytes of the arrays that a mask was made of."""
    fields = (getattr(part, name) for part in mask.split() for name in part.__struct_fields__)
    return sum(len(value.data) for value in fields if isinstance(value, FrozenArray))


def _traced_jax(q: Array, k: Array, v: Array, words: Words) -> tuple[Call, int]:
    """Return the plan of a traced JAX call; its two implementations are built when JAX first runs them."""
    demands = [demand_of(q, k, v, words, train) for train in (False, True)]
    choice = jax_choices(words.impl, *demands)

    def call(train: bool) -> Callable[..., Any]:
        decision, demand = choice(train)
        try:
            pick = decision.taken(words.impl, demand)
        except Unsupported:
            if train or words.impl == "auto":
                raise
            decision, demand = choice(True)  # one for training alone: `grad(jit(f))` traces the forward pass first
            pick = decision.taken(words.impl, demand)
        return built(pick, decision.config, demand, words.layout)

    return by_pass(call), bytes_kept(demands[1])


def jax_choices(impl: str, forward: Demand, training: Demand) -> Callable[[bool], tuple[PickDecision, Demand]]:
    """Choose now for both passes, and return a function of `train` that reports a miss and returns that choice.

    If a policy covers training alone, the forward pass uses that choice too: `grad(jit(f))` traces it first.
    """
    demands = (forward, training)
    decisions = [decide(impl, demand) for demand in demands]
    training_first = not decisions[0].measured and decisions[1].measured

    def choice(train: bool) -> tuple[PickDecision, Demand]:
        at = train or training_first
        if impl == "auto":
            report(decisions[at], demands[at])
        return decisions[at], demands[at]

    return choice


def by_pass(make: Callable[[bool], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a JAX function of arrays or None that runs `make(False)`, and `make(True)` if it is differentiated."""
    import jax
    from jax.custom_derivatives import SymbolicZero

    calls = lru_cache(make)
    run = jax.custom_jvp(lambda *arrays: calls(False)(*arrays))

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        constant = (type(None), SymbolicZero)
        varied = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, constant)]

        def of_varied(*some: Any) -> Any:
            arrays = list(primals)
            for at, array in zip(varied, some):
                arrays[at] = array
            return calls(True)(*arrays)

        return jax.jvp(of_varied, tuple(primals[at] for at in varied), tuple(tangents[at] for at in varied))

    run.defjvp(rule, symbolic_zeros=True)
    return run


def _without_lse_gradient(call: Call, name: str, framework: str) -> Call:
    """Return the same call, except that asking for the gradient of its LSE raises Unsupported."""
    mark = {"torch": _torch_mark, "jax": _jax_mark}[framework]()

    def run(q: Array, k: Array, v: Array, *values: Array) -> tuple[Array, Array]:
        out, lse = call(q, k, v, *values)
        return out, mark(q, k, lse, name)

    return run


def refuse_lse_gradient(name: str) -> NoReturn:
    """Raise in place of the gradient of an LSE that has none."""
    raise Unsupported(
        f"no gradient flows through the LSE of {name}: detach the LSE (detach, stop_gradient) if it is only read, or "
        "ask for an implementation whose LSE has a gradient: torch.eager, torch.pair, jax.einsum or jax.pair."
    )


@cache
def _torch_mark() -> Any:
    import torch

    class WithoutGradient(torch.autograd.Function):
        """The LSE unchanged, as a function of q and k whose derivative raises."""

        generate_vmap_rule = True

        @staticmethod
        def forward(q: Any, k: Any, lse: Any, name: str) -> Any:
            return lse.detach().clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.name = inputs[3]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            refuse_lse_gradient(ctx.name)

    return WithoutGradient.apply


@cache
def _jax_mark() -> Any:
    import jax

    mark = jax.custom_vjp(lambda q, k, lse, name: lse, nondiff_argnums=(3,))
    mark.defvjp(lambda q, k, lse, name: (lse, None), lambda name, saved, grad: refuse_lse_gradient(name))
    return mark
