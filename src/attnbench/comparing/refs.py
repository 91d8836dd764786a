"""Git refs as sides of a comparison: each is checked out in a worktree of its own, built, and removed afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from attnbench.config import load_settings
from attnbench.errors import UsageError
from attnbench.printable import printable
from attnbench.results.sentences import some_of
from attnbench.run import git
from attnbench.run.machine import PREFIX, owned, remove_if_abandoned, scratch

WORKING_TREE = (".", "WORKTREE")
"""Names of the working tree, uncommitted changes included."""
OWNER = "attnbench-owner"
"""File beside a worktree's entry in the repository that shows who made it, and whether that process lives."""
IMPORTABLE = (".py", ".so", ".pyd")
LAST_LINES = 12


class BuildFailed(UsageError):
    """A ref whose build command failed."""

    def __init__(self, ref: str, commit: str, command: str, code: int, output: str) -> None:
        lines = output.strip().splitlines()[-LAST_LINES:]
        output_lines = "".join(f"\n    {line}" for line in lines) if lines else " It printed nothing."
        super().__init__(
            f"{ref} ({commit[:12]}) does not build: `{command}` ended with exit code {code}.{output_lines}"
        )


class Ref(Struct, frozen=True, kw_only=True):
    """A ref, checked out and built."""

    name: str
    commit: str
    """Full commit id; empty for a working tree without any commit."""
    subject: str
    path: Path
    pythonpath: tuple[Path, ...] = ()
    """Absolute folders that its workers import from, first to last."""
    dirty: bool = False
    """Whether the tree holds changes that no commit has."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as uncommitted changes that the ref does not contain."""
    files: dict[str, tuple[int, ...]] = {}
    """Files of the tree as they were at the end of the build."""
    outputs: tuple[Path, ...] = ()
    """Files and folders that attnbench itself writes: they are not part of the ref."""
    built_ns: tuple[int, int] = (0, 0)
    """Times at which the build began and ended, by the clock of the system; 0 if there was none."""
    unequal: tuple[str, ...] = ()
    """Importable files of a working tree that git ignores and the ref beside it lacks, relative to the root."""

    def altered(self) -> list[str]:
        """Return the files that were changed or removed since the build; new files beside them do not count."""
        now = _fingerprint(self.path, self.outputs)
        return sorted(name for name, state in self.files.items() if now.get(name) != state)

    def require_intact(self) -> None:
        """Raise UsageError if anybody else, such as the build of another ref, has touched the tree."""
        if self.commit and git.head(self.path) != self.commit:
            raise UsageError(
                f"{self.name} was moved to another commit while refs were built: the build command must not do that."
            )
        now = _fingerprint(self.path, self.outputs)
        touched = sorted(name for name in self.files | now if self.files.get(name) != now.get(name))
        if touched:
            raise UsageError(
                f"{some_of(touched)} of {self.name} changed after the build, so the tree no longer matches the ref: "
                "the build command must write only to its own folder."
            )


@contextmanager
def checkout(
    ref: str,
    folder: Path,
    build: str | None = None,
    pythonpath: Sequence[str] = (),
    outputs: Sequence[Path] = (),
) -> Iterator[Ref]:
    """Check out a ref of the repository that `folder` lies in, in a temporary worktree; "." is the working tree itself.
    `outputs` are files that attnbench writes, as it writes runs and baselines: they are not part of a working tree."""
    top = git.root(folder)
    outputs = own_outputs(top, folder, outputs)
    if ref in WORKING_TREE:
        commit = git.head(top)
        facts = {"subject": git.subject(commit, top) if commit else "", "dirty": bool(_changes(top, outputs))}
        made = Ref(name=ref, commit=commit, path=top, outputs=outputs, **facts)
        yield _ready(made, build, pythonpath)
        return
    commit = git.resolve(ref, top)
    with scratch() as temporary, ExitStack() as owner:
        _forget_abandoned(top)
        path = temporary / top.name
        try:
            git.answer(top, "worktree", "add", "--quiet", "--detach", str(path), commit)
            with suppress(OSError):  # a file system without locks: nobody else will take its entry away then
                owner.enter_context(owned(Path(git.answer(path, "rev-parse", "--absolute-git-dir")) / OWNER))
            notes = (*_left_out_notes(ref, commit, top, outputs), *fill_submodules(top, path))
            made = Ref(name=ref, commit=commit, subject=git.subject(commit, top), path=path, notes=notes)
            yield _ready(made, build, pythonpath)
        finally:
            git.ask(top, "worktree", "remove", "--force", "--force", str(path))
            shutil.rmtree(path, ignore_errors=True)


def fill_submodules(top: Path, path: Path) -> list[str]:
    """Check out each submodule at the commit that the worktree asks for; returns a note for each that is left empty."""
    if not (path / ".gitmodules").is_file():
        return []
    listed = git.ask(path, "config", "--file", ".gitmodules", "--get-regexp", r"^submodule\..*\.path$").stdout
    notes: list[str] = []
    for place in (line.partition(" ")[2] for line in listed.splitlines()):
        source, target, entry = top / place, path / place, git.ask(path, "ls-tree", "HEAD", place).stdout.split()
        if len(entry) < 3 or entry[1] != "commit":
            continue
        if not (source / ".git").exists():
            why = "it is not checked out here (run `git submodule update --init`)"
            notes.append(f"submodule {place} is left empty: {why}")
            continue
        done = git.ask(path, "clone", "--quiet", "--shared", "--no-checkout", str(source), str(target))
        if done.returncode == 0:
            done = git.ask(target, "checkout", "--quiet", "--detach", entry[2])
        if done.returncode:
            notes.append(f"submodule {place} is left empty: {git.last_line(done)}")
        elif (target / ".gitmodules").is_file():
            notes.append(f"submodule {place} has submodules of its own, which are left empty")
    return notes


def own_outputs(top: Path, here: Path, outputs: Sequence[Path]) -> tuple[Path, ...]:
    """Return what attnbench writes inside a repository: `outputs`, runs and baselines. The root and folders in which
    git knows code are left out, since changes of that code must be seen."""
    settings = load_settings(cwd=here)
    written = (*outputs, here / settings.runs_dir, here / settings.baselines_dir)
    inside = [path for one in written if (path := Path(os.path.realpath(one))) != top and path.is_relative_to(top)]
    known = {path: git.ask(top, "ls-files", "-z", "--", str(path)).stdout.split("\0") for path in inside}
    return tuple(path for path in inside if not any(name.endswith(IMPORTABLE) for name in known[path]))


def same_code(baseline: str, current: str, folder: Path, outputs: Sequence[Path] = ()) -> str:
    """Return why two refs are one and the same code, so that comparing them shows nothing; empty if they may differ.
    `outputs` as in `checkout`."""
    top = git.root(folder)
    trees = [one in WORKING_TREE for one in (baseline, current)]
    commits = {git.head(top) if is_tree else git.resolve(one, top) for one, is_tree in zip((baseline, current), trees)}
    if len(commits) > 1 or (any(trees) and not all(trees) and _changes(top, own_outputs(top, folder, outputs))):
        return ""
    what = "both the working tree" if all(trees) else f"the same commit {commits.pop()[:9]}"
    return f"{baseline} and {current} are {what}, so there is nothing to compare"


def ignored_code(top: Path) -> list[str]:
    """Return files of a working tree that Python can import and git ignores, without those of virtual environments."""
    listed = git.ask(top, "ls-files", "-z", "--others", "--ignored", "--exclude-standard").stdout.split("\0")
    names = [name for name in listed if name.endswith(IMPORTABLE) and "__pycache__" not in Path(name).parts]
    within = {folder: (top / folder / "pyvenv.cfg").is_file() for name in names for folder in Path(name).parents}
    return [name for name in names if not any(within[folder] for folder in Path(name).parents)]


def _changes(top: Path, outputs: Sequence[Path]) -> list[str]:
    return [name for name in git.changes(top) if not any((top / name).is_relative_to(one) for one in outputs)]


def _left_out_notes(ref: str, commit: str, top: Path, outputs: Sequence[Path]) -> list[str]:
    if commit != git.head(top):
        return []
    known = git.changes(top, untracked=False)
    unknown = [name for name in _changes(top, outputs) if name not in known]
    notes = [f'{ref} does not contain the uncommitted changes of the working tree: "." includes them'] if known else []
    if unknown:
        notes.append(f'{ref} does not contain {some_of(unknown)}, which git does not track: "." includes it')
    return notes


def _forget_abandoned(top: Path) -> None:
    """Remove the worktree entries of processes that were killed; their folders are gone by now. A folder that cannot be
    seen from here may belong to a living process in a container with a temporary folder of its own, so its owner must
    be dead too. Git itself forgets what is left after three months."""
    common = Path(git.answer(top, "rev-parse", "--path-format=absolute", "--git-common-dir"))
    for entry in common.glob("worktrees/*/gitdir"):
        folder = Path(entry.read_text(encoding="utf-8", errors="replace").strip()).parent
        if folder.parent.name.startswith(PREFIX) and not folder.exists():
            remove_if_abandoned(entry.parent / OWNER)


def _fingerprint(path: Path, outputs: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Return for each file what shows whether it was touched. In a worktree made for the comparison all files count; in
    the user's working tree, only files that git does not ignore and attnbench does not write."""
    if path.parent.name.startswith(PREFIX):
        names = []
        for folder, inner, files in os.walk(path):
            inner[:] = [name for name in inner if name != ".git"]
            names += [os.path.relpath(os.path.join(folder, name), path) for name in files if name != ".git"]
    else:
        listed = git.ask(path, "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
        names = [name for name in listed.split("\0") if name]
    states: dict[str, tuple[int, ...]] = {}
    for name in names:
        if "__pycache__" in Path(name).parts or any((path / name).is_relative_to(one) for one in outputs):
            continue
        with suppress(OSError):
            now = (path / name).lstat()
            states[name] = (now.st_ino, now.st_size, now.st_mode, now.st_ctime_ns)
    return states


def _ready(ref: Ref, build: str | None, pythonpath: Sequence[str]) -> Ref:
    built_ns = (0, 0)
    if build:
        began = time.time_ns()
        _build(ref, build)
        built_ns = (began, time.time_ns())
    source = ref.path / "src"
    default = ["src", "."] if any([*source.glob("*/__init__.py"), *source.glob("*.py")]) else ["."]
    wanted = [(ref.path / name).resolve() for name in pythonpath or default]
    strange = [str(folder) for folder in wanted if not folder.is_relative_to(ref.path.resolve())]
    if strange:
        raise UsageError(
            f"{some_of(strange)} is not in {ref.name}, so every ref would import the same code from it: set pythonpath "
            "in [tool.attnbench] to folders of the repository, relative to its root."
        )
    there = [folder for folder in wanted if folder.is_dir()]
    if not there:
        raise UsageError(
            f"{ref.name} has no folder {' or '.join(pythonpath)}: set pythonpath in [tool.attnbench] to the folders "
            "of its packages."
        )
    notes = [f"{ref.name} has no folder {folder.name}" for folder in wanted if folder not in there]
    if build and ref.name not in WORKING_TREE and (rebuilt := git.changes(ref.path, untracked=False)):
        notes.append(f"the build of {ref.name} changed files that git tracks: {some_of(rebuilt)}")
    facts = {"files": _fingerprint(ref.path, ref.outputs), "built_ns": built_ns}
    return msgspec.structs.replace(ref, pythonpath=tuple(there), notes=(*ref.notes, *notes), **facts)


def _build(ref: Ref, command: str) -> None:
    """Run the command in the ref's root with this interpreter first on PATH: `python` is then the one that measures."""
    print(f"building {printable(ref.name)}: {printable(command)}", file=sys.stderr, flush=True)
    environment = git.environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    done = subprocess.run(
        command,
        shell=True,
        cwd=ref.path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        raise BuildFailed(ref.name, ref.commit, command, done.returncode, done.stdout)
