"""Protection of times and checks against the code under test: the state of its process, and frozen declarations.

The state of the process is taken before the code is loaded and compared after each of its turns. Settings are values of
the whole process, such as threads and affinity. Functions are those that the clock and the checks call: ours, those of
`time`, NumPy and the framework. A change that affects times or checks is refused; other changes are noted in the
record. Code that works below Python (ctypes, another thread that restores everything in time) is not found;
docs/method.md says so.

What an implementation declares decides how it is checked and whether it is ranked. So a user's implementation is frozen
when its worker first looks at it, and it may not bring a clock of its own.
"""

from __future__ import annotations

import builtins
import gc
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from attnbench.frameworks import Framework
from attnbench.frameworks.base import TOOLS, Setting, Untrusted, Watched
from attnbench.spec import Config, Implementation
from attnbench.steps import StepImplementation
from attnbench.verifying.checks import CHECKS

HOOKED_BY_MANY = {"print", "input", "open", "breakpoint", "exit", "quit", "help", "__import__", "__build_class__"}
"""Built-in functions that consoles and import hooks replace, and that nothing here relies on."""
TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
SIGNALS = ("SIGINT", "SIGTERM", "SIGALRM", "SIGVTALRM", "SIGPROF")
VARIABLES = re.compile(
    r"^(OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|MALLOC_|XLA_FLAGS$|NVIDIA_TF32_OVERRIDE$|CUDA_VISIBLE_DEVICES$|CUDA_LAUNCH_BLOCKING$)"
)
"""Environment variables that libraries read late or pass to processes that they start."""
LIMITS = ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "RSS", "STACK", "MEMLOCK")


class StateChange(NamedTuple):
    """A difference between two states of a process."""

    what: str
    """Name of a function that was replaced, or a text such as `torch's threads from 2 to 1`."""
    refused: bool
    """Whether times and checks cannot be trusted after it."""
    remedy: str = ""
    set_again: bool = False
    """Whether every cell begins by setting this value."""
    harness: bool = True
    """Whether it is attnbench's or Python's own; False for a library, which an implementation of ours may wrap."""


class ProcessState:
    """State of this process at one moment."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._settings = _settings(framework)
        self._entries, self._codes, self._shadows = _functions(framework)
        self._instance = frozenset(vars(framework))

    def changes(self) -> list[StateChange]:
        """Return the differences between the stored state and the state now, settings first."""
        changes: list[StateChange] = []
        now = _settings(self._framework)
        for name, before in self._settings.items():
            after = now[name]
            if after.value != before.value:
                what = f"{name} from {_in_words(before.value)} to {_in_words(after.value)}"
                changes.append(StateChange(what, before.refused, before.remedy.format(after.value), before.set_again))
        for namespace, prefix, watched, known in self._entries:
            get = namespace.get  # several thousand functions are looked at after every turn
            for key, value in known:
                if get(key) is not value:
                    changes.append(StateChange(f"{prefix}{key}", watched.refused, harness=watched.harness))
        for name, function, code, defaults in self._codes:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                changes.append(StateChange(name, refused=True))
        for name, kind, known, watched in self._shadows:
            if vars(kind).keys() <= known:
                continue
            for key in vars(kind).keys() - known:
                if any(key in vars(base) for base in kind.__mro__[1:]):
                    changes.append(StateChange(f"{name}.{key}", watched.refused, harness=watched.harness))
        for key in vars(self._framework).keys() - self._instance:
            changes.append(StateChange(f"attnbench's adapter of {self._framework.name} ({key})", refused=True))
        return changes


def _in_words(value: object) -> str:
    return "nothing" if value is None or value == () else str(value)


def _settings(framework: Framework) -> dict[str, Setting]:
    """Return the settings of the process and its framework, by the names that messages use."""
    timers = tuple(kind for kind in TIMERS if signal.getitimer(getattr(signal, kind)) != (0.0, 0.0))
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = () if monitoring is None else tuple(monitoring.get_tool(tool) for tool in range(TOOLS))
    settings = {
        "running interval timers": Setting(timers),
        "Python's garbage collection": Setting((gc.isenabled(), gc.get_threshold())),
        "Python's switch interval": Setting(sys.getswitchinterval()),
        "Python's trace function": Setting(sys.gettrace(), refused=True),
        "Python's profile function": Setting(sys.getprofile(), refused=True),
        "Python's monitoring tools": Setting(tools, refused=True),
        "callbacks of Python's garbage collection": Setting(len(gc.callbacks)),
        "NumPy's error handling": Setting(tuple(sorted(np.geterr().items()))),
    }
    for name in SIGNALS:
        if (number := getattr(signal, name, None)) is not None:
            settings[f"the handler of {name}"] = Setting(signal.getsignal(number))
    for name in LIMITS:
        if (number := getattr(resource, f"RLIMIT_{name}", None)) is not None:
            settings[f"the resource limit {name}"] = Setting(resource.getrlimit(number))
    variables = sorted((name, value) for name, value in os.environ.items() if VARIABLES.match(name))
    settings["environment variables"] = Setting(tuple(variables))
    if hasattr(os, "sched_getaffinity"):
        remedy = "remove that call and pass --threads, which pins all implementations alike"
        settings["the CPU affinity"] = Setting(tuple(sorted(os.sched_getaffinity(0))), refused=True, remedy=remedy)
    if hasattr(os, "sched_getscheduler"):
        settings["the scheduling policy"] = Setting(os.sched_getscheduler(0), refused=True)
    if hasattr(os, "getpriority"):
        settings["the nice value"] = Setting(os.getpriority(os.PRIO_PROCESS, 0), refused=True)
    return settings | dict(framework.settings())


def _functions(framework: Framework) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return the watched functions by namespace, the code of those written in Python, and the classes to which a method
    could be added that hides an inherited one."""
    entries: list[tuple[Any, ...]] = []
    codes: list[tuple[Any, ...]] = []
    shadows: list[tuple[Any, ...]] = []
    # The modules of Python and NumPy that clocks and checks call.
    python = [(module.__name__, module, Watched()) for module in (time, resource, math, msgspec, msgspec.structs)]
    kinds = (FunctionType, BuiltinFunctionType, type, np.ufunc, type(np.concatenate))
    numpy = [(module.__name__, module, Watched(kinds=kinds, harness=False)) for module in (np, np.linalg)]
    for name, where, watched in (*_ours(framework), *python, *numpy, *framework.functions()):
        held = vars(where)
        entries.append((held, f"{name}.", watched, [one for one in held.items() if isinstance(one[1], watched.kinds)]))
        if watched.code:
            functions = [one for one in held.items() if isinstance(one[1], FunctionType)]
            codes += [(f"{name}.{key}", one, one.__code__, one.__defaults__) for key, one in functions]
        if isinstance(where, type):
            shadows.append((name, where, frozenset(held), watched))
    functions = [one for one in vars(builtins).items() if isinstance(one[1], BuiltinFunctionType)]
    entries.append((vars(builtins), "", Watched(), [one for one in functions if one[0] not in HOOKED_BY_MANY]))
    for check in CHECKS:
        run = check.run
        codes.append((f"attnbench.verifying.checks.CHECKS ({check.name})", run, run.__code__, run.__defaults__))
    return entries, codes, shadows


def _ours(framework: Framework) -> Iterator[tuple[str, Any, Watched]]:
    """Yield every loaded module and class of attnbench, and the framework's adapter."""
    field = type(StateChange.what)  # of a named tuple
    kinds = (FunctionType, BuiltinFunctionType, type, property, staticmethod, classmethod, cached_property, field)
    watched = Watched(kinds=(*kinds, type(msgspec.msgpack.Encoder().encode), type(lambda: 0)), code=True)
    for name, module in list(sys.modules.items()):
        if (name == "attnbench" or name.startswith("attnbench.")) and isinstance(module, ModuleType):
            yield name, module, watched
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{key}", value, watched
    yield f"attnbench.frameworks.{framework.name}.FRAMEWORK", type(framework), watched


DECLARED = tuple(Implementation.__annotations__)
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def _delegated(method: str) -> Any:
    def run(self: Frozen, *args: Any) -> Any:
        return getattr(self._inner, method)(*args)

    return run


class Frozen(Implementation):
    """An implementation whose declarations were read once; its work is delegated."""

    available = _delegated("available")
    supports = _delegated("supports")
    configs = _delegated("configs")
    configs_here = _delegated("configs_here")
    proofs = _delegated("proofs")
    build = _delegated("build")
    build_lse = _delegated("build_lse")
    partial = _delegated("partial")
    passes = _delegated("passes")
    quality = _delegated("quality")

    def __init__(self, inner: Implementation) -> None:
        self._inner = inner
        for name in DECLARED:
            setattr(self, name, getattr(inner, name))

    def configured(self, config: Config) -> Implementation:
        """Return the implementation with the settings of `config`, frozen too; itself if settings change nothing."""
        implementation = self._inner.configured(config)
        return self if implementation is self._inner else frozen(implementation)

    def apparatus(self, framework: Any, config: Config) -> Any:
        """Return attnbench's own way to time calls; raises Untrusted if the implementation brings another."""
        apparatus = self._inner.apparatus
        code = getattr(getattr(apparatus, "__func__", apparatus), "__code__", None)
        if code is None or not code.co_filename.startswith(PACKAGE):
            raise Untrusted(f"{self.name} times itself (apparatus): only attnbench's own implementations may")
        return apparatus(framework, config)


class FrozenStep(Frozen, StepImplementation):
    """A frozen implementation of a training step."""

    state = _delegated("state")
    function = _delegated("function")


def frozen(implementation: Implementation) -> Implementation:
    """Return an implementation whose declarations no longer change, since each of them is read once, here."""
    return FrozenStep(implementation) if isinstance(implementation, StepImplementation) else Frozen(implementation)
