"""Steps that attention is a part of: how each is drawn and checked, and who computes it."""

from __future__ import annotations

from importlib import import_module

from attnbench.errors import UnknownName
from attnbench.steps.base import StepImplementation, StepKind

__all__ = ["StepImplementation", "StepKind", "kind_of"]

KINDS = {
    "multihead": "attnbench.steps.multihead:MULTIHEAD",
    "gemma-stack": "attnbench.steps.gemma_stack:GEMMA_STACK",
}


def kind_of(name: str) -> StepKind:
    """How the step of that name is drawn and checked."""
    if name not in KINDS:
        raise UnknownName("step", name, list(KINDS), "attnbench.workloads.steps.STEPS")
    module, _, attribute = KINDS[name].partition(":")
    return getattr(import_module(module), attribute)
