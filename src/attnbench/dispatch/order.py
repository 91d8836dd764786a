"""The fixed order of `impl="auto"` until a measured policy exists, and what it picks for a workload.

| framework | order | why |
| --- | --- | --- |
| torch on an accelerator | sdpa-cudnn, sdpa-flash, sdpa-efficient, flex, eager | fused first; eager takes every mask |
| torch on a CPU | sdpa-flash, eager | flex would compile for seconds at the first call |
| jax | cudnn, xla, einsum | likewise |
| numpy | float32, reference | float64 arrays need the second |

Before them all, torch and jax ask an implementation of the dilated mask (dilated-improved, dilated): it takes no other.

The first that supports the workload on its device is used. An implementation asked for by name is used or refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from attnbench import frameworks, registry
from attnbench.errors import Unsupported
from attnbench.spec import Call, Environment, Implementation, Workload

ORDER: dict[str, tuple[str, ...]] = {
    "torch": (
        "torch.dilated-improved", "torch.sdpa-cudnn", "torch.sdpa-flash", "torch.sdpa-efficient", "torch.flex",
        "torch.eager",
    ),
    "jax": ("jax.dilated", "jax.cudnn", "jax.xla", "jax.einsum"),
    "numpy": ("numpy.float32", "numpy.reference"),
}  # fmt: skip
CPU_ORDER: dict[str, tuple[str, ...]] = {
    "torch": ("torch.dilated-improved", "torch.sdpa-flash", "torch.eager"),
    "jax": ("jax.dilated", "jax.xla", "jax.einsum"),
}


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


def candidates(
    workload: Workload, framework: str, device: str, impl: str = "auto", with_lse: bool = False
) -> list[Candidate]:
    """The whole order (or the one asked for) with reasons."""
    names = order_on(framework, device) if impl == "auto" else (impl,)
    return [Candidate(name, _why_not(registry.get(name), workload, framework, device, with_lse)) for name in names]


def _why_not(
    implementation: Implementation, workload: Workload, framework: str, device: str, with_lse: bool
) -> str | None:
    reason = refusal(implementation, workload, framework, device)
    if reason is None and with_lse and implementation.build_lse(workload, {}) is None:
        return "gives no LSE"
    return reason


def _refused(workload: Workload, framework: str, device: str, impl: str, tried: list[Candidate]) -> str:
    if impl != "auto":
        return f"{impl} cannot run {workload.title}: {tried[0].reason}."
    reasons = "; ".join(f"{one.name}: {one.reason}" for one in tried)
    return f"no {framework} implementation can run {workload.title} on {device}: {reasons}."


@lru_cache(maxsize=1024)
def built(
    workload: Workload, framework: str, device: str, impl: str, with_lse: bool, generation: int
) -> tuple[Call, str]:
    """The call and the layout it takes, made once per workload (and again after a registration)."""
    del generation
    tried = candidates(workload, framework, device, impl, with_lse)
    name = next((one.name for one in tried if one.reason is None), None)
    if name is None:
        raise Unsupported(_refused(workload, framework, device, impl, tried))
    implementation = registry.get(name)
    call = implementation.build_lse(workload, {}) if with_lse else implementation.build(workload, {})
    assert call is not None
    return call, implementation.layout
