"""Git refs as arms of a comparison: each in a worktree of its own, built, and gone afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec import Struct

from attnbench.errors import UsageError
from attnbench.run import git
from attnbench.run.git import commits_between, is_repository, merge_base
from attnbench.run.submodules import fill_submodules

__all__ = ["BuildFailed", "Ref", "WORKING_TREE", "checkout", "commits_between", "is_repository", "merge_base"]

WORKING_TREE = (".", "WORKTREE")
"""Names of the working tree as it is, with everything that is not committed."""
LAST_LINES = 12


class BuildFailed(UsageError):
    """A ref whose build command failed."""

    def __init__(self, ref: str, commit: str, command: str, code: int, output: str) -> None:
        lines = output.strip().splitlines()[-LAST_LINES:]
        told = "".join(f"\n    {line}" for line in lines) if lines else " It printed nothing."
        super().__init__(f"{ref} ({commit[:12]}) does not build: `{command}` ended with exit code {code}.{told}")
        self.ref, self.code, self.output = ref, code, output


class Ref(Struct, frozen=True, kw_only=True):
    """A ref, checked out and built."""

    name: str
    """As it was asked for."""
    commit: str
    """In full; empty for a working tree without any commit."""
    subject: str
    """First line of the commit's message."""
    path: Path
    """Its root folder."""
    pythonpath: tuple[Path, ...]
    """Absolute folders that its workers import from, first to last."""
    dirty: bool = False
    """Whether it holds changes that no commit has."""
    notes: tuple[str, ...] = ()
    """What a user should know, such as uncommitted changes that are not in it."""


@contextmanager
def checkout(ref: str, folder: Path, build: str | None = None, pythonpath: Sequence[str] = ()) -> Iterator[Ref]:
    """A ref of the repository that `folder` lies in, in a temporary worktree; the working tree itself for "."."""
    top = git.root(folder)
    if ref in WORKING_TREE:
        yield _ready(_working_tree(ref, top), build, pythonpath)
        return
    commit = git.resolve(ref, top)
    with TemporaryDirectory(prefix="attnbench-", ignore_cleanup_errors=True) as temporary:
        path = Path(temporary).resolve() / top.name
        try:
            git.answer(top, "worktree", "add", "--quiet", "--detach", str(path), commit)
            notes = (*_left_out(ref, commit, top), *fill_submodules(top, path))
            made = Ref(name=ref, commit=commit, subject=git.subject(commit, top), path=path, pythonpath=(), notes=notes)
            yield _ready(made, build, pythonpath)
        finally:
            _remove(top, path)


def _working_tree(ref: str, top: Path) -> Ref:
    commit = git.head(top)
    subject = git.subject(commit, top) if commit else ""
    return Ref(name=ref, commit=commit, subject=subject, path=top, pythonpath=(), dirty=git.is_dirty(top))


def _left_out(ref: str, commit: str, top: Path) -> list[str]:
    if commit != git.head(top) or not git.is_dirty(top):
        return []
    return [f'the uncommitted changes of the working tree are not in {ref}: "." takes them']


def _remove(top: Path, path: Path) -> None:
    git.ask(top, "worktree", "remove", "--force", "--force", str(path))
    shutil.rmtree(path, ignore_errors=True)


def _ready(ref: Ref, build: str | None, pythonpath: Sequence[str]) -> Ref:
    if build:
        _build(ref, build)
    wanted = [(ref.path / name).resolve() for name in pythonpath] or _default_pythonpath(ref.path)
    there = [folder for folder in wanted if folder.is_dir()]
    if not there:
        raise UsageError(
            f"{ref.name} has no folder {' or '.join(pythonpath)}: set pythonpath in [tool.attnbench] to where "
            "its packages lie."
        )
    missing = [f"{ref.name} has no folder {folder.name}" for folder in wanted if folder not in there]
    return msgspec.structs.replace(ref, pythonpath=tuple(there), notes=(*ref.notes, *missing))


def _default_pythonpath(path: Path) -> list[Path]:
    source = path / "src"
    holds_code = any(source.glob("*/__init__.py")) or any(source.glob("*.py"))
    return [source, path] if holds_code else [path]


def _build(ref: Ref, command: str) -> None:
    """Run it in the ref's root with this interpreter first on PATH, so that `python` means the one that measures."""
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
