"""Whether the code that runs as a git ref is that ref's: no editable install, no installed copy, no working tree."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlparse

from msgspec import Struct

from attnbench import registry
from attnbench.errors import UsageError

REMEDY = (
    "set pythonpath in [tool.attnbench] to the folder of the repository in which its packages lie, or uninstall the "
    "copy that Python finds first"
)


class NotInRef(UsageError):
    """What would be measured as a git ref is other code."""


class Origin(Struct, frozen=True, kw_only=True):
    """Where the code of a git ref lies, and where other code of the same repository does."""

    tree: str = ""
    """Root of the ref's checkout; empty if no ref is meant."""
    within: tuple[str, ...] = ()
    """Folders of it in which the measured object itself must be found."""
    others: tuple[str, ...] = ()
    """Files and folders that hold the repository's code as another ref or an installation has it."""


_expected = Origin()


def expect(origin: Origin) -> None:
    """From now on this process stands for a ref: forget folders on the import path that hold other code of it."""
    global _expected
    registry.names()  # entry points may be declared in a folder that is about to be hidden
    _expected = origin
    sys.path[:] = [one for one in sys.path if not one or not _is_other(one, origin)]


def require(name: str) -> None:
    """Raise NotInRef if the module that brings an implementation is not in the expected ref."""
    if not _expected.tree:
        return
    module = registry.module_of(name)
    if module.partition(".")[0] == "attnbench" and not _is_within(module, _expected.within):
        raise NotInRef(
            f"{name} is attnbench's own, so nothing of this repository would be measured: name a function of it, "
            "file.py:function or package.module:function."
        )
    require_module(module, _expected.within)


def require_module(module: str, within: Sequence[str]) -> None:
    """Raise NotInRef if a loaded module comes from elsewhere although the ref has one of that name, and a plain
    UsageError if the ref has none."""
    if _is_within(module, within):
        return
    found = getattr(sys.modules.get(module), "__file__", None)
    if _expected.tree and not _holds(Path(_expected.tree), module):
        raise UsageError(f"{module} is not in this ref; what Python finds is {found}.")
    raise NotInRef(f"{module} is not in this ref; what Python finds is {found}: {REMEDY}.")


def require_file(file: str, within: Sequence[str]) -> None:
    """Raise NotInRef if a file lies outside of the ref: it is the same for all refs."""
    if not any(_lies_in(file, folder) for folder in within):
        raise NotInRef(f"{file} is not in this ref: name it relative to the root of the repository.")


def _is_within(module: str, within: Sequence[str]) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(_lies_in(file, folder) for folder in within)


def _holds(tree: Path, module: str) -> bool:
    """Whether a checkout has a file for a module, in whatever folder."""
    place = module.replace(".", "/")
    return any(next(tree.rglob(form), None) for form in (f"{place}.py", f"{place}/__init__.py", f"{place}.*so"))


def other_code() -> str:
    """Say which loaded module belongs to the repository but not to the expected ref; empty if there is none."""
    if not _expected.tree:
        return ""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # A relative name is no file's: torch.ops calls itself "_ops.py".
        if not isinstance(file, str) or not os.path.isabs(file) or name.partition(".")[0] == "attnbench":
            continue
        if _is_other(file, _expected):
            return f"{name} was imported from {file}, which is not in this ref: {REMEDY}."
    return ""


def other_places(tree: Path, repository: Path) -> tuple[str, ...]:
    """Where else code of a repository may be imported from: its working tree, and copies that were installed of it."""
    working = () if tree == repository else (str(repository),)
    return (*working, *_installed_copies(repository))


def _is_other(file: str, origin: Origin) -> bool:
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


def _real(file: str) -> str:
    folder, name = os.path.split(file)
    return os.path.join(_real_folder(folder), name)


@cache
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _installed_copies(repository: Path) -> list[str]:
    """Top-level packages and modules of distributions that were made from the repository and copied somewhere else."""
    project, found = _project_name(repository), set()
    for one in distributions():
        if not (_made_from(one, repository) or (project and _normal(one.name) == project)):
            continue
        for file in one.files or ():
            place, top = str(one.locate_file("")), file.parts[0]
            if file.suffix in (".py", ".so", ".pyd") and top != ".." and not top.startswith("__editable__"):
                found.add(os.path.join(os.path.realpath(place), top))
    return sorted(found)


def _made_from(one: Distribution, repository: Path) -> bool:
    try:
        url = json.loads(one.read_text("direct_url.json") or "{}").get("url", "")
    except ValueError:
        return False
    parts = urlparse(url)
    return parts.scheme == "file" and _lies_in(unquote(parts.path).rstrip("/"), os.path.realpath(repository))


def _project_name(repository: Path) -> str:
    try:
        settings = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return _normal(str(settings.get("project", {}).get("name", "")))


def _normal(name: str | None) -> str:
    return (name or "").lower().replace("_", "-").replace(".", "-")
