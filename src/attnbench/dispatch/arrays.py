"""Live arrays -> (framework, device, layout bshd, Workload), by shape and type alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from attnbench import frameworks
from attnbench.errors import InvalidWorkload
from attnbench.spec import DTYPE_BYTES, Array, Pass, Workload
from attnbench.workloads.masks import AnyMask

LAYOUTS = ("bshd", "bhsd", "packed")


class Sizes(NamedTuple):
    """(batch, tokens, heads, dim) of one array."""

    batch: int
    tokens: int
    heads: int
    dim: int


def sizes(array: Array, layout: str, heads: int | None) -> Sizes:
    """Read the sizes off an array in its layout."""
    shape = tuple(array.shape)
    if layout == "packed":
        if len(shape) != 3 or heads is None or shape[2] % heads:
            raise InvalidWorkload(
                f"a packed array is [batch, tokens, heads * dim] with heads= given; this one is {shape}, heads={heads}."
            )
        return Sizes(shape[0], shape[1], heads, shape[2] // heads)
    if len(shape) != 4:
        raise InvalidWorkload(f"layout {layout} has 4 axes, not {len(shape)}: {shape}.")
    batch, second, third, dim = shape
    return Sizes(batch, second, third, dim) if layout == "bshd" else Sizes(batch, third, second, dim)


def workload_of(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: AnyMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bshd",
    heads: int | tuple[int, int] | None = None,
    pass_: Pass = "forward",
) -> Workload:
    """The workload that a call with these arrays is; its id is the one a suite or a file would give."""
    if layout not in LAYOUTS:
        raise InvalidWorkload(f'layout is one of {", ".join(LAYOUTS)}, not "{layout}".')
    if heads is not None and layout != "packed":
        raise InvalidWorkload(f"heads= belongs to layout packed; in {layout} the arrays say how many heads there are.")
    q_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    a, b, c = (sizes(x, layout, n) for x, n in ((q, q_heads), (k, kv_heads), (v, kv_heads)))
    if a.batch != b.batch or b[:3] != c[:3] or a.dim != b.dim:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise InvalidWorkload(f"shapes do not go together in layout {layout}: {shapes}.")
    dtypes = {dtype_name(x) for x in (q, k, v)}
    if len(dtypes) > 1:
        raise InvalidWorkload(f"q, k and v must have one dtype, not {', '.join(sorted(dtypes))}.")
    return Workload(
        batch=a.batch, q_len=a.tokens, kv_len=b.tokens, heads=a.heads, kv_heads=b.heads, head_dim=a.dim,
        v_head_dim=c.dim, dtype=dtypes.pop(), mask=mask, scale=scale, softcap=softcap, pass_=pass_,
    )  # fmt: skip


def dtype_name(array: Array) -> str:
    """float32, bfloat16, ... of a torch, jax or numpy array."""
    name = str(array.dtype).rpartition(".")[2]
    if name not in DTYPE_BYTES:
        raise InvalidWorkload(f"dtype {name} is not one of {', '.join(DTYPE_BYTES)}.")
    return name


def framework_of(*arrays: Array) -> str:
    """The one framework the arrays belong to."""
    names = {frameworks.of(array) for array in arrays}
    if len(names) > 1:
        raise InvalidWorkload(f"q, k and v must come from one framework, not {' and '.join(sorted(names))}.")
    return names.pop()


def device_of(array: Array, framework: str) -> str:
    """Our name of the device an array lies on (of a traced JAX array: the default device)."""
    if framework == "torch":
        kind = array.device.type
        found = frameworks.get("torch").devices()
        return "rocm" if kind == "cuda" and "rocm" in found else kind
    if framework == "numpy":
        return "cpu"
    from jax.core import Tracer

    kinds = frameworks.get("jax").devices()
    on_cpu = not isinstance(array, Tracer) and next(iter(array.devices())).platform == "cpu"
    return "cpu" if on_cpu else kinds[0]


def pass_of(framework: str, *arrays: Array) -> Pass:
    """Whether gradients may be asked of a call: torch says so itself, JAX may ask them of any that is traced."""
    if framework == "torch":
        import torch

        return "train" if torch.is_grad_enabled() and any(array.requires_grad for array in arrays) else "forward"
    if framework == "jax":
        from jax.core import Tracer

        return "train" if any(isinstance(array, Tracer) for array in arrays) else "forward"
    return "forward"


def to_layout(array: Array, source: str, target: str, heads: int | None = None) -> Array:
    """A view in another layout, differentiable and traceable; `heads` when the source is packed."""
    if source == "packed":
        array = array.reshape(*array.shape[:2], heads, -1)
        source = "bshd"
    if target == "packed":
        array = to_layout(array, source, "bshd")
        return array.reshape(*array.shape[:2], -1)
    return array if source == target else _swap(array)


def _swap(array: Array) -> Any:
    return array.transpose(1, 2) if hasattr(array, "requires_grad") else array.transpose(0, 2, 1, 3)
