"""The dense kernel that computes a part: the one named, or the first of a fixed order that takes the part.

An automatic choice obeys the user's settings of torch (deterministic algorithms, SDPA backends switched off); an
implementation that is asked for by name runs as named.
"""

from __future__ import annotations

from typing import NamedTuple

from attnbench import registry
from attnbench.errors import Unsupported
from attnbench.frameworks import environment_of
from attnbench.impls.torch._sdpa_pins import switched_off
from attnbench.spec import Implementation, Partial, Workload


class Rules(NamedTuple):
    """Settings of the process that an automatic choice depends on."""

    deterministic: bool = False
    """Whether torch.use_deterministic_algorithms(True) is set."""
    off: tuple[str, ...] = ()
    """Backends that `torch.backends.cuda.enable_*_sdp(False)` or `sdpa_kernel` switched off."""


NO_RULES = Rules()


def current() -> Rules:
    """Return the current settings of the process."""
    import torch

    return Rules(torch.are_deterministic_algorithms_enabled(), switched_off())


def ruled_out(implementation: Implementation, workload: Workload, rules: Rules) -> str | None:
    """Return why the rules leave an implementation out; None if they do not."""
    off = [flag for flag in implementation.switches if flag in rules.off]
    if off:
        return f"is switched off in this process (torch.backends.cuda.enable_{off[0]}_sdp)"
    asked = ("forward", "backward") if workload.needs_gradients else ("forward",)
    if rules.deterministic and any(pass_ in implementation.not_deterministic for pass_ in asked):
        return "is not deterministic, and torch.use_deterministic_algorithms is on"
    return None


ORDER = ("torch.sdpa-cudnn", "torch.sdpa-flash", "torch.sdpa-efficient", "torch.eager")
"""Implementations in the order of their measured speed on an H200; eager takes everything and stores the scores."""


@registry.cached(4096)
def choose(kernel: str, workload: Workload, device: str, rules: Rules = NO_RULES) -> tuple[str, Partial]:
    """Return name and (forward, backward) for a part; raise Unsupported if none can compute it.

    `kernel` is an implementation's name or "auto". Only "auto" obeys the rules.
    """
    reasons = []
    for name in ORDER if kernel == "auto" else (kernel,):
        implementation, where = registry.get(name), environment_of("torch", device)
        reason = implementation.available(where) or implementation.supports(workload, where)
        if kernel == "auto" and reason is None:
            reason = ruled_out(implementation, workload, rules)
        pair = None if reason else implementation.partial(workload, {})
        if pair is not None:
            return name, pair
        reasons.append(f"{name} {reason or 'has no partial form here'}")
    raise Unsupported(f"no kernel computes {workload.title} on {device}: {'; '.join(reasons)}.")
