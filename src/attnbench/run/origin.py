"""Proof that the code which runs as a git ref is that ref's, not an editable install, a copy or a working tree."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from msgspec import Struct

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.processes import mapped_files
from attnbench.run import git
from attnbench.run.machine import cache_folder

COARSE_NS = 20_000_000
"""Nanoseconds by which the clock of a file system may lag behind."""
COMMON = ("tests", "test", "docs", "doc", "examples", "benchmarks", "scripts", "tools", "setup", "conftest", "noxfile")
"""Names of top-level modules that many repositories have: a distribution that installs one is no copy for it."""
WATCHED = {"open": 0, "ctypes.dlopen": 0, "import": 1, "exec": 0, "compile": 1}
"""Audit events of reading or executing files, with the index of the argument that is the file."""
REMEDY = (
    "set pythonpath in [tool.attnbench] to the folder of the repository in which its packages lie, or uninstall the "
    "copy that Python finds first"
)


class NotInRef(UsageError):
    """Measured code that lies outside of the git ref it should come from."""


class Origin(Struct, frozen=True, kw_only=True):
    """The places of a git ref's code, and of other code of the same repository."""

    tree: str = ""
    """Root of the ref's checkout; empty if no ref is meant."""
    within: tuple[str, ...] = ()
    """Folders of the checkout in which the measured object itself must be found."""
    others: tuple[str, ...] = ()
    """Files and folders with the repository's code in another version: of another ref, or installed."""
    unequal: tuple[str, ...] = ()
    """Files of the tree that git ignores and the other ref lacks."""
    built_ns: tuple[int, int] = (0, 0)
    """Times at which the builds of all refs began and ended; files outside of the tree that changed meanwhile hold what
    the last build wrote."""


_expected = Origin()
_noticed: list[str] = []
"""Files that were read from other places of the repository; messages name the first."""
_watching = False


def expect(origin: Origin) -> None:
    """Run as the code of a git ref from now on: drop import folders with other code of its repository, and note every
    file that is read from there."""
    global _expected, _watching
    registry.names()  # entry points may be declared in a folder that is about to be hidden
    _expected = origin
    sys.path[:] = [one for one in sys.path if not one or not _is_other(one, origin)]
    if not _watching:  # a hook cannot be taken away again
        _watching = True
        sys.addaudithook(_watch)


def _watch(event: str, given: tuple[Any, ...]) -> None:
    """Note files of other code that are read, loaded or executed by any Python function."""
    if event not in WATCHED or _noticed or not _expected.tree:
        return
    if event == "open":
        file, _, flags = given
        if isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY:
            return
    else:
        file = getattr(given[0], "co_filename", None) if event == "exec" else given[WATCHED[event]]
    if isinstance(file, bytes):
        file = os.fsdecode(file)
    if not isinstance(file, str | os.PathLike):
        return
    file = os.fspath(file)
    if not isinstance(file, str) or (event != "open" and os.sep not in file):
        return
    file = os.path.abspath(file)
    if _is_other(file, _expected) and os.path.isfile(file) and not _is_exempt(file):
        _noticed.append(file)


def _is_exempt(file: str) -> bool:
    """Return whether a file belongs to git, package metadata, a virtual environment or attnbench's cache."""
    if any(part == ".git" or part.endswith((".egg-info", ".dist-info")) for part in file.split(os.sep)):
        return True
    prefix = os.path.realpath(sys.prefix)
    if sys.prefix != sys.base_prefix and _lies_in(file, prefix):
        # Copies of the repository that were installed there are named one by one.
        return not any(_lies_in(file, one) for one in _expected.others if _lies_in(one, prefix))
    return _lies_in(file, os.path.realpath(cache_folder()))


def noticed() -> str:
    """Return a sentence about the first file that was read from another place of the repository; empty if there is
    none."""
    return f"{_noticed[0]} was read, {_why(_noticed[0])}." if _noticed else ""


def _why(file: str) -> str:
    if _real(file) in _expected.unequal:
        return (
            "which git ignores and the other ref lacks, so that the two are not built alike: set build in "
            "[tool.attnbench] to the command that makes it"
        )
    if _was_built_outside(file):
        return (
            "which a build has written outside of its ref, and the build of every ref would write again: let the "
            "build command write to its own folder only"
        )
    return f"which is not in this ref: {REMEDY}"


def require(name: str) -> None:
    """Raise NotInRef if the module of an implementation is not in the expected ref."""
    if not _expected.tree:
        return
    module = registry.module_of(name)
    if module.partition(".")[0] == "attnbench" and not _is_within(module, _expected.within):
        raise NotInRef(
            f"{name} belongs to attnbench, so none of this repository's code would be measured: name one of "
            "its functions, file.py:function or package.module:function."
        )
    require_module(module, _expected.within)


def require_module(module: str, within: Sequence[str]) -> None:
    """Raise NotInRef if a loaded module comes from elsewhere; UsageError if the ref has no module of that name."""
    if _is_within(module, within):
        return
    found = getattr(sys.modules.get(module), "__file__", None)
    place, tree = module.replace(".", "/"), Path(_expected.tree)
    forms = (f"{place}.py", f"{place}/__init__.py", f"{place}.*so")
    if _expected.tree and not any(next(tree.rglob(form), None) for form in forms):
        raise UsageError(f"{module} is not in this ref; Python finds {found} instead.")
    raise NotInRef(f"{module} is not in this ref; Python finds {found} instead: {REMEDY}.")


def require_file(file: str, within: Sequence[str]) -> None:
    """Raise NotInRef if a file lies outside of the ref, since it is then the same for all refs."""
    if not any(_lies_in(file, folder) for folder in within):
        raise NotInRef(f"{file} is not in this ref: name it relative to the root of the repository.")


def _is_within(module: str, within: Sequence[str]) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(_lies_in(file, folder) for folder in within)


def loaded_libraries() -> Iterator[str]:
    """Yield the files of shared libraries that this process has mapped, however they were loaded."""
    for file in mapped_files():
        if ".so" in os.path.basename(file) or file.endswith((".dylib", ".pyd")):
            yield file


def other_code() -> str:
    """Return a sentence about a loaded module of the repository that is not in the expected ref; empty if there is
    none."""
    if not _expected.tree:
        return ""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # A relative name is no file's: torch.ops calls itself "_ops.py".
        if not isinstance(file, str) or not os.path.isabs(file) or name.partition(".")[0] == "attnbench":
            continue
        if _is_other(file, _expected) or _was_built_outside(file):
            return f"{name} was imported from {file}, {_why(file)}."
    for file in loaded_libraries():
        if _was_built_outside(file) or (_is_other(file, _expected) and not _is_exempt(file)):
            return f"{file} was loaded, {_why(file)}."
    return noticed()


@cache
def other_places(tree: Path, repository: Path, folders: tuple[str, ...] = (".", "src")) -> tuple[str, ...]:
    """Return where else a repository's code may be imported from: its working trees and its installed copies.

    `folders` of a tree hold its packages: a distribution that installs one of these names is a copy.
    """
    listed = git.ask(repository, "worktree", "list", "--porcelain").stdout.splitlines()
    others = [Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")]
    trees = list(dict.fromkeys(Path(os.path.realpath(one)) for one in (repository, *others) if one.is_dir()))
    places = [place / folder for place in (tree, repository) for folder in folders]
    copies = _installed_copies(repository, trees, places)
    return (*(str(one) for one in trees if one != Path(os.path.realpath(tree))), *copies)


def _was_built_outside(file: str) -> bool:
    """Return whether a file outside of the tree was written while the refs were built."""
    began, ended = _expected.built_ns
    if not ended or _lies_in(file, _expected.tree):
        return False
    try:
        return began - COARSE_NS <= os.stat(file).st_ctime_ns <= ended + COARSE_NS
    except OSError:
        return False


def _is_other(file: str, origin: Origin) -> bool:
    if _real(file) in origin.unequal:
        return True
    if _lies_in(file, origin.tree) or not any(_lies_in(file, folder) for folder in origin.others):
        return False
    # A virtual environment inside the repository holds other people's packages; copies of its own are named one by one.
    named = any(_lies_in(file, one) for one in origin.others if _is_installed(one))
    return named or not _is_installed(file)


def _is_installed(file: str) -> bool:
    return any(_lies_in(file, folder) for folder in _installation())


@cache
def _installation() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({os.path.realpath(sysconfig.get_path(kind)) for kind in kinds})


def _lies_in(file: str, folder: str) -> bool:
    place = _real(file)
    return bool(folder) and (place == folder or place.startswith(folder.rstrip(os.sep) + os.sep))


@cache
def _real(file: str) -> str:
    return os.path.realpath(file)


def _installed_copies(repository: Path, trees: Sequence[Path], folders: Sequence[Path]) -> list[str]:
    """Return the installed top-level packages and modules of distributions that were made from the repository."""
    names, paths = _project_names(repository), set()
    for one in distributions():
        place, tops = os.path.realpath(str(one.locate_file(""))), _top_levels(one)
        brings = [top for top in tops if top.partition(".")[0] not in COMMON]
        if _normal(one.name) in names or _made_from(one, trees) or any(_has(folders, top) for top in brings):
            paths |= {os.path.join(place, top) for top in tops}
    trees_of = [str(one) for one in trees]
    return sorted(one for one in paths if not any(_lies_in(one, tree) for tree in trees_of) or _is_installed(one))


def _top_levels(one: Distribution) -> set[str]:
    """Return the top-level names of a distribution's code."""
    listed = one.read_text("RECORD")  # parsed here: `files` makes an object of every line, and some have thousands
    names = [str(file) for file in one.files or ()] if listed is None else re.findall(r'^"?([^",\n]+)', listed, re.M)
    code = {name.partition("/")[0] for name in names if name.endswith((".py", ".so", ".pyd"))}
    return {top for top in code if top != ".." and not top.startswith("__editable__")}


def _has(folders: Sequence[Path], top: str) -> bool:
    """Return whether one of the folders has a package or a module of that name."""
    name = top.partition(".")[0]
    return any((folder / form).is_file() for folder in folders for form in (f"{name}.py", f"{name}/__init__.py", top))


def _made_from(one: Distribution, trees: Sequence[Path]) -> bool:
    try:
        url = json.loads(one.read_text("direct_url.json") or "{}").get("url", "")
    except ValueError:
        return False
    parts = urlparse(url)
    place = unquote(parts.path).rstrip("/")
    return parts.scheme == "file" and any(_lies_in(place, str(tree)) for tree in trees)


def _project_names(repository: Path) -> set[str]:
    """Return the distribution names in the repository's pyproject.toml, setup.cfg and setup.py."""

    def text(name: str) -> str:
        try:
            return (repository / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    project_names: list[Any] = []
    with suppress(ValueError, AttributeError):
        settings = tomllib.loads(text("pyproject.toml"))
        project_names.append(settings.get("project", {}).get("name"))
        project_names.append(settings.get("tool", {}).get("poetry", {}).get("name"))
    with suppress(configparser.Error):
        old = configparser.ConfigParser(interpolation=None)
        old.read_string(text("setup.cfg"))
        project_names.append(old.get("metadata", "name", fallback=None))
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text("setup.py"))):
            if isinstance(node, ast.keyword) and node.arg == "name" and isinstance(node.value, ast.Constant):
                project_names.append(node.value.value)
    return {_normal(name) for name in project_names if isinstance(name, str) and name}


def _normal(name: str | None) -> str:
    return (name or "").lower().replace("_", "-").replace(".", "-")
