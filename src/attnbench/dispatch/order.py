"""The fixed order of `impl="auto"`, used if no policy covers a call, and why an implementation cannot serve a call.

| framework | order | why |
| --- | --- | --- |
| torch on an accelerator | sdpa-cudnn, sdpa-flash, sdpa-efficient, flex, eager | fused first; eager takes every mask |
| torch on Apple's mps | sdpa, eager | the backends cannot be pinned there |
| torch on a CPU | sdpa-flash, eager | flex would compile for seconds at the first call |
| jax | cudnn, xla, einsum | fused first; einsum takes every mask |
| numpy | float32, reference | float64 arrays need the second |

Before them all, torch and jax ask an implementation of the dilated mask (dilated-improved, dilated): it takes no other.

What compiles for seconds at every build (`compiles_each_plan`: flex) stands behind eager if such a plan may serve one
call only: without gradients (prompts and caches have all lengths) and if the mask carries data (lengths, documents,
arrays), as long as eager's scores stay under MOST_SCORES.

An implementation that supports a call and raises Unsupported all the same when it runs is left out of the automatic
choices of this process for calls of the same class: device, pass, dtype, kind of mask, head dims, soft cap, LSE and
torch's settings are equal, heads are grouped in both or in neither, and sizes have the same power of two. A wider
class would leave a kernel out for sizes that it can compute, a narrower one would try it again at every new length.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import NamedTuple

from msgspec.structs import replace

from attnbench import registry
from attnbench.dispatch.demand import Demand, Form, environment_of
from attnbench.errors import UsageError
from attnbench.impls.partial.torch_choice import ruled_out
from attnbench.spec import Config, Implementation, Workload

ORDER: dict[str, tuple[str, ...]] = {
    "torch": (
        "torch.dilated-improved", "torch.sdpa-cudnn", "torch.sdpa-flash", "torch.sdpa-efficient", "torch.flex",
        "torch.eager",
    ),
    "jax": ("jax.dilated", "jax.cudnn", "jax.xla", "jax.einsum"),
    "numpy": ("numpy.float32", "numpy.reference"),
}  # fmt: skip
MPS_ORDER = ("torch.dilated-improved", "torch.sdpa", "torch.eager")
CPU_ORDER: dict[str, tuple[str, ...]] = {
    "torch": ("torch.dilated-improved", "torch.sdpa-flash", "torch.eager"),
    "jax": ("jax.dilated", "jax.xla", "jax.einsum"),
}
TAKE_ARRAYS: dict[str, tuple[str, ...]] = {
    "torch": ("torch.sdpa", "torch.eager"),
    "jax": ("jax.cudnn", "jax.xla", "jax.einsum"),
}
"""Framework -> implementations that take a mask as an array of each call (attnbench.dispatch.array_masks), in order."""
OF_DATA = ("lengths", "valid", "documents", "block_causal", "dense")
"""Kinds of masks that carry data, which usually differs from call to call."""
FEW_QUERIES = 16
"""Most queries of a call that counts as decoding, in which the number of keys grows from call to call."""
MOST_SCORES = 1 << 30
"""Most bytes of logits for which `auto` prefers storing them to compiling for what may be one call."""
MOST_FAILURES = 4096
_failed: dict[Hashable, str] = {}
"""Implementation, settings and class of calls -> why it could not run such a call."""


class Candidate(NamedTuple):
    """An implementation that was considered, with its settings in brackets, and why it cannot be used, or None."""

    name: str
    reason: str | None


def order_on(framework: str, device: str, form: Form = "call") -> tuple[str, ...]:
    """Return the fixed order on a device."""
    if form == "array":
        return TAKE_ARRAYS[framework]
    if framework == "torch" and device == "mps":
        return MPS_ORDER
    return CPU_ORDER.get(framework, ORDER[framework]) if device == "cpu" else ORDER[framework]


def order_of(demand: Demand) -> tuple[str, ...]:
    """Return the fixed order for a demand."""
    order = order_on(demand.framework, demand.device, demand.form)
    varies = not demand.workload.needs_gradients or _of_one_call(demand.workload)
    if demand.form == "traced" or not varies or not _scores_fit(demand.workload):
        return order
    return tuple(sorted(order, key=lambda name: registry.get(name).compiles_each_plan))


def compiles_in_vain(name: str, demand: Demand) -> bool:
    """Return whether an implementation would compile for seconds for a plan that may serve one call only."""
    if demand.form == "traced" or not registry.get(name).compiles_each_plan:
        return False
    return _of_one_call(demand.workload) and _scores_fit(demand.workload)


def _of_one_call(workload: Workload) -> bool:
    """Return whether the mask carries data, or the queries are so few that their keys may grow with every call."""
    return any(kind in OF_DATA for kind in workload.visible_mask.kinds) or workload.q_len <= FEW_QUERIES


def _scores_fit(workload: Workload) -> bool:
    return 4 * workload.batch * workload.heads * workload.q_len * workload.kv_len <= MOST_SCORES


def why_not_auto(name: str, config: Config, demand: Demand, named: Collection[str] = ()) -> str | None:
    """Return why an automatic choice leaves an implementation out; None if it does not.

    `named`: implementations that the maker of the policy asked for by name.
    """
    reason = why_not(name, config, demand) or known_failure(name, config, demand)
    if reason is not None:
        return reason
    implementation = registry.configured(name, config)
    if implementation.approximate:
        return "is approximate: ask for it by name"
    if implementation.verify_only:
        return f"is not for use, only to be checked: {implementation.verify_only}"
    if implementation.by_name_only and name not in named:
        return f"is taken by name only: {implementation.by_name_only}"
    if demand.any_kv_len and not implementation.any_kv_len:
        return "is built for one number of keys"
    return ruled_out(implementation, demand.workload, demand.rules)


def why_not(name: str, config: Config, demand: Demand) -> str | None:
    """Return why the implementation of a name cannot serve a demand; None if it can."""
    try:
        implementation = registry.configured(name, config)
    except UsageError as error:
        return f"is not available here: {error}"
    workload = demand.workload
    if demand.form == "array" and name not in TAKE_ARRAYS[demand.framework]:
        return "takes no mask that is an argument of the call"
    reason = refusal(implementation, workload, demand.framework, demand.device)
    if reason is None and demand.with_lse and implementation.build_lse(workload, config) is None:
        wide = replace(workload, dtype="float32")
        can = workload.dtype != "float32" and refusal(implementation, wide, demand.framework, demand.device) is None
        there = can and implementation.build_lse(wide, config) is not None
        return f"gives no LSE in {workload.dtype}, only in float32" if there else "gives no LSE"
    # In a compiled graph that does not trace the implementation, its backward pass must be callable by itself.
    opaque = demand.form == "operator" or (demand.form == "traced" and not implementation.traceable)
    if reason is None and opaque and workload.needs_gradients and implementation.partial(workload, config) is None:
        return "has no backward pass that a graph of torch.compile can call"
    return reason


def refusal(implementation: Implementation, workload: Workload, framework: str, device: str) -> str | None:
    """Return why an implementation cannot compute a workload with arrays of a framework and device; None if it can."""
    if implementation.framework != framework:
        return f"takes {implementation.framework} arrays, these are {framework}"
    if implementation.step:
        return f"computes the step {implementation.step}, not attention alone"
    environment = environment_of(framework, device)
    return implementation.available(environment) or implementation.supports(workload, environment)


def remember_failure(name: str, config: Config, demand: Demand, reason: str) -> None:
    """Leave an implementation with these settings out of the automatic choices for calls like this one."""
    if len(_failed) >= MOST_FAILURES:
        _failed.clear()
    _failed[_failure_key(name, config, demand)] = f"could not run such a call: {reason}"


def withdraw_failure(name: str, config: Config, demand: Demand) -> None:
    """Let an implementation be chosen again for calls like this one."""
    _failed.pop(_failure_key(name, config, demand), None)


def known_failure(name: str, config: Config, demand: Demand) -> str | None:
    """Return why an implementation could not run a call like this one; None if nothing is known."""
    return _failed.get(_failure_key(name, config, demand)) if _failed else None


def forget_failures() -> None:
    """Let all implementations that failed be chosen again."""
    _failed.clear()


def _failure_key(name: str, config: Config, demand: Demand) -> Hashable:
    """Return implementation, settings and class of a call: two calls of one class fail alike."""
    work = demand.workload
    sizes = (work.batch * work.heads, work.q_len, work.kv_len)
    return (
        name, repr(sorted(config.items())), registry.generation(), demand.framework, demand.device, demand.with_lse,
        demand.rules, work.pass_, work.dtype, work.visible_mask.kinds, work.head_dim, work.value_dim,
        work.softcap is None, work.group > 1, work.q_len < work.kv_len, work.q_len > work.kv_len,
        *(size.bit_length() for size in sizes),
    )  # fmt: skip
