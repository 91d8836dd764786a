"""Steps that attention is a part of: how each is drawn and checked, and who computes it."""

from __future__ import annotations

from importlib import import_module

from attnbench.errors import UnknownName
from attnbench.steps.base import StepImplementation, StepKind

__all__ = ["StepImplementation", "StepKind", "kind_of"]

KINDS = {
    "multihead": "attnbench.steps.multihead:MULTIHEAD",
    "gemma-stack": "attnbench.steps.gemma:GEMMA_STACK",
    "pi0-attention": "attnbench.steps.pi0:PI0_ATTENTION",
    "pi0-block": "attnbench.steps.pi0:PI0_BLOCK",
    "pi0-model": "attnbench.steps.pi0:PI0_MODEL",
    "pi0-sampler": "attnbench.steps.pi0:PI0_SAMPLER",
    "pi0-fast-prefill": "attnbench.steps.pi0_fast:PREFILL",
    "pi0-fast-decode": "attnbench.steps.pi0_fast:DECODE",
}


def kind_of(name: str) -> StepKind:
    """How the step of that name is drawn and checked."""
    if name not in KINDS:
        raise UnknownName("step", name, list(KINDS), "attnbench.workloads.steps.STEPS")
    module, _, attribute = KINDS[name].partition(":")
    return getattr(import_module(module), attribute)
