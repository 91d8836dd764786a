"""What the user told torch, and what it leaves to choose from: deterministic algorithms, SDPA backends switched off.

Whatever is chosen automatically obeys; what is asked for by name runs as named.
"""

from __future__ import annotations

from typing import NamedTuple

from attnbench.impls.torch._sdpa_pins import switched_off
from attnbench.spec import Implementation, Workload


class Rules(NamedTuple):
    """Settings of the process that a choice depends on."""

    deterministic: bool = False
    """torch.use_deterministic_algorithms(True)."""
    off: tuple[str, ...] = ()
    """Backends that `torch.backends.cuda.enable_*_sdp(False)` or `sdpa_kernel` switched off."""


NO_RULES = Rules()


def current() -> Rules:
    """Return what is set now."""
    import torch

    return Rules(torch.are_deterministic_algorithms_enabled(), switched_off())


def ruled_out(implementation: Implementation, workload: Workload, rules: Rules) -> str | None:
    """Return why the rules leave an implementation out; None if they do not."""
    off = [flag for flag in implementation.switches if flag in rules.off]
    if off:
        return f"is switched off in this process (torch.backends.cuda.enable_{off[0]}_sdp)"
    asked = ("forward", "backward") if workload.needs_gradients else ("forward",)
    if rules.deterministic and any(one in implementation.not_deterministic for one in asked):
        return "is not deterministic, and torch.use_deterministic_algorithms is on"
    return None
