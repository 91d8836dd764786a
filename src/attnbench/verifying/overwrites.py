"""Memory that is written to: inputs by the harness, earlier results by the implementation.

Is a result computed from its inputs, or found under their addresses? Other values are written into the same memory: the
answer must be that of the new ones. And is it the caller's to keep? A later call must not write into it.
"""

from __future__ import annotations

from attnbench.frameworks import OUTPUTS, Inputs, Program
from attnbench.spec import Array
from attnbench.verifying.same_result import apart, spot
from attnbench.verifying.subject import Subject, Wrong, run
from attnbench.verifying.tolerance import Limits

OVERWRITES = "overwrites the result of its previous call"


def check(subject: Subject, good: tuple[Array, ...], limits: dict[str, Limits]) -> tuple[str, ...]:
    """What was done; nothing where arrays cannot be changed. `good` are the verified outputs on the second set."""
    framework, program, workload = subject.framework, subject.programs.main, subject.workload
    first, second = subject.draws.inputs(subject.layout)[:2]
    if not framework.overwrites:
        return ()
    inputs = Inputs(*framework.snapshot(tuple(first)))
    framework.wait(run(program, inputs))
    for array, values in zip(inputs, second):
        framework.overwrite(array, values)
    outputs = run(program, inputs)
    framework.wait(outputs)
    for name, found, right in zip(OUTPUTS[workload.pass_], outputs, good):
        if framework.same_bits(found, right):
            continue
        if differs := apart(framework, found, right, limits[name], workload.dtype):
            raise Wrong(
                f"wrong {name} when other values lie where its inputs lay: a stored result? "
                f"({spot(differs, subject.layout)} differs by {differs.share:.1e}, {differs.allowed:.1e} allowed)"
            )
    return ("overwritten inputs",)


def require_kept(subject: Subject, program: Program) -> None:
    """Hold the result of a call over three later ones on the other input set: it must stay as it was."""
    framework, (first, second) = subject.framework, subject.draws.inputs(subject.layout)[:2]
    if not framework.overwrites:
        return
    held = run(program, first)
    framework.wait(held)
    before = framework.snapshot(held)
    for _ in range(3):
        framework.wait(run(program, second))
        if not all(framework.same_bits(old, now) for old, now in zip(before, held)):
            raise Wrong(OVERWRITES)
