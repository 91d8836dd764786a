"""Where a run took place, as its workers say."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from git_repository import Repository

from attnbench import registry
from attnbench.measuring.rates import Ceilings
from attnbench.measuring.sampling import ESTIMATOR
from attnbench.run import protocol as p
from attnbench.run import worker as worker_module
from attnbench.run.environment import commit_of, without_home
from attnbench.run.machine import cache_folder
from attnbench.run.plan import Group
from attnbench.run.pool import Pool, load_ceilings, store_ceilings
from attnbench.run.remote import Remote
from attnbench.run.worker import Worker
from attnbench.spec import Cell, Environment, Workload

START_S = 60.0
HERE = Environment(device="cpu", device_name="Test CPU", framework="numpy", packages={"numpy": "2.0"})


def described(framework):
    worker = Remote.start(framework, None, None)
    try:
        answer = worker.ask(p.Describe([]), START_S)
    finally:
        worker.kill()
    assert isinstance(answer, p.EnvironmentAnswer)
    return answer.environment


def test_two_processes_have_one_fingerprint(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    first, second = described("numpy"), described("numpy")
    assert first.fingerprint == second.fingerprint
    assert first.device_name
    assert first.packages["numpy"]
    assert first.memory_bytes > first.free_bytes > 0
    assert first.variables["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert described("numpy").fingerprint != first.fingerprint
    assert first.harness == f"{version('attnbench')} (estimator {ESTIMATOR})"


@pytest.mark.parametrize(
    "change",
    [{"packages": {"numpy": "2.1"}}, {"device_name": "Other"}, {"threads": 7}, {"driver": "1"}, {"harness": "9"}],
)
def test_what_decides_about_times_changes_the_fingerprint(change):
    assert msgspec.structs.replace(HERE, **change).fingerprint != HERE.fingerprint


def test_soft_facts_do_not():
    warm = msgspec.structs.replace(HERE, clocks={"load": 3.0}, variables={"OMP_NUM_THREADS": "2"}, free_bytes=5)
    assert warm.fingerprint == HERE.fingerprint


def test_loaded_libraries_are_listed_with_their_files():
    libraries = described("numpy").libraries
    blas = [library for library in libraries if "openblas" in library.name or "mkl" in library.name]
    assert blas
    assert all(Path(library.path).name.startswith(library.name.partition(".so")[0]) for library in libraries)
    assert not any(str(Path.home()) in library.path for library in libraries)


@pytest.mark.torch
def test_torch_says_which_libraries_it_really_loaded():
    environment = described("torch")
    assert any(library.name.startswith("libtorch_cpu") for library in environment.libraries)
    assert environment.packages["torch"]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path))
    return tmp_path / "attnbench"


def test_ceilings_are_kept_per_environment_and_dtype(cache):
    assert cache_folder() == cache
    assert load_ceilings(HERE, "float32") is None
    store_ceilings(HERE, "float32", Ceilings(1e12, 1e11, 1 << 20))
    assert load_ceilings(HERE, "float32") == Ceilings(1e12, 1e11, 1 << 20)
    assert load_ceilings(HERE, "bfloat16") is None
    assert load_ceilings(msgspec.structs.replace(HERE, packages={"numpy": "2.1"}), "float32") is None
    assert load_ceilings(msgspec.structs.replace(HERE, processor="GenuineIntel 6-85"), "float32") is None


def test_a_broken_or_unwritable_cache_costs_a_measurement_and_nothing_else(cache):
    store_ceilings(HERE, "float32", Ceilings(1e12, 1e11))
    (file,) = cache.iterdir()
    zero, negative = (f'{{"flops_per_s": {n}, "bytes_per_s": {n}, "cache_bytes": 0}}' for n in (0, -1e12))
    for text in ('{"flops_per_s": "much"}', zero, negative, "[" * 5000, "\N{SNOWMAN}"):
        file.write_text(text)
        assert load_ceilings(HERE, "float32") is None, text
    file.unlink()
    cache.rmdir()
    cache.write_text("a file where the folder should be")
    store_ceilings(HERE, "float32", Ceilings(1e12, 1e11))
    assert load_ceilings(HERE, "float32") is None


def test_ceilings_are_measured_once(cache, monkeypatch):
    with Pool((), None, None) as pool:
        pool.start([Group("numpy")])
        measured = pool.ceilings("float32", "cpu")
    assert measured is not None
    assert measured.flops_per_s > 1e8
    assert measured.bytes_per_s > 1e8
    monkeypatch.setattr(Pool, "_measure_ceilings", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(Pool, "_confirms", lambda *_: True)  # how fast the machine is just now is not the question
    with Pool((), None, None) as pool:
        pool.start([Group("numpy")])
        assert pool.ceilings("float32", "cpu") == measured


@pytest.mark.parametrize(
    ("seen", "kept"),
    [
        (Ceilings(6e11, 6e10), True),
        (Ceilings(4e11, 1e11), False),
        (Ceilings(1e12, 2e10), False),
        (Ceilings(1e12, 1e11, 1 << 40), False),
    ],
)
def test_stored_ceilings_that_a_short_look_does_not_come_near_are_measured_again(cache, monkeypatch, seen, kept):
    stored, measured, asked = Ceilings(1e12, 1e11), Ceilings(5e10, 5e9), []
    store_ceilings(HERE, "float32", stored)

    def ask(self, group, question, timeout_s):
        asked.append((group, question.brief))
        return p.MeasuredCeilings(seen if question.brief else measured)

    monkeypatch.setattr(Pool, "ask", ask)
    monkeypatch.setattr(Pool, "start", lambda self, groups: None)
    pool = Pool((), None, None)
    pool.environments[Group("numpy")] = HERE
    expected = stored if kept else measured
    assert pool.ceilings("float32", HERE.device) == pool.ceilings("float32", HERE.device) == expected
    assert load_ceilings(HERE, "float32") == expected
    assert asked == [(Group("numpy"), True), *([] if kept else [(Group("numpy"), False)])], "once a run"


def test_no_ceiling_for_a_dtype_that_the_framework_lacks(cache):
    with Pool((), None, None) as pool:
        pool.start([Group("numpy")])
        assert pool.ceilings("bfloat16", "cpu") is None


@pytest.mark.parametrize(
    "told,kept",
    [
        ("/home/me/.venv/lib/python3.11/site-packages/torch/lib/libgomp.so.1", "site-packages/torch/lib/libgomp.so.1"),
        ('File "/home/me/src/attnbench/run/worker.py", line 3', 'File "attnbench/run/worker.py", line 3'),
        ("/usr/lib/x86_64-linux-gnu/libcudnn.so.9", "/usr/lib/x86_64-linux-gnu/libcudnn.so.9"),
    ],
)
def test_paths_do_not_tell_where_an_environment_lies(told, kept):
    assert without_home(told) == kept


def test_the_commit_is_marked_if_the_tree_holds_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = Repository(tmp_path / "project")
    commit = made.commit("first", "kern.py", "")[:12]
    made.write("runs/one.jsonl", "")
    assert commit_of(made.path) == commit, "what is no code, and git does not know, is no change"
    made.write("fresh.py", "")
    assert commit_of(made.path) == f"{commit}+dirty"
    (made.path / "fresh.py").unlink()
    made.write("kern.py", "changed")
    assert commit_of(made.path / "runs") == f"{commit}+dirty"
    monkeypatch.chdir(tmp_path)
    assert commit_of() == ""
    assert Environment(device="cpu", device_name="", commit=commit_of(made.path)).is_dirty


def test_neither_a_hook_nor_an_ignored_submodule_hides_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inner, made = Repository(tmp_path / "inner"), Repository(tmp_path / "project")
    inner.commit("kernel", "kern.py", "fast = 1\n")
    made.git("submodule", "add", "--quiet", str(inner.path), "sub")
    made.git("config", "--file", ".gitmodules", "submodule.sub.ignore", "all")
    made.git("add", "--all")
    commit = made.commit("submodule")[:12]
    assert commit_of(made.path) == commit
    made.write("sub/kern.py", "fast = 0\n")
    assert commit_of(made.path) == f"{commit}+dirty"
    monkeypatch.setenv("GIT_DIR", str(inner.path / ".git"))  # as in a hook of another repository
    assert commit_of(made.path) == f"{commit}+dirty"


@pytest.mark.parametrize("told", ["before", "after"])
def test_the_commit_is_that_of_the_measured_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str):
    here, there = Repository(tmp_path / "here"), Repository(tmp_path / "there")
    here.commit("first")
    commit = there.commit("another", "kern.py", "def attend(q, k, v):\n    return q\n")[:12]
    monkeypatch.chdir(here.path)
    monkeypatch.setattr(worker_module, "_measured", None)
    worker = Worker("numpy", "cpu")
    with registry.restored():
        questions = [p.Describe([]), p.Load("attend", "numpy", f"{there.path / 'kern.py'}:attend", None, [])]
        for question in questions if told == "before" else reversed(questions):
            assert not isinstance(worker.answer(question), p.Refused)
    assert worker._environment.commit == commit


@pytest.mark.parametrize("installed", [False, True])
def test_the_commit_is_that_of_the_package_that_brings_an_implementation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
):
    here, there = Repository(tmp_path / "here"), Repository(tmp_path / ("site-packages" if installed else "there"))
    working = here.commit("first")[:12]
    module = f"brought_{installed}"
    there.write(f"{module}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    there.write(f"{module}-1.dist-info/entry_points.txt", f"[attnbench.implementations]\nnumpy.own = {module}:OWN\n")
    text = "from attnbench.registry import Function\n\nOWN = Function(lambda q, k, v: v, 'numpy', 'numpy.own')\n"
    commit = there.commit("a package", f"{module}.py", text)[:12]
    there.write(f"{module}.py", f"{text}\n")
    monkeypatch.chdir(here.path)
    monkeypatch.syspath_prepend(str(there.path))
    registry._entry_points.cache_clear()
    try:
        worker = Worker("numpy", "cpu")
        worker.answer(p.Describe([]))
        small = Workload(batch=1, q_len=8, heads=1, head_dim=8)
        cells = [Cell(implementation=name, workload=small) for name in ("numpy.own", "numpy.float32")]
        assert worker.answer(p.Refusals(cells)) == p.Reasons([None, None])
        commits = [worker._facts(cell)["environment"].commit for cell in cells]
        assert commits == [working if installed else f"{commit}+dirty", working]
        record = worker.answer(p.Open(cells[0], False, False, None, 0)).record
        assert record.environment.commit == commits[0]
    finally:
        registry._entry_points.cache_clear()


def test_a_commit_is_marked_if_git_was_told_not_to_look_at_a_change(tmp_path: Path):
    repository = Repository(tmp_path / "repository")
    commit = repository.commit("kernel", "kernel.py", "a = 1\n")[:12]
    repository.write("sub/readme.txt", "")
    assert commit_of(repository.path) == commit
    for flag in ("--assume-unchanged", "--skip-worktree"):
        repository.git("update-index", flag, "kernel.py")
        (repository.path / "kernel.py").write_text("a = 2\n")
        assert commit_of(repository.path) == commit_of(repository.path / "sub") == f"{commit}+dirty", flag
        (repository.path / "kernel.py").write_text("a = 1\n")
        repository.git("update-index", flag.replace("--", "--no-", 1), "kernel.py")


def test_a_commit_is_that_of_the_folder_also_within_a_git_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    repository, other = Repository(tmp_path / "one"), Repository(tmp_path / "two")
    commit, _ = repository.commit("one")[:12], other.commit("two")
    monkeypatch.setenv("GIT_DIR", str(other.path / ".git"))
    assert commit_of(repository.path) == commit
