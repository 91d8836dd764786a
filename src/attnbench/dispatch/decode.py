"""`ab.decode`: one or a few queries of each sequence against its KV cache, contiguous or in pages.

A plan is made once for each doubling of the capacity, and none for a new length: lengths and block tables are arguments
of the kernel. The implementation is the one named, or the first of the fixed order over caches (`choice.READ_CACHES`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from attnbench import registry
from attnbench.dispatch.attention import Explanation
from attnbench.dispatch.choice import chosen, decide
from attnbench.dispatch.demand import Demand, device_of
from attnbench.dispatch.kv_cache import KvCache
from attnbench.dispatch.plan import OWN_RUN, AutoChoice, Plans
from attnbench.errors import InvalidWorkload, Unsupported
from attnbench.frameworks.jax.plain import in_usual_promotion
from attnbench.frameworks.torch.internals import without_autocast
from attnbench.impls._arguments import dtype_name
from attnbench.impls.partial.torch_choice import NO_RULES, current
from attnbench.impls.partial.torch_passes import dense_rows
from attnbench.masks import AnyMask, causal, full
from attnbench.masks import window as window_mask
from attnbench.spec import Array, Config, Implementation, Workload
from attnbench.tracing import is_fake

_PLANS = Plans()


class DecodeWords(NamedTuple):
    """All arguments of a call except its arrays."""

    scale: float | None
    softcap: float | None
    window: int | None
    impl: str


def decode(
    q: Array, cache: KvCache, *, scale: float | None = None, softcap: float | None = None, window: int | None = None,
    impl: str = "auto", return_lse: bool = False,
) -> Any:  # fmt: skip
    """Return attention of the newest tokens of each sequence over its cache, in the layout of q; without gradients.

    q is [batch, queries, heads, dim]: the last tokens of each sequence, whose keys are in the cache already. Each sees
    the tokens up to itself, with `window` the `window` tokens before it and itself, as `ab.masks.window(window)`. A
    query of a sequence that has fewer tokens than there are queries may see none: its output is 0 and its LSE -inf.
    `impl` is a name, which is used or refused, or "auto". With `return_lse` also the log-sum-exp [batch, heads,
    queries], natural log, float32.
    """
    if not isinstance(cache, KvCache):
        raise InvalidWorkload(f"cache must be a ContiguousCache or PagedCache, not {type(cache).__name__}.")
    words, arrays = DecodeWords(scale, softcap, window, impl), cache.arrays
    if cache.framework != "torch":
        both = _run_for(q, *arrays, words, cache.framework, return_lse)(q, *arrays)
        return both if return_lse else both[0]
    import torch

    if torch.compiler.is_dynamo_compiling() or is_fake(q):
        from attnbench.dispatch.decode_operator import operator

        out, lse = operator(q, *arrays, *words)
    else:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *arrays[:2])):
            raise Unsupported("decode computes no gradients: call it inside torch.no_grad(), or detach its inputs.")
        out, lse = on_tensors(q, *arrays, words)
    return (out, lse) if return_lse else out


def explain(
    q: Array, cache: KvCache, *, scale: float | None = None, softcap: float | None = None, window: int | None = None,
    impl: str = "auto",
) -> Explanation:  # fmt: skip
    """Explain what `decode` would use for the same arguments: the pick, and why others of the order cannot run."""
    k, v, _, table = cache.arrays
    demand = _demand(q, k, v, table, DecodeWords(scale, softcap, window, impl), cache.framework)
    decision = decide(impl, demand)
    return Explanation(demand.workload, demand.device, decision.label, decision.why, decision.candidates)


def on_tensors(q: Any, k: Any, v: Any, lengths: Any, table: Any, words: DecodeWords) -> tuple[Any, Any]:
    """Return out and LSE of a call with torch's tensors."""
    run = _run_for(q, k, v, lengths, table, words, "torch", True)
    with OWN_RUN, without_autocast(q.device.type):
        return run(dense_rows(q), k, v, lengths.int(), None if table is None else table.int())


def _run_for(
    q: Array, k: Array, v: Array, lengths: Array, table: Array | None, words: DecodeWords, framework: str, lse: bool
) -> Callable[..., Any]:
    """Return what a call runs, made at the first call of its class."""
    page_size, batch, capacity = _sizes(k, table)
    rules = current() if framework == "torch" else NO_RULES
    devices = (q.device, k.device) if framework == "torch" else (device_of(k, framework),)
    key = (
        words, framework, tuple(q.shape), batch, tuple(k.shape[2:]), v.shape[3], page_size, capacity.bit_length(),
        q.dtype, k.dtype, *devices, lse, rules, registry.generation(),
    )  # fmt: skip
    run: Any = _PLANS.get(key)
    if run is None:
        demand = _demand(q, k, v, table, words, framework)
        pick, decision = chosen(words.impl, demand)
        build = partial(_built, demand=demand, lse=lse)
        run = build(pick, decision.config)
        run = AutoChoice(run, decision, demand, build) if words.impl == "auto" else run
        _PLANS.put(key, run)
    return run


def _built(pick: Implementation, config: Config, demand: Demand, lse: bool) -> Callable[..., Any]:
    call: Any = pick.decode(demand.workload, demand.environment, config, demand.page_size)
    if isinstance(call, str):
        raise Unsupported(f"{pick.name} {call}.")
    if demand.framework != "jax":
        return call
    import jax

    # Without the LSE in the program's results, XLA leaves out what only it needs.
    usual = in_usual_promotion(call if lse else lambda *arrays: (call(*arrays)[0],))
    return jax.jit(usual)


def _sizes(k: Array, table: Array | None) -> tuple[int | None, int, int]:
    """Return the page size, the number of sequences and the capacity of a cache."""
    if table is None:
        return None, k.shape[0], k.shape[1]
    return k.shape[1], table.shape[0], table.shape[1] * k.shape[1]


def _demand(q: Array, k: Array, v: Array, table: Array | None, words: DecodeWords, framework: str) -> Demand:
    """Return what a call asks: the attention of every sequence, with keys for the next power of two of the capacity.

    Raise InvalidWorkload if the queries do not go together with the cache.
    """
    page_size, batch, capacity = _sizes(k, table)
    if len(q.shape) != 4 or q.shape[0] != batch or q.shape[3] != k.shape[3]:
        raise InvalidWorkload(
            f"q must be [batch, queries, heads, dim] with {batch} sequences and dim {k.shape[3]}, as the cache; "
            f"its shape is {tuple(q.shape)}."
        )
    if q.dtype != k.dtype:
        raise InvalidWorkload(f"q must have the dtype of the cache, {k.dtype}, not {q.dtype}.")
    if getattr(q, "requires_grad", None) is not None and q.device != k.device:
        raise InvalidWorkload(f"q must be on the device of the cache, {k.device}, not on {q.device}.")
    mask: AnyMask = full() if q.shape[1] == 1 else causal()
    workload = Workload(
        batch=batch, q_len=q.shape[1], kv_len=1 << (capacity - 1).bit_length(), heads=q.shape[2], kv_heads=k.shape[2],
        head_dim=k.shape[3], v_head_dim=v.shape[3], dtype=dtype_name(q), scale=words.scale, softcap=words.softcap,
        mask=mask if words.window is None else window_mask(words.window),
    )  # fmt: skip
    rules = current() if framework == "torch" else NO_RULES
    return Demand(workload, framework, device_of(k, framework), form="cache", rules=rules, page_size=page_size)
