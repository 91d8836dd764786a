"""Which policies a call asks, innermost first: `with use_policy(p)`, the user's file, those that come with attnbench.

A `with` holds for its own thread and task only; the user's file is the setting `policy` (ATTNBENCH_POLICY).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from msgspec import Struct

from attnbench.policy.choices import Choice
from attnbench.policy.files import load_policy, packaged
from attnbench.policy.policy import Policy
from attnbench.spec import Environment, Workload

Token = tuple[int, tuple[str, ...]]


class _Stack(Struct, frozen=True):
    policies: tuple[Policy, ...] = ()
    digests: tuple[str, ...] = ()


class Found(Struct, frozen=True, kw_only=True):
    """What the active policies say of a workload."""

    choice: Choice | None
    policy: Policy | None = None
    """The one that spoke."""
    misses: tuple[str, ...] = ()
    """Why those asked before it, or all, had nothing to say."""


_stack: ContextVar[_Stack] = ContextVar("attnbench_policies", default=_Stack())  # noqa: B039 (frozen)
_epoch = 0


@contextmanager
def use_policy(policy: Policy) -> Iterator[Policy]:
    """Ask this policy before all others inside the `with`; such blocks stack, the innermost is asked first."""
    outer = _stack.get()
    token = _stack.set(_Stack((policy, *outer.policies), (policy.digest, *outer.digests)))
    try:
        yield policy
    finally:
        _stack.reset(token)


def active() -> tuple[Policy, ...]:
    """Every policy a call in this thread asks, in order."""
    return (*_stack.get().policies, *_standing(_epoch))


def generation() -> Token:
    """Cheap and hashable; equal as long as `active` says the same: what was chosen under another one may be stale."""
    return _epoch, _stack.get().digests


def forget() -> None:
    """Read the user's file and the packaged ones again at the next call."""
    global _epoch
    _epoch += 1


def find(workload: Workload, framework: str, environment: Environment) -> Found:
    """The choice of the first active policy that has one, and why the others had none."""
    misses: list[str] = []
    for policy in active():
        choice = policy.choice(workload, framework, environment)
        if choice is not None:
            return Found(choice=choice, policy=policy, misses=tuple(misses))
        misses.append(policy.miss(workload, framework, environment) or "")
    return Found(choice=None, misses=tuple(misses))


@lru_cache(maxsize=1)
def _standing(epoch: int) -> tuple[Policy, ...]:
    from attnbench.config import load_settings

    del epoch
    path = load_settings().policy
    return (*((load_policy(path),) if path else ()), *packaged())
