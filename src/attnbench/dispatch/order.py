"""The fixed order of `impl="auto"`, which stands in wherever no policy was measured, and why one cannot be used.

| framework | order | why |
| --- | --- | --- |
| torch on an accelerator | sdpa-cudnn, sdpa-flash, sdpa-efficient, flex, eager | fused first; eager takes every mask |
| torch on Apple's mps | sdpa, eager | the backends cannot be pinned there |
| torch on a CPU | sdpa-flash, eager | flex would compile for seconds at the first call |
| jax | cudnn, xla, einsum | likewise |
| numpy | float32, reference | float64 arrays need the second |

Before them all, torch and jax ask an implementation of the dilated mask (dilated-improved, dilated): it takes no other.

What compiles for seconds at every build (`compiles_each_plan`: flex) stands behind eager if such a plan may serve one
call only: without gradients (prompts and caches have all lengths) and if the mask carries data (lengths, documents,
arrays), as long as eager's scores stay under MOST_SCORES.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Literal, NamedTuple

from msgspec.structs import replace

from attnbench import frameworks, registry
from attnbench.dispatch import failures
from attnbench.errors import UsageError
from attnbench.impls.partial.torch_choice import NO_RULES, Rules, ruled_out
from attnbench.spec import Config, Environment, Implementation, Workload

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
"""Those that take a mask as an array of each call, and their order (attnbench.dispatch.array_masks)."""
OF_DATA = ("lengths", "valid", "documents", "block_causal", "dense")
"""Kinds of masks that carry data, which usually differs from call to call."""
FEW_QUERIES = 16
"""So many queries, or fewer, are taken for decoding, where the number of keys grows from call to call."""
MOST_SCORES = 1 << 30
"""Bytes of logits that `auto` stores sooner than it compiles for what may be one call."""
META = "meta"
"""Torch's device of tensors that have a shape and no numbers."""
Form = Literal["call", "traced", "operator", "array"]
"""How it will be run: called, looked into by torch.compile where it may be, as one operator of a compiled graph, or
with its mask an array that is an argument of the call."""


class Candidate(NamedTuple):
    """An implementation that was asked, with its settings in brackets, and why not it (None: it would do)."""

    name: str
    reason: str | None


class Demand(NamedTuple):
    """What a call asks of an implementation."""

    workload: Workload
    framework: str
    device: str
    with_lse: bool = False
    form: Form = "call"
    rules: Rules = NO_RULES
    """What the user told torch; only automatic choices obey."""
    any_kv_len: bool = False
    """Whether what is built must compute any number of keys."""

    @property
    def environment(self) -> Environment:
        """Of the device."""
        return environment_of(self.framework, self.device)


@lru_cache(maxsize=32)
def environment_of(framework: str, device: str) -> Environment:
    """Light facts about a device, asked once; torch's meta tensors, which have no numbers, are taken for a CPU's."""
    return frameworks.get(framework).environment("cpu" if device == META else device)


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

    `named`: implementations that whoever made the policy asked for by name.
    """
    reason = why_not(name, config, demand) or failures.remembered(name, config, demand)
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


def refusal(implementation: Implementation, workload: Workload, framework: str, device: str) -> str | None:
    """Why an implementation cannot serve these arrays."""
    if implementation.framework != framework:
        return f"takes {implementation.framework} arrays, these are {framework}"
    if implementation.step:
        return f"computes the step {implementation.step}, not attention alone"
    environment = environment_of(framework, device)
    return implementation.available(environment) or implementation.supports(workload, environment)


def why_not(name: str, config: Config, demand: Demand) -> str | None:
    """Why the implementation of that name cannot do what is asked; None when it can."""
    try:
        implementation = registry.configured(name, config)
    except UsageError as error:
        return f"cannot be had here: {error}"
    workload = demand.workload
    if demand.form == "array" and name not in TAKE_ARRAYS[demand.framework]:
        return "takes no mask that is an argument of the call"
    reason = refusal(implementation, workload, demand.framework, demand.device)
    if reason is None and demand.with_lse and implementation.build_lse(workload, config) is None:
        wide = replace(workload, dtype="float32")
        can = workload.dtype != "float32" and refusal(implementation, wide, demand.framework, demand.device) is None
        there = can and implementation.build_lse(wide, config) is not None
        return f"gives no LSE in {workload.dtype}, only in float32" if there else "gives no LSE"
    if reason is None and needs_partial(implementation, demand) and implementation.partial(workload, config) is None:
        return "has no backward pass that a graph of torch.compile can call"
    return reason


def needs_partial(implementation: Implementation, demand: Demand) -> bool:
    """Whether its backward must be callable apart: in a compiled graph that does not look into it."""
    opaque = demand.form == "operator" or (demand.form == "traced" and not implementation.traceable)
    return opaque and demand.workload.needs_gradients
