"""Small reasons that `supports` is written with: each returns None or one clause that completes "cannot run: ..."."""

from __future__ import annotations

from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

from attnbench.spec import Environment, Workload

ACCELERATORS = ("cuda", "rocm", "xpu", "mps")


def first_reason(*reasons: str | None) -> str | None:
    """The first that is not None."""
    return next((reason for reason in reasons if reason is not None), None)


def needs_device(environment: Environment, *kinds: str) -> str | None:
    """Only on these device kinds."""
    return None if environment.device in kinds else f"needs {' or '.join(kinds)}, this is {environment.device}"


def needs_dtype(workload: Workload, *dtypes: str) -> str | None:
    """Only these precisions."""
    return None if workload.dtype in dtypes else f"takes {' or '.join(dtypes)}, not {workload.dtype}"


def needs_mask(workload: Workload, *kinds: str) -> str | None:
    """Only masks made of these kinds."""
    other = [kind for kind in workload.visible_mask.kinds if kind not in kinds]
    return f"has no {other[0]} mask (only {', '.join(kinds)})" if other else None


def needs_forward(workload: Workload) -> str | None:
    """No gradients."""
    return "has no backward pass" if workload.needs_gradients else None


def needs_head_dim(workload: Workload, largest: int, multiple_of: int = 1) -> str | None:
    """head_dim (and the values' width) within a bound and a multiple."""
    for dim in (workload.head_dim, workload.value_dim):
        if dim > largest or dim % multiple_of:
            step = f" in steps of {multiple_of}" if multiple_of > 1 else ""
            return f"takes head_dim up to {largest}{step}, not {dim}"
    return None


def needs_equal_dims(workload: Workload) -> str | None:
    """V as wide as K."""
    if workload.value_dim != workload.head_dim:
        return f"needs v_head_dim = head_dim, not {workload.value_dim} and {workload.head_dim}"
    return None


def needs_no_softcap(workload: Workload) -> str | None:
    """No soft cap on the logits."""
    return "has no softcap" if workload.softcap is not None else None


def needs_capability(environment: Environment, least: tuple[int, int]) -> str | None:
    """A CUDA compute capability of at least this."""
    have = environment.capability
    if have is not None and tuple(have) >= least:
        return None
    return f"needs compute capability {least[0]}.{least[1]}" + (f", this is {have[0]}.{have[1]}" if have else "")


def find_module(module: str) -> ModuleSpec | None:
    """Where a module lies, without importing its parents (`flash_attn` alone would load torch and CUDA libraries)."""
    top, *children = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    for child in children:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its bare name: a dotted one makes the finder look for the parent among the imported modules.
        spec = PathFinder.find_spec(child, list(spec.submodule_search_locations))
    return spec


def needs_package(module: str, install: str) -> str | None:
    """An importable module (found, not imported), with the command that brings it."""
    return None if find_module(module) is not None else f"{module} is not installed: {install}"
