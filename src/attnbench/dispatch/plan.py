"""What a call runs, made once for everything it depends on and kept: a function of (q, k, v) in the caller's layout."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

from attnbench.dispatch import failures
from attnbench.dispatch.arrays import device_of, framework_of, to_layout
from attnbench.dispatch.choice import Decision, decide
from attnbench.dispatch.lse_guard import guarded
from attnbench.dispatch.misses import report, tell_failure
from attnbench.dispatch.order import Demand, Form
from attnbench.dispatch.torch_hook import OWN_RUN
from attnbench.errors import Unsupported
from attnbench.frameworks.jax_plain import in_usual_promotion
from attnbench.impls._arguments import workload_of
from attnbench.impls.partial.torch_choice import NO_RULES, current
from attnbench.masks import AnyMask
from attnbench.masks.base import FrozenArray
from attnbench.policy.policy import label_of
from attnbench.spec import Array, Call, Config, Implementation
from attnbench.tracing import is_fake

MOST = 4096
MOST_BYTES = 1 << 30
"""Of the masks that plans keep: their own data, and the arrays that implementations make of them."""
BYTES_A_PAIR = {"torch": (5, 9), "jax": (1, 5), "numpy": (0, 0)}
"""At most so many are made of one query-key pair of a mask: of booleans, and of weights (a float beside each)."""


class Words(NamedTuple):
    """Everything a call says beside its arrays."""

    mask: AnyMask | None
    scale: float | None
    softcap: float | None
    impl: str
    layout: str
    heads: int | tuple[int, int] | None
    return_lse: bool


class Plan(NamedTuple):
    """What a call runs, and how many bytes of a mask it may keep."""

    run: Any
    size: int = 0


class Plans:
    """Plans by key, oldest forgotten first. Reading is one lookup without a lock. A key's mask is its plan's own."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._found: dict[Hashable, Any] = {}
        self._sizes: dict[Hashable, int] = {}
        self._total = 0
        self._limits = (most, most_bytes)
        self._lock = Lock()
        self.get = self._found.get
        """The `run` of a plan, or None."""

    def __len__(self) -> int:
        return len(self._found)

    def put(self, key: Hashable, plan: Plan) -> None:
        """Keep a plan."""
        most, most_bytes = self._limits
        with self._lock:
            self._drop(key)
            self._found[key] = plan.run
            if plan.size:
                self._sizes[key] = plan.size
                self._total += plan.size
            while len(self._sizes) > 1 and self._total > most_bytes:
                self._drop(next(iter(self._sizes)))
            while len(self._found) > most:
                self._drop(next(iter(self._found)))

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._found.clear()
            self._sizes.clear()
            self._total = 0

    def _drop(self, key: Hashable) -> None:
        self._found.pop(key, None)
        self._total -= self._sizes.pop(key, 0)


PLANS = Plans()


def demand_of(
    q: Array, k: Array, v: Array, words: Words, train: bool, form: Form = "call", framework: str = ""
) -> Demand:
    """What a call with these arrays asks."""
    framework = framework or framework_of(q, k, v)
    mask, scale, softcap, _, layout, heads, return_lse = words
    workload = workload_of(
        q, k, v, mask=mask, scale=scale, softcap=softcap, layout=layout, heads=heads,
        pass_="train" if train else "forward",
    )  # fmt: skip
    rules = current() if framework == "torch" else NO_RULES
    return Demand(workload, framework, device_of(q, framework), return_lse, form, rules)


def planned(q: Array, k: Array, v: Array, words: Words, train: bool) -> Plan:
    """Choose, warn where nothing was measured, and build."""
    if train and framework_of(q, k, v) == "jax":
        from attnbench.dispatch import jax_traced

        return jax_traced.planned(q, k, v, words)
    if is_fake(q) or getattr(q, "is_meta", False):
        from attnbench.dispatch import traced

        return Plan(traced.without_numbers(q, k, v, words, train))
    demand = demand_of(q, k, v, words, train)
    return Plan(running(words.impl, demand, words.layout), bytes_kept(demand))


def running(impl: str, demand: Demand, layout: str) -> Call:
    """Return what a call runs: what was named, or what `auto` chooses, which gives way if it cannot run."""
    pick, decision = chosen(impl, demand)
    call = built(pick, decision, demand, layout)
    return Chosen(call, decision, demand, layout) if impl == "auto" else call


class Chosen:
    """What `auto` chose. If it raises Unsupported when it runs, the next candidate takes its place from then on."""

    def __init__(self, call: Call, decision: Decision, demand: Demand, layout: str) -> None:
        self._call, self._decision, self._demand, self._layout = call, decision, demand, layout
        self._lock = Lock()

    def __call__(self, q: Array, k: Array, v: Array) -> Any:
        while True:
            call = self._call
            try:
                return call(q, k, v)
            except Unsupported as error:
                self._give_way(call, error)

    def _give_way(self, call: Call, error: Unsupported) -> None:
        with self._lock:
            if self._call is not call:  # another thread was here first
                return
            failed = self._decision
            assert failed.pick is not None
            pick, decision = next_choice(failed.pick.name, failed.config, self._demand, error)
            self._call, self._decision = built(pick, decision, self._demand, self._layout), decision


def next_choice(name: str, config: Config, demand: Demand, error: Unsupported) -> tuple[Implementation, Decision]:
    """Choose again without what could not run this call, in this process and for calls like it; warn once.

    If nothing is left, the error is raised.
    """
    failures.remember(name, config, demand, str(error))
    decision = decide("auto", demand)
    if decision.pick is None:
        failures.take_back(name, config, demand)
        raise error
    tell_failure(label_of(name, dict(config)), str(error), str(decision.label), demand)
    return decision.pick, decision


def chosen(impl: str, demand: Demand) -> tuple[Implementation, Decision]:
    """The implementation to use; Unsupported when there is none."""
    decision = decide(impl, demand)
    if impl == "auto":
        report(decision, demand)
    return decision.taken(impl, demand), decision


def built(pick: Implementation, decision: Decision, demand: Demand, layout: str, prepare_for: Any = None) -> Call:
    """The call of an implementation, in the caller's layout; with all that it makes on a device, where one is given."""
    workload, config = demand.workload, decision.config
    with _outside_traces(demand.framework):
        call = pick.build_lse(workload, config) if demand.with_lse else pick.build(workload, config)
    assert call is not None
    call = in_usual_promotion(call) if demand.framework == "jax" else call
    if demand.with_lse and workload.needs_gradients and not pick.lse_gradient:
        call = guarded(call, pick.name, demand.framework)
    prepare = getattr(call, "prepare", None)
    if prepare_for is not None and prepare is not None:
        prepare(prepare_for)
    run = arranged(call, demand, layout, pick.layout)
    # Dynamo looks into what a graph is made of, and what is traceable calls nothing that could be redirected.
    return run if demand.framework != "torch" or demand.form == "traced" else undisturbed(run)


def undisturbed(call: Call) -> Call:
    """Return the same call, whose own calls of torch's functions no `redirect_sdpa` around it changes."""

    def run(q: Array, k: Array, v: Array) -> Any:
        with OWN_RUN:
            return call(q, k, v)

    return run


def arranged(call: Call, demand: Demand, layout: str, native: str) -> Call:
    """A call in one layout for arrays in another."""
    heads, kv_heads, with_lse = demand.workload.heads, demand.workload.kv_heads, demand.with_lse
    if layout == native:
        return call

    def transposed(q: Array, k: Array, v: Array) -> Any:
        return call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    if demand.framework == "torch" and layout != "packed" and not with_lse:
        return transposed

    def run(q: Array, k: Array, v: Array) -> Any:
        q = to_layout(q, layout, native, heads)
        k, v = to_layout(k, layout, native, kv_heads), to_layout(v, layout, native, kv_heads)
        if not with_lse:
            return to_layout(call(q, k, v), native, layout)
        out, lse = call(q, k, v)
        return to_layout(out, native, layout), lse

    return run


def bytes_kept(demand: Demand) -> int:
    """Return how many bytes of its mask a plan keeps at most: the mask's data, and what is made of it."""
    workload, mask = demand.workload, demand.workload.visible_mask
    if mask.kinds == ("full",) or (mask.kinds == ("causal",) and workload.q_len == workload.kv_len):
        return 0
    rows = (workload.batch if mask.per_batch else 1) * (workload.heads if mask.per_head else 1)
    a_pair = BYTES_A_PAIR[demand.framework][mask.weighted]
    return data_bytes(mask) + a_pair * rows * workload.q_len * workload.kv_len


def data_bytes(mask: AnyMask) -> int:
    """Return the bytes of the arrays that a mask was made of."""
    fields = (getattr(part, name) for part in mask.split() for name in part.__struct_fields__)
    return sum(len(value.data) for value in fields if isinstance(value, FrozenArray))


def _outside_traces(framework: str) -> AbstractContextManager[Any]:
    """What is built inside a jitted function is kept, so its arrays must be real ones."""
    if framework != "jax":
        return nullcontext()
    import jax

    return jax.ensure_compile_time_eval()
