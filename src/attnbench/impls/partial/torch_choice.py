"""Which dense kernel computes a part: the one named, or the first of the order that takes it."""

from __future__ import annotations

from functools import lru_cache

from attnbench import frameworks, registry
from attnbench.errors import Unsupported
from attnbench.impls.partial.torch_rules import NO_RULES, Rules, ruled_out
from attnbench.spec import Environment, Partial, Workload

ORDER = ("torch.sdpa-cudnn", "torch.sdpa-flash", "torch.sdpa-efficient", "torch.eager")
"""The fastest first where it was measured (an H200); eager takes everything and stores the scores."""


@lru_cache(maxsize=8)
def environment_of(device: str) -> Environment:
    """Facts about a device, asked once."""
    return frameworks.get("torch").environment(device)


@lru_cache(maxsize=4096)
def choose(kernel: str, workload: Workload, device: str, rules: Rules = NO_RULES) -> tuple[str, Partial]:
    """Name and (forward, backward) for a part; `kernel` is an implementation's name or "auto". Raises Unsupported.

    Only "auto" obeys the rules.
    """
    reasons = []
    for name in ORDER if kernel == "auto" else (kernel,):
        implementation, where = registry.get(name), environment_of(device)
        reason = implementation.available(where) or implementation.supports(workload, where)
        if kernel == "auto" and reason is None:
            reason = ruled_out(implementation, workload, rules)
        pair = None if reason else implementation.partial(workload, {})
        if pair is not None:
            return name, pair
        reasons.append(f"{name} {reason or 'has no partial form here'}")
    raise Unsupported(f"no kernel computes {workload.title} on {device}: {'; '.join(reasons)}.")
