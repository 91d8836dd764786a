"""Functions of the user: their names in a run, how they are sent to a worker, and whether their files changed.

A function is sent by reference (`file.py:function`), or by value through cloudpickle.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import site
import sys
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
from msgspec import Struct, structs

from attnbench import frameworks, registry
from attnbench.errors import UsageError
from attnbench.frameworks.base import library_settings
from attnbench.registry import is_reference
from attnbench.results.run_file import Run
from attnbench.run import protocol as p
from attnbench.run.plan import process_of
from attnbench.spec import Implementation

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of folders of installed modules, in whatever environment."""
LARGEST = 1 << 27
"""Most bytes that are sent; a function whose modules hold more stays in this process."""


class CannotSend(UsageError):
    """A function that holds something which no other process can have, such as a lock."""


class UserFunction(Struct, frozen=True, kw_only=True):
    """An implementation that a new process does not find in its registry."""

    name: str
    framework: str
    process: str
    label: str
    reference: str | None = None
    pickled: bytes | None = None

    @property
    def is_here(self) -> bool:
        """Whether the function was registered in this process and runs here."""
        return self.reference is None and self.pickled is None

    def load(self, within: Sequence[str] = ()) -> p.Load:
        """Return the message that makes a worker load the function, with the settings of the library here if the
        function is sent by value and may depend on them."""
        told = self.pickled is not None and self.framework in sys.modules
        settings = library_settings(frameworks.get(self.framework)) if told else {}
        return p.Load(self.name, self.framework, self.reference, self.pickled, list(within), settings)


def from_reference(text: str, framework: str, taken: set[str], name: str = "") -> UserFunction:
    """Return the function of `file.py:function` or `package.module:function`, named like the function or `name`; its
    file is not run here."""
    where, _, attribute = text.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise UsageError(f"there is no file {where}.")
        text = f"{Path(where).resolve()}:{attribute}"
    if not where or not attribute:
        lacks = "no file or module" if attribute else "no function"
        raise UsageError(f'"{text}" names {lacks}: write file.py:function or package.module:function.')
    name = free_name(name or attribute, taken)
    return UserFunction(name=name, framework=framework, process=process_of(name), label=text, reference=text)


def from_object(what: Callable[..., Any] | Implementation, framework: str, taken: set[str]) -> UserFunction | None:
    """Return a function or implementation, pickled by value; None if it cannot be sent."""
    implementation = registry.resolve(what, framework)
    pickled = _pickle(what)
    if pickled is None:
        return None
    name = free_name(implementation.name, taken)
    framework, process = implementation.framework, process_of(name)
    return UserFunction(name=name, framework=framework, process=process, label=name, pickled=pickled)


def unpack(pickled: bytes) -> Any:
    """Return the object that `from_object` has packed, in another process.

    The modules that the object uses are imported first if possible, since importing them may register something that it
    calls. The object still uses the copies that were packed with it, with the values they had.
    """
    parcel = cloudpickle.loads(pickled)
    for name in parcel["modules"]:
        with suppress(Exception, SystemExit):
            importlib.import_module(name)
    return cloudpickle.loads(parcel["object"])


def _pickle(what: Any) -> bytes | None:
    """Return an object packed by value with the user's own modules that it reaches; None if that fails or is too large.

    A worker that imported these modules instead would measure what their files hold, without later changes of this
    process.
    """
    registered: list[ModuleType] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated objects warn when they are merely looked at
        own, home = _own_modules(what), _module_of(what)
        try:
            for module in own:
                if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                    cloudpickle.register_pickle_by_value(module)
                    registered.append(module)
            # Of its own module nothing but what it uses was ever needed.
            modules = [module.__name__ for module in own if module is not home]
            packed = cloudpickle.dumps({"modules": modules, "object": cloudpickle.dumps(what)})
        except Exception:
            # Whatever the object holds (a lock, a handle, a device), the answer is the same: it stays in this process.
            return None
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)
    return packed if len(packed) <= LARGEST else None


def _own_modules(what: Any) -> list[ModuleType]:
    """Return the user's modules that an object reaches: those that define it, and those that its functions name."""
    modules: dict[str, ModuleType] = {}
    visited: set[int] = set()
    todo = [what]
    while todo:
        one = todo.pop()
        if id(one) in visited:
            continue
        visited.add(id(one))
        if isinstance(one, ModuleType):
            if _is_own(one):
                modules[one.__name__] = one
                todo += list(vars(one).values())
            continue
        home = _module_of(one)
        if home is not None and _is_own(home):
            modules[home.__name__] = home
        todo += _parts(one)
    return list(modules.values())


def _module_of(one: Any) -> ModuleType | None:
    name = getattr(one, "__module__", None) or type(one).__module__
    return sys.modules.get(name) if isinstance(name, str) else None


def _parts(one: Any) -> list[Any]:
    """Return the objects that are packed with an object: what a function names, holds and wraps, and what an instance
    or a class of the user holds."""
    if isinstance(one, FunctionType):
        named = [one.__globals__[name] for name in _names(one.__code__) if name in one.__globals__]
        cells = [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
        return [*named, *cells, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values(), *vars(one).values()]
    if isinstance(one, MethodType):
        return [one.__func__, one.__self__]
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, staticmethod | classmethod):
        return [one.__func__]
    if isinstance(one, list | tuple | set | frozenset):
        return list(one)
    if isinstance(one, dict):
        return list(one.values())
    home = _module_of(one)
    ours = home is not None and home.__name__.partition(".")[0] == "attnbench"
    if home is None or not (_is_own(home) or home.__name__ == "__main__" or (ours and not isinstance(one, type))):
        return []
    return [type(one), *(vars(one).values() if hasattr(one, "__dict__") else ())]


def _names(code: CodeType) -> set[str]:
    """Return the names that a function's code uses, including the functions nested in it."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that has no value yet
        return False


@functools.cache
def _folders() -> tuple[str, ...]:
    """Return the folders of installed modules, and attnbench's own."""
    kinds = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    sites = [*site.getsitepackages(), site.getusersitepackages()]
    ours = str(Path(__file__).parents[1])
    return tuple({f"{os.path.realpath(folder)}{os.sep}" for folder in (*kinds, *sites, ours)})


def own_folder(name: str) -> Path | None:
    """Return the folder of the module that brought an implementation if that is the user's code, such as an editable
    package's; None if it is installed or was not imported."""
    module = sys.modules.get(registry.module_of(name))
    return Path(str(module.__file__)).parent if module is not None and _is_own(module) else None


def _is_own(module: ModuleType) -> bool:
    """Return whether a module is Python code of the user: not installed, not attnbench's, not compiled."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or module.__name__ == "__main__":
        return False
    place = os.path.realpath(file)
    installed = place.startswith(_folders()) or bool(INSTALLED & {*Path(place).parts})
    return sys.modules.get(module.__name__) is module and not installed


def name_references(implementations: Iterable[Any], taken: Collection[str] = ()) -> dict[str, str]:
    """Return the name of each reference: `a.py:f` is f; beside `b.py:f` it is a:f; beside `old/a.py:f` it is
    new/a:f."""
    references = list(dict.fromkeys(what for what in implementations if is_reference(what)))
    names: dict[str, str] = {}
    for reference in references:
        end = f":{reference.rpartition(':')[2]}"
        rivals = [other for other in references if other != reference and other.endswith(end)]
        names[reference] = free_name(_apart(reference, rivals), {*taken, *names.values()})
    return names


def free_name(name: str, taken: Collection[str]) -> str:
    """Return the name, with a number appended if it is taken."""
    if name not in taken:
        return name
    return next(f"{name}-{n}" for n in range(2, len(taken) + 3) if f"{name}-{n}" not in taken)


def _apart(reference: str, rivals: Collection[str]) -> str:
    """Return the shortest name that differs from those of functions of the same name in other places."""
    (where, _, function), place = reference.rpartition(":"), _place(reference)
    others = {_place(rival) for rival in rivals} - {place}
    if not others:
        return function
    differs = (n for n in range(1, len(place)) if all(other[-n:] != place[-n:] for other in others))
    between = "/" if where.endswith(".py") else "."
    return f"{between.join(place[-next(differs, len(place)) :])}:{function}"


def _place(reference: str) -> tuple[str, ...]:
    where = reference.rpartition(":")[0]
    return Path(where).resolve().with_suffix("").parts if where.endswith(".py") else tuple(where.split("."))


def fingerprint_sources(implementations: Iterable[Any]) -> dict[str, str]:
    """Return the hash of the file of each reference, by file or module as it was written."""
    places = dict.fromkeys(what.rpartition(":")[0] for what in implementations if is_reference(what))
    files = {where: source_file(where) for where in places}
    return {where: hashlib.sha256(file.read_bytes()).hexdigest() for where, file in files.items() if file is not None}


def refuse_changed_sources(run: Path, before: Mapping[str, str], implementations: Iterable[Any]) -> None:
    """Raise UsageError if a file of the references has changed since the run began."""
    now = {source_file(where): found for where, found in fingerprint_sources(implementations).items()}
    for where, then in before.items():
        if now.get(source_file(where), then) != then:
            raise UsageError(
                f"{where} has changed since {run} began, which holds times of the old version: "
                "start a new run, or undo the change and resume again."
            )


def asked_references(request: Mapping[str, Any]) -> list[str]:
    """Return the references among the implementations of a header's request; the request may hold anything."""
    implementations = request.get("implementations")
    return [one for one in implementations if is_reference(one)] if isinstance(implementations, list | tuple) else []


def told_apart(runs: Mapping[Path, Run]) -> tuple[dict[Path, Run], dict[str, str]]:
    """Return runs that are read together, with other names for functions of one name that come from different files,
    and the file of each new name: `fast:attend` and `slow:attend`, as one run of both would call them."""
    found: dict[str, list[str]] = {}
    for run in runs.values():
        for reference in _references(run).values():
            found.setdefault(reference.rpartition(":")[2], []).append(reference)
    names: dict[str, str] = {}
    for references in found.values():
        kept: list[str] = []
        for one in sorted(set(references), key=lambda one: (len(one), one)):
            where = one.rpartition(":")[0]
            known = next((other for other in kept if one_source(other.rpartition(":")[0], where)), None)
            names[one] = known or one
            kept += [] if known else [one]
        apart = name_references(kept) if len(kept) > 1 else {}
        names |= {one: apart.get(names[one], "") for one in references}
    told, places = dict(runs), dict[str, str]()
    for path, run in runs.items():
        given = {old: one for old, one in _references(run).items() if names[one] not in ("", old)}
        if given:
            places |= {names[one]: one.rpartition(":")[0] for one in given.values()}
            renamed = {old: names[one] for old, one in given.items()}
            records = [
                structs.replace(r, implementation=renamed.get(r.implementation, r.implementation)) for r in run.records
            ]
            told[path] = structs.replace(run, records=tuple(records))
    return told, places


def _references(run: Run) -> dict[str, str]:
    """Return the reference of each function that a run was given, by the function's name."""
    return {
        name: reference
        for header in run.headers
        for reference, name in name_references(asked_references(header.request)).items()
    }


def sources_of(run: Run) -> dict[str, str]:
    """Return the file or module of each function that a run was given by reference, by the function's name."""
    return {name: reference.rpartition(":")[0] for name, reference in _references(run).items()}


def one_source(a: str, b: str) -> bool:
    """Return whether two spellings may mean one file or module; an unknown one may mean any.

    `kern.py`, `/home/me/kern.py` and `pkg.kern` are one, since each longer one ends with the shorter.
    """
    first, second = sorted((_source_parts(a), _source_parts(b)), key=len)
    return not first or second[-len(first) :] == first


def _source_parts(where: str) -> tuple[str, ...]:
    """Return the parts of a file's or module's name: `src/pkg/kern.py` and `pkg.kern` end alike."""
    if not where.endswith(".py"):
        return tuple(filter(None, where.split(".")))
    return tuple(part for part in Path(where.removesuffix(".py")).parts if part not in ("/", ".", ".."))


def source_file(where: str) -> Path | None:
    """Return the file of `file.py` or `package.module`, found without importing anything; None if there is none."""
    if where.endswith(".py"):
        file = Path(where).resolve()
        return file if file.is_file() else None
    *packages, module = where.split(".")
    folders = [Path(folder, *packages) for folder in (*sys.path, "")]
    files = (file for folder in folders for file in (folder / module / "__init__.py", folder / f"{module}.py"))
    return next((file.resolve() for file in files if file.is_file()), None)
