"""Workloads read from calls of attention functions: shapes, dtypes and masks, without keeping the arrays.

Mask arrays are read when the step is over, and recognised as the mask from which the model made them. Under
torch.func.vmap an array has the shape of one example, and the kernel runs with all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from math import prod
from operator import and_
from typing import Any, NamedTuple

import numpy as np

from attnbench import frameworks, masks
from attnbench.dispatch.array_masks import mask_of_keys
from attnbench.dispatch.demand import Outline
from attnbench.errors import InvalidWorkload
from attnbench.frameworks.torch.internals import dtype_under_autocast
from attnbench.impls._arguments import workload_of
from attnbench.masks import Align, AnyMask, DeviceMask, MaskShape
from attnbench.masks.base import to_numpy
from attnbench.masks.combine import literal, mask_of
from attnbench.spec import Array, Workload

UNKNOWN = object()
"""Placeholder of a mask array whose values a compiler does not have."""
VARIES = object()
"""Placeholder of a mask array that differs between the examples of vmap."""
UNKNOWN_MASK = "its mask array has values only at run time: written as full"
NOT_READ = "its mask has {} on the device, which nobody reads: written without them"
DROPOUT = "it asked for dropout, which workloads do not have: written without dropout"
VARIED_MASK = "its mask array differs between the examples of vmap: written as full"
ALL_EXAMPLES = "called under vmap: its {} examples are written as one batch"
ONE_EXAMPLE = "called under vmap: written as one of its {} examples"
NESTED = "its tensors are nested and have no single shape"
CHANGED_MASK = "its mask array was changed in place after the call: written as it was at the end"
ALIGNMENTS: tuple[Align, ...] = ("bottom-right", "top-left")
HIDES = -6e4
"""Largest number that hides a pair if it is added to its logit; the least float16 is below it."""


class SeenCall(NamedTuple):
    """One call of an attention function; `arrays` are its mask arrays with their versions, read after the step."""

    forms: tuple[Outline, Outline, Outline]
    mask: AnyMask | None
    arrays: tuple[tuple[Array, int | None], ...]
    options: dict[str, Any]
    note: str = ""
    examples: int = 1
    """Number of examples of these forms that vmap computes at once."""

    def workload(self, known: dict[tuple[int, MaskShape], AnyMask]) -> tuple[Workload, str]:
        """Return the workload (forward) and a note about it; `known` keeps masks that were recognised."""
        if self.examples == 1:
            return self._workload(known)
        if not any(len(shape := getattr(x, "shape", ())) >= 4 and shape[0] > 1 for x, _ in self.arrays):
            forms: Any = tuple(one._replace(shape=(self.examples * one.shape[0], *one.shape[1:])) for one in self.forms)
            try:
                workload, note = self._replace(forms=forms)._workload(known)
                return workload, joined(note, ALL_EXAMPLES.format(self.examples))
            except InvalidWorkload:  # a mask with data for each row of the batch
                pass
        workload, note = self._workload(known)
        return workload, joined(note, ONE_EXAMPLE.format(self.examples))

    def _workload(self, known: dict[tuple[int, MaskShape], AnyMask]) -> tuple[Workload, str]:
        options: dict[str, Any] = self.options
        # Models pass the scale though it is the default, which a workload of a suite leaves out.
        if options["layout"] != "packed" and options["scale"] == self.forms[0].shape[-1] ** -0.5:
            options = options | {"scale": None}
        bare = workload_of(*self.forms, **options)
        parts: list[Any] = [] if self.mask is None else [self.mask]
        note = self.note
        for array, version in self.arrays:
            if array is VARIES or is_traced(array):
                note = joined(note, VARIED_MASK if array is VARIES else UNKNOWN_MASK)
                continue
            note = joined(note, CHANGED_MASK if version != _version(array) else "")
            key = (id(array), bare.mask_shape)
            if key not in known:
                known[key] = recognise(array, bare.mask_shape)
            parts.append(known[key])
        mask = reduce(and_, parts) if parts else None
        return workload_of(*self.forms, **options, mask=mask), note


def joined(*notes: str) -> str:
    """Join notes by semicolons, each of them once."""
    parts = (part for note in notes for part in note.split("; ") if part)
    return "; ".join(dict.fromkeys(parts))


def read_attention(
    q: Array, k: Array, v: Array, *, mask: Any = None, visible: Any = None, bias: Any = None, scale: Any = None,
    softcap: Any = None, layout: str = "bshd", heads: Any = None, **_: Any,
) -> SeenCall:  # fmt: skip
    """Read a call of `ab.attention`, or of `attention_with_array`, whose mask is the arrays `visible` and `bias`."""
    options = {"scale": scale, "softcap": softcap, "layout": layout, "heads": heads}
    if isinstance(mask, DeviceMask):
        call = _read(q, k, v, mask=mask.fixed, arrays=(visible, bias), options=options)
        return call._replace(note=NOT_READ.format(" and ".join(mask.kinds)))
    return _read(q, k, v, mask=mask, arrays=(visible, bias), options=options)


def read_sdpa(
    query: Array, key: Array, value: Array, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> SeenCall:  # fmt: skip
    """Read a call of torch's SDPA: any number of leading axes, causal aligned top-left; dropout becomes a note."""
    mask = masks.causal("top-left" if query.shape[-2] != key.shape[-2] else "bottom-right") if is_causal else None
    call = _read(query, key, value, mask=mask, arrays=(attn_mask,), options={"scale": scale, "layout": "bhsd"})
    return call._replace(note=DROPOUT if dropout_p else "")


def read_jax_nn(
    query: Array, key: Array, value: Array, bias: Any = None, mask: Any = None, *, scale: Any = None,
    is_causal: bool = False, key_value_seq_lengths: Any = None, query_seq_lengths: Any = None,
    local_window_size: Any = None, **_: Any,
) -> SeenCall:  # fmt: skip
    """Read a call of `jax.nn.dot_product_attention`: [b, t, heads, dim] or no batch; masks aligned top-left."""
    align = "top-left" if query.shape[-3] != key.shape[-3] else "bottom-right"
    parts: list[Any] = [masks.causal(align)] if is_causal else []
    if local_window_size is not None:
        sides = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        parts.append(masks.window(int(sides[0]), 0 if is_causal else int(sides[1]), align))
    if query_seq_lengths is not None:
        raise InvalidWorkload("query_seq_lengths cannot be expressed as a mask of attnbench.")
    arrays = [bias, mask]
    if key_value_seq_lengths is not None and not is_traced(key_value_seq_lengths):
        parts.append(masks.lengths(key_value_seq_lengths))
    elif key_value_seq_lengths is not None:
        arrays.append(key_value_seq_lengths)
    whole = reduce(and_, parts) if parts else None
    return _read(query, key, value, mask=whole, arrays=tuple(arrays), options={"scale": scale, "layout": "bshd"})


def _read(q: Array, k: Array, v: Array, *, options: dict[str, Any], mask: Any = None, arrays: Any = ()) -> SeenCall:
    if any(getattr(x, "is_nested", False) for x in (q, k, v)):
        raise InvalidWorkload(NESTED)
    shapes = (tuple(x.shape) for x in (q, k, v))
    if options["layout"] != "packed":  # four axes: the leading ones are multiplied, or 1 if there are none
        shapes = ((prod(shape[:-3]), *(1,) * (3 - len(shape)), *shape[-3:]) for shape in shapes)
    forms: Any = tuple(Outline(shape, _dtype(x)) for shape, x in zip(shapes, (q, k, v)))
    arrays = [array for array in arrays if array is not None]
    kept = tuple((VARIES, None) if _vmap_levels(array) else (array, _version(array)) for array in arrays)
    sizes: dict[int, int] = {}
    for array in (q, k, v, *arrays):
        sizes |= _vmap_levels(array)
    return SeenCall(forms, mask, kept, options, examples=prod(sizes.values()))


def _dtype(array: Array) -> Any:
    """Return the dtype that is computed in: autocast's, if it is on."""
    is_tensor = hasattr(array, "requires_grad")
    return dtype_under_autocast(array, array.device.type) if is_tensor else array.dtype


def _version(array: Array) -> int | None:
    """Return torch's count of changes in place; None for other arrays and for tensors of inference mode."""
    inference = getattr(array, "is_inference", None)
    return None if inference is None or inference() else array._version


Note = Callable[..., None]
"""Function called while torch.compile traces, so its arguments are constants."""


def note_sdpa(
    note: Note, query: Array, key: Array, value: Array, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    """Note a call of torch's SDPA that torch.compile traces."""
    note(*_outlines(query, key, value), attn_mask is not None, ("is_causal", is_causal, "scale", scale))


def note_attention(
    note: Note, q: Array, k: Array, v: Array, *, mask: Any = None, visible: Any = None, bias: Any = None,
    scale: float | None = None, softcap: float | None = None, layout: str = "bshd", heads: Any = None, **_: Any,
) -> None:  # fmt: skip
    """Note a call of `ab.attention` or `attention_with_array` that torch.compile traces, its mask as plain values."""
    words = ("mask", literal(mask), "scale", scale, "softcap", softcap, "layout", layout, "heads", heads)
    note(*_outlines(q, k, v), visible is not None or bias is not None, words)


def _outlines(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
    """Return whether gradients are asked, and shape and dtype of each array; a dynamic size has its present value."""
    import torch
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    wants = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return wants, *[(tuple([guard_scalar(size) for size in x.shape]), _dtype(x)) for x in (q, k, v)]


def read_outline(
    read: Callable[..., SeenCall], q: Any, k: Any, v: Any, has_mask: bool, words: tuple[Any, ...]
) -> SeenCall:
    """Return the call that an outline describes."""
    forms = (Outline(*one) for one in (q, k, v))
    array = {"attn_mask" if read is read_sdpa else "visible": UNKNOWN} if has_mask else {}
    options = dict(zip(words[::2], words[1::2]))
    if "mask" in options:
        options["mask"] = mask_of(options["mask"])
    call = read(*forms, **array, **options)
    functorch = sys.modules["torch"]._C._functorch
    levels = [one for one in functorch.get_interpreter_stack() or () if one.key() == functorch.TransformType.Vmap]
    examples = prod(functorch.CVmapInterpreterPtr(level).batchSize() for level in levels)
    return call if examples == 1 else call._replace(note=joined(call.note, ONE_EXAMPLE.format(examples)))


def is_traced(array: Array) -> bool:
    """Return whether a compiler traces the array, which then has no values."""
    if array is UNKNOWN:
        return True
    framework = frameworks.of(array)
    if framework == "jax":
        from jax.core import Tracer

        return isinstance(array, Tracer)
    if framework == "torch":
        from torch._subclasses.fake_tensor import FakeTensor

        return isinstance(array, FakeTensor)
    return False


def wants_gradient(array: Array) -> bool:
    """Return whether a gradient is asked of an array: torch's flag, or a tracer of JAX's `grad`."""
    return bool(getattr(array, "requires_grad", False)) or type(array).__name__ in ("JVPTracer", "LinearizeTracer")


def clock_of(array: Array) -> str | None:
    """Return which clock can time a call on the array; None if it is traced or there is none."""
    if is_traced(array):
        return None
    framework = frameworks.of(array)
    if framework != "torch":
        return framework
    return array.device.type if array.device.type in ("cpu", "cuda") else None


def _vmap_levels(array: Any) -> dict[int, int]:
    """Return level of vmap -> number of examples of a tensor; empty if it is the same for all examples."""
    torch = sys.modules.get("torch")
    levels: dict[int, int] = {}
    if torch is None or not isinstance(array, torch.Tensor):
        return levels
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(array):  # levels of torch.func.grad lie between those of vmap
        inner = functorch.get_unwrapped(array)
        if functorch.is_batchedtensor(array):
            levels[functorch.maybe_get_level(array)] = inner.shape[functorch.maybe_get_bdim(array)]
        array = inner
    return levels


def recognise(array: Any, shape: MaskShape) -> AnyMask:
    """Return the mask that equals an array: full, causal or a window, without padded keys; else `dense`."""
    values = to_numpy(array, "the mask")
    values = values.reshape((1,) * (4 - values.ndim) + values.shape)
    if values.dtype != bool:
        if not ((values == 0) | (values <= HIDES)).all():
            return masks.dense(values)
        if (values <= HIDES).all(-1).any() and not np.isneginf(values.min()):
            return masks.dense(values)  # a row of large negative numbers is the mean of V, one of -inf is 0
        values = values == 0
    if values.shape[1] > 1:
        return masks.dense(values)
    visible = np.broadcast_to(values, (values.shape[0], 1, shape.q_len, shape.kv_len))[:, 0]
    real = mask_of_keys(np.any(visible, axis=1), shape.batch)
    candidates: list[Any] = [masks.full(), *map(masks.causal, ALIGNMENTS)]
    if visible.any():
        _, rows, keys = np.nonzero(visible)
        for align in ALIGNMENTS:
            at = rows + (shape.kv_len - shape.q_len if align == "bottom-right" else 0)
            left, right = int((at - keys).max()), int((keys - at).max())
            if left >= 0 and right >= 0:
                candidates += [masks.window(left, right, align), masks.window(left, None, align)]
    for mask in candidates:
        whole = mask & real
        if (np.broadcast_to(whole.array(shape), (shape.batch, 1, *visible.shape[1:]))[:, 0] == visible).all():
            return whole
    return masks.dense(values)
