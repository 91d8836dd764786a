"""Which implementation a call uses: the one named, else that of the active policies, else the first of a fixed order.

An implementation that compiles for seconds at every build (`compiles_each_plan`: flex) comes after eager if its plan
may serve only one call: without gradients (the lengths of prompts and caches vary) and if the mask carries data
(lengths, documents, arrays), as long as eager's scores take at most MOST_SCORES.

An implementation that supports a call, but raises Unsupported when it runs, is left out of the automatic choices of
this process for calls of the same class (`_failure_key`). A wider class would leave a kernel out for sizes that it can
compute, a narrower one would try it again at every new length.

If no measurement covers a call, what the policies predict is taken, else the first of the fixed order; that is
reported once per kind of call: a warning, an error or nothing (setting `on_miss`). An active policy that does not hold
here (stale, or of another device) is reported once as well, even if another policy covers the call. Calls are reported
when their plan is made, not when a plan is used again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

from msgspec.structs import replace

from attnbench import policy, registry
from attnbench.dispatch.demand import META, Demand, Form
from attnbench.errors import PolicyMiss, PolicyWarning, Unsupported, UsageError
from attnbench.frameworks import environment_of
from attnbench.impls.partial.torch_choice import ruled_out
from attnbench.masks.device import MaskForm
from attnbench.policy import Alternative, Choice, Policy
from attnbench.policy.labels import label_of
from attnbench.policy.policy import UsableFor
from attnbench.printable import printable
from attnbench.spec import Config, Environment, Implementation, Workload

ORDER: dict[str, tuple[str, ...]] = {
    "torch": (
        "torch.dilated-improved", "torch.sdpa-cudnn", "torch.sdpa-flash", "torch.sdpa-efficient", "torch.fa3",
        "torch.flash-attn", "torch.fa4", "torch.flex", "torch.eager",
    ),
    "jax": ("jax.dilated", "jax.cudnn", "jax.xla", "jax.einsum"),
    "numpy": ("numpy.float32", "numpy.reference"),
}  # fmt: skip
"""Fixed order: the kernels of the dilated mask, which take no other, then fused ones, libraries that take a soft cap or
a window, if they are installed, then what takes every mask. `for_mask` puts first what skips what a mask hides."""
MPS_ORDER = ("torch.dilated-improved", "torch.sdpa", "torch.eager")
"""Order on Apple's mps, where SDPA's backends cannot be pinned."""
XPU_ORDER = ("torch.dilated-improved", "torch.sdpa", "torch.flex", "torch.eager")
"""Order on an XPU, where torch's own pick is oneDNN's attention, which cannot be pinned."""
CPU_ORDER: dict[str, tuple[str, ...]] = {
    "torch": ("torch.dilated-improved", "torch.sdpa-flash", "torch.eager"),
    "jax": ("jax.dilated", "jax.xla", "jax.einsum"),
}
"""Order on a CPU, where flex would compile for seconds at the first call."""
TAKE_ARRAYS: dict[str, tuple[str, ...]] = {
    "torch": ("torch.sdpa", "torch.eager"),
    "jax": ("jax.cudnn", "jax.xla", "jax.einsum"),
}
"""Framework -> implementations that take a mask as an array of each call (attnbench.dispatch.array_masks), in order."""
READ_CACHES: dict[str, tuple[str, ...]] = {
    "torch": ("torch.triton-decode", "torch.flash-attn", "torch.eager"),
    "jax": ("jax.cudnn", "jax.einsum"),
    "numpy": ("numpy.float32", "numpy.reference"),
}
"""Fixed order over KV caches: kernels that split the keys of few queries, then what reads every cache. Policies, whose
figures are of whole arrays, are not asked. FA3 and FA4, in whose output a NaN behind the end of a sequence shows, are
used by name only."""
READ_CACHES_ON_CPU: dict[str, tuple[str, ...]] = {"torch": ("torch.sdpa-flash", "torch.eager"), "jax": ("jax.einsum",)}
TAKE_VALUES: dict[str, tuple[str, ...]] = {
    "torch": ("torch.sdpa", "torch.eager"),
    "jax": ("jax.cudnn", "jax.xla", "jax.einsum"),
}
"""Fixed order under a mask whose values are arguments of the call (attnbench.masks.DeviceMask)."""
TAKE_PACKED: dict[str, tuple[str, ...]] = {
    "torch": ("torch.fa3", "torch.fa4", "torch.flash-attn", "torch.sdpa-flash", "torch.sdpa", "torch.eager"),
    "jax": TAKE_VALUES["jax"],
}
"""Fixed order for packed sequences: what computes each by itself, then what hides the tokens of the others."""
OF_DATA = ("lengths", "valid", "documents", "block_causal", "dense")
"""Kinds of masks that carry data, which usually differs from call to call."""
CALLS_OF_A_LENGTH = 1000
"""Forward passes of one length for which compiling must pay off: prompts have all lengths, models tens of layers."""
FEW_QUERIES = 16
"""Most queries of a call that counts as decoding, in which the number of keys grows from call to call."""
MOST_SCORES = 1 << 30
"""Most bytes of logits for which `auto` prefers storing them to compiling for what may be one call."""
MOST_FAILURES = 4096
FOR_SHAPES = "torch.eager"
WHY_FOR_SHAPES = (
    "meta tensors have no values: its operators compute their shapes; pass tensors on a device to see what runs there"
)
FIXED = "the first of the fixed order that can run this"
ADVICE = "`attnbench run` and `attnbench choose` make one; ATTNBENCH_ON_MISS=quiet silences this"
NOTHING_TO_CHOOSE = ("numpy",)
"""Frameworks whose implementations differ in what they take, not in speed."""
_failed: dict[Hashable, str] = {}
"""Implementation, settings and class of calls -> why the implementation could not run such a call."""
_warned: dict[Hashable, object] = {}


class Candidate(NamedTuple):
    """An implementation that was considered, with its settings in brackets, and why it cannot be used, or None."""

    name: str
    reason: str | None


class Evidence(NamedTuple):
    """Evidence for a pick that comes from a policy, by its measurements or by what it predicts."""

    policy: str
    choice: Choice
    regret: float | None
    """Expected time of the pick / time of the fastest measured implementation; larger for an alternative than for the
    choice. None beyond the measured grid if no shape was held out."""

    def __str__(self) -> str:
        other = self.choice.runner_up
        beside = f"; next {other.label}, {other.ratio:.2f} times its time" if other else ""
        return f"{self.policy}: {self.choice}{beside}"


class PickDecision(NamedTuple):
    """The pick, and everything it was picked from."""

    pick: Implementation | None
    config: Config
    why: str
    candidates: list[Candidate]
    evidence: Evidence | None = None
    missed: tuple[str, ...] = ()
    """Why the policies that were asked first had no choice that can run."""

    @property
    def measured(self) -> bool:
        """Whether the pick was measured, near enough: it is neither predicted nor from the fixed order."""
        return self.evidence is not None and not self.evidence.choice.predicted

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


def chosen(impl: str, demand: Demand) -> tuple[Implementation, PickDecision]:
    """Return the implementation to use, after reporting a miss; raise Unsupported if there is none."""
    decision = decide(impl, demand)
    if impl == "auto":
        report(decision, demand)
    return decision.taken(impl, demand), decision


def next_choice(name: str, config: Config, demand: Demand, error: Unsupported) -> tuple[Implementation, PickDecision]:
    """Choose again without an implementation that could not run, now and for calls like this one; warn once.

    If no other candidate is left, the error is raised.
    """
    if len(_failed) >= MOST_FAILURES:
        _failed.clear()
    key = _failure_key(name, config, demand)
    _failed[key] = f"could not run a call like this one: {error}"
    decision = decide("auto", demand)
    if decision.pick is None:
        _failed.pop(key, None)
        raise error
    label = label_of(name, dict(config))
    text = f"{label} was chosen for {demand.workload.title} on {demand.device} and could not run it ({error})"
    _warn_once(("failed", label, demand.framework, demand.device), f"{text}; {decision.label} is used instead.")
    return decision.pick, decision


def decide(impl: str, demand: Demand) -> PickDecision:
    """Choose an implementation, without building it and without a warning."""
    if impl == "auto" and demand.device == META:
        return decide(FOR_SHAPES, demand)._replace(why=WHY_FOR_SHAPES)
    if impl == "auto":
        return _decide_automatically(demand)
    name, config = registry.asked(impl)
    reason = why_not(name, config, demand)
    pick = registry.get(name).configured(config) if reason is None else None
    return PickDecision(pick, config, "asked for by name" if pick else "refuses", [Candidate(impl, reason)])


def _decide_automatically(demand: Demand) -> PickDecision:
    """Decide by the measured choices of the active policies, else by what they predict, else by the fixed order."""
    candidates: list[Candidate] = []
    missed: list[str] = []
    wrong: dict[str, str] = {}
    policies = () if demand.form == "cache" else policy.active()
    asked = demand.workload, demand.framework, demand.environment
    for number, active in enumerate(policies):
        choice = active.choice(*asked, policies[:number])
        wrong = active.incorrect(*asked) | wrong
        if choice is None:
            if not _is_for_other_devices(active, demand.environment):
                missed.append(active.miss(*asked, policies[:number]) or f"{active.name} has no entry")
        elif (decision := _able(active, choice, demand, candidates)) is not None:
            return decision._replace(missed=tuple(missed))
        else:
            missed.append(f"the choice of {active.name} ({choice.label}) cannot run here")
    usable = _hidden_if_usable(demand)
    for number, active in enumerate(policies):
        predicted = active.predicted(*asked, usable, policies[:number])
        if isinstance(predicted, str):
            missed.append(predicted)
        elif predicted is not None and (decision := _able(active, predicted, demand, candidates)) is not None:
            return decision._replace(missed=tuple(missed))
    tried = {one.name for one in candidates}
    fixed = [
        Candidate(name, why_not_auto(name, {}, demand) or wrong.get(name))
        for name in order_of(demand)
        if name not in tried
    ]
    pick = next((registry.get(one.name) for one in fixed if one.reason is None), None)
    return PickDecision(pick, {}, FIXED if pick else "all refuse", [*candidates, *fixed], None, tuple(missed))


def _able(active: Policy, choice: Choice, demand: Demand, candidates: list[Candidate]) -> PickDecision | None:
    """Return the decision for the first of a choice and its alternatives that can run; None if nobody can. Those that
    were considered are added to `candidates`."""
    ranked = [Alternative(implementation=choice.implementation, config=choice.config, ratio=1.0)]
    ranked[0] = replace(ranked[0], compile_s=choice.compile_s)
    ranked += choice.alternatives
    refusals = {one.label: why_not_auto(one.implementation, one.config, demand, choice.named) for one in ranked}
    tried = {one.name for one in candidates}
    for at, one in enumerate(ranked):
        name, config, label = one.implementation, one.config, one.label
        if label in tried:
            continue
        reason = refusals[label]
        if reason is None and registry.get(name).compiles_each_plan:
            others = [other for other in ranked[at + 1 :] if refusals[other.label] is None]
            others = [other for other in others if not registry.get(other.implementation).compiles_each_plan]
            reason = _why_not_worth_compiling(active, choice, one, others[0] if others else None, demand)
        candidates.append(Candidate(label, reason))
        if reason is None:
            regret = choice.regret * one.ratio
            evidence = Evidence(active.name, choice, regret if choice.regret_known else None)
            pick, why = registry.get(name).configured(config), str(evidence)
            if label != choice.label:
                gone = "cannot run" if refusals[choice.label] else "compiles too long"
                why = f"{label} in place of {choice.label}, which {gone}; {why}"
            return PickDecision(pick, config, why, candidates, evidence)
    return None


def _why_not_worth_compiling(
    active: Policy, choice: Choice, one: Alternative, other: Alternative | None, demand: Demand
) -> str | None:
    """Return why compiling for seconds does not pay off for a call beside another candidate; None if it does.

    At the very shape that a policy of the user measured it always does.
    """
    packaged = active.origin.startswith("packaged ")
    exact = not choice.predicted and choice.distance == 0
    if demand.form == "traced" or (exact and not packaged):
        return None
    advice = "ask for it by name, or measure it on this machine"
    if other is None or not choice.time_us or not one.compile_s:
        one_call = _may_serve_one_call(demand.workload, demand.values) and _scores_fit(demand.workload)
        if plan_may_vary(demand.workload, demand.values) if choice.predicted else packaged and one_call:
            return f"compiles for seconds, which does not pay off for what may be a single call: {advice}"
        return None
    calls = 1 if _may_serve_one_call(demand.workload, demand.values) else CALLS_OF_A_LENGTH
    if demand.workload.needs_gradients and calls > 1:
        return None
    saved = calls * (other.ratio - one.ratio) * choice.time_us * 1e-6
    if saved >= one.compile_s:
        return None
    times = "a single call" if calls == 1 else f"{calls:,} calls of one length"
    return f"compiles for about {one.compile_s:.1f} s, which does not pay off for {times}: {advice}"


def _hidden_if_usable(demand: Demand) -> UsableFor:
    """Return a function of an implementation: whether it computes what the mask hides, None if it cannot be used."""

    def computes_hidden(name: str, config: Config, named: Collection[str]) -> bool | None:
        if why_not_auto(name, config, demand, named) is not None:
            return None
        return registry.configured(name, config).computes_hidden(demand.workload, demand.environment)

    return computes_hidden


def order_on(framework: str, device: str, form: Form = "call") -> tuple[str, ...]:
    """Return the fixed order on a device."""
    if form == "array":
        return TAKE_ARRAYS[framework]
    if form == "cache":
        on_cpu = READ_CACHES_ON_CPU.get(framework) if device == "cpu" else None
        return on_cpu or READ_CACHES[framework]
    if framework == "torch" and device == "mps":
        return MPS_ORDER
    if framework == "torch" and device == "xpu":
        return XPU_ORDER
    return CPU_ORDER.get(framework, ORDER[framework]) if device == "cpu" else ORDER[framework]


def order_of(demand: Demand) -> tuple[str, ...]:
    """Return the fixed order for a demand."""
    if demand.form in ("array", "cache"):
        return order_on(demand.framework, demand.device, demand.form)
    if demand.values is not None:
        return (TAKE_PACKED if demand.values.packed else TAKE_VALUES).get(demand.framework, ())
    varies = demand.form != "traced" and plan_may_vary(demand.workload)
    workload, environment = demand.workload, demand.environment
    order = order_on(demand.framework, demand.device, demand.form)
    return for_mask(order, workload, varies, lambda name: registry.get(name).computes_hidden(workload, environment))


def for_mask(
    order: tuple[str, ...], workload: Workload, varies: bool, computes_hidden: Callable[[str], bool]
) -> tuple[str, ...]:
    """Return names in the order for a workload: those that compute what its mask hides come after those that skip it,
    and if the call `varies`, those that compile for each plan come last."""
    hides = workload.visible_mask.kinds != ("full",)

    def key(name: str) -> tuple[bool, bool]:
        return varies and registry.get(name).compiles_each_plan, hides and computes_hidden(name)

    return tuple(sorted(order, key=key))


def plan_may_vary(workload: Workload, values: MaskForm | None = None) -> bool:
    """Return whether calls like this one may need many plans, which is too many to compile each: prompts have all
    lengths, masks carry data that are not `values` of the call. False if eager would store too much for all of them."""
    varies = not workload.needs_gradients or _may_serve_one_call(workload, values)
    return varies and _scores_fit(workload)


def _may_serve_one_call(workload: Workload, values: MaskForm | None = None) -> bool:
    """Return whether the mask carries data, or the queries are so few that their keys may grow with every call."""
    carries = values is None and any(kind in OF_DATA for kind in workload.visible_mask.kinds)
    return carries or workload.q_len <= FEW_QUERIES


def _scores_fit(workload: Workload) -> bool:
    return 4 * workload.batch * workload.heads * workload.q_len * workload.kv_len <= MOST_SCORES


def why_not_auto(name: str, config: Config, demand: Demand, named: Collection[str] = ()) -> str | None:
    """Return why an automatic choice leaves an implementation out; None if it does not.

    `named`: implementations that the maker of the policy asked for by name.
    """
    reason = why_not(name, config, demand) or known_failure(name, config, demand)
    if reason is not None:
        return reason
    implementation = registry.configured(name, config)
    if implementation.approximate:
        return "is approximate: ask for it by name"
    if implementation.verify_only:
        return f"is for verification only: {implementation.verify_only}"
    if implementation.by_name_only and name not in named:
        return f"is used only if asked for by name: {implementation.by_name_only}"
    if demand.any_kv_len and not takes_any_length(implementation):
        return "is built for a fixed number of keys"
    return ruled_out(implementation, demand.workload, demand.rules)


def takes_any_length(implementation: Implementation) -> bool:
    """Return whether one call may serve all numbers of keys: a claim that is believed of our own implementations only,
    because a call is verified for the number that it was built for."""
    return implementation.any_kv_len and registry.origin(implementation.name) == registry.OURS


def why_not(name: str, config: Config, demand: Demand) -> str | None:
    """Return why the implementation of a name cannot serve a demand; None if it can."""
    try:
        implementation = registry.configured(name, config)
    except UsageError as error:
        return f"is not available here: {error}"
    workload = demand.workload
    if demand.form == "array" and name not in TAKE_ARRAYS[demand.framework]:
        return "does not take a mask as an argument of the call"
    if demand.shards is not None and implementation.over_devices != "partitioned":
        if implementation.over_devices == "alone":
            return "runs on devices of its own choice, not on arrays that are sharded over devices"
        if not demand.shards.separate:
            return (
                "cannot be partitioned by XLA, so each device would gather and compute everything: shard batch or "
                "heads alone, for q, k and v alike, or call it inside jax.shard_map"
            )
    reason = refusal(implementation, workload, demand.framework, demand.device, demand.values)
    if demand.form == "cache":
        call = None if reason else implementation.decode(workload, demand.environment, config, demand.page_size)
        return call if isinstance(call, str) else reason
    if demand.values is not None:
        return reason or _why_not_values(implementation, config, demand)
    if reason is None and demand.with_lse and implementation.build_lse(workload, config) is None:
        wide = replace(workload, dtype="float32")
        runs_wide = (
            workload.dtype != "float32" and refusal(implementation, wide, demand.framework, demand.device) is None
        )
        has_wide_lse = runs_wide and implementation.build_lse(wide, config) is not None
        lacks = f"returns no LSE in {workload.dtype}, only in float32" if has_wide_lse else "returns no LSE"
        return f"{lacks}, which attention sinks need" if demand.with_sinks else lacks
    # In a compiled graph that does not trace the implementation, its backward pass must be callable by itself.
    opaque = demand.form == "operator" or (demand.form == "traced" and not implementation.traceable)
    if reason is None and opaque and workload.needs_gradients and implementation.partial(workload, config) is None:
        return "has no backward pass that a graph of torch.compile can call"
    trains_sinks = demand.with_sinks and workload.needs_gradients and not opaque and not implementation.lse_gradient
    if reason is None and trains_sinks and implementation.partial(workload, config) is None:
        return "has no gradient through its LSE, which attention sinks need"
    return reason


def _why_not_values(implementation: Implementation, config: Config, demand: Demand) -> str | None:
    """Return why an implementation that takes a mask's values cannot serve a demand all the same."""
    workload, form = demand.workload, demand.values
    assert form is not None
    if demand.with_lse and implementation.build_values(workload, form, config, True) is None:
        return "returns no LSE under a mask on the device"
    traced = demand.form == "traced" and implementation.traceable
    if demand.form == "call" or traced or not workload.needs_gradients:
        return None
    without = implementation.partial_values(workload, form, config) is None
    return "has no backward pass that a graph of torch.compile can call" if without else None


def refusal(
    implementation: Implementation, workload: Workload, framework: str, device: str, values: MaskForm | None = None
) -> str | None:
    """Return why an implementation cannot compute a workload with arrays of a framework and device; None if it can.

    `values` is the form of a mask that is an argument of the call.
    """
    if implementation.framework != framework:
        return f"takes {implementation.framework} arrays, not {framework} arrays"
    if implementation.step:
        return f"computes the step {implementation.step}, not attention alone"
    environment = environment_of(framework, "cpu" if device == META else device)
    if values is not None:
        return implementation.available(environment) or implementation.supports_values(workload, values, environment)
    return implementation.available(environment) or implementation.supports(workload, environment)


def known_failure(name: str, config: Config, demand: Demand) -> str | None:
    """Return why an implementation could not run a call like this one; None if nothing is known."""
    return _failed.get(_failure_key(name, config, demand)) if _failed else None


def _failure_key(name: str, config: Config, demand: Demand) -> Hashable:
    """Return implementation, settings and class of a call: two calls of one class fail alike."""
    work = demand.workload
    sizes = (work.batch * work.heads, work.q_len, work.kv_len)
    return (
        name, repr(sorted(config.items())), registry.generation(), demand.framework, demand.device, demand.with_lse,
        demand.form == "cache", demand.page_size, demand.with_sinks, demand.rules,
        work.pass_, work.dtype, work.visible_mask.kinds, work.head_dim, work.value_dim,
        work.softcap is None, work.group > 1, work.q_len < work.kv_len, work.q_len > work.kv_len,
        *(size.bit_length() for size in sizes),
    )  # fmt: skip


def report(decision: PickDecision, demand: Demand) -> None:
    """Warn once, or raise PolicyMiss, if no policy covers a call; warn once of policies that do not hold here."""
    if demand.framework in NOTHING_TO_CHOOSE or demand.device == META or demand.form == "cache":
        return
    rule, place, active = policy.on_miss(), (demand.framework, demand.device), policy.active()
    reasons = "; ".join(decision.missed) or "none is for this device"
    miss = f"no measured policy covers {demand.workload.title} on {demand.device} ({reasons})"
    if not decision.measured and rule == "error":
        raise PolicyMiss(f"{miss}, and on_miss is error; {ADVICE.partition(';')[0]}.")
    if rule == "quiet":
        return
    for one in active:
        why = None if _is_for_other_devices(one, demand.environment) else one.stale(demand.environment)
        if why is not None:
            _warn_once((one.digest, *place), f"{why}: it is not used.")
    if not decision.measured:
        # Calls share a warning: all of a device without policies, else those of one shape class, whatever their sizes.
        some_hold = not all(one.stale(demand.environment) for one in active)
        key = (*place, tuple(policy.shape_of(demand.workload).hard.items()), decision.label) if some_hold else place
        how = FIXED if decision.evidence is None else decision.evidence.choice.predicted
        used = f"{decision.label} is used, {how}" if decision.label else ""
        _warn_once(key, f"{miss}; {used}. {ADVICE}.")


def _is_for_other_devices(one: Policy, environment: Environment) -> bool:
    """Return whether a policy came with attnbench and is for other devices: then no message mentions it."""
    here = (environment.device, environment.device_name)
    return one.origin.startswith("packaged ") and all((p.device, p.device_name) != here for p in one.places)


def _warn_once(key: Hashable, text: str) -> None:
    token = object()
    if _warned.setdefault(key, token) is not token:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("attnbench."):
        level, frame = level + 1, frame.f_back  # up to the first frame outside of attnbench
    warnings.warn(printable(text), PolicyWarning, stacklevel=level)


def forget() -> None:
    """Let implementations that failed be chosen again, and warn again of what was reported before."""
    _failed.clear()
    _warned.clear()
