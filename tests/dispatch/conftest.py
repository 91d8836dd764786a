"""Every test here starts without policies and without anything that was told or planned before."""

from __future__ import annotations

import sys

import pytest

from attnbench import policy
from attnbench.dispatch.choice import forget
from attnbench.dispatch.plan import PLANS
from attnbench.policy import stack


@pytest.fixture(autouse=True)
def _no_policies(monkeypatch):
    """Those that come with attnbench may hold on one machine and not on the next."""
    monkeypatch.setattr(stack, "packaged", lambda: ())
    monkeypatch.delenv("ATTNBENCH_POLICY", raising=False)
    monkeypatch.delenv("ATTNBENCH_ON_MISS", raising=False)
    policy.forget()
    forget()
    PLANS.clear()
    yield
    monkeypatch.undo()
    policy.forget()


@pytest.fixture(autouse=True)
def _quick(request):
    """Which implementation is called, and with what, does not depend on how well XLA optimises it."""
    if "jax" in sys.modules:
        request.getfixturevalue("quick_to_compile")
