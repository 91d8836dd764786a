"""Questions to git about refs and commits; an error is one sentence with a remedy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from attnbench.errors import UnknownName, UsageError

HERE = Path()
UNSHALLOW = "this clone is shallow, so fetch the history first: `git fetch --unshallow` (in CI: fetch-depth: 0)"
HOOK_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
FIELD = "\x1f"


def environment() -> dict[str, str]:
    """Return the variables of this process, without those that a git hook sets to bind git to its repository."""
    return {name: value for name, value in os.environ.items() if name not in HOOK_VARIABLES}


def ask(folder: Path, *arguments: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run git in a folder, without hooks, and return the finished process whatever its exit code; raises
    TimeoutExpired."""
    try:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), "-c", f"core.hooksPath={os.devnull}", *arguments],
            env=environment() | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except OSError as error:
        raise UsageError("git is not installed (or not on PATH): install it.") from error


def answer(folder: Path, *arguments: str) -> str:
    """Return git's output; raises UsageError with the last line of its error message."""
    done = ask(folder, *arguments)
    if done.returncode:
        raise UsageError(f"`git {' '.join(arguments[:2])}` failed in {folder}: {last_line(done)}.")
    return done.stdout.strip()


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a failed command's output."""
    lines = (done.stderr or done.stdout or "").strip().splitlines()
    return lines[-1].removeprefix("fatal: ").removeprefix("error: ").rstrip(".") if lines else "it said nothing"


def is_repository(folder: Path = HERE) -> bool:
    """Return whether a folder lies in a git repository."""
    try:
        root(folder)
    except UsageError:
        return False
    return True


def root(folder: Path = HERE) -> Path:
    """Return the top folder of the working tree; raises UsageError if there is none."""
    done = ask(folder, "rev-parse", "--show-toplevel")
    if done.returncode == 0 and done.stdout.strip():
        return Path(done.stdout.strip())
    where, why = folder.resolve(), done.stderr
    if "dubious ownership" in why:
        raise UsageError(
            f"{where} belongs to another user: allow it with `git config --global --add safe.directory {where}`."
        )
    if "work tree" in why:
        raise UsageError(
            f"{where} has no working tree (it is a bare repository or a .git folder): run this in a clone of it."
        )
    raise UsageError(
        f"{where} is not in a git repository: run this in one, since refs are looked up in the current folder."
    )


def resolve(ref: str, folder: Path = HERE) -> str:
    """Return the full commit id of a ref; raises UsageError if there is none."""
    done = None if ref.startswith("-") else ask(folder, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if done is not None and done.returncode == 0:
        return done.stdout.strip()
    root(folder)
    if not head(folder):
        raise UsageError(f'no git ref called "{ref}": this repository has no commit yet.')
    if is_shallow(folder):
        raise UsageError(f'no git ref called "{ref}" here: {UNSHALLOW}.')
    names = answer(folder, "for-each-ref", "--format=%(refname:short)").splitlines()
    if remote := next((name for name in names if name.endswith(f"/{ref}")), None):
        raise UsageError(f'no git ref called "{ref}", but there is {remote}: use that name.')
    raise UnknownName("git ref", ref, names, "git branch --all")


def is_ref(ref: str, folder: Path = HERE) -> bool:
    """Return whether git knows a commit by that name."""
    try:
        return bool(resolve(ref, folder))
    except UsageError:
        return False


def head(folder: Path = HERE) -> str:
    """Return the commit that is checked out; empty before the first commit."""
    return ask(folder, "rev-parse", "--verify", "--quiet", "HEAD").stdout.strip()


def is_shallow(folder: Path = HERE) -> bool:
    """Return whether the clone lacks the beginning of the history."""
    return ask(folder, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"


def subject(commit: str, folder: Path = HERE) -> str:
    """Return the first line of a commit's message."""
    return answer(folder, "log", "-1", "--format=%s", commit)


def changes(
    folder: Path = HERE, *, untracked: bool = True, code: tuple[str, ...] = ("",), timeout_s: float | None = None
) -> list[str]:
    """Return the files that differ from HEAD, including unknown ones that are not ignored, which Python could import,
    and those at which git was told not to look (--assume-unchanged, --skip-worktree).

    `code`: endings of the unknown files that count; all by default.
    """
    kind = "all" if untracked else "no"
    status = ask(
        folder, "status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=none", f"--untracked-files={kind}",
        timeout_s=timeout_s,
    )  # fmt: skip
    if status.returncode:
        raise UsageError(f"`git status` failed in {folder}: {last_line(status)}.")
    entries = [entry for entry in status.stdout.split("\0") if entry]
    names = [entry[3:] for entry in entries if not entry.startswith("??") or entry.endswith(code)]
    listed = ask(folder, "ls-files", "-v", "-z", "--", ":/", timeout_s=timeout_s).stdout
    tracked = [entry.split(" ", 1) for entry in listed.split("\0") if entry]
    names += [name for flag, name in tracked if (flag.islower() or flag == "S") and (folder / name).exists()]
    return [name for name in names if "__pycache__" not in Path(name).parts]


def merge_base(a: str, b: str, folder: Path = HERE) -> str:
    """Return the last common commit of two refs; raises UsageError if there is none."""
    done = ask(folder, "merge-base", resolve(a, folder), resolve(b, folder))
    if done.returncode == 0:
        return done.stdout.split()[0]
    remedy = UNSHALLOW if is_shallow(folder) else "choose refs of one history"
    raise UsageError(f'"{a}" and "{b}" have no common ancestor here: {remedy}.')


def is_ancestor(old: str, new: str, folder: Path = HERE) -> bool:
    """Return whether git knows the first ref to be the second or an ancestor of it."""
    return ask(folder, "merge-base", "--is-ancestor", resolve(old, folder), resolve(new, folder)).returncode == 0


def commits_between(old: str, new: str, folder: Path = HERE, *, first_parent: bool = False) -> list[tuple[str, str]]:
    """Return (commit, subject) of what is in `new` but not in `old`, oldest first; `first_parent` leaves out merged
    commits."""
    only = ["--first-parent"] if first_parent else []
    span = f"{resolve(old, folder)}..{resolve(new, folder)}"
    lines = answer(folder, "log", "--reverse", "--topo-order", *only, f"--format=%H{FIELD}%s", span).splitlines()
    return [(commit, text) for commit, _, text in (line.partition(FIELD) for line in lines)]


def commit_order(commits: Iterable[str], folder: Path = HERE) -> dict[str, int]:
    """Return the position of each commit in the history, parents first; commits that this clone lacks are left out."""
    found = {}
    for commit in set(commits):
        done = ask(folder, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
        if done.returncode == 0:
            found[commit] = done.stdout.strip()
    if not found:
        return {}
    listed = answer(folder, "rev-list", "--topo-order", "--reverse", *found.values()).splitlines()
    places = {commit: place for place, commit in enumerate(listed)}
    return {commit: places[full] for commit, full in found.items()}
