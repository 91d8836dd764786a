"""`ab.explain`: which implementation a call would use, and why the others would not be."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from attnbench.dispatch.arrays import device_of, framework_of, workload_of
from attnbench.dispatch.order import Candidate, candidates
from attnbench.spec import Array, Workload


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


def explain(q: Array, k: Array, v: Array, *, layout: str = "bshd", heads: Any = None, **asked: Any) -> Explanation:
    """Candidates of `impl="auto"` in order, their refusals, and the pick. `asked` is mask, scale, softcap, pass_."""
    framework = framework_of(q, k, v)
    workload = workload_of(q, k, v, layout=layout, heads=heads, **asked)
    device = device_of(q, framework)
    found = candidates(workload, framework, device)
    pick = next((one.name for one in found if one.reason is None), None)
    why = "the first of the fixed order that can run this; no measured policy is loaded" if pick else "all refuse"
    return Explanation(workload, device, pick, why, found)
