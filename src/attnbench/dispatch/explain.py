"""`ab.explain`: which implementation a call would use, on what evidence, and why it would not use the others."""

from __future__ import annotations

from msgspec import Struct

from attnbench import registry
from attnbench.dispatch.choice import Decision, decide
from attnbench.dispatch.demand import META, Demand, Words, demand_of, framework_of, pass_of
from attnbench.dispatch.order import Candidate, order_of, why_not, why_not_auto
from attnbench.frameworks.torch.internals import under_autocast
from attnbench.masks import AnyMask
from attnbench.policy import Choice
from attnbench.printable import printable
from attnbench.spec import Array, Workload

NOT_ASKED = "can run, but neither a policy nor the fixed order names it: ask for it by name"
CAN = "can run; "
"""Beginning of the reason of candidates that would be used if those before them could not run."""
NOT_REACHED = f"{CAN}the choice of a policy comes before the fixed order"


class Explanation(Struct, frozen=True):
    """The pick, and everything it was picked from."""

    workload: Workload
    device: str
    pick: str | None
    why: str
    candidates: list[Candidate]
    policy: str | None = None
    """Name of the policy that the pick comes from."""
    evidence: Choice | None = None
    """Choice of that policy: its nearest shape (`measured`, `distance` in octaves), regret and `runner_up`."""
    regret: float | None = None
    """Expected time of the pick / time of the fastest; null without evidence."""
    missed: tuple[str, ...] = ()
    """Why the policies asked before had no choice."""

    @property
    def able(self) -> list[str]:
        """Names of the pick and of what would replace it: alternatives of the policy, then the fixed order."""
        found = [one.name for one in self.candidates if one.reason is None or one.reason.startswith(CAN)]
        return sorted(found, key=lambda name: name != self.pick)

    def __str__(self) -> str:
        lines = [f"{self.workload.title} on {self.device}: {self.pick or 'nothing'} ({self.why})"]
        lines += [f"  no choice: {reason}" for reason in self.missed]
        lines += [f"  {one.name}: {one.reason or 'can run'}" for one in self.candidates]
        return "\n".join(map(printable, lines))


def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: AnyMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str = "auto",
    layout: str = "bshd",
    heads: int | tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Explanation:
    """Explain what `attention` would use for the same arguments: the pick, candidates, refusals and evidence."""
    framework = framework_of(q, k, v)
    train = pass_of(framework, q, k, v) == "train"
    if framework == "torch":
        q, k, v = under_autocast(q, k, v)
    return explained(q, k, v, Words(mask, scale, softcap, impl, layout, heads, return_lse), train)


def explained(q: Array, k: Array, v: Array, words: Words, train: bool) -> Explanation:
    """Explain a call of the forward pass, or of training."""
    impl, demand = words.impl, demand_of(q, k, v, words, train)
    found = decide(impl, demand)
    asked = impl == "auto" and demand.device != META
    others = _others(found, demand) if asked else []
    pick, evidence = found.label, found.evidence
    why = found.why
    if evidence is None and asked and pick is not None:
        why += "; no measured policy covers it" if found.missed else "; no measured policy is active"
    return Explanation(
        demand.workload, demand.device, pick, why, [*found.candidates, *others],
        evidence and evidence.policy, evidence and evidence.choice, evidence and evidence.regret, found.missed,
    )  # fmt: skip


def _others(found: Decision, demand: Demand) -> list[Candidate]:
    """Return the candidates that were not asked: measured and slower, refusing, or used only by name."""
    measured = _slower(found.evidence.choice, found, demand) if found.evidence else []
    named = {one.name.partition("[")[0] for one in (*found.candidates, *measured)}
    known = map(registry.get, registry.loadable()[0])
    mine = [one for one in known if one.framework == demand.framework and not one.step]
    order = order_of(demand)
    return measured + [
        Candidate(one.name, why_not(one.name, {}, demand) or (NOT_REACHED if one.name in order else NOT_ASKED))
        for one in mine
        if one.name not in named
    ]


def _slower(choice: Choice, found: Decision, demand: Demand) -> list[Candidate]:
    asked = {one.name for one in found.candidates}
    words = f"times the time of {choice.label}"
    return [
        Candidate(
            one.label,
            why_not_auto(one.implementation, one.config, demand, choice.named)
            or f"{CAN}measured at {one.ratio:.2f} {words}",
        )
        for one in choice.alternatives
        if one.label not in asked
    ]
