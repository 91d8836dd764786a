"""Checks of arguments that several functions share, and the workload that a call with given arrays computes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attnbench.errors import InvalidWorkload, UsageError
from attnbench.masks import AnyMask
from attnbench.spec import DTYPE_BYTES, Array, Pass, Workload


def number(value: Any) -> bool:
    """Return whether a value is an int or a float; True and False are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse a value that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def check_scale(scale: Any) -> None:
    """Refuse a scale that is not a finite number or None."""
    if scale is not None and not (number(scale) and math.isfinite(scale)):
        raise UsageError(f"scale must be a finite number, or None for head_dim ** -0.5, not {scale!r}.")


def check_causal(causal: Any) -> None:
    """Refuse values other than True and False."""
    if not isinstance(causal, bool):
        raise UsageError(f"causal must be True or False, not {causal!r}.")


def check_mix_grad(mix_grad: Any) -> None:
    """Refuse unknown ways to differentiate the mixing of dilated branches."""
    if mix_grad not in ("full", "detached"):
        raise UsageError(f'mix_grad must be "full" or "detached" (torchscale), not "{mix_grad}".')


def check_tensors(who: str, *arrays: Any) -> None:
    """Refuse arrays that are not torch tensors."""
    import torch

    for x in arrays:
        if not isinstance(x, torch.Tensor):
            raise UsageError(f"{who} takes torch tensors, not {kind_of(x)}: convert with torch.as_tensor(x).")


def kind_of(x: Any) -> str:
    """Return the name of a value's type, such as numpy.ndarray or jax.Array, for messages."""
    if x is None:
        return "None"
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


LAYOUTS = ("bshd", "bhsd", "packed")


class ArraySizes(NamedTuple):
    """Batch, tokens, heads and dim of an array."""

    batch: int
    tokens: int
    heads: int
    dim: int


def sizes(array: Array, layout: str, heads: int | None) -> ArraySizes:
    """Read the sizes from an array in its layout."""
    shape = tuple(array.shape)
    if layout == "packed":
        if len(shape) != 3 or heads is None or shape[2] % heads:
            raise InvalidWorkload(
                f"a packed array is [batch, tokens, heads * dim] with heads= given; this one is {shape}, heads={heads}."
            )
        return ArraySizes(shape[0], shape[1], heads, shape[2] // heads)
    if len(shape) != 4:
        raise InvalidWorkload(f"an array in layout {layout} has 4 axes, not {len(shape)}: its shape is {shape}.")
    batch, second, third, dim = shape
    return ArraySizes(batch, second, third, dim) if layout == "bshd" else ArraySizes(batch, third, second, dim)


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
    """Return the workload of a call with these arrays; its id is that of the same workload in a suite or a file."""
    a, b, c, dtype = fitting(q, k, v, layout, heads)
    return Workload(
        batch=a.batch, q_len=a.tokens, kv_len=b.tokens, heads=a.heads, kv_heads=b.heads, head_dim=a.dim,
        v_head_dim=c.dim, dtype=dtype, mask=mask, scale=scale, softcap=softcap, pass_=pass_,
    )  # fmt: skip


def both_heads(heads: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Return the heads of queries and of keys that `heads=` gives; None if not given."""
    if heads is None:
        return None, None
    pair = heads if isinstance(heads, tuple) else (heads, heads)
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair):
        raise InvalidWorkload(f"heads= must be a number of heads, or (heads, kv_heads), not {heads!r}.")
    return pair


def fitting(
    q: Array, k: Array, v: Array, layout: str = "bshd", heads: int | tuple[int, int] | None = None
) -> tuple[ArraySizes, ArraySizes, ArraySizes, str]:
    """Return the sizes of three arrays that fit together, and their dtype; raise if they do not fit.

    torch's tensors must be on one device; JAX itself checks arrays on several devices.
    """
    if layout not in LAYOUTS:
        raise InvalidWorkload(f'layout must be one of {", ".join(LAYOUTS)}, not "{layout}".')
    if heads is not None and layout != "packed":
        raise InvalidWorkload(f"heads= is for layout packed only: in layout {layout} the arrays have a heads axis.")
    q_heads, kv_heads = both_heads(heads)
    a, b, c = (sizes(x, layout, n) for x, n in ((q, q_heads), (k, kv_heads), (v, kv_heads)))
    if a.batch != b.batch or b[:3] != c[:3] or a.dim != b.dim:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise InvalidWorkload(f"shapes do not go together in layout {layout}: {shapes}.")
    if str(q.dtype).startswith("torch."):
        devices = {str(device): None for x in (q, k, v) if (device := getattr(x, "device", None)) is not None}
        if len(devices) > 1:
            raise InvalidWorkload(f"q, k and v must be on one device, not on {' and '.join(devices)}.")
    dtypes = {dtype_name(x) for x in (q, k, v)}
    if len(dtypes) > 1:
        raise InvalidWorkload(f"q, k and v must have one dtype, not {', '.join(sorted(dtypes))}.")
    return a, b, c, dtypes.pop()


def dtype_name(array: Array) -> str:
    """Return the dtype of a torch, jax or numpy array as a name such as float32 or bfloat16."""
    name = str(array.dtype).rpartition(".")[2]
    if name not in DTYPE_BYTES:
        raise InvalidWorkload(f"dtype {name} is not one of {', '.join(DTYPE_BYTES)}.")
    return name
