"""`attnbench verify`: is anything broken?"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from attnbench import registry
from attnbench.cli.options import (
    NOTHING,
    OWN_SHAPE,
    Device,
    Json,
    Names,
    Quiet,
    Selection,
    ShapeOptions,
    Switch,
    expand,
    load_suite,
    loadable_names,
    of_framework,
    select_workloads,
)
from attnbench.cli.output import print_json, stderr_console, stdout_console
from attnbench.config import load_settings
from attnbench.errors import UsageError
from attnbench.report.progress import make_listener
from attnbench.report.terminal import count_statuses, print_verification, verification_verdict
from attnbench.results.records import is_anchor
from attnbench.run import launch as launcher
from attnbench.spec import Record, Workload
from attnbench.workloads.catalogue import step_edges

SPREAD = (
    "b3-t61x127-h5-d32-causal-float32-forward",
    "b2-t64-h6:2-d32-causal-float32-train",
    "b2-t128-h8:2-d64-window32:0-bfloat16-forward",
    "b2-t64-h4-d32-lengths-f96b0713-float32-train",
    "b2-t64-h4-d32-window7:0-float32-forward",
    "b2-t64-h4-d32-causal-float32-forward-softcap=5",
    "b2-t64-h4-d32-causal&dilated16r1+32r2+64r4-float32-train",
)
"""Workloads of the edge suite that are checked by default: odd sizes, grouped heads, 16 bits, rows that see nothing, a
window, a soft cap, log-weights; about a minute."""
FAMILY_SPREAD = {
    "dilated": (
        "b2-t61-h12-d32-dilated16r1+32r6+61r12-float32-train",
        "b2-t64-h6:2-d32-causal&dilated16r1+64r4-float32-train",
        "b2-t64-h4-d32-dilated16r1+64r3&lengths-aab9928a-float32-train",
        "b2-t64-h4-d32-causal&dilated16r1+64r4-bfloat16-train",
        "b2-t64-h4-d32-dilated16r1+32r3+64r6-group-float32-forward",
        "b2-t64-h4-d32-dilated32r2-float32-forward",
    )
}
"""Workloads of the edge suite for families that compute one kind of mask only: an odd length that no rate divides,
grouped heads under a causal mask, key lengths with an empty row, 16 bits, the other offset rule, rows that no branch
holds. `--suite edge` runs the others with this mask too."""
BROKEN = {"incorrect", "failed", "timeout"}


def verify(
    *,
    impl: Annotated[Names, Parameter(help="Names, a framework, file.py:function; all when not given.")] = (),
    suite: Annotated[str | None, Parameter(help="Every workload of this suite; by default a spread of `edge`.")] = None,
    quick: Annotated[Switch, Parameter(help="Cap the shapes of the suite.")] = False,
    shape: ShapeOptions = ShapeOptions(),  # noqa: B008 (frozen)
    family: Annotated[Names, Parameter(help="Only these families, such as sdpa or flex.")] = (),
    framework: Annotated[
        str | None, Parameter(help="Framework of bare functions; without --impl, only this framework is checked.")
    ] = None,
    device: Device = None,
    explain: Annotated[Switch, Parameter(help="Show where each wrong result is wrong.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Check every implementation against float64: forward, LSE, gradients, determinism, stability, properties.

    A bare function is checked as full attention unless the options say what it computes (`--causal --seq-len 128`).
    """
    settings = load_settings({"device": device, "framework": framework})
    names = _implementations(impl, family, settings.framework)
    request = launcher.Request(
        workloads=_workloads(suite, quick, shape, impl, family, names),
        implementations=names,
        framework=settings.framework or "torch",
        device=settings.device,
        measure=False,
        thorough=True,
        every_config=True,
        timeout_s=settings.timeout_s,
        threads=settings.threads,
        seed=settings.seed,
    )
    records: list[Record] = []
    with make_listener(stderr_console(), quiet or json, measure=False) as listener:
        launcher.launch(request, records.extend, listener)
    if json:
        print_json({"summary": count_statuses(records), "records": records, "closing": verification_verdict(records)})
    else:
        print_verification(stdout_console(), records, explain)
    statuses = {record.status for record in records if not is_anchor(record)}
    return 1 if statuses & BROKEN else 0 if "ok" in statuses else NOTHING


def _workloads(
    suite: str | None,
    quick: bool,
    shape: ShapeOptions,
    impl: tuple[str, ...],
    family: tuple[str, ...],
    names: tuple[str, ...],
) -> tuple[Workload, ...]:
    """Return the workloads asked for; by default a spread of `edge`, and small steps for the names that compute one."""
    if suite is not None or shape != ShapeOptions():
        return select_workloads(suite, quick, shape, Selection())[1]
    asked = {registry.get(registry.asked(name)[0]).step for name in names if not registry.is_reference(name)}
    steps = tuple(workload for workload in step_edges() if workload.step in asked)
    if impl and all(map(registry.is_reference, impl)):
        return select_workloads(None, quick, OWN_SHAPE, Selection())[1] + steps
    own = {one for name in family for one in FAMILY_SPREAD.get(name, ())}
    spread = own if family and set(family) <= set(FAMILY_SPREAD) else own | set(SPREAD)
    return tuple(w for w in load_suite("edge", quick=False)[1] if w.id in spread) + steps


def _implementations(impl: tuple[str, ...], family: tuple[str, ...], framework: str | None) -> tuple[str, ...]:
    known = registry.names()
    names = [name for one in impl for name in expand(one, known)]
    if not impl:
        names = of_framework(framework, loadable_names())
    if family:
        names = [name for name in names if families_of(name) & set(family)]
        if not names:
            among = "implementation named by --impl" if impl else "implementation"
            told = " or ".join(family)
            raise UsageError(f"no {among} is of the family {told}: see `attnbench list implementations`.")
    return tuple(dict.fromkeys(names))


def families_of(name: str) -> set[str]:
    """Return the families of a name: sdpa for torch.sdpa-flash; a step has two, multihead and dilated for example."""
    first, *more = name.partition(".")[2].split("-")
    return {first, *more[:1]} if registry.get(name).step else {first}
