"""Conditions for `supports`: each returns None, or a clause that completes "cannot run: ..."."""

from __future__ import annotations

from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

from attnbench.masks.device import MaskForm
from attnbench.masks.large_bias import has_large_bias
from attnbench.spec import Environment, Workload

BFLOAT16_SINCE = (8, 0)
LITTLE_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""Compute capabilities on which flash-attention 2 (torch's too) refuses gradients of head_dim in NO_GRADIENTS_OF."""
NO_GRADIENTS_OF = (192, 224)
XPU_HEAD_DIMS = (64, 96, 128, 192)
"""Values of head_dim for which torch 2.10 to 2.13 has flash kernels on an XPU."""
CUDNN_WIDEST, CUDNN_ELSEWHERE = {(9, 0): 256}, 128
"""Largest head_dim that torch 2.11 to 2.13 passes to cuDNN: by compute capability, and on all others."""


MOST_ALIBI_BYTES = 1 << 30
"""Most bytes of a bias in float32 that is made of ALiBi's slopes for a kernel that reads an array."""


def first_reason(*reasons: str | None) -> str | None:
    """Return the first reason that is not None; None if there is none."""
    return next((reason for reason in reasons if reason is not None), None)


def needs_device(environment: Environment, *kinds: str) -> str | None:
    """Refuse other kinds of device."""
    return None if environment.device in kinds else f"needs {' or '.join(kinds)}, this is {environment.device}"


def needs_dtype(workload: Workload, *dtypes: str) -> str | None:
    """Refuse all other dtypes."""
    return None if workload.dtype in dtypes else f"takes {' or '.join(dtypes)}, not {workload.dtype}"


def needs_mask(workload: Workload, *kinds: str) -> str | None:
    """Refuse masks with a part of another kind."""
    other = [kind for kind in workload.visible_mask.kinds if kind not in kinds]
    return f"has no {other[0]} mask (only {', '.join(kinds)})" if other else None


def needs_small_alibi(workload: Workload) -> str | None:
    """Refuse ALiBi if its bias of all pairs, which a kernel would read as an array, is large."""
    size = 4 * workload.heads * workload.q_len * workload.kv_len
    if "alibi" not in workload.visible_mask.kinds or size <= MOST_ALIBI_BYTES:
        return None
    return f"reads the bias of alibi as an array, which would take {size / 2**30:.1f} GiB"


def needs_forward(workload: Workload) -> str | None:
    """Refuse workloads with gradients."""
    return "has no backward pass" if workload.needs_gradients else None


def needs_head_dim(workload: Workload, largest: int, multiple_of: int = 1) -> str | None:
    """Refuse a head_dim (or width of V) above a bound or off a multiple."""
    for dim in (workload.head_dim, workload.value_dim):
        if dim > largest or dim % multiple_of:
            step = f" in steps of {multiple_of}" if multiple_of > 1 else ""
            return f"takes head_dim up to {largest}{step}, not {dim}"
    return None


def needs_equal_dims(workload: Workload) -> str | None:
    """Refuse values whose width differs from that of the keys."""
    if workload.value_dim != workload.head_dim:
        return f"needs v_head_dim = head_dim, not {workload.value_dim} and {workload.head_dim}"
    return None


def needs_positive_scale(workload: Workload) -> str | None:
    """Refuse a scale of 0 or less, with which kernels may compute NaN from hidden logits of -inf."""
    return None if workload.softmax_scale > 0 else f"takes a positive scale, not {workload.softmax_scale:g}"


def needs_no_softcap(workload: Workload) -> str | None:
    """Refuse a soft cap on the logits."""
    return "has no softcap" if workload.softcap is not None else None


def needs_torch(environment: Environment, least: tuple[int, int]) -> str | None:
    """Refuse a torch that is known to be older than a release."""
    version = environment.packages.get("torch", "")
    have = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    return f"needs torch {least[0]}.{least[1]}, this is {version}" if have and have < least else None


def needs_small_bias(form: MaskForm) -> str | None:
    """Refuse a large bias beside values on the device, on which the largest bias that a row sees would depend."""
    return "takes no large bias together with a mask on the device" if has_large_bias(form.fixed) else None


def needs_packed(form: MaskForm) -> str | None:
    """Refuse masks on the device other than packed sequences."""
    return None if form.packed else f"takes {form.parts[0].kind} of host data only, not on the device"


def needs_capability(environment: Environment, least: tuple[int, int]) -> str | None:
    """Refuse a CUDA compute capability below `least`, or an unknown one."""
    have = environment.capability
    if have is not None and tuple(have) >= least:
        return None
    return f"needs compute capability {least[0]}.{least[1]}" + (f", this is {have[0]}.{have[1]}" if have else "")


def needs_at_least(environment: Environment, least: tuple[int, int]) -> str | None:
    """Refuse a CUDA device that is known to have a lower compute capability."""
    unknown = environment.device != "cuda" or environment.capability is None
    return None if unknown else needs_capability(environment, least)


def needs_bfloat16(workload: Workload, environment: Environment) -> str | None:
    """Refuse bfloat16 on a CUDA device before Ampere."""
    reason = needs_at_least(environment, BFLOAT16_SINCE) if workload.dtype == "bfloat16" else None
    return reason and f"bfloat16 {reason}"


def needs_cudnn_head_dim(workload: Workload, environment: Environment) -> str | None:
    """Refuse a head_dim that cuDNN's attention does not take on this chip; on an unknown one the widest is taken."""
    chip = environment.capability
    widest = max(CUDNN_WIDEST.values()) if chip is None else CUDNN_WIDEST.get(chip, CUDNN_ELSEWHERE)
    reason = needs_head_dim(workload, widest, 8)
    return reason if reason is None or chip is None else f"{reason} (compute capability {chip[0]}.{chip[1]})"


def needs_xpu_head_dim(workload: Workload, environment: Environment) -> str | None:
    """Refuse a head_dim for which torch has no flash kernel on an XPU."""
    if environment.device != "xpu" or workload.head_dim in XPU_HEAD_DIMS:
        return None
    *others, last = map(str, XPU_HEAD_DIMS)
    return f"takes head_dim {', '.join(others)} or {last} on an XPU, not {workload.head_dim}"


def needs_cudnn_training_dims(workload: Workload, environment: Environment) -> str | None:
    """Refuse gradients of a head_dim for which cuDNN 9 has kernels on no chip but Hopper; from 10.0 on 192/128 too."""
    chip, dims = environment.capability, (workload.head_dim, workload.value_dim)
    if chip is None or not workload.needs_gradients or max(dims) <= CUDNN_ELSEWHERE or chip in CUDNN_WIDEST:
        return None
    if chip >= (10, 0) and dims == (192, 128):
        return None
    return f"has no gradients for head_dim above {CUDNN_ELSEWHERE} on compute capability {chip[0]}.{chip[1]}"


def needs_generation(environment: Environment, *majors: int) -> str | None:
    """Refuse a CUDA compute capability of another generation, or an unknown one."""
    chip = environment.capability
    if chip is not None and chip[0] in majors:
        return None
    known = " or ".join(f"{major}.x" for major in majors)
    return f"needs compute capability {known}" + (f", this is {chip[0]}.{chip[1]}" if chip else "")


def needs_room_for_gradients(workload: Workload, environment: Environment) -> str | None:
    """Refuse what flash-attention 2 refuses: gradients of some head_dim on chips with little shared memory."""
    low, high = NO_GRADIENTS_OF
    chip = environment.capability if environment.device == "cuda" else None
    if chip in LITTLE_SHARED_MEMORY and workload.needs_gradients and low < workload.head_dim <= high:
        assert chip is not None
        return f"has no gradients for head_dim {low + 1} to {high} on compute capability {chip[0]}.{chip[1]}"
    return None


def find_module(module: str) -> ModuleSpec | None:
    """Return a module's location without importing its parents (`flash_attn` would load torch and CUDA)."""
    top, *children = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    for child in children:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # Search by the bare name: with a dotted name the finder looks for the parent among the imported modules.
        spec = PathFinder.find_spec(child, list(spec.submodule_search_locations))
    return spec


def needs_package(module: str, install: str) -> str | None:
    """Refuse if a module is not installed, with the command that installs it; the module is not imported."""
    return None if find_module(module) is not None else f"{module} is not installed: {install}"
