"""attnbench: find out which attention to run, prove that it is right, run it, and never let it get slower.

Names are loaded on first use: `import attnbench` imports neither torch nor jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnbench import masks as masks
    from attnbench.comparing.compare import compare as compare
    from attnbench.dispatch.attention import attention as attention
    from attnbench.dispatch.attention import explain as explain
    from attnbench.dispatch.capture import capture as capture
    from attnbench.dispatch.decode import decode as decode
    from attnbench.dispatch.device_masks import attention_varlen as attention_varlen
    from attnbench.dispatch.kv_cache import ContiguousCache as ContiguousCache
    from attnbench.dispatch.kv_cache import PagedCache as PagedCache
    from attnbench.measuring.memory import MemoryProfiler as MemoryProfiler
    from attnbench.policy import load_policy as load_policy
    from attnbench.policy import set_policy as set_policy
    from attnbench.policy import use_policy as use_policy
    from attnbench.registry import names as implementations  # noqa: F401
    from attnbench.registry import register as register
    from attnbench.runner import BenchmarkRunner as BenchmarkRunner
    from attnbench.runner import compare_implementations as compare_implementations
    from attnbench.runner import measure as measure
    from attnbench.runner import verify as verify
    from attnbench.spec import Environment as Environment
    from attnbench.spec import Implementation as Implementation
    from attnbench.spec import Workload as Workload

_HOME = {  # public name -> where it lives
    "compare": ("attnbench.comparing.compare", "compare"),
    "attention": ("attnbench.dispatch.attention", "attention"),
    "attention_varlen": ("attnbench.dispatch.device_masks", "attention_varlen"),
    "capture": ("attnbench.dispatch.capture", "capture"),
    "decode": ("attnbench.dispatch.decode", "decode"),
    "ContiguousCache": ("attnbench.dispatch.kv_cache", "ContiguousCache"),
    "PagedCache": ("attnbench.dispatch.kv_cache", "PagedCache"),
    "explain": ("attnbench.dispatch.attention", "explain"),
    "MemoryProfiler": ("attnbench.measuring.memory", "MemoryProfiler"),
    "load_policy": ("attnbench.policy", "load_policy"),
    "set_policy": ("attnbench.policy", "set_policy"),
    "use_policy": ("attnbench.policy", "use_policy"),
    "implementations": ("attnbench.registry", "names"),
    "register": ("attnbench.registry", "register"),
    "BenchmarkRunner": ("attnbench.runner", "BenchmarkRunner"),
    "compare_implementations": ("attnbench.runner", "compare_implementations"),
    "measure": ("attnbench.runner", "measure"),
    "verify": ("attnbench.runner", "verify"),
    "Environment": ("attnbench.spec", "Environment"),
    "Implementation": ("attnbench.spec", "Implementation"),
    "Workload": ("attnbench.spec", "Workload"),
}

_MODULES = {"masks": "attnbench.masks", "models": "attnbench.models", "nn": "attnbench.nn"}

__all__ = [*_HOME, "masks"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attnbench")
    if name in _MODULES:
        found = import_module(_MODULES[name])
    elif name in _HOME:
        module, attribute = _HOME[name]
        found = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module 'attnbench' has no attribute '{name}'")
    globals()[name] = found  # so that the next use costs no call
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
