"""`ab.explain`: which implementation a call would use, and why the others would not be."""

from __future__ import annotations

from msgspec import Struct

from attnbench import registry
from attnbench.dispatch.arrays import device_of, framework_of, pass_of, workload_of
from attnbench.dispatch.order import Candidate, candidates, refusal
from attnbench.spec import Array, Workload
from attnbench.workloads.masks import AnyMask

NOT_IN_ORDER = "can run, but is not in the fixed order: ask for it by name"


class Explanation(Struct, frozen=True):
    """The pick and everything it was picked from."""

    workload: Workload
    device: str
    pick: str | None
    why: str
    candidates: list[Candidate]

    def __str__(self) -> str:
        lines = [f"{self.workload.title} on {self.device}: {self.pick or 'nothing'} ({self.why})"]
        return "\n".join(lines + [f"  {one.name}: {one.reason or 'can run'}" for one in self.candidates])


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
    """What `attention` with the same arguments would use: candidates in order, their refusals, and the pick."""
    framework = framework_of(q, k, v)
    pass_ = pass_of(framework, q, k, v)
    workload = workload_of(q, k, v, mask=mask, scale=scale, softcap=softcap, layout=layout, heads=heads, pass_=pass_)
    device = device_of(q, framework)
    found = candidates(workload, framework, device, impl, return_lse)
    pick = next((one.name for one in found if one.reason is None), None)
    why = "all refuse"
    if pick is not None:
        fixed = "the first of the fixed order that can run this; no measured policy is loaded"
        why = fixed if impl == "auto" else "asked for by name"
    others = [name for name in registry.loadable()[0] if name not in {one.name for one in found}]
    mine = [name for name in others if registry.get(name).framework == framework] if impl == "auto" else []
    rest = [Candidate(name, refusal(registry.get(name), workload, framework, device) or NOT_IN_ORDER) for name in mine]
    return Explanation(workload, device, pick, why, [*found, *rest])
