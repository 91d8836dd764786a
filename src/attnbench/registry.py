"""Names -> implementations. All arrive alike, through the entry-point group `attnbench.implementations`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from attnbench.errors import UnknownName, UsageError
from attnbench.spec import Call, Config, Environment, Implementation, Workload

P = ParamSpec("P")
T = TypeVar("T")

GROUP = "attnbench.implementations"
_registered: dict[str, Implementation] = {}
_generation = 0
_caches: list[Callable[[], None]] = []

OURS = "attnbench"
"""Origin of the implementations of this package."""
HERE = "this process"
"""Origin of implementations that no package brings."""


def is_reference(what: Any) -> bool:
    """Return whether a text points into a file or module (`file.py:function`, `package.module:function`)."""
    return isinstance(what, str) and ":" in what


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def register(implementation: Implementation) -> Implementation:
    """Add an implementation for this process, and return it, so that the call can wrap its creation."""
    if not isinstance(implementation, Implementation):
        raise UsageError(f"register takes an attnbench Implementation, not {type(implementation).__name__}.")
    _registered[implementation.name] = implementation
    _outdated()
    return implementation


def generation() -> int:
    """Return a number that grows with every registration: whatever was built from a name before may be outdated."""
    return _generation


@contextmanager
def restored() -> Iterator[None]:
    """Forget at the end of the block whatever was registered inside."""
    before = dict(_registered)
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)
        _outdated()


def _outdated() -> None:
    global _generation
    _generation += 1
    for clear in _caches:
        clear()


def cached(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator like lru_cache whose cache is emptied by every registration, for what is built from a name."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept = lru_cache(maxsize)(function)
        _caches.append(kept.cache_clear)
        return cast("Callable[P, T]", kept)

    return decorate


def names() -> list[str]:
    """Return all known names, sorted; nothing is imported."""
    return sorted({*_entry_points(), *_registered})


def get(name: str) -> Implementation:
    """Return the implementation with that name."""
    if name in _registered:
        return _registered[name]
    if (point := _point(name)) is None:
        raise UnknownName("implementation", name, names(), "attnbench list implementations")
    try:
        implementation = point.load()
    except Exception as error:
        raise UsageError(f'implementation "{name}" ({point.value}) could not be loaded: {error}') from error
    if not isinstance(implementation, Implementation) or implementation.name != name:
        raise UsageError(f'entry point "{name}" ({point.value}) is not an Implementation of that name.')
    return implementation


def asked(text: str) -> tuple[str, dict[str, int | float | str | bool]]:
    """Return the name and the checked settings of a text such as `torch.ring[world=4,layout=striped]`."""
    if not isinstance(text, str):
        raise UsageError(f'the name of an implementation is text such as "torch.sdpa", not {text!r}.')
    name, bracket, rest = text.partition("[")
    tunables = get(name).tunables
    if not bracket:
        return name, {}
    if not rest.endswith("]"):
        raise UsageError(f'"{text}" has no closing bracket: write {name}[name=value,name=value].')
    config: dict[str, int | float | str | bool] = {}
    for word in rest[:-1].split(","):
        key, _, value = (part.strip() for part in word.partition("="))
        _check_setting(name, key)
        kind = type(tunables[key])
        try:
            config[key] = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError):
            raise UsageError(f'{key} of {name} takes a value of type {kind.__name__}, not "{value}".') from None
    get(name).configured(config)  # raises for what cannot be
    return name, config


def configured(name: str, config: Config) -> Implementation:
    """Return the implementation with settings from a file; raise if the implementation does not have or accept them."""
    for key in config:
        _check_setting(name, key)
    return get(name).configured(config)


def _check_setting(name: str, key: str) -> None:
    tunables = get(name).tunables
    if key not in tunables:
        offered = f"it has {', '.join(tunables)}" if tunables else "it has none"
        raise UsageError(f'{name} has no setting "{key}"; {offered}.')


def loadable() -> tuple[list[str], dict[str, str]]:
    """Return the names that load, and those that do not with the reason, so that a broken package stops no other."""
    good, broken = [], {}
    for name in names():
        try:
            good.append(get(name).name)
        except UsageError as error:
            broken[name] = str(error)
    return good, broken


def origin(name: str) -> str:
    """Return the distribution that brings an implementation; HERE if it was registered by hand under whatever name."""
    point = _point(name)
    return HERE if point is None or point.dist is None else point.dist.name


def module_of(name: str) -> str:
    """Return the module that brings an implementation; empty text if it was registered by hand."""
    return "" if (point := _point(name)) is None else point.module


def _point(name: str) -> EntryPoint | None:
    return None if name in _registered else _entry_points().get(name)


class Function(Implementation):
    """A bare function of (q, k, v) in layout bshd, judged by the workload's mask and scale."""

    layout = "bshd"

    def __init__(self, function: Callable[..., Any], framework: str, name: str | None = None) -> None:
        self.function = function
        self.framework = framework
        self.name = name or getattr(function, "__name__", type(function).__name__)

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """Return None: a bare function claims every workload, and verification decides."""
        return None

    def build(self, workload: Workload, config: Config) -> Call:
        """Return the function itself."""
        return self.function


def resolve(what: str | Callable[..., Any] | Implementation, framework: str = "torch") -> Implementation:
    """Return the Implementation for a name, `file.py:function`, `package.module:function`, a function or itself."""
    if isinstance(what, Implementation):
        return what
    if isinstance(what, str):
        if not is_reference(what):
            return get(what)
        found = load_reference(what)
        return found if isinstance(found, Implementation) else Function(found, framework)
    if callable(what):
        return Function(what, framework)
    raise UsageError(f"an implementation is a name, a function or an Implementation, not {type(what).__name__}.")


def load_reference(reference: str) -> Any:
    """Return the object that `file.py:name` or `package.module:name` refers to."""
    where, _, attribute = reference.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f'"{reference}" could not be imported: {type(error).__name__}: {error}') from error
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UnknownName(f"function in {where}", attribute, public, "")
    found = getattr(module, attribute)
    if not callable(found) and not isinstance(found, Implementation):
        raise UsageError(f'"{reference}" is a {type(found).__name__}, not a function of (q, k, v).')
    return found


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
