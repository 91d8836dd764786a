"""Which implementation a call uses: the one named, else that of the active policies, else the first of the fixed order.

If no measured policy covers a call, that is reported once per kind of call: a warning, an error or nothing (setting
`on_miss`). An active policy that does not hold here (stale, or of another device) is reported once as well, even if
another policy covers the call. Calls are reported when their plan is made, not when a plan is used again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from attnbench import policy, registry
from attnbench.dispatch.demand import META, Demand
from attnbench.dispatch.order import Candidate, compiles_in_vain, order_of, why_not, why_not_auto
from attnbench.errors import PolicyMiss, PolicyWarning, Unsupported
from attnbench.policy import Choice, Policy
from attnbench.printable import printable
from attnbench.spec import Config, Environment, Implementation

FOR_SHAPES = "torch.eager"
WHY_FOR_SHAPES = (
    "meta tensors have shapes only, which its operators compute; pass tensors of a device to see what runs there"
)
FIXED = "the first of the fixed order that can run this"
ADVICE = "`attnbench run` and `attnbench choose` make one; ATTNBENCH_ON_MISS=quiet silences this"
NOTHING_TO_CHOOSE = ("numpy",)
"""Frameworks whose implementations differ in what they take, not in speed."""
_warned: dict[Hashable, object] = {}


class Evidence(NamedTuple):
    """Evidence for a pick that comes from a policy."""

    policy: str
    choice: Choice
    regret: float | None
    """Expected time of the pick / time of the fastest measured; for an alternative more than the choice's own. None off
    a grid of which no shape was held out."""

    def __str__(self) -> str:
        other = self.choice.runner_up
        beside = f"; next {other.label}, {other.ratio:.2f} times its time" if other else ""
        return f"{self.policy}: {self.choice}{beside}"


class Decision(NamedTuple):
    """The pick, and everything it was picked from."""

    pick: Implementation | None
    config: Config
    why: str
    candidates: list[Candidate]
    evidence: Evidence | None = None
    missed: tuple[str, ...] = ()
    """Why the policies that were asked first had no choice that can run."""

    @property
    def label(self) -> str | None:
        """Name of the pick among the candidates, with its settings."""
        return None if self.pick is None else next(one.name for one in self.candidates if one.reason is None)

    def taken(self, impl: str, demand: Demand) -> Implementation:
        """Return the pick, or raise Unsupported with every reason."""
        if self.pick is not None:
            return self.pick
        title, tried = demand.workload.title, self.candidates
        if impl != "auto":
            raise Unsupported(f"{tried[0].name} cannot run {title}: {tried[0].reason}.")
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in tried)
        raise Unsupported(f"no {demand.framework} implementation can run {title} on {demand.device}: {reasons}.")


def chosen(impl: str, demand: Demand) -> tuple[Implementation, Decision]:
    """Return the implementation to use, after reporting a miss; raise Unsupported if there is none."""
    decision = decide(impl, demand)
    if impl == "auto":
        report(decision, demand)
    return decision.taken(impl, demand), decision


def decide(impl: str, demand: Demand) -> Decision:
    """Choose an implementation, without building it and without a warning."""
    if impl == "auto" and demand.device == META:
        return decide(FOR_SHAPES, demand)._replace(why=WHY_FOR_SHAPES)
    if impl == "auto":
        return _measured(demand)
    name, config = registry.asked(impl)
    reason = why_not(name, config, demand)
    pick = registry.get(name).configured(config) if reason is None else None
    return Decision(pick, config, "asked for by name" if pick else "refuses", [Candidate(impl, reason)])


def _measured(demand: Demand) -> Decision:
    """Decide by the active policies, and if none has a choice that can run, by the fixed order."""
    asked: list[Candidate] = []
    missed: list[str] = []
    for one in policy.active():
        choice = one.choice(demand.workload, demand.framework, demand.environment)
        if choice is None and _of_elsewhere(one, demand.environment):
            continue
        if choice is None:
            why = one.miss(demand.workload, demand.framework, demand.environment)
            missed.append(why or f"{one.name} has no entry")
            continue
        for name, config, label, regret in _ranked(choice):
            reason = why_not_auto(name, config, demand, choice.named)
            if reason is None and one.origin.startswith("packaged ") and compiles_in_vain(name, demand):
                # A policy that came with attnbench: nobody measured on this machine that compiling pays.
                reason = (
                    "compiles for seconds, which a plan for one call does not repay: ask for it by name, or measure it "
                    "here"
                )
            asked.append(Candidate(label, reason))
            if reason is None:
                evidence = Evidence(one.name, choice, regret if choice.regret_known else None)
                pick, why = registry.get(name).configured(config), str(evidence)
                why = why if label == choice.label else f"{label} in place of {choice.label}, which cannot run; {why}"
                return Decision(pick, config, why, asked, evidence, tuple(missed))
        missed.append(f"the choice of {one.name} ({choice.label}) cannot run here")
    return _fixed(demand, asked, missed)


def _ranked(choice: Choice) -> Iterator[tuple[str, Config, str, float]]:
    """Yield name, config, label and regret of a choice and its alternatives."""
    yield choice.implementation, choice.config, choice.label, choice.regret
    for other in choice.alternatives:
        yield other.implementation, other.config, other.label, choice.regret * other.ratio


def _fixed(demand: Demand, asked: list[Candidate], missed: list[str]) -> Decision:
    known = {one.name for one in asked}
    names = [name for name in order_of(demand) if name not in known]
    found = [*asked, *(Candidate(name, why_not_auto(name, {}, demand)) for name in names)]
    name = next((one.name for one in found[len(asked) :] if one.reason is None), None)
    pick = None if name is None else registry.get(name)
    return Decision(pick, {}, "all refuse" if pick is None else FIXED, found, None, tuple(missed))


def _of_elsewhere(one: Policy, environment: Environment) -> bool:
    """Return whether a policy came with attnbench and is for other devices: then no message mentions it."""
    here = (environment.device, environment.device_name)
    return one.origin.startswith("packaged ") and all((p.device, p.device_name) != here for p in one.places)


def report(decision: Decision, demand: Demand) -> None:
    """Warn once, or raise PolicyMiss, if no policy covers a call; warn once of policies that do not hold here."""
    if demand.framework in NOTHING_TO_CHOOSE or demand.device == META:
        return
    rule = policy.on_miss()
    if decision.evidence is None and rule == "error":
        raise PolicyMiss(f"{_miss(decision, demand)}, and on_miss is error; {ADVICE.partition(';')[0]}.")
    if rule != "quiet":
        for one in policy.active():
            why = None if _of_elsewhere(one, demand.environment) else one.stale(demand.environment)
            if why is not None:
                _warn_once((one.digest, demand.framework, demand.device), f"{why}: it is not used.")
        if decision.evidence is None:
            pick = f"{decision.pick.name} is used, {FIXED}" if decision.pick else ""
            _warn_once(_warning_key(decision, demand), f"{_miss(decision, demand)}; {pick}. {ADVICE}.")


def report_failure(label: str, reason: str, instead: str, demand: Demand) -> None:
    """Warn once that a candidate was chosen and could not run, and which one replaces it."""
    text = f"{label} was chosen for {demand.workload.title} on {demand.device} and could not run it ({reason})"
    _warn_once(("failed", label, demand.framework, demand.device), f"{text}; {instead} takes its place.")


def forget_warnings() -> None:
    """Warn again of what was reported before."""
    _warned.clear()


def _miss(decision: Decision, demand: Demand) -> str:
    reasons = "; ".join(decision.missed) or "none is of this device"
    return f"no measured policy covers {demand.workload.title} on {demand.device} ({reasons})"


def _warning_key(decision: Decision, demand: Demand) -> Hashable:
    """Return the class of calls that share a warning: a device without policies, else all sizes of one shape class."""
    place = (demand.framework, demand.device)
    if all(one.stale(demand.environment) for one in policy.active()):
        return place
    shape = policy.shape_of(demand.workload)
    return (*place, tuple(shape.hard.items()), decision.pick and decision.pick.name)


def _warn_once(key: Hashable, text: str) -> None:
    mine = object()
    if _warned.setdefault(key, mine) is mine:
        warnings.warn(printable(text), PolicyWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """Return the level of the first frame outside of attnbench, seen from the function that warns."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("attnbench."):
        level, frame = level + 1, frame.f_back
    return level
