"""`ab.explain`: which implementation a call would use, on what evidence, and why the others would not be."""

from __future__ import annotations

from msgspec import Struct

from attnbench import registry
from attnbench.dispatch.arrays import framework_of, pass_of
from attnbench.dispatch.choice import Decision, decide
from attnbench.dispatch.order import META, Candidate, Demand, order_of, why_not, why_not_auto
from attnbench.dispatch.plan import Words, demand_of
from attnbench.frameworks.torch.internals import under_autocast
from attnbench.masks import AnyMask
from attnbench.policy import Choice
from attnbench.printable import printable
from attnbench.spec import Array, Workload

NOT_ASKED = "can run, but neither a policy nor the fixed order names it: ask for it by name"
CAN = "can run; "
"""Of those that would be taken if nobody before them could."""
NOT_REACHED = f"{CAN}what a policy measured comes before the fixed order"


class Explanation(Struct, frozen=True):
    """The pick and everything it was picked from."""

    workload: Workload
    device: str
    pick: str | None
    why: str
    candidates: list[Candidate]
    policy: str | None = None
    """The policy that the pick comes from."""
    evidence: Choice | None = None
    """What it measured: the nearest shape (`measured`, `distance` in octaves), the regret there, the `runner_up`."""
    regret: float | None = None
    """Expected time of the pick over that of the fastest; null without evidence."""
    missed: tuple[str, ...] = ()
    """Why the policies asked before had no answer."""

    @property
    def able(self) -> list[str]:
        """The pick, then whoever would take its place: what was measured, then the fixed order."""
        found = [one.name for one in self.candidates if one.reason is None or one.reason.startswith(CAN)]
        return sorted(found, key=lambda name: name != self.pick)

    def __str__(self) -> str:
        lines = [f"{self.workload.title} on {self.device}: {self.pick or 'nothing'} ({self.why})"]
        lines += [f"  no answer: {reason}" for reason in self.missed]
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
    """What `attention` with the same arguments would use: candidates in order, refusals, evidence, the pick and why."""
    framework = framework_of(q, k, v)
    train = pass_of(framework, q, k, v) == "train"
    if framework == "torch":
        q, k, v = under_autocast(q, k, v)
    return explained(q, k, v, Words(mask, scale, softcap, impl, layout, heads, return_lse), train)


def explained(q: Array, k: Array, v: Array, words: Words, train: bool) -> Explanation:
    """The same of one pass."""
    impl, demand = words.impl, demand_of(q, k, v, words, train)
    found = decide(impl, demand)
    asked = impl == "auto" and demand.device != META
    others = _others(found, demand) if asked else []
    pick, evidence = found.label, found.evidence
    why = found.why
    if evidence is None and asked and pick is not None:
        why += "; no measured policy speaks for it" if found.missed else "; no measured policy is active"
    return Explanation(
        demand.workload, demand.device, pick, why, [*found.candidates, *others],
        evidence and evidence.policy, evidence and evidence.choice, evidence and evidence.regret, found.missed,
    )  # fmt: skip


def _others(found: Decision, demand: Demand) -> list[Candidate]:
    """Those of the framework that were not asked: each was measured and is slower, refuses, or waits to be named."""
    measured = _slower(found.evidence.choice, found, demand) if found.evidence else []
    named = {one.name.partition("[")[0] for one in (*found.candidates, *measured)}
    mine = [one for one in map(registry.get, registry.loadable()[0]) if one.framework == demand.framework]
    mine = [one for one in mine if not one.step]
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
