"""Calls of attention functions read into one form: shapes, dtypes and masks, without holding on to the arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

from attnbench import frameworks, masks
from attnbench.dispatch.recognise import recognise
from attnbench.dispatch.vmapped import examples, examples_here, varies
from attnbench.errors import InvalidWorkload
from attnbench.frameworks.torch_autocast import dtype_under_autocast
from attnbench.impls._arguments import workload_of
from attnbench.masks import AnyMask, MaskShape
from attnbench.masks.combine import literal, mask_of
from attnbench.spec import Array, Workload

UNKNOWN = object()
"""Stands for a mask array that a compiler has no values of."""
VARIES = object()
"""Stands for a mask array that is another one in each example of vmap."""
UNKNOWN_MASK = "its mask array has values only at run time: written as full"
DROPOUT = "it asked for dropout, which no workload has: written without"
VARIED_MASK = "its mask array differs between the examples of vmap: written as full"
ALL_EXAMPLES = "called under vmap: its {} examples are written as one batch"
ONE_EXAMPLE = "called under vmap: written as one of its {} examples"
NESTED = "its tensors are nested, which have no one shape"
CHANGED_MASK = "its mask array was changed in place after the call: written as it was at the end"


def joined(*notes: str) -> str:
    """Each said once."""
    said = (part for note in notes for part in note.split("; ") if part)
    return "; ".join(dict.fromkeys(said))


class Form(NamedTuple):
    """What is left of an array."""

    shape: tuple[int, ...]
    dtype: Any


class Seen(NamedTuple):
    """One call; `arrays` are mask arrays with their version, to be looked at when the step is over."""

    forms: tuple[Form, Form, Form]
    mask: AnyMask | None
    arrays: tuple[tuple[Array, int | None], ...]
    options: dict[str, Any]
    note: str = ""
    examples: int = 1
    """So many of what the forms say are computed at once, by vmap."""

    def workload(self, known: dict[tuple[int, MaskShape], AnyMask]) -> tuple[Workload, str]:
        """The workload (forward), and what is to be said about it; `known` keeps masks that were recognised."""
        if self.examples == 1:
            return self._workload(known)
        if not any(_has_batch(array) for array, _ in self.arrays):
            try:
                workload, note = self._replace(forms=self._all_examples())._workload(known)
                return workload, joined(note, ALL_EXAMPLES.format(self.examples))
            except InvalidWorkload:  # a mask of ours that is one for each row of the batch
                pass
        workload, note = self._workload(known)
        return workload, joined(note, ONE_EXAMPLE.format(self.examples))

    def _all_examples(self) -> Any:
        return tuple(form._replace(shape=(self.examples * form.shape[0], *form.shape[1:])) for form in self.forms)

    def _workload(self, known: dict[tuple[int, MaskShape], AnyMask]) -> tuple[Workload, str]:
        options: dict[str, Any] = self.options
        if options["scale"] == _usual_scale(self.forms[0], options):
            options = options | {"scale": None}
        bare = workload_of(*self.forms, **options)
        found: list[Any] = [] if self.mask is None else [self.mask]
        note = self.note
        for array, version in self.arrays:
            if array is VARIES or is_traced(array):
                note = joined(note, VARIED_MASK if array is VARIES else UNKNOWN_MASK)
                continue
            note = joined(note, CHANGED_MASK if version != _version(array) else "")
            key = (id(array), bare.mask_shape)
            if key not in known:
                known[key] = recognise(array, bare.mask_shape)
            found.append(known[key])
        mask = reduce(and_, found) if found else None
        return workload_of(*self.forms, **options, mask=mask), note


def _usual_scale(query: Form, options: dict[str, Any]) -> float | None:
    """Models hand it over though it is the default; a workload of a suite leaves it out."""
    return None if options["layout"] == "packed" else query.shape[-1] ** -0.5


def of_attention(
    q: Array, k: Array, v: Array, *, mask: Any = None, scale: Any = None, softcap: Any = None, layout: str = "bshd",
    heads: Any = None, **_: Any,
) -> Seen:  # fmt: skip
    """`ab.attention`."""
    options = {"scale": scale, "softcap": softcap, "layout": layout, "heads": heads}
    return _seen(q, k, v, mask=mask, options=options)


def of_array_masks(
    q: Array, k: Array, v: Array, *, visible: Any = None, bias: Any = None, scale: Any = None, softcap: Any = None,
    layout: str = "bshd", **_: Any,
) -> Seen:  # fmt: skip
    """`attention_with_array`."""
    options = {"scale": scale, "softcap": softcap, "layout": layout}
    return _seen(q, k, v, arrays=(visible, bias), options=options)


def of_sdpa(
    query: Array, key: Array, value: Array, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Seen:  # fmt: skip
    """Torch's function: any number of leading axes, causal aligned top-left; dropout is noted."""
    mask = masks.causal("top-left" if query.shape[-2] != key.shape[-2] else "bottom-right") if is_causal else None
    seen = _seen(query, key, value, mask=mask, arrays=(attn_mask,), options={"scale": scale, "layout": "bhsd"})
    forms: Any = tuple(form._replace(shape=_four(form.shape)) for form in seen.forms)
    return seen._replace(forms=forms, note=DROPOUT if dropout_p else "")


def of_jax_nn(
    query: Array, key: Array, value: Array, bias: Any = None, mask: Any = None, *, scale: Any = None,
    is_causal: bool = False, key_value_seq_lengths: Any = None, query_seq_lengths: Any = None,
    local_window_size: Any = None, **_: Any,
) -> Seen:  # fmt: skip
    """`jax.nn.dot_product_attention`: [b, t, heads, dim] or without batch; causal and window aligned top-left."""
    align = "top-left" if query.shape[-3] != key.shape[-3] else "bottom-right"
    parts: list[Any] = [masks.causal(align)] if is_causal else []
    if local_window_size is not None:
        sides = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        parts.append(masks.window(int(sides[0]), 0 if is_causal else int(sides[1]), align))
    if query_seq_lengths is not None:
        raise InvalidWorkload("query_seq_lengths has no mask of ours.")
    arrays = [bias, mask]
    if key_value_seq_lengths is not None and not is_traced(key_value_seq_lengths):
        parts.append(masks.lengths(key_value_seq_lengths))
    elif key_value_seq_lengths is not None:
        arrays.append(key_value_seq_lengths)
    joined = reduce(and_, parts) if parts else None
    seen = _seen(query, key, value, mask=joined, arrays=tuple(arrays), options={"scale": scale, "layout": "bshd"})
    forms = tuple(form._replace(shape=(1,) * (4 - len(form.shape)) + form.shape) for form in seen.forms)
    return seen._replace(forms=forms)


def _seen(q: Array, k: Array, v: Array, *, options: dict[str, Any], mask: Any = None, arrays: Any = ()) -> Seen:
    if any(getattr(x, "is_nested", False) for x in (q, k, v)):
        raise InvalidWorkload(NESTED)
    forms: Any = tuple(Form(tuple(x.shape), _dtype(x)) for x in (q, k, v))
    arrays = [array for array in arrays if array is not None]
    kept = tuple((VARIES, None) if varies(array) else (array, _version(array)) for array in arrays)
    return Seen(forms, mask, kept, options, examples=examples(q, k, v, *arrays))


def _dtype(array: Array) -> Any:
    """Return the dtype that is computed in: autocast's, if it is on."""
    is_tensor = hasattr(array, "requires_grad")
    return dtype_under_autocast(array, array.device.type) if is_tensor else array.dtype


def _has_batch(array: Array) -> bool:
    shape = getattr(array, "shape", ())
    return len(shape) >= 4 and shape[0] > 1


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) <= 4:
        return (1,) * (4 - len(shape)) + shape
    batch = 1
    for size in shape[:-3]:
        batch *= size
    return (batch, *shape[-3:])


def _version(array: Array) -> int | None:
    """Torch counts changes in place, but not of tensors made in inference mode."""
    inference = getattr(array, "is_inference", None)
    return None if inference is None or inference() else array._version


Note = Callable[..., None]


def outline_of_sdpa(
    note: Note, query: Array, key: Array, value: Array, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    """Inside torch.compile `note` is called while it traces, so it is told constants only."""
    note(*_outlines(query, key, value), attn_mask is not None, ("is_causal", is_causal, "scale", scale))


def outline_of_attention(
    note: Note, q: Array, k: Array, v: Array, *, mask: Any = None, scale: float | None = None,
    softcap: float | None = None, layout: str = "bshd", heads: Any = None, **_: Any,
) -> None:  # fmt: skip
    """Likewise; the mask as plain values."""
    words = ("mask", literal(mask), "scale", scale, "softcap", softcap, "layout", layout, "heads", heads)
    note(*_outlines(q, k, v), False, words)


def outline_of_array_masks(
    note: Note, q: Array, k: Array, v: Array, *, scale: float | None = None, softcap: float | None = None,
    layout: str = "bshd", **_: Any,
) -> None:  # fmt: skip
    """Likewise."""
    note(*_outlines(q, k, v), True, ("scale", scale, "softcap", softcap, "layout", layout))


def _outlines(q: Array, k: Array, v: Array) -> tuple[Any, ...]:
    """A size that may vary is taken as it is now: inside the block there is a graph for each."""
    import torch
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    wants = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return wants, *[(tuple([guard_scalar(size) for size in x.shape]), _dtype(x)) for x in (q, k, v)]


def from_outline(read: Callable[..., Seen], q: Any, k: Any, v: Any, has_mask: bool, words: tuple[Any, ...]) -> Seen:
    """The call that an outline tells of."""
    forms = (Form(*one) for one in (q, k, v))
    array = {"attn_mask" if read is of_sdpa else "visible": UNKNOWN} if has_mask else {}
    told = dict(zip(words[::2], words[1::2]))
    if "mask" in told:
        told["mask"] = mask_of(told["mask"])
    seen, inside = read(*forms, **array, **told), examples_here()
    return seen if inside == 1 else seen._replace(note=joined(seen.note, ONE_EXAMPLE.format(inside)))


def is_traced(array: Array) -> bool:
    """Whether a compiler stands in for the values."""
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
    """Torch says it itself; of JAX's tracers those of `grad` tell."""
    return bool(getattr(array, "requires_grad", False)) or type(array).__name__ in ("JVPTracer", "LinearizeTracer")


def clock_of(array: Array) -> str | None:
    """Which clock can time a call on the array; None where a compiler is at work or there is none."""
    if is_traced(array):
        return None
    framework = frameworks.of(array)
    if framework != "torch":
        return framework
    return array.device.type if array.device.type in ("cpu", "cuda") else None
