"""Active policies, in the order a call asks them: `use_policy(p)`, `set_policy(p)`, the user's file, attnbench's own.

A `with` block holds for its own thread and task only, `set_policy` for the whole process; the user's file is the
setting `policy` (ATTNBENCH_POLICY). Autograd may run a backward pass, and with it the recomputation of activation
checkpointing, in another thread, where no `with` block holds: `set_policy` reaches that thread, and so does
`checkpoint_context`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from contextvars import Token as ContextToken
from functools import lru_cache
from threading import Lock
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from attnbench.config import OnMiss, load_settings
from attnbench.errors import UsageError
from attnbench.policy.files import load_policy, packaged
from attnbench.policy.policy import Choice, Policy
from attnbench.spec import Environment, Workload

Token = tuple[int, tuple[str, ...], OnMiss | None]
READINGS = 8
"""Number of readings of settings and files that are kept: a forward pass before `forget` may be computed again."""


class _Process(Struct, frozen=True):
    """State of the whole process: the policy of `set_policy`, and which reading of settings and files counts."""

    epoch: int = 0
    """Number that differs after each change."""
    reading: int = 0
    policies: tuple[Policy, ...] = ()
    on_miss: OnMiss | None = None


class _Stack(Struct, frozen=True):
    """State of a thread or task: the policies of its `use_policy` blocks, innermost first."""

    policies: tuple[Policy, ...] = ()
    digests: tuple[str, ...] = ()
    on_miss: OnMiss | None = None
    outer: _Stack | None = None
    process: _Process | None = None
    """State of the process at the forward pass that is being recomputed; None: the present one."""


class PolicyAnswer(Struct, frozen=True, kw_only=True):
    """Answer of the active policies for a workload."""

    choice: Choice | None
    policy: Policy | None = None
    """Policy that the choice is from."""
    misses: tuple[str, ...] = ()
    """Reasons why the policies asked before `policy`, or all if it is None, had no choice."""


_stack: ContextVar[_Stack] = ContextVar("attnbench_policies", default=_Stack())  # noqa: B039 (frozen)
_process = _Process()
_changing = Lock()


def _check(policy: object, who: str, on_miss: object) -> None:
    if not isinstance(policy, Policy):
        raise UsageError(f"{who} takes what load_policy(path) returns, not {policy!r:.60}.")
    if on_miss not in (None, *get_args(OnMiss)):
        raise UsageError(f"on_miss must be {' or '.join(get_args(OnMiss))}, not {on_miss!r}.")


class use_policy(AbstractContextManager[Policy]):
    """Ask this policy before all others inside the `with` block; blocks nest, the innermost is asked first.

    `on_miss` ("warn", "error" or "quiet") is what `attention` does in the block if no policy covers a call; by default
    that of the block around it, and outside of all blocks the setting.
    """

    def __init__(self, policy: Policy, *, on_miss: OnMiss | None = None) -> None:
        _check(policy, "use_policy", on_miss)
        self._policy = policy
        self._on_miss: OnMiss | None = on_miss

    def __enter__(self) -> Policy:
        outer, mine = _stack.get(), self._policy
        on_miss = self._on_miss or outer.on_miss
        _stack.set(_Stack((mine, *outer.policies), (mine.digest, *outer.digests), on_miss, outer, outer.process))
        return mine

    def __exit__(self, *_: object) -> None:
        outer = _stack.get().outer
        assert outer is not None
        _stack.set(outer)


def set_policy(policy: Policy | None, *, on_miss: OnMiss | None = None) -> None:
    """Ask this policy in every thread of the process, after those of `use_policy` blocks; None removes it.

    A second call replaces the first. `on_miss` is that of `use_policy`, for calls outside of all blocks that set it.
    """
    global _process
    if policy is not None:
        _check(policy, "set_policy", on_miss)
    elif on_miss is not None:
        raise UsageError("on_miss needs a policy: pass one, or set ATTNBENCH_ON_MISS.")
    policies = () if policy is None else (policy,)
    with _changing:
        _process = replace(_process, epoch=_process.epoch + 1, policies=policies, on_miss=on_miss)


def checkpoint_context() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the two contexts that `torch.utils.checkpoint.checkpoint(..., context_fn=checkpoint_context)` needs.

    Calls recomputed in the backward pass, in any thread, ask the policies of their forward pass: those of
    `use_policy` blocks, and that of `set_policy`.
    """
    stack = _stack.get()
    return nullcontext(), _Recomputation(replace(stack, process=stack.process or _process))


class _Recomputation:
    """Context that restores the policies of a forward pass, each time that its checkpoint is recomputed."""

    def __init__(self, stack: _Stack) -> None:
        self._asked = stack
        self._tokens: list[ContextToken[_Stack]] = []

    def __enter__(self) -> None:
        self._tokens.append(_stack.set(self._asked))

    def __exit__(self, *_: object) -> None:
        _stack.reset(self._tokens.pop())


def active() -> tuple[Policy, ...]:
    """Return every policy that a call in this thread asks, in order."""
    stack = _stack.get()
    process = stack.process or _process
    return (*stack.policies, *process.policies, *_default_policies(process.reading))


def generation() -> Token:
    """Return a cheap hashable token that is equal as long as `active` returns the same policies."""
    stack = _stack.get()
    return (stack.process or _process).epoch, stack.digests, stack.on_miss


def on_miss() -> OnMiss:
    """Return what happens on a miss: set by the innermost `use_policy`, else by `set_policy`, else the setting."""
    stack = _stack.get()
    process = stack.process or _process
    return stack.on_miss or process.on_miss or _on_miss_setting(process.reading)


def forget() -> None:
    """Read the settings, the user's file and the packaged policies again at the next call."""
    global _process
    with _changing:
        _process = replace(_process, epoch=_process.epoch + 1, reading=_process.reading + 1)


def find(workload: Workload, framework: str, environment: Environment) -> PolicyAnswer:
    """Return the choice of the first active policy that has one, and why the policies before it have none. Whom these
    found incorrect it does not choose."""
    misses: list[str] = []
    policies = active()
    for number, policy in enumerate(policies):
        choice = policy.choice(workload, framework, environment, policies[:number])
        if choice is not None:
            return PolicyAnswer(choice=choice, policy=policy, misses=tuple(misses))
        misses.append(policy.miss(workload, framework, environment, policies[:number]) or "")
    return PolicyAnswer(choice=None, misses=tuple(misses))


@lru_cache(maxsize=READINGS)
def _default_policies(reading: int) -> tuple[Policy, ...]:
    """Return the policies that hold without being set: the user's file and the packaged ones."""
    del reading
    path = load_settings().policy
    return (*((load_policy(path),) if path else ()), *packaged())


@lru_cache(maxsize=READINGS)
def _on_miss_setting(reading: int) -> OnMiss:
    del reading
    return load_settings().on_miss
