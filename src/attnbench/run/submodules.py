"""Submodules of a worktree, cloned from those checked out beside it: nothing is fetched, no setting is touched."""

from __future__ import annotations

from pathlib import Path

from attnbench.run.git import ask, last_line


def fill_submodules(top: Path, path: Path) -> list[str]:
    """Check out each submodule at the commit that the worktree asks for; returns a note for each that is left empty."""
    if not (path / ".gitmodules").is_file():
        return []
    listed = ask(path, "config", "--file", ".gitmodules", "--get-regexp", r"^submodule\..*\.path$").stdout
    places = [line.partition(" ")[2] for line in listed.splitlines()]
    return [note for place in places if (note := _fill(top, path, place))]


def _fill(top: Path, path: Path, place: str) -> str:
    entry = ask(path, "ls-tree", "HEAD", place).stdout.split()
    if len(entry) < 3 or entry[1] != "commit":
        return ""
    source, target = top / place, path / place
    if not (source / ".git").exists():
        return f"submodule {place} is left empty: it is not checked out here (`git submodule update --init` does it)"
    done = ask(path, "clone", "--quiet", "--shared", "--no-checkout", str(source), str(target))
    if done.returncode == 0:
        done = ask(target, "checkout", "--quiet", "--detach", entry[2])
    if done.returncode:
        return f"submodule {place} is left empty: {last_line(done)}"
    if (target / ".gitmodules").is_file():
        return f"submodule {place} has submodules of its own, which are left empty"
    return ""
