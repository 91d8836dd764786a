"""Which implementation a call uses: the one named, else the active policies', else the first of the fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from attnbench import policy, registry
from attnbench.dispatch.order import META, Candidate, Demand, compiles_in_vain, order_of, why_not, why_not_auto
from attnbench.errors import Unsupported
from attnbench.policy import Choice, Policy
from attnbench.spec import Config, Environment, Implementation

FOR_SHAPES = "torch.eager"
WHY_FOR_SHAPES = (
    "meta tensors have a shape only, which its operators tell; give tensors of a device for what runs there"
)
FIXED = "the first of the fixed order that can run this"


class Evidence(NamedTuple):
    """What a pick by a policy rests on."""

    policy: str
    choice: Choice
    regret: float | None
    """Expected time of the pick over that of the fastest measured; more than the choice's own for an alternative,
    not known off a grid of which nothing was held out."""

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
    """Why the policies that were asked first had no answer that can run."""

    @property
    def label(self) -> str | None:
        """The pick as it stands among the candidates, with its settings."""
        return None if self.pick is None else next(one.name for one in self.candidates if one.reason is None)

    def taken(self, impl: str, demand: Demand) -> Implementation:
        """The pick, or Unsupported with every reason."""
        if self.pick is not None:
            return self.pick
        title, tried = demand.workload.title, self.candidates
        if impl != "auto":
            raise Unsupported(f"{tried[0].name} cannot run {title}: {tried[0].reason}.")
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in tried)
        raise Unsupported(f"no {demand.framework} implementation can run {title} on {demand.device}: {reasons}.")


def decide(impl: str, demand: Demand) -> Decision:
    """Choose; nothing is built and nobody is warned."""
    if impl == "auto" and demand.device == META:
        return decide(FOR_SHAPES, demand)._replace(why=WHY_FOR_SHAPES)
    if impl == "auto":
        return _measured(demand)
    name, config = registry.asked(impl)
    reason = why_not(name, config, demand)
    pick = registry.get(name).configured(config) if reason is None else None
    return Decision(pick, config, "asked for by name" if pick else "refuses", [Candidate(impl, reason)])


def _measured(demand: Demand) -> Decision:
    asked: list[Candidate] = []
    missed: list[str] = []
    for one in policy.active():
        choice = one.choice(demand.workload, demand.framework, demand.environment)
        if choice is None and of_elsewhere(one, demand.environment):
            continue
        if choice is None:
            why = one.miss(demand.workload, demand.framework, demand.environment)
            missed.append(why or f"{one.name} has no entry")
            continue
        for name, config, label, regret in _ranked(choice):
            reason = why_not_auto(name, config, demand, choice.named) or _why_not_packaged(one, name, demand)
            asked.append(Candidate(label, reason))
            if asked[-1].reason is None:
                evidence = Evidence(one.name, choice, regret if choice.regret_known else None)
                pick, why = registry.get(name).configured(config), str(evidence)
                why = why if label == choice.label else f"{label} in place of {choice.label}, which cannot run; {why}"
                return Decision(pick, config, why, asked, evidence, tuple(missed))
        missed.append(f"what {one.name} chose ({choice.label}) cannot run here")
    return _fixed(demand, asked, missed)


def _ranked(choice: Choice) -> Iterator[tuple[str, Config, str, float]]:
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


def _why_not_packaged(one: Policy, name: str, demand: Demand) -> str | None:
    """Return why a policy that came with attnbench is not followed: nobody here measured that compiling pays."""
    if one.origin.startswith("packaged ") and compiles_in_vain(name, demand):
        return "compiles for seconds, which a plan for one call does not repay: ask for it by name, or measure it here"
    return None


def of_elsewhere(one: Policy, environment: Environment) -> bool:
    """Whether it came with attnbench and is of another device: nobody here asked for it, nobody need hear of it."""
    here = (environment.device, environment.device_name)
    return one.origin.startswith("packaged ") and all((p.device, p.device_name) != here for p in one.places)
