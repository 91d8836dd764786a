"""Files that are written whole or not at all, by everyone who writes one."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from gate_factory import report
from policy_factory import policy
from record_factory import ok, workload

from attnbench.comparing.baselines import update
from attnbench.comparing.ci_files import write_ci
from attnbench.drafts import draft_of, write_texts
from attnbench.errors import UsageError
from attnbench.policy import save_policy
from attnbench.report.pytest_session import SessionFile, write_session
from attnbench.workloads.suite_file import write_suite


def write_baseline(path: Path) -> None:
    records = [ok(name, [1e6, 1e6]) for name in ("torch.sdpa", "anchor.matmul", "anchor.copy")]
    update(records, path.parent)


WRITERS: dict[str, Callable[[Path], None]] = {
    "policy": lambda path: save_policy(policy(), path),
    "suite": lambda path: write_suite(path, "mine", "", [workload()]),
    "ci": lambda path: write_ci(report(), path.parent, {}),
    "session": lambda path: write_session(path, SessionFile(records=[], comparisons=[], tests={})),
    "baseline": write_baseline,
    "texts": lambda path: write_texts({path: "new"}),
}
"""What writes a file of that name, or files beside it."""


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there_and_nothing_else(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = WRITERS[name]
    write(tmp_path / "file")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_text("old")
    before = content(tmp_path)
    assert before

    def half(self: Path, data: str | bytes, *_: object, **__: object) -> None:
        with self.open("wb") as file:
            file.write(b"ha")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises((UsageError, OSError), match="No space left"):
        write(tmp_path / "file")
    monkeypatch.undo()
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", WRITERS)
def test_no_link_is_followed(name: str, tmp_path: Path):
    """Neither one in place of a file, nor one under any name that a draft could have had before."""
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    WRITERS[name](folder / "file")
    victim.write_text("precious")
    for path in [one for one in folder.rglob("*") if one.is_file()]:
        path.with_name(f".{path.name}.draft").symlink_to(victim)
        path.unlink()
        path.symlink_to(victim)
    WRITERS[name](folder / "file")
    assert victim.read_text() == "precious"
    assert any(path.is_file() and not path.is_symlink() for path in folder.rglob("*"))


def test_permissions_are_kept_and_new_files_obey_the_umask(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("1")
    old.chmod(0o640)
    before = os.umask(0o027)
    try:
        write_texts({old: "2", new: "2"})
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [0o640, 0o640]
    old.chmod(0o600)
    write_texts({old: "3"})
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


def test_drafts_have_names_that_cannot_be_foreseen(tmp_path: Path):
    with draft_of(tmp_path / "a") as first, draft_of(tmp_path / "a") as second:
        assert first != second
        assert first.parent == second.parent == tmp_path
        assert first.is_file()
    with draft_of(tmp_path / ("x" * 250)) as draft:  # as long as names may be
        draft.write_text("1")


def test_all_or_none_are_replaced(tmp_path: Path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()
    for first, second in (("a", "b"), ("b", "a")):
        with pytest.raises(IsADirectoryError):
            write_texts({tmp_path / first: "new", tmp_path / second: "new"})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
        assert (tmp_path / "a").read_text() == "old"


def test_a_device_stays_one(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_texts({pipe: "hello"})
    assert os.read(reader, 100) == b"hello"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
