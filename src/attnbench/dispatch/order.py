"""The fixed order of `impl="auto"` until a measured policy exists, and what it picks for a workload.

| framework | order | why |
| --- | --- | --- |
| torch on an accelerator | sdpa-cudnn, sdpa-flash, sdpa-efficient, flex, eager | fused first; eager takes every mask |
| torch on a CPU | sdpa-flash, eager | flex would compile for seconds at the first call |
| jax | cudnn, xla, einsum | likewise |
| numpy | float32, reference | float64 arrays need the second |

The first that supports the workload on its device is used. An implementation asked for by name is used or refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from attnbench import frameworks, registry
from attnbench.errors import Unsupported
from attnbench.spec import Call, Environment, Implementation, Workload

ORDER: dict[str, tuple[str, ...]] = {
    "torch": ("torch.sdpa-cudnn", "torch.sdpa-flash", "torch.sdpa-efficient", "torch.flex", "torch.eager"),
    "jax": ("jax.cudnn", "jax.xla", "jax.einsum"),
    "numpy": ("numpy.float32", "numpy.reference"),
}
CPU_ORDER: dict[str, tuple[str, ...]] = {"torch": ("torch.sdpa-flash", "torch.eager"), "jax": ("jax.xla", "jax.einsum")}


class Candidate(NamedTuple):
    """An implementation in the order, and why it was passed over (None: it would do)."""

    name: str
    reason: str | None


@lru_cache(maxsize=32)
def environment_of(framework: str, device: str) -> Environment:
    """Light facts about a device, asked once."""
    return frameworks.get(framework).environment(device)


def refusal(implementation: Implementation, workload: Workload, framework: str, device: str) -> str | None:
    """Why an implementation cannot serve these arrays."""
    if implementation.framework != framework:
        return f"takes {implementation.framework} arrays, these are {framework}"
    environment = environment_of(framework, device)
    return implementation.available(environment) or implementation.supports(workload, environment)


def order_on(framework: str, device: str) -> tuple[str, ...]:
    """The fixed order on a device."""
    return CPU_ORDER.get(framework, ORDER[framework]) if device == "cpu" else ORDER[framework]


def candidates(workload: Workload, framework: str, device: str) -> list[Candidate]:
    """The whole order with reasons."""
    return [
        Candidate(name, refusal(registry.get(name), workload, framework, device))
        for name in order_on(framework, device)
    ]


def pick(workload: Workload, framework: str, device: str, impl: str) -> Implementation:
    """The implementation to use; raises Unsupported with every reason when there is none."""
    if impl != "auto":
        implementation = registry.get(impl)
        if (reason := refusal(implementation, workload, framework, device)) is not None:
            raise Unsupported(f"{impl} cannot run {workload.title}: {reason}.")
        return implementation
    tried = candidates(workload, framework, device)
    for one in tried:
        if one.reason is None:
            return registry.get(one.name)
    reasons = "; ".join(f"{one.name}: {one.reason}" for one in tried)
    raise Unsupported(f"no {framework} implementation can run {workload.title} on {device}: {reasons}.")


@lru_cache(maxsize=1024)
def built(workload: Workload, framework: str, device: str, impl: str, with_lse: bool) -> tuple[Call, str]:
    """The call and the layout it takes, made once per workload."""
    if not with_lse:
        implementation = pick(workload, framework, device, impl)
        return implementation.build(workload, {}), implementation.layout
    names = order_on(framework, device) if impl == "auto" else (impl,)
    reasons = []
    for name in names:
        implementation = registry.get(name)
        reason = refusal(implementation, workload, framework, device)
        call = None if reason is not None else implementation.build_lse(workload, {})
        if call is not None:
            return call, implementation.layout
        reasons.append(f"{name}: {reason or 'gives no LSE'}")
    raise Unsupported(f"LSE cannot be had for {workload.title} on {device}: {'; '.join(reasons)}.")
