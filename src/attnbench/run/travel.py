"""How a user's function reaches a worker: by reference (`file.py:name`), or by value through cloudpickle."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from msgspec import Struct

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.run import protocol as p
from attnbench.run.naming import free_name
from attnbench.run.plan import process_of
from attnbench.spec import Implementation


class Traveller(Struct, frozen=True, kw_only=True):
    """An implementation that is not in the registry of a fresh process."""

    name: str
    framework: str
    process: str
    label: str
    reference: str | None = None
    pickled: bytes | None = None

    @property
    def is_here(self) -> bool:
        """Whether it needs no journey: it was registered in this very process."""
        return self.reference is None and self.pickled is None

    def enlist(self, within: Sequence[str] = ()) -> p.Enlist:
        """The message that makes it known."""
        return p.Enlist(self.name, self.framework, self.reference, self.pickled, list(within))


def from_reference(text: str, framework: str, taken: set[str], name: str = "") -> Traveller:
    """`file.py:function` or `package.module:function`, under its own name or `name`; the file is not run here."""
    where, _, attribute = text.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise UsageError(f"there is no file {where}.")
        text = f"{Path(where).resolve()}:{attribute}"
    if not where or not attribute:
        lacks = "no file or module" if attribute else "no function"
        raise UsageError(f'"{text}" names {lacks}: write file.py:function or package.module:function.')
    name = free_name(name or attribute, taken)
    return Traveller(name=name, framework=framework, process=process_of(name), label=text, reference=text)


def from_object(what: Callable[..., Any] | Implementation, framework: str, taken: set[str]) -> Traveller | None:
    """A function or object, pickled by value; None when it cannot travel."""
    implementation = registry.resolve(what, framework)
    pickled = _pickle(what)
    if pickled is None:
        return None
    name = free_name(implementation.name, taken)
    framework, process = implementation.framework, process_of(name)
    return Traveller(name=name, framework=framework, process=process, label=name, pickled=pickled)


def _pickle(what: Any) -> bytes | None:
    """By value when it comes from the user's own modules (a worker may be unable to import them), else by reference."""
    modules = _own_modules(what)
    try:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        return cloudpickle.dumps(what)
    except Exception:
        # Whatever the object holds (a lock, a handle, a device), the answer is the same: it stays in this process.
        return None
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules(what: Any) -> list[ModuleType]:
    name = getattr(what, "__module__", None) or type(what).__module__
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or file is None or name == "__main__":
        return []
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    ours = str(Path(__file__).parents[1])
    return [] if any(str(file).startswith(folder) for folder in (*installed, ours)) else [module]
