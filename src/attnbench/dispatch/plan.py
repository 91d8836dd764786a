"""What a call runs, made once for everything it depends on and kept: a function of (q, k, v) in the caller's layout."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

from attnbench.dispatch.arrays import device_of, framework_of, swap, to_layout, workload_of
from attnbench.dispatch.choice import Decision, decide
from attnbench.dispatch.misses import report
from attnbench.dispatch.order import Demand, Form
from attnbench.spec import Array, Call, Implementation, Workload
from attnbench.workloads.masks import AnyMask, Mask

MOST = 4096
MOST_WITH_DATA = 64
"""Plans whose mask holds an array: each keeps what it became on the device."""


class Words(NamedTuple):
    """Everything a call says beside its arrays."""

    mask: AnyMask | None
    scale: float | None
    softcap: float | None
    impl: str
    layout: str
    heads: int | tuple[int, int] | None
    return_lse: bool


class Plans:
    """Plans by key, oldest forgotten first. Reading is one lookup without a lock."""

    def __init__(self, most: int, most_with_data: int) -> None:
        self._found: dict[Hashable, Call] = {}
        self._with_data: dict[Hashable, None] = {}
        self._limits = (most, most_with_data)
        self._lock = Lock()
        self.get = self._found.get

    def __len__(self) -> int:
        return len(self._found)

    def put(self, key: Hashable, plan: Call, with_data: bool) -> None:
        """Keep a plan."""
        with self._lock:
            self._found[key] = plan
            if with_data:
                self._with_data[key] = None
            most, most_with_data = self._limits
            while len(self._with_data) > most_with_data:
                self._drop(next(iter(self._with_data)))
            while len(self._found) > most:
                self._drop(next(iter(self._found)))

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._found.clear()
            self._with_data.clear()

    def _drop(self, key: Hashable) -> None:
        self._found.pop(key, None)
        self._with_data.pop(key, None)


PLANS = Plans(MOST, MOST_WITH_DATA)


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
    return Demand(workload, framework, device_of(q, framework), return_lse, form)


def planned(q: Array, k: Array, v: Array, words: Words, train: bool) -> Call:
    """Choose, warn where nothing was measured, and build."""
    demand = demand_of(q, k, v, words, train)
    pick, decision = chosen(words.impl, demand)
    return built(pick, decision, demand, words.layout)


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
    prepare = getattr(call, "prepare", None)
    if prepare_for is not None and prepare is not None:
        prepare(prepare_for)
    return arranged(call, workload, layout, pick.layout, demand.with_lse)


def arranged(call: Call, workload: Workload, layout: str, native: str, with_lse: bool) -> Call:
    """A call in one layout for arrays in another."""
    heads, kv_heads = workload.heads, workload.kv_heads
    if layout == native:
        return call

    def swapped(q: Array, k: Array, v: Array) -> Any:
        return swap(call(swap(q), swap(k), swap(v)))

    if layout != "packed" and not with_lse:
        return swapped

    def run(q: Array, k: Array, v: Array) -> Any:
        q = to_layout(q, layout, native, heads)
        k, v = to_layout(k, layout, native, kv_heads), to_layout(v, layout, native, kv_heads)
        if not with_lse:
            return to_layout(call(q, k, v), native, layout)
        out, lse = call(q, k, v)
        return to_layout(out, native, layout), lse

    return run


def holds_data(mask: Mask | None) -> bool:
    """Whether a mask carries an array."""
    return mask is not None and not {"full", "causal", "window", "prefix", "dilated"}.issuperset(mask.kinds)


def _outside_traces(framework: str) -> AbstractContextManager[Any]:
    """What is built inside a jitted function is kept, so its arrays must be real ones."""
    if framework != "jax":
        return nullcontext()
    import jax

    return jax.ensure_compile_time_eval()
