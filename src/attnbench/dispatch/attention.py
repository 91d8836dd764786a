"""`ab.attention`: one call for torch, jax and numpy arrays; and `ab.explain`: what such a call would use, and why.

Everything that depends on shapes, types, device, gradients and arguments alone is looked up; a plan is made only for a
new problem. Nothing here measures or reports.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from attnbench import policy, registry
from attnbench.dispatch.choice import Candidate, PickDecision, decide, order_of, why_not, why_not_auto
from attnbench.dispatch.demand import META, Demand, Words, demand_of, device_of, framework_of, pass_of
from attnbench.dispatch.plan import PLANS, planned
from attnbench.dispatch.sinks import with_sinks
from attnbench.errors import Unsupported
from attnbench.frameworks.jax.shards import sharding_of
from attnbench.frameworks.torch.internals import is_autocast, under_autocast, without_autocast
from attnbench.impls.partial.torch_choice import current
from attnbench.masks import AnyMask, DeviceMask
from attnbench.masks.device import mask_or_form, outline_of
from attnbench.policy import Choice
from attnbench.printable import printable
from attnbench.spec import Array, Workload
from attnbench.tracing import is_fake

NOT_ASKED = "can run, but neither a policy nor the fixed order names it: ask for it by name"
CAN = "can run; "
"""Beginning of the reason of a candidate that would be used if the candidates before it could not run."""
NOT_REACHED = f"{CAN}the choice of a policy takes precedence over the fixed order"


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: AnyMask | DeviceMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str = "auto",
    layout: str = "bshd",
    heads: int | tuple[int, int] | None = None,
    return_lse: bool = False,
    sinks: Array | None = None,
    bias: Array | None = None,
) -> Any:
    """Return attention of q, k and v in their layout; differentiable.

    `layout` is bshd, bhsd or packed ([b, s, heads * dim]; then `heads` is the number of heads, or (heads, kv_heads)).
    `impl` is a name (with settings in brackets if it has some), which is used or refused, or "auto": the choice of the
    active policies, else the first of the fixed order of `attnbench.dispatch.choice`, with a warning.
    With `return_lse` also the log-sum-exp [b, heads, q_len], natural log, float32. A gradient flows through it if the
    implementation supports that (`lse_gradient`); with any other, asking for that gradient is an error.
    `sinks` [heads] are logits that join every row's softmax and have no value, differentiable as well.
    `bias` broadcasts to [b, heads, q_len, kv_len] and is added to the logits, an array of the call with a gradient; one
    that is constant may be a mask, `masks.dense`.
    """
    joined = sinks is not None
    if isinstance(mask, DeviceMask):
        from attnbench.dispatch import device_masks

        if joined or bias is not None:
            raise Unsupported(
                "a mask whose values stay on the device does not go together with sinks or bias: read its values, "
                "with constant=True."
            )
        return device_masks.attention(q, k, v, mask, scale, softcap, impl, layout, heads, return_lse)
    if bias is not None:
        from attnbench.dispatch.array_masks import attention_with_bias

        words = Words(mask, scale, softcap, impl, layout, heads, return_lse, joined)
        return attention_with_bias(q, k, v, bias, words, sinks)
    with_lse = return_lse or joined
    recording, rules = False, None
    if hasattr(q, "requires_grad"):
        import torch

        if torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled():
            if is_autocast(q.device.type):
                q, k, v = under_autocast(q, k, v)
                with without_autocast(q.device.type):
                    return attention(
                        q, k, v, mask=mask, scale=scale, softcap=softcap, impl=impl, layout=layout, heads=heads,
                        return_lse=return_lse, sinks=sinks,
                    )  # fmt: skip
            if torch.compiler.is_dynamo_compiling():
                from attnbench.dispatch import torch_compile

                found = torch_compile.attention(q, k, v, mask, scale, softcap, impl, layout, heads, with_lse, joined)
                return found if sinks is None else with_sinks(found, sinks, layout, return_lse)
        recording, rules = torch.is_grad_enabled(), current()
        place: Any = q.device
    else:
        place = None
    try:
        if place is None:
            place, train = _place_and_pass(q, k, v)
        else:
            train = recording and (q.requires_grad or k.requires_grad or v.requires_grad)
            if place != k.device or place != v.device:  # no plan has such a key: `planned` refuses it
                place = (place, k.device, v.device)
        dtype = q.dtype
        if dtype is not k.dtype or dtype is not v.dtype:
            dtype = (dtype, k.dtype, v.dtype)
        key = (
            q.shape, k.shape, v.shape, dtype, place, train, mask, scale, softcap, impl, layout, heads, with_lse,
            joined, type(q), rules, registry.generation(), policy.generation(),
        )  # fmt: skip
        run = PLANS.get(key)
    except (AttributeError, TypeError):  # several frameworks, or not a mask: `planned` refuses them
        key, run, train = None, None, _place_and_pass(q, k, v)[1]
    if run is None:
        run, size = planned(q, k, v, Words(mask, scale, softcap, impl, layout, heads, with_lse, joined), train)
        if key is not None and not is_fake(q):  # a later call cannot use arrays made of fake ones
            PLANS.put(key, run, size)
    return run(q, k, v) if sinks is None else with_sinks(run(q, k, v), sinks, layout, return_lse)


def _place_and_pass(q: Array, k: Array, v: Array) -> tuple[Any, bool]:
    framework = framework_of(q, k, v)
    place = device_of(q, framework), type(k), type(v)
    train = pass_of(framework, q, k, v) == "train"
    if framework == "jax":
        place = (*place, *map(sharding_of, (q, k, v)))
    return place, train


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
        names = [one.name for one in self.candidates if one.reason is None or one.reason.startswith(CAN)]
        return sorted(names, key=lambda name: name != self.pick)

    def __str__(self) -> str:
        lines = [f"{self.workload.title} on {self.device}: {self.pick or 'nothing'} ({self.why})"]
        lines += [f"  no choice: {reason}" for reason in self.missed]
        lines += [f"  {one.name}: {one.reason or 'can run'}" for one in self.candidates]
        return "\n".join(map(printable, lines))


def explain(
    q: Array, k: Array, v: Array, *, mask: AnyMask | DeviceMask | None = None, scale: float | None = None,
    softcap: float | None = None, impl: str = "auto", layout: str = "bshd",
    heads: int | tuple[int, int] | None = None, return_lse: bool = False, sinks: Array | None = None,
) -> Explanation:  # fmt: skip
    """Explain what `attention` would use for the same arguments: the pick, candidates, refusals and evidence."""
    framework = framework_of(q, k, v)
    train = pass_of(framework, q, k, v) == "train"
    if framework == "torch":
        q, k, v = under_autocast(q, k, v)
    joined = sinks is not None
    known = mask_or_form(outline_of(mask)) if isinstance(mask, DeviceMask) else mask
    return explained(q, k, v, Words(known, scale, softcap, impl, layout, heads, return_lse or joined, joined), train)


def explained(q: Array, k: Array, v: Array, words: Words, train: bool) -> Explanation:
    """Explain a call of the forward pass, or of training."""
    demand = demand_of(q, k, v, words, train)
    decision = decide(words.impl, demand)
    candidates, why, evidence = decision.candidates, decision.why, decision.evidence
    if words.impl == "auto" and demand.device != META:
        candidates = [*candidates, *_not_asked(decision, demand)]
        if evidence is None and decision.pick is not None:
            why += "; no measured policy covers it" if decision.missed else "; no measured policy is active"
    return Explanation(
        demand.workload, demand.device, decision.label, why, candidates, evidence and evidence.policy,
        evidence and evidence.choice, evidence and evidence.regret, decision.missed,
    )  # fmt: skip


def _not_asked(decision: PickDecision, demand: Demand) -> list[Candidate]:
    """Return the candidates that the decision did not reach: measured and slower, refusing, or used only by name."""
    others: list[Candidate] = []
    if decision.evidence is not None:
        choice, asked = decision.evidence.choice, {one.name for one in decision.candidates}
        for one in choice.alternatives:
            if one.label not in asked:
                refusal = why_not_auto(one.implementation, one.config, demand, choice.named)
                how = "predicted" if choice.predicted else "measured"
                slower = f"{CAN}{how} at {one.ratio:.2f} times the time of {choice.label}"
                others.append(Candidate(one.label, refusal or slower))
    named = {one.name.partition("[")[0] for one in (*decision.candidates, *others)}
    order = order_of(demand)
    for one in map(registry.get, registry.loadable()[0]):
        if one.framework == demand.framework and not one.step and one.name not in named:
            reason = why_not(one.name, {}, demand) or (NOT_REACHED if one.name in order else NOT_ASKED)
            others.append(Candidate(one.name, reason))
    return others
