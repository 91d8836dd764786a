"""Refs in worktrees: what is checked out, that it is gone afterwards, and one sentence for everything wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from git_repository import Repository

from attnbench.comparing.refs import BuildFailed, checkout
from attnbench.errors import UnknownName, UsageError
from attnbench.run.git import changes, commit_order, commits_between, is_repository, merge_base


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "project")
    made.commit("first", text="value = 1\n")
    made.commit("second", text="value = 2\n")
    return made


def test_a_ref_is_checked_out_and_gone_afterwards(repository: Repository):
    with checkout("HEAD~1", repository.path) as ref:
        assert (ref.path / "code.py").read_text() == "value = 1\n"
        assert ref.path != repository.path
        assert (ref.name, ref.subject, ref.dirty, ref.notes) == ("HEAD~1", "first", False, ())
        assert ref.commit == repository.git("rev-parse", "HEAD~1")
        assert ref.pythonpath == (ref.path,)
        assert repository.worktrees() == 2
    assert not ref.path.exists()
    assert repository.worktrees() == 1
    assert (repository.path / "code.py").read_text() == "value = 2\n"


def test_two_refs_at_once_from_a_subfolder(repository: Repository):
    (repository.path / "deep").mkdir()
    with checkout("HEAD", repository.path / "deep") as new, checkout("HEAD~1", repository.path / "deep") as old:
        assert [(ref.path / "code.py").read_text() for ref in (old, new)] == ["value = 1\n", "value = 2\n"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_the_worktree_goes_whatever_happens(repository: Repository, error: type[BaseException]):
    seen: list[Path] = []

    def stop() -> None:
        with checkout("HEAD", repository.path, build="touch left_over") as ref:
            seen.append(ref.path)
            raise error

    with pytest.raises(error):
        stop()
    assert not seen[0].exists()
    assert repository.worktrees() == 1


def test_hooks_do_not_run_and_a_hooks_variables_do_not_mislead(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hook = repository.path / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'hooked'}\n")
    hook.chmod(0o755)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    with checkout("HEAD", repository.path, build="git rev-parse HEAD > head.txt") as ref:
        assert (ref.path / "head.txt").read_text().strip() == ref.commit
    assert not (tmp_path / "hooked").exists()


def test_the_working_tree_as_it_is(repository: Repository):
    with checkout(".", repository.path) as ref:
        assert (ref.path, ref.dirty, ref.subject) == (repository.path, False, "second")
    repository.write("code.py", "value = 3\n")
    with checkout("WORKTREE", repository.path, build="touch built") as ref:
        assert (ref.dirty, ref.commit) == (True, repository.git("rev-parse", "HEAD"))
    assert (repository.path / "built").exists()
    assert repository.path.exists()


def test_a_dirty_tree_is_told_of(repository: Repository):
    assert not changes(repository.path)
    repository.write("__pycache__/code.pyc", "")
    assert not changes(repository.path)
    repository.write("kernels/new kernel.py", "")
    assert changes(repository.path), "a new file is imported like any other"
    with checkout(".", repository.path) as ref:
        assert ref.dirty
    unknown = 'HEAD does not contain kernels/new kernel.py, which git does not track: "." includes it'
    with checkout("HEAD", repository.path) as ref:
        assert ref.notes == (unknown,)
    repository.write("code.py", "value = 3\n")
    with checkout("HEAD", repository.path) as ref:
        known = 'HEAD does not contain the uncommitted changes of the working tree: "." includes them'
        assert ref.notes == (known, unknown)
        assert not ref.dirty
    with checkout("HEAD~1", repository.path) as ref:
        assert ref.notes == ()


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_files_at_which_git_was_told_not_to_look_count_as_changed(repository: Repository, flag: str):
    repository.write("kernel.py", "fast = 1\n")
    repository.git("add", "kernel.py")
    repository.commit("kernel")
    assert changes(repository.path) == []
    repository.git("update-index", flag, "kernel.py")
    repository.write("kernel.py", "fast = 0\n")
    assert changes(repository.path) == ["kernel.py"]
    (repository.path / "kernel.py").unlink()
    assert changes(repository.path) == [], "a sparse checkout has no such file to import"


def test_a_dirty_submodule_that_is_to_be_ignored_counts_as_changed(repository: Repository, tmp_path: Path):
    inner = Repository(tmp_path / "inner")
    inner.write("kernel.py", "fast = 1\n")
    inner.git("add", "kernel.py")
    inner.commit("kernel")
    repository.git("submodule", "add", "--quiet", str(inner.path), "sub")
    repository.git("config", "--file", ".gitmodules", "submodule.sub.ignore", "all")
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "-m", "submodule")
    assert changes(repository.path) == []
    repository.write("sub/kernel.py", "fast = 0\n")
    assert changes(repository.path) == ["sub"]


def test_pythonpath_is_src_and_root_unless_set(repository: Repository):
    repository.commit("a package", "src/mine/__init__.py", "")
    repository.commit("a library", "lib/other.py", "")
    with checkout("HEAD", repository.path) as ref:
        assert ref.pythonpath == (ref.path / "src", ref.path)
    with checkout("HEAD", repository.path, None, ["lib", "none"]) as ref:
        assert ref.pythonpath == (ref.path / "lib",)
        assert ref.notes == ("HEAD has no folder none",)
    with pytest.raises(UsageError, match=r"HEAD~2 has no folder lib: set pythonpath"):
        checkout("HEAD~2", repository.path, None, ["lib"]).__enter__()


def test_build_runs_inside_the_worktree(repository: Repository):
    with checkout("HEAD~1", repository.path, "python -c \"print(open('code.py').read())\" > built.txt") as ref:
        assert (ref.path / "built.txt").read_text().strip() == "value = 1"
    assert not (repository.path / "built.txt").exists()


def test_a_build_is_told_before_it_runs(repository: Repository, capfd: pytest.CaptureFixture[str]):
    with checkout("HEAD", repository.path, build="echo from the command >&2; exit 0"):
        assert capfd.readouterr().err.startswith("building HEAD: echo from the command")


def test_a_ref_that_does_not_build_says_how(repository: Repository):
    with pytest.raises(BuildFailed) as caught:
        checkout("HEAD", repository.path, "seq 100; echo no compiler >&2; exit 7").__enter__()
    told = str(caught.value)
    assert told.startswith("HEAD (")
    assert "ended with exit code 7" in told
    assert told.endswith("no compiler")
    assert "\n    99\n" in told
    assert "\n    80\n" not in told
    assert repository.worktrees() == 1


def test_unknown_refs_come_with_the_nearest(repository: Repository):
    repository.git("branch", "feature/fast")
    with pytest.raises(UnknownName, match=r'no git ref called "mian"\. Near: main'):
        checkout("mian", repository.path).__enter__()
    with pytest.raises(UsageError, match=r'no git ref called "fast", but there is feature/fast'):
        checkout("fast", repository.path).__enter__()
    with pytest.raises(UsageError, match='no git ref called "--all"'):
        checkout("--all", repository.path).__enter__()


def test_a_shallow_clone_names_the_remedy(repository: Repository, tmp_path: Path):
    old = repository.git("rev-parse", "HEAD~1")
    repository.git("clone", "--quiet", "--depth", "1", f"file://{repository.path}", str(tmp_path / "shallow"))
    with pytest.raises(UsageError, match=r"shallow.*git fetch --unshallow.*fetch-depth: 0"):
        checkout(old, tmp_path / "shallow").__enter__()
    with checkout("HEAD", tmp_path / "shallow") as ref:
        assert ref.subject == "second"


def test_a_merge_base_that_a_shallow_clone_lacks(repository: Repository, tmp_path: Path):
    repository.git("checkout", "--quiet", "-b", "side", "HEAD~1")
    side = repository.commit("aside", "side.py")
    repository.git("checkout", "--quiet", "main")
    assert merge_base("side", "main", repository.path) == repository.git("rev-parse", "main~1")
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth", "1", "--no-single-branch", f"file://{repository.path}", str(shallow))
    with pytest.raises(UsageError, match=r"no common ancestor here: this clone is shallow.*--unshallow"):
        merge_base(side, "HEAD", shallow)


def test_unrelated_histories(repository: Repository):
    repository.git("checkout", "--quiet", "--orphan", "other")
    repository.commit("alone")
    with pytest.raises(UsageError, match="no common ancestor here: choose refs of one history"):
        merge_base("other", "main", repository.path)


def test_no_repository_a_bare_one_and_an_empty_one(repository: Repository, tmp_path: Path):
    assert is_repository(repository.path)
    assert not is_repository(tmp_path)
    with pytest.raises(UsageError, match="is not in a git repository"):
        checkout("main", tmp_path).__enter__()
    repository.git("clone", "--quiet", "--bare", str(repository.path), str(tmp_path / "bare"))
    with pytest.raises(UsageError, match="bare repository"):
        checkout("main", tmp_path / "bare").__enter__()
    empty = Repository(tmp_path / "empty")
    with pytest.raises(UsageError, match="has no commit yet"):
        checkout("HEAD", empty.path).__enter__()


def test_no_git(repository: Repository, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", os.devnull)
    assert not is_repository(repository.path)
    with pytest.raises(UsageError, match="git is not installed"):
        checkout("main", repository.path).__enter__()


def test_commits_between_are_oldest_first(repository: Repository):
    third = repository.commit('third: "quoted" | odd')
    repository.git("checkout", "--quiet", "-b", "side", "HEAD~1")
    repository.commit("aside", "side.py")
    repository.git("checkout", "--quiet", "main")
    repository.git("merge", "--quiet", "--no-ff", "--message", "merged", "side")
    found = commits_between("main~2", "main", repository.path)
    assert [text for _, text in found][-1] == "merged"
    assert sorted(text for _, text in found) == ["aside", "merged", 'third: "quoted" | odd']
    straight = commits_between("main~2", "main", repository.path, first_parent=True)
    assert [text for _, text in straight] == ['third: "quoted" | odd', "merged"]
    assert straight[0][0] == third
    assert commits_between("main", "main", repository.path) == []


def test_order_of_abbreviated_commits(repository: Repository):
    first, second = (repository.git("rev-parse", "--short=12", name) for name in ("HEAD~1", "HEAD"))
    places = commit_order([second, first, "0123456789ab"], repository.path)
    assert sorted(places, key=places.__getitem__) == [first, second]
    assert commit_order(["0123456789ab"], repository.path) == {}


def test_submodules_come_from_the_clone_beside(repository: Repository, tmp_path: Path):
    library = Repository(tmp_path / "library")
    library.commit("old", "lib.py", "speed = 1\n")
    repository.git("submodule", "--quiet", "add", str(library.path), "third_party/lib")
    repository.git("commit", "--quiet", "--message", "with a submodule")
    library.commit("new", "lib.py", "speed = 2\n")
    repository.git("submodule", "--quiet", "update", "--remote")
    repository.commit("newer submodule")
    before = repository.git("config", "--list", "--local")
    for ref, speed in (("HEAD", 2), ("HEAD~1", 1)):
        with checkout(ref, repository.path) as made:
            assert (made.path / "third_party/lib/lib.py").read_text() == f"speed = {speed}\n"
            assert made.notes == ()
    assert repository.git("config", "--list", "--local") == before
    repository.git("submodule", "--quiet", "deinit", "--force", "--all")
    with checkout("HEAD", repository.path) as made:
        (note,) = made.notes
    assert note.startswith("submodule third_party/lib is left empty: it is not checked out here")
    assert repository.worktrees() == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from attnbench.comparing.refs import checkout

with checkout("HEAD", Path(sys.argv[1])) as ref:
    print(ref.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that no other process tidies."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def killed_checkout(repository: Repository) -> Path:
    """A process that is killed while it has a ref checked out; returns the worktree that it leaves."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(repository.path)], capture_output=True, text=True)
    left = Path(done.stdout.strip())
    assert left.is_dir(), done.stderr
    assert repository.worktrees() == 2
    return left


def test_what_a_killed_process_left_is_removed_by_the_next(repository: Repository, temporary_folder: Path):
    left = killed_checkout(repository)
    with checkout("HEAD~1", repository.path) as live:
        assert not left.parent.exists()
        assert repository.worktrees() == 2
        with checkout("HEAD", repository.path):
            assert live.path.is_dir(), "its owner lives"
    assert repository.worktrees() == 1
    assert not list(temporary_folder.iterdir())


def test_a_worktree_whose_folder_is_gone_is_unregistered_and_no_one_elses(repository: Repository, tmp_path: Path):
    shutil.rmtree(killed_checkout(repository).parent)
    theirs = tmp_path / "theirs"
    repository.git("worktree", "add", "--quiet", "--detach", str(theirs))
    shutil.rmtree(theirs)
    with checkout("HEAD", repository.path):
        pass
    assert repository.worktrees() == 2, "the main one, and one that the user may bring back"


HOLDS = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.stdin.read()")


def test_the_worktree_of_a_living_process_stays_though_its_folder_cannot_be_seen(
    repository: Repository, tmp_path: Path
):
    """Another container has the repository, and a temporary folder of its own."""
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(repository.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip()).parent
        folder.rename(tmp_path / "of the container")
        with checkout("HEAD~1", repository.path):
            assert repository.worktrees() == 3
        assert repository.worktrees() == 2
        (tmp_path / "of the container").rename(folder)
    finally:
        owner.communicate("")
    assert repository.worktrees() == 1
    assert not folder.exists()


@pytest.mark.parametrize("text", [None, "another system", ""])
def test_a_worktree_that_another_machine_may_use_stays(repository: Repository, text: str | None):
    """Its owner's lock cannot be seen from here; git forgets it in time."""
    shutil.rmtree(killed_checkout(repository).parent)
    (marker,) = repository.path.glob(".git/worktrees/*/attnbench-owner")
    before = marker.read_text()
    marker.unlink()
    if text is not None:
        marker.write_text(text)
    with checkout("HEAD", repository.path):
        pass
    assert repository.worktrees() == 2
    marker.write_text(before)
    with checkout("HEAD", repository.path):
        pass
    assert repository.worktrees() == 1


def test_a_repository_without_locks_is_compared_all_the_same(repository: Repository, monkeypatch: pytest.MonkeyPatch):
    def no_lock(marker: Path) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("attnbench.comparing.refs.owned", no_lock)
    with checkout("HEAD", repository.path) as ref:
        assert ref.path.is_dir()
    assert repository.worktrees() == 1


def test_a_file_that_a_later_build_touches_is_noticed(repository: Repository):
    with checkout("HEAD", repository.path, "echo 1 > built") as old:
        old.require_intact()
        assert old.altered() == []
        (old.path / "unforeseen.py").write_text("")
        with pytest.raises(UsageError, match=r"unforeseen.py of HEAD changed after the build"):
            old.require_intact()
        assert old.altered() == [], "a cache beside the sources, say"
        (old.path / "built").write_text("2\n")
        (old.path / "code.py").unlink()
        assert old.altered() == ["built", "code.py"]
        with pytest.raises(UsageError, match=r"built, code.py, unforeseen.py of HEAD"):
            old.require_intact()


def test_a_worktree_that_is_moved_to_another_commit_is_noticed(repository: Repository):
    with checkout("HEAD", repository.path) as ref:
        repository.git("-C", str(ref.path), "checkout", "--quiet", "--detach", "HEAD~1")
        with pytest.raises(UsageError, match="HEAD was moved to another commit"):
            ref.require_intact()


def test_the_working_tree_is_watched_too(repository: Repository):
    with checkout(".", repository.path) as ref:
        ref.require_intact()
        repository.write("code.py", "value = 9\n")
        assert ref.altered() == ["code.py"]
        with pytest.raises(UsageError, match=r"code.py of \. changed"):
            ref.require_intact()


def test_a_build_that_changes_its_own_sources_is_told(repository: Repository):
    with checkout("HEAD", repository.path, "echo 3 > code.py") as ref:
        assert ref.notes == ("the build of HEAD changed files that git tracks: code.py",)
        ref.require_intact()


def test_folders_outside_the_ref_are_not_its_code(repository: Repository, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    for outside in (str(repository.path), "..", str(tmp_path / "elsewhere")):
        with pytest.raises(UsageError, match="is not in HEAD, so every ref would import the same code from it"):
            checkout("HEAD", repository.path, None, [outside]).__enter__()
    (repository.path / "lib").symlink_to(tmp_path / "elsewhere")
    repository.git("add", "lib")
    repository.git("commit", "--quiet", "--message", "a link out of the repository")
    with pytest.raises(UsageError, match="is not in HEAD"):
        checkout("HEAD", repository.path, None, ["lib"]).__enter__()
