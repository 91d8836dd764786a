"""Which FA3 is installed and what its build left out; torch_flash asks before it claims or calls anything.

Two packages offer FA3: the full build of flash-attention's hopper/ folder (`flash_attn_interface`) and the forward-only
wheel `fa3-fwd` (`fa3_fwd_interface`). On the package index the first name is an unrelated stub of a few bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from attnbench.errors import Unsupported
from attnbench.impls import conditions
from attnbench.impls.conditions import find_module
from attnbench.spec import Workload


def module_name() -> str | None:
    """The FA3 interface that is really installed; a file without `flash_attn_func` is the index's stub."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        spec = find_module(name)
        source = Path(spec.origin) if spec is not None and spec.origin else None
        if source is not None and source.is_file() and "def flash_attn_func" in source.read_text(errors="replace"):
            return name
    return None


def missing() -> str:
    """Why there is no FA3, and what brings it."""
    if find_module("flash_attn_interface") is not None:
        return "flash_attn_interface here is a stub, not FA3: pip uninstall flash_attn_interface; pip install fa3-fwd"
    return "neither flash_attn_interface (FA3's hopper/ folder) nor fa3_fwd_interface is installed: pip install fa3-fwd"


def interface() -> Any:
    """The interface module; the forward-only wheel asks for its build flags under the full build's name."""
    name = module_name()
    if name is None:
        raise Unsupported(f"torch.fa3: {missing()}.")
    if name == "fa3_fwd_interface":
        sys.modules.setdefault("flash_attn_config", import_module("fa3_fwd_config"))
    return import_module(name)


def left_out() -> frozenset[str]:
    """What the build left out ("BACKWARD", "LOCAL", "FP16", "HDIM96", ...), by its own configuration module."""
    forward_only = module_name() == "fa3_fwd_interface"
    module = "fa3_fwd_config" if forward_only else "flash_attn_config"
    if find_module(module) is None:
        return frozenset({"BACKWARD", "LOCAL", "FP16"}) if forward_only else frozenset()
    flags: Mapping[str, bool] = import_module(module).CONFIG["build_flags"]
    return frozenset(flag.partition("DISABLE_")[2] for flag, off in flags.items() if off and "DISABLE_" in flag)


def dims_reason(workload: Workload, off: frozenset[str]) -> str | None:
    """None, or why the build has no kernel for these head sizes."""
    dim, value_dim = workload.head_dim, workload.value_dim
    if dim != value_dim:
        wide = dim <= 64 and value_dim <= 512 and "HDIMDIFF64" not in off
        latent = 128 < dim <= 192 and 96 < value_dim <= 128 and "HDIMDIFF192" not in off
        if workload.needs_gradients or not (wide or latent) or dim % 8 or value_dim % 8:
            return f"has no kernel for head_dim {dim} with v_head_dim {value_dim}"
        return None
    sizes = [size for size in (64, 96, 128, 192, 256) if f"HDIM{size}" not in off]
    return conditions.needs_head_dim(workload, max(sizes, default=0), multiple_of=8)
