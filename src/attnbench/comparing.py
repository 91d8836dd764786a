"""`ab.compare`: two implementations, or one in two git refs, each launch in fresh processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import msgspec

from attnbench import config, registry
from attnbench.comparison import FLOOR, Comparison
from attnbench.errors import UsageError
from attnbench.run import git
from attnbench.run.arms import Arm, LocalSide, NurserySide, Side, arm_of
from attnbench.run.duel import Duel, Terms, Watch
from attnbench.run.launch import CannotTravel, check_seconds, refuse_distortion
from attnbench.run.lock import LOCK_PATIENCE_S, measuring
from attnbench.run.origin import Origin, other_places
from attnbench.run.refs import Ref, checkout
from attnbench.spec import Implementation, Workload

Subject = str | Callable[..., Any] | Implementation
IN_PROCESS = "in the calling process: one of the two cannot be sent to another, so launches share one memory layout"


def compare(
    a: Subject,
    b: Subject,
    workload: Workload,
    *,
    framework: str = "torch",
    device: str | None = None,
    budget_s: float = 60.0,
    threads: int | None = None,
    floor: float = FLOOR,
    watch: Watch | None = None,
) -> Comparison:
    """Is b slower than a? `.ratio` is the wall time of b / of a (device time on an accelerator), `.verdict` b's.

    Every launch starts a fresh process of each, checks both against the reference, and times them in turn; it ends as
    soon as the answer is sure, at the latest after `budget_s`.
    """
    check(workload, budget_s)
    terms = Terms(workload=workload, budget_s=budget_s, floor=floor, confirm=True)
    device = None if device is None else str(device).partition(":")[0]
    try:
        arms = [arm_of(what, framework) for what in (a, b)]
    except CannotTravel:
        with measuring("comparison", LOCK_PATIENCE_S) as notes:
            return _with_notes(_in_process((a, b), framework, device, terms, watch), notes)
    with measuring("comparison", LOCK_PATIENCE_S) as notes, sides(arms, device, threads) as (first, second):
        return _with_notes(Duel(first, second, terms, watch or _silent).fight(), notes)


def compare_refs(
    *,
    baseline: str,
    current: str,
    implementation: str,
    workload: Workload,
    folder: Path | None = None,
    framework: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    budget_s: float = 60.0,
    watch: Watch | None = None,
) -> Comparison:
    """One implementation as two git refs have it."""
    check(workload, budget_s)
    with measuring("comparison", LOCK_PATIENCE_S) as lock, refs(baseline, current, folder) as (old, new):
        arms = [ref_arm(implementation, ref, folder, framework) for ref in (old, new)]
        with sides(arms, device, threads) as (first, second):
            terms = Terms(workload=workload, budget_s=budget_s, confirm=True)
            found = Duel(first, second, terms, watch or _silent).fight()
        if altered := altered_notes(old, new):
            # What was verified and what was timed may be two different things.
            found = msgspec.structs.replace(found, verdict=found.verdict and "inconclusive")
    notes = (*lock, *old.notes, *new.notes, *_dirty_notes(old, new), *altered, *found.notes)
    return msgspec.structs.replace(found, dirty_a=old.dirty, dirty_b=new.dirty, notes=notes)


def _with_notes(found: Comparison, notes: Sequence[str]) -> Comparison:
    return msgspec.structs.replace(found, notes=(*found.notes, *notes))


def altered_notes(*refs: Ref) -> list[str]:
    """Say of each ref which of its files were changed while it was measured."""
    changed = {ref.name: ref.altered() for ref in refs}
    return [
        f"{', '.join(files[:3])} of {name} changed while it was measured, so no verdict holds"
        for name, files in changed.items()
        if files
    ]


def _dirty_notes(*refs: Ref) -> list[str]:
    """What a commit id alone would hide."""
    return [f'"{ref.name}" is {ref.commit[:9] or "no commit"} with uncommitted changes' for ref in refs if ref.dirty]


@contextmanager
def refs(baseline: str, current: str, folder: Path | None = None) -> Iterator[tuple[Ref, Ref]]:
    """Both refs, checked out and built as `[tool.attnbench]` says; raises UsageError if a build touched the other."""
    where = folder or Path.cwd()
    settings = config.load_settings(cwd=where)
    with ExitStack() as stack:
        old, new = (
            stack.enter_context(checkout(name, where, settings.build, settings.pythonpath))
            for name in (baseline, current)
        )
        for ref in (old, new):
            ref.require_intact()
        yield old, new


def ref_arm(implementation: str, ref: Ref, folder: Path | None = None, framework: str | None = None) -> Arm:
    """An implementation as its workers find it with a ref's folders first on their path, and no other tree's."""
    label = f"{implementation} at {ref.name}"
    path, home = tuple(str(folder) for folder in ref.pythonpath), git.root(folder or Path.cwd())
    hidden = "" if ref.path == home else str(home)
    origin = Origin(tree=str(ref.path), within=path, others=other_places(ref.path, home))
    if ":" not in implementation:
        name, config_of = registry.asked(implementation) if "[" in implementation else (implementation, {})
        framework = name.partition(".")[0]
        facts = {"path": path, "hidden": hidden, "commit": ref.commit, "origin": origin}
        return Arm(label=label, name=name, framework=framework, config=config_of, **facts)
    where, _, attribute = implementation.rpartition(":")
    is_file = where.endswith(".py")
    reference = f"{ref.path / where}:{attribute}" if is_file else implementation
    framework = framework or config.load_settings(cwd=home).framework or "torch"
    within = (*path, str(ref.path)) if is_file else path
    return arm_of(reference, framework, label, within, hidden, ref.commit, origin)


@contextmanager
def sides(arms: Sequence[Arm], device: str | None, threads: int | None) -> Iterator[list[Side]]:
    """Live arms; all are ended on the way out."""
    refuse_distortion()
    if os.environ.get("ATTNBENCH_WORKER"):
        raise UsageError("a worker cannot start a comparison: guard the call with `if __name__ == '__main__':`.")
    with ExitStack() as stack:
        yield [stack.enter_context(NurserySide(arm, device, threads)) for arm in arms]


def _in_process(
    subjects: tuple[Subject, Subject], framework: str, device: str | None, terms: Terms, watch: Watch | None
) -> Comparison:
    with registry.restored():
        live: list[Side] = []
        for letter, what in zip("ab", subjects):
            found = registry.get(what) if isinstance(what, str) else registry.resolve(what, framework)
            implementation = copy(found)
            label, implementation.name = implementation.name, f"{implementation.name}#{letter}"
            arm = Arm(label=label, name=implementation.name, framework=implementation.framework)
            live.append(LocalSide(arm, implementation, device))
        outcome = Duel(live[0], live[1], terms, watch or _silent).fight()
    return msgspec.structs.replace(outcome, notes=(*outcome.notes, IN_PROCESS))


def check(workload: Workload, budget_s: float) -> None:
    """Refuse what cannot be compared before anything starts."""
    if not isinstance(workload, Workload):
        raise UsageError(f"a workload is an attnbench.Workload, not {type(workload).__name__}.")
    check_seconds("budget_s", budget_s)


def _silent(launches: object, decision: object) -> None:
    """No progress."""
