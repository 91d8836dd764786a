"""What is measured as a git ref is the code of that ref: not the working tree's, not an installed copy's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from git_repository import Repository

from attnbench.comparing.compare import code_of_ref, refs
from attnbench.comparing.experiment import Experiment, Terms
from attnbench.comparing.refs import checkout
from attnbench.comparing.sides import ForkedSide, verify_alone
from attnbench.errors import UsageError
from attnbench.run import origin
from attnbench.run.origin import NotInRef, Origin, other_places
from attnbench.spec import Workload

SMALL = Workload(batch=1, q_len=16, heads=1, head_dim=8)
ATTEND = """
import numpy as np

def attend(q, k, v):
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v).astype(q.dtype)
"""
MINE = ATTEND + "\nfrom attnbench.registry import Function\nMINE = Function(attend, 'numpy', 'numpy.mine')\n"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "project")
    made.write("attnbench.toml", 'framework = "numpy"\n')
    made.write("pyproject.toml", '[project]\nname = "Mine_Pkg"\n')
    made.commit("first", "python/minepkg/__init__.py", MINE)
    made.commit("a wrapper", "wrapper.py", "from minepkg import attend\n")
    made.commit(
        "a lazy one", "lazy.py", "def attend(q, k, v):\n    import minepkg\n    return minepkg.attend(q, k, v)\n"
    )
    made.commit("new since the last", "python/minepkg/fresh.py", ATTEND)
    return made


def install(site: Path, url: str = "", *files: str) -> None:
    """Metadata of a distribution that brings numpy.mine, in a folder of its own."""
    info = site / "mine_pkg-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-pkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attnbench.implementations]\nnumpy.mine = minepkg:MINE\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    if url:
        (info / "direct_url.json").write_text(f'{{"url": "{url}", "dir_info": {{"editable": true}}}}')


@pytest.fixture
def editable(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that imports from the working tree by a finder before all others, as meson-python's does."""
    site = tmp_path / "site"
    install(site, f"file://{repository.path}")
    (site / "sitecustomize.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n\n"
        "class Finder:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        f"        folder = {str(repository.path / 'python')!r}\n"
        "        return PathFinder.find_spec(name, [folder]) if name == 'minepkg' else None\n"
        "\nsys.meta_path.insert(0, Finder)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def on_the_path(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation whose folder is on the import path, as a .pth file puts it there."""
    install(tmp_path / "site", f"file://{repository.path}")
    folders = [str(tmp_path / "site"), str(repository.path / "python"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that `pip install .` made."""
    site = tmp_path / "site"
    install(site, "", "minepkg/__init__.py")
    (site / "minepkg").mkdir()
    (site / "minepkg/__init__.py").write_text(MINE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(site))


def load(repository: Repository, name: str, ref: str = "HEAD", pythonpath: tuple[str, ...] = ()) -> None:
    with checkout(ref, repository.path, None, pythonpath) as made:
        side = code_of_ref(name, made, repository.path)
        with ForkedSide(side, "cpu", 1) as a, ForkedSide(side, "cpu", 1) as b:
            terms = Terms(workload=SMALL, budget_s=0.01, launch_s=0.0)
            found = Experiment(a, b, terms, lambda launches, decision: None).run()
            assert found.verdict is not None, found.reason


@pytest.mark.parametrize("name", ["numpy.mine", "minepkg:attend", "wrapper:attend", "wrapper.py:attend", "lazy:attend"])
@pytest.mark.parametrize("installed", ["editable", "copied"])
def test_code_of_the_repository_that_is_not_the_refs_is_refused(
    repository: Repository, request: pytest.FixtureRequest, name: str, installed: str
):
    request.getfixturevalue(installed)
    with pytest.raises(NotInRef, match=r"minepkg.*(is not in this ref|which is not in this ref).*set pythonpath"):
        load(repository, name)


@pytest.mark.parametrize("name", ["numpy.mine", "minepkg:attend", "wrapper:attend"])
def test_the_working_tree_on_the_import_path_is_not_seen(repository: Repository, on_the_path: None, name: str):
    with pytest.raises(UsageError, match=r"could not be loaded: .*No module named 'minepkg'"):
        load(repository, name)


@pytest.mark.parametrize("name", ["numpy.mine", "minepkg:attend", "wrapper:attend", "lazy:attend"])
@pytest.mark.parametrize("installed", ["on_the_path", "copied"])
def test_the_refs_own_code_is_found_first_if_the_settings_say_where(
    repository: Repository, request: pytest.FixtureRequest, name: str, installed: str
):
    request.getfixturevalue(installed)
    load(repository, name, pythonpath=("python", "."))


def test_what_a_ref_does_not_have_is_absent_and_not_elsewhere(repository: Repository, editable: None):
    with pytest.raises(UsageError) as caught:
        load(repository, "minepkg.fresh:attend", "HEAD~1")
    assert not isinstance(caught.value, NotInRef)


def test_what_attnbench_brings_is_no_code_of_another_repository(repository: Repository):
    with pytest.raises(NotInRef, match="none of this repository's code would be measured"):
        load(repository, "numpy.float32")


@pytest.mark.parametrize("file", ["{outside}", "../{name}"])
def test_a_file_outside_the_repository_is_the_same_in_every_ref(repository: Repository, tmp_path: Path, file: str):
    outside = tmp_path / "outside.py"
    outside.write_text(ATTEND)
    with checkout("HEAD", repository.path) as made:
        (made.path.parent / "outside.py").write_text(ATTEND)
        side = code_of_ref(f"{file.format(outside=outside, name=outside.name)}:attend", made, repository.path)
        with pytest.raises(NotInRef, match="name it relative to the root of the repository"):
            ForkedSide(side, "cpu", 1)


def test_a_virtual_environment_inside_the_repository_is_not_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / ".venv" / "lib" / "site-packages"
    monkeypatch.setattr(origin, "_installation", lambda: (str(site),))
    ref = Origin(tree="/elsewhere/project", within=("/elsewhere/project",), others=(str(tmp_path),))
    assert not origin._is_other(str(site / "numpy/__init__.py"), ref)
    assert origin._is_other(str(tmp_path / "src/mine.py"), ref)
    assert not origin._is_other("/elsewhere/project/src/mine.py", ref)
    copy = Origin(tree=ref.tree, within=ref.within, others=(str(tmp_path), str(site / "minepkg")))
    assert origin._is_other(str(site / "minepkg/__init__.py"), copy)


def test_the_working_tree_is_no_other_place_of_itself(repository: Repository, copied: None, tmp_path: Path):
    mine = str(tmp_path / "site/minepkg")
    assert other_places(repository.path, repository.path) == (mine,)
    assert other_places(Path("/elsewhere"), repository.path) == (str(repository.path), mine)


def test_a_module_without_a_file_of_its_own_is_no_other_code(repository: Repository, monkeypatch: pytest.MonkeyPatch):
    """torch.ops calls itself "_ops.py", which the folder one happens to be in does not hold."""
    monkeypatch.chdir(repository.path)
    others = (str(repository.path),)
    monkeypatch.setattr(origin, "_expected", Origin(tree="/elsewhere", within=("/elsewhere",), others=others))
    pretended = ModuleType("pretended")
    monkeypatch.setitem(sys.modules, "pretended", pretended)
    pretended.__file__ = "_ops.py"
    assert origin.other_code() == ""
    pretended.__file__ = str(repository.path / "wrapper.py")
    assert "pretended was imported from" in origin.other_code()


def tried(repository: Repository, name: str = "kern:attend", ref: str = "HEAD", folder: Path | None = None) -> None:
    """Open a function of a ref as a comparison does."""
    with checkout(ref, repository.path) as made, ForkedSide(code_of_ref(name, made, folder), "cpu", 1) as side:
        record = verify_alone(side, SMALL)
        assert record.status == "ok", record.reason


def test_files_of_relative_names_are_those_of_the_ref(repository: Repository, monkeypatch: pytest.MonkeyPatch):
    told = "assert open('setting.txt').read() == 'old'\n"
    repository.write("inner/setting.txt", "old")
    repository.commit("old", "kern.py", told + ATTEND + "\nplain = attend\n\ndef attend(q, k, v):\n    " + told +
                      "    return plain(q, k, v)\n")  # fmt: skip
    repository.write("inner/setting.txt", "new")
    monkeypatch.chdir(repository.path / "inner")
    tried(repository)
    (repository.path / "inner").rename(repository.path / "outer")
    monkeypatch.chdir(repository.path / "outer")
    with pytest.raises(UsageError, match=r"setting.txt"):  # the ref has no such folder: its root takes its place
        tried(repository)


READS = {
    "when it is loaded": "SETTING = open({file!r}).read()\n" + ATTEND,
    "when it is called": ATTEND.replace("logits =", "open({file!r}).read()\n    logits =", 1),
    "by os.open": ATTEND.replace(
        "logits =", "import os\n    os.close(os.open({file!r}, os.O_RDONLY))\n    logits =", 1
    ),
    "as code that is in no module": "import runpy\nattend = runpy.run_path({file!r})['attend']\n",
}


@pytest.mark.parametrize("how", READS)
def test_a_file_that_is_read_from_the_working_tree_is_noticed(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, how: str
):
    monkeypatch.chdir(repository.path)
    repository.write("beside.py", ATTEND)
    repository.commit("reads", "kern.py", READS[how].format(file=str(repository.path / "beside.py")))
    with pytest.raises(NotInRef, match=r"beside.py was read, which is not in this ref"):
        tried(repository)
    tried(repository, ref=".")


def test_what_is_written_to_the_working_tree_is_not_read_from_there(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(repository.path)
    log = str(repository.path / "log.txt")
    repository.commit("writes", "kern.py", f"open({log!r}, 'w').close()\n" + ATTEND)
    tried(repository)


def mapping(file: Path) -> str:
    """Code that has a file in its memory, as a loaded library is, without any import."""
    return f"import mmap, os\nHELD = mmap.mmap(os.open({str(file)!r}, os.O_RDONLY), 0, mmap.MAP_PRIVATE, 1)\n"


def test_a_library_of_the_working_tree_is_noticed_however_it_is_loaded(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
):
    repository.write("mine.so", "code" * 2000)
    (mapped,) = [
        line for line in subprocess.run(
            [sys.executable, "-c", mapping(repository.path / "mine.so") + ORIGIN_TELLS],
            env=os.environ, capture_output=True, text=True, check=True,
        ).stdout.splitlines() if "mine" in line
    ]  # fmt: skip
    assert mapped == str(repository.path / "mine.so")
    monkeypatch.setattr(origin, "loaded_libraries", lambda: iter([mapped]))
    others = (str(repository.path),)
    monkeypatch.setattr(origin, "_expected", Origin(tree="/elsewhere", within=("/elsewhere",), others=others))
    assert "mine.so was loaded, which is not in this ref" in origin.other_code()


ORIGIN_TELLS = "from attnbench.run import origin\nprint(*origin.loaded_libraries(), sep='\\n')\n"


@pytest.mark.parametrize("what", ["library", "module"])
def test_what_a_build_leaves_outside_of_its_ref_is_refused(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
):
    outside = tmp_path / "outside"
    outside.mkdir()
    name = {"library": "built.so", "module": "built.py"}[what]
    use = {
        "library": mapping(outside / name),
        "module": f"import sys\nsys.path.append({str(outside)!r})\nimport built\n",
    }[what]
    repository.write("attnbench.toml", f'framework = "numpy"\nbuild = "cp wrapped.py {outside}/{name}"\n')
    repository.write("wrapped.py", ATTEND)
    repository.commit("builds", "kern.py", use + ATTEND)
    repository.commit("next")
    monkeypatch.chdir(repository.path)
    with refs("HEAD~1", "HEAD") as both:
        for ref in both:
            with pytest.raises(NotInRef, match=r"built.* was (loaded|imported).*a build has written outside"):
                ForkedSide(code_of_ref("kern:attend", ref), "cpu", 1)


def test_a_committed_link_into_the_working_tree_is_other_code(repository: Repository, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(repository.path)
    repository.write("impl/core.py", ATTEND)
    (repository.path / "core.py").symlink_to(repository.path / "impl/core.py")
    (repository.path / "near.py").symlink_to("impl/core.py")
    repository.commit("a link", "kern.py", "from core import attend\n")
    with pytest.raises(NotInRef, match="core was imported from"):
        tried(repository)
    tried(repository, "near:attend")


@pytest.mark.parametrize(
    "file, text",
    [
        ("pyproject.toml", '[tool.poetry]\nname = "mine.pkg"\n'),
        ("setup.cfg", "[metadata]\nname = mine_pkg\n"),
        ("setup.py", "from setuptools import setup\nsetup(name='mine-pkg', version='1')\n"),
        ("core.py", "the name of one of its modules"),
        ("", "made from another working tree"),
        (None, ""),
    ],
)
def test_an_installed_copy_is_known_by_any_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None, text: str
):
    made, site, other = Repository(tmp_path / "project"), tmp_path / "site", tmp_path / "other"
    made.commit("first")
    made.git("worktree", "add", "--quiet", str(other))
    if file:
        made.write(file, text)
    install(site, f"file://{other}" if file == "" else "", "core.py", "rest/__init__.py", "tests/__init__.py")
    made.write("tests/__init__.py", "")
    monkeypatch.syspath_prepend(str(site))
    copies = [one for one in other_places(made.path, made.path) if one.startswith(str(site))]
    assert copies == ([] if file is None else [str(site / name) for name in ("core.py", "rest", "tests")])


@pytest.mark.parametrize("name", ["kern.py", "./kern.py", "../kern.py"])
def test_a_file_is_named_from_the_folder_one_is_in(repository: Repository, monkeypatch: pytest.MonkeyPatch, name: str):
    wrong = "def attend(q, k, v):\n    return q * 0\n"
    repository.write("inner/kern.py", wrong if name == "../kern.py" else ATTEND)
    repository.write("wrapper.py", ATTEND)
    repository.commit("two files", "kern.py", wrong if name == "./kern.py" else ATTEND)
    monkeypatch.chdir(repository.path / "inner")
    tried(repository, f"{name}:attend")
    tried(repository, "wrapper.py:attend")  # only the root has it
    repository.commit("they differ", "kern.py", ATTEND + "# differs\n")
    if name == "kern.py":
        with pytest.raises(
            UsageError,
            match=r"is ambiguous: HEAD has inner/kern.py and kern.py, which differ.*Write ./kern.py.*../kern.py",
        ):
            tried(repository, f"{name}:attend")


def test_generated_code_that_only_the_working_tree_has_leaves_no_verdict(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(repository.path)
    repository.write(".gitignore", "_fast.py\n_unused.py\nenv/\n")
    text = "try:\n    from _fast import attend\nexcept ImportError:\n    from wrapped import attend\n"
    repository.write("wrapped.py", ATTEND)
    repository.commit("first", "kern.py", text)
    repository.write("notes.txt", "uncommitted")
    for name in ("_fast.py", "_unused.py", "env/lib/third.py"):
        repository.write(name, ATTEND)
    repository.write("env/pyvenv.cfg", "")
    with refs("HEAD", ".") as (old, new):
        assert any("HEAD lacks _fast.py, _unused.py, which git ignores in the working tree" in n for n in new.notes)
        ForkedSide(code_of_ref("kern:attend", old), "cpu", 1).close()
        ForkedSide(code_of_ref("wrapped:attend", new), "cpu", 1).close()
        with pytest.raises(NotInRef, match=r"_fast.py, which git ignores and the other ref lacks.*set build"):
            ForkedSide(code_of_ref("kern:attend", new), "cpu", 1)
    repository.write("attnbench.toml", 'framework = "numpy"\nbuild = "cp wrapped.py _fast.py"\n')
    with refs("HEAD", ".") as (old, new):
        assert not any("_fast.py" in note for note in new.notes)
        ForkedSide(code_of_ref("kern:attend", new), "cpu", 1).close()
