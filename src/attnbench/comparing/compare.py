"""`ab.compare`: two implementations, or one implementation at two git refs, each launch in fresh processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import msgspec

from attnbench import config, registry
from attnbench.comparing.experiment import Experiment, Terms, Watch
from attnbench.comparing.refs import WORKING_TREE, Ref, checkout, ignored_code, same_code
from attnbench.comparing.sides import Code, ForkedSide, LocalSide, Side, code_of
from attnbench.comparison import FLOOR, Comparison
from attnbench.errors import UsageError
from attnbench.results.sentences import MOST_NAMED, some_of
from attnbench.run import git
from attnbench.run.environment import threads_left
from attnbench.run.launch import check_seconds, refuse_distortion
from attnbench.run.machine import LIBRARY_PATIENCE_S, measuring
from attnbench.run.origin import Origin, other_places
from attnbench.run.user_functions import CannotSend
from attnbench.spec import Implementation, Workload

Subject = str | Callable[..., Any] | Implementation
HARNESS = (
    "comparing", "verifying", "run", "measuring", "frameworks", "masks", "workloads",
    "comparison.py", "reference.py", "registry.py", "spec.py",
)  # fmt: skip
"""Parts of attnbench that draw inputs, run, time and check."""
HARNESS_MARK = "attnbench/run/worker.py"
IN_PROCESS = (
    "measured in the calling process, since one of the two cannot be sent to another process: all launches share one "
    "memory layout"
)


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
    """Compare b with a: `.ratio` is time of b / time of a (wall time, or device time on an accelerator), `.verdict` is
    b's. Every launch starts a fresh process of each side, checks both against the reference and times them in turn,
    until the evidence is enough, at the latest until `budget_s` is over."""
    check(workload, budget_s)
    if not 0 <= floor < 1:
        raise UsageError(f"floor must be a fraction such as 0.03, not {floor!r}.")
    terms = Terms(workload=workload, budget_s=budget_s, floor=floor, confirm=True)
    device = None if device is None else str(device).partition(":")[0]
    try:
        codes = [code_of(what, framework) for what in (a, b)]
    except CannotSend:
        codes = None
    with measuring("comparison", LIBRARY_PATIENCE_S) as notes:
        if codes is None:
            notes.insert(0, IN_PROCESS)
            with registry.restored():
                live: list[Side] = []
                for letter, what in zip("ab", (a, b)):
                    known = registry.get(what) if isinstance(what, str) else registry.resolve(what, framework)
                    implementation = copy(known)
                    implementation.name = f"{known.name}#{letter}"
                    code = Code(label=known.name, name=implementation.name, framework=known.framework)
                    live.append(LocalSide(code, implementation, device))
                found = Experiment(live[0], live[1], terms, watch).run()
        else:
            found = _compare_codes(codes, device, threads, terms, watch, notes)
    return msgspec.structs.replace(found, notes=(*found.notes, *notes))


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
    """Compare one implementation as two git refs have it."""
    check(workload, budget_s)
    if same := same_code(baseline, current, folder or Path.cwd()):
        raise UsageError(f"{same}: name two refs that differ.")
    with measuring("comparison", LIBRARY_PATIENCE_S) as lock, refs(baseline, current, folder) as (old, new):
        codes = [code_of_ref(implementation, ref, folder, framework) for ref in (old, new)]
        terms = Terms(workload=workload, budget_s=budget_s, confirm=True)
        found = _compare_codes(codes, device, threads, terms, watch, lock)
        if doubts := [*altered_notes(old, new), *harness_notes(old, new)]:
            # The verified code and the timed code may differ, or the clocks of the two refs may.
            found = msgspec.structs.replace(found, verdict=found.verdict and "inconclusive")
    dirty = [
        f'"{one.name}" is {one.commit[:9] or "no commit"} with uncommitted changes' for one in (old, new) if one.dirty
    ]
    notes = (*lock, *old.notes, *new.notes, *dirty, *doubts, *found.notes)
    return msgspec.structs.replace(found, dirty_a=old.dirty, dirty_b=new.dirty, notes=notes)


def _compare_codes(
    codes: Sequence[Code], device: str | None, threads: int | None, terms: Terms, watch: Watch | None, notes: list[str]
) -> Comparison:
    """Compare two sides in processes of their own; adds a note if other programs leave fewer threads than cores."""
    if threads is None:
        threads, told = threads_left(device)
        notes += [told] * bool(told)
    with sides(codes, device, threads) as (first, second):
        return Experiment(first, second, terms, watch).run()


def altered_notes(*refs: Ref) -> list[str]:
    """Return a note for each ref whose files were changed while it was measured."""
    return [
        f"{', '.join(files[:MOST_NAMED])} of {ref.name} changed during the measurement, so no verdict is valid"
        for ref in refs
        if (files := ref.altered())
    ]


def harness_notes(old: Ref, new: Ref) -> list[str]:
    """Return a note if two refs of attnbench itself measure in different ways: each is timed by its own code."""
    there = [
        next((folder / "attnbench" for folder in ref.pythonpath if (folder / HARNESS_MARK).is_file()), None)
        for ref in (old, new)
    ]
    if there == [None, None]:
        return []
    first, second = ({} if package is None else _harness(package) for package in there)
    changed = sorted(name for name in first | second if first.get(name) != second.get(name))
    if not changed:
        return []
    return [
        f"attnbench's own measuring code differs between {old.name} and {new.name} ({some_of(changed)}), and each ref "
        "is measured by its own copy: a difference may come from the clocks and checks, so no verdict is valid"
    ]


def _harness(package: Path) -> dict[str, bytes]:
    """Return the content of the files of attnbench that measure, by name."""
    files = [file for name in HARNESS for file in (package / name, *(package / name).rglob("*.py")) if file.is_file()]
    return {str(file.relative_to(package)): file.read_bytes() for file in files}


@contextmanager
def refs(
    baseline: str, current: str, folder: Path | None = None, outputs: Sequence[Path] = ()
) -> Iterator[tuple[Ref, Ref]]:
    """Check out both refs and build them as `[tool.attnbench]` says; raises UsageError if a build touched the other
    ref. `outputs` are files that the caller writes during the comparison."""
    here = folder or Path.cwd()
    settings = config.load_settings(cwd=here)
    with ExitStack() as stack:
        made = [
            stack.enter_context(checkout(name, here, settings.build, settings.pythonpath, outputs))
            for name in (baseline, current)
        ]
        for ref in made:
            ref.require_intact()
        built = (made[0].built_ns[0], made[1].built_ns[1])
        old, new = (
            msgspec.structs.replace(_note_unequal_files(ref, other, bool(settings.build)), built_ns=built)
            for ref, other in (made, made[::-1])
        )
        yield old, new


def _note_unequal_files(ref: Ref, other: Ref, is_built: bool) -> Ref:
    """Return a working tree with the generated files, ignored by git, that no other worktree can have. With a build
    command both refs were built in the same way, so a file that only one of them has is a difference of the code."""
    if ref.name not in WORKING_TREE or other.name in WORKING_TREE:
        return ref
    alone = tuple(name for name in ignored_code(ref.path) if not (other.path / name).exists())
    if not alone:
        return ref
    note = f"{other.name} lacks {some_of(alone)}, which git ignores in the working tree"
    return msgspec.structs.replace(ref, unequal=() if is_built else alone, notes=(*ref.notes, note))


def folder_in(ref: Ref, inner: Path) -> Path:
    """Return the folder of a ref at a place relative to its root, or the nearest above it that the ref has."""
    return next(one for one in (ref.path / inner, *(ref.path / inner).parents) if one.is_dir())


def code_of_ref(implementation: str, ref: Ref, folder: Path | None = None, framework: str | None = None) -> Code:
    """Return the side of an implementation at a ref: its workers import from the ref's folders and no other tree's."""
    label, here = f"{implementation} at {ref.name}", (folder or Path.cwd()).resolve()
    path, home = tuple(str(folder) for folder in ref.pythonpath), git.root(here)
    hidden = "" if ref.path == home else str(home)
    tree = ref.path.resolve()
    folders = (".", "src", *(os.path.relpath(one, tree) for one in path))
    origin = Origin(
        tree=str(tree),
        within=path,
        others=other_places(ref.path, home, folders),
        unequal=tuple(os.path.realpath(ref.path / name) for name in ref.unequal),
        built_ns=ref.built_ns,
    )
    inner = here.relative_to(home.resolve())
    facts = {"label": label, "path": path, "hidden": hidden, "commit": ref.commit, "origin": origin}
    facts["cwd"] = str(folder_in(ref, inner))
    if ":" not in implementation:  # looked up by the workers and not here
        name, config_of = registry.asked(implementation) if "[" in implementation else (implementation, {})
        return Code(name=name, framework=name.partition(".")[0], config=config_of, **facts)
    where, _, attribute = implementation.rpartition(":")
    if where.endswith(".py"):
        implementation = f"{ref.path / _in_tree(where, inner, ref, home)}:{attribute}"
        facts["path"] = (*path, str(ref.path))
    framework = framework or config.load_settings(cwd=home).framework or "torch"
    return msgspec.structs.replace(code_of(implementation, framework), **facts)


def _in_tree(file: str, inner: Path, ref: Ref, home: Path) -> str:
    """Return the path, from the root of a repository, of a file that was named in the folder `inner` of it. The file is
    the one that a shell would open if there is such a file, else the one from the root; raises UsageError if both are
    there and differ."""
    from_here = os.path.normpath(inner / file)
    if inner == Path() or os.path.isabs(file) or from_here.startswith(".."):
        return file
    if file.startswith(("./", "../")):
        return from_here
    here, top = ref.path / from_here, ref.path / file
    if here.is_file() and top.is_file() and here.read_bytes() != top.read_bytes():
        up = os.path.relpath(file, inner)
        raise UsageError(
            f"{file} is ambiguous: {ref.name} has {from_here} and {file}, which differ. Write ./{file} for the first, "
            f"{up} for the second."
        )
    known = [home / from_here, home / file, here]
    return file if next((one for one in known if one.is_file()), here) == home / file else from_here


@contextmanager
def sides(codes: Sequence[Code], device: str | None, threads: int | None) -> Iterator[list[Side]]:
    """Start both sides, and end them on the way out."""
    refuse_distortion()
    if os.environ.get("ATTNBENCH_WORKER"):
        raise UsageError("a worker cannot start a comparison: guard the call with `if __name__ == '__main__':`.")
    with ExitStack() as stack:
        yield [stack.enter_context(ForkedSide(code, device, threads)) for code in codes]


def check(workload: Workload, budget_s: float) -> None:
    """Refuse what cannot be compared before anything starts."""
    if not isinstance(workload, Workload):
        raise UsageError(f"workload must be an attnbench.Workload, not {type(workload).__name__}.")
    check_seconds("budget_s", budget_s)
