"""Base class of pairs of libraries in every framework: which passes can be paired, and why others cannot."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import msgspec

from attnbench import registry
from attnbench.errors import Unsupported, UsageError
from attnbench.impls.conditions import needs_device
from attnbench.masks.large_bias import has_large_bias
from attnbench.spec import Call, Config, Environment, Implementation, Partial, Pass, Workload

Role = Literal["forward", "backward"]
ROLES: tuple[Role, Role] = ("forward", "backward")
AUTO = "auto"
CONTENDERS = 3
"""Number of implementations of each pass that are tried in pairs."""


class Pairing(Implementation):
    """Forward pass of one implementation followed by the backward pass of another, both in layout bshd."""

    process = "pair"
    tunables = {"forward": AUTO, "backward": AUTO}
    every_config = True
    lse_gradient = True

    def __init__(self, forward: str = AUTO, backward: str = AUTO) -> None:
        self.names: dict[Role, str] = {"forward": forward, "backward": backward}
        parts = [registry.get(name) for name in self.names.values() if name != AUTO]
        self.materialises_scores = any(part.materialises_scores for part in parts)
        self.forbids = tuple(pattern for part in parts for pattern in part.forbids)
        self.switches = tuple(flag for part in parts for flag in part.switches)
        named = {role: registry.get(name) for role, name in self.names.items() if name != AUTO}
        self.not_deterministic = tuple(role for role, part in named.items() if role in part.not_deterministic)

    @abstractmethod
    def order(self, role: Role, workload: Workload) -> Sequence[str]:
        """Return the implementations that may run a pass, the fastest first."""

    @abstractmethod
    def lse_call(self, part: Implementation, workload: Workload) -> Callable[..., tuple[Any, Any]] | None:
        """Return `build_lse` of a part as a forward pass in bshd without gradients; None if it returns no LSE."""

    def configured(self, config: Config) -> Self:
        unknown = sorted(set(config) - set(self.tunables))
        if unknown:
            raise UsageError(f"{self.name} has no setting {', '.join(unknown)}; it has forward and backward.")
        names = {role: str(config.get(role, name)) for role, name in self.names.items()}
        return self if names == self.names else type(self)(**names)

    def proofs(self, pass_: Pass) -> tuple[tuple[str, ...], ...]:
        """Return the proofs of each library that is named; those of the forward's only if its pass runs."""
        roles = ("backward",) if pass_ == "backward" else ROLES
        named = [self.names[role] for role in roles if self.names[role] != AUTO]
        return tuple(proof for name in named for proof in registry.get(name).proofs(pass_))

    def available(self, environment: Environment) -> str | None:
        return needs_device(environment, "cpu", "cuda")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return self.available(environment) or self._hindrance(workload, environment)

    def configs(self, workload: Workload) -> Sequence[Config]:
        """Return all known pairs, whether installed or not."""
        return _pairs(*(self._asked(role, workload) for role in ROLES))

    def configs_here(self, workload: Workload, environment: Environment) -> Sequence[Config]:
        """Return pairs of the first few implementations that can run each pass."""
        if not workload.needs_gradients:
            return ()
        able = [
            [name for name in self._asked(role, workload) if self._refusal(role, name, workload, environment) is None]
            for role in ROLES
        ]
        return _pairs(*(names[:CONTENDERS] for names in able))

    def build(self, workload: Workload, config: Config) -> Call:
        call = self.build_lse(workload, config)
        assert call is not None
        return lambda q, k, v: call(q, k, v)[0]

    def chosen(self, workload: Workload, environment: Environment) -> Partial:
        """Return the two functions; raise Unsupported with the reason of each part that cannot run."""
        hindrance = self._hindrance(workload, environment)
        reasons: list[str] = [] if hindrance is None else [hindrance]
        for pair in () if hindrance else self.configs_here(workload, environment):
            forward, backward = (self._function(role, str(pair[role]), workload) for role in ROLES)
            if forward is not None and backward is not None:
                return forward, backward
            role: Role = "backward" if backward is None else "forward"
            reasons.append(_refusal_text(role, str(pair[role]), _missing(role)))
        raise Unsupported(f"{self.name} cannot run {workload.title}: {'; '.join(dict.fromkeys(reasons))}.")

    def _asked(self, role: Role, workload: Workload) -> Sequence[str]:
        return self.order(role, workload) if self.names[role] == AUTO else (self.names[role],)

    def _hindrance(self, workload: Workload, environment: Environment) -> str | None:
        if not workload.needs_gradients:
            return "is for training only: without a backward pass there is no second library"
        if has_large_bias(workload.visible_mask):
            return "passes the LSE from one library to the other, which would be rounded away beside such a large bias"
        forward, backward = self.names.values()
        if forward == backward != AUTO:
            return f"both passes are {forward}: ask for {forward} itself"
        if self.configs_here(workload, environment):
            return None
        able: set[str] = set()
        for role in ROLES:
            tried = {name: self._refusal(role, name, workload, environment) for name in self._asked(role, workload)}
            fine = {name for name, reason in tried.items() if reason is None}
            if not fine:
                return "; ".join(_refusal_text(role, name, str(reason)) for name, reason in tried.items())
            able |= fine
        return f"needs two libraries, and only {' or '.join(sorted(able))} can run this here"

    def _refusal(self, role: Role, name: str, workload: Workload, environment: Environment) -> str | None:
        part = registry.get(name)
        kind = type(part)
        own = kind.partial is not Implementation.partial or kind.passes is not Implementation.passes
        fit = own or (role == "forward" and kind.build_lse is not Implementation.build_lse)
        if part.framework != self.framework:
            return f"is not a {self.framework} implementation"
        if isinstance(part, Pairing):
            return "is a pair itself: name the library of the pass"
        if part.approximate:
            return "is approximate, and another's backward pass is not the gradient of what it computes"
        asked = _of_pass(workload, role)
        return part.available(environment) or part.supports(asked, environment) or (None if fit else _missing(role))

    def _function(self, role: Role, name: str, workload: Workload) -> Callable[..., Any] | None:
        part, asked = registry.get(name), _of_pass(workload, role)
        forward, backward = part.passes(asked, {})
        return backward if role == "backward" else forward or self.lse_call(part, asked)


def _pairs(forwards: Sequence[str], backwards: Sequence[str]) -> list[Config]:
    """Return all pairs of two different names, those of the first names first."""
    ranked = [
        (n + m, n, {"forward": forward, "backward": backward})
        for n, forward in enumerate(forwards)
        for m, backward in enumerate(backwards)
        if forward != backward
    ]
    return [pair for *_, pair in sorted(ranked, key=lambda one: one[:2])]


def _of_pass(workload: Workload, role: Role) -> Workload:
    return msgspec.structs.replace(workload, pass_=role)


def _missing(role: Role) -> str:
    missing = {"forward": "returns no LSE for it", "backward": "has no backward pass that can be called alone for it"}
    return missing[role]


def _refusal_text(role: Role, name: str, reason: str) -> str:
    return f"{name} as the {role} pass: {reason}"
