"""What is measured as a git ref is the code of that ref: not the working tree's, not an installed copy's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from git_repository import Repository

from attnbench.comparing import ref_arm
from attnbench.errors import UsageError
from attnbench.run import origin
from attnbench.run.arms import NurserySide
from attnbench.run.duel import Duel, Terms
from attnbench.run.origin import NotInRef, Origin, other_places
from attnbench.run.refs import checkout
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
        arm = ref_arm(name, made, repository.path)
        with NurserySide(arm, "cpu", 1) as a, NurserySide(arm, "cpu", 1) as b:
            terms = Terms(workload=SMALL, budget_s=0.01, launch_s=0.0)
            found = Duel(a, b, terms, lambda launches, decision: None).fight()
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
    with pytest.raises(NotInRef, match="nothing of this repository would be measured"):
        load(repository, "numpy.float32")


@pytest.mark.parametrize("file", ["{outside}", "../{name}"])
def test_a_file_outside_the_repository_is_the_same_in_every_ref(repository: Repository, tmp_path: Path, file: str):
    outside = tmp_path / "outside.py"
    outside.write_text(ATTEND)
    with checkout("HEAD", repository.path) as made:
        (made.path.parent / "outside.py").write_text(ATTEND)
        arm = ref_arm(f"{file.format(outside=outside, name=outside.name)}:attend", made, repository.path)
        with pytest.raises(NotInRef, match="name it relative to the root of the repository"):
            NurserySide(arm, "cpu", 1)


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
