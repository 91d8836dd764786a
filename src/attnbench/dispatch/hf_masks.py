"""Transformers' masks as attnbench masks.

Transformers passes a mask interface the sizes of the step and a predicate made of its own small functions (causal,
sliding window, chunks, packed sequences) joined by `and_masks`. These are recognised by name and read from their
closures. Any other predicate (bidirectional image tokens, a user's own) is evaluated by Transformers itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache, reduce
from itertools import islice
from operator import and_
from types import FrameType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from attnbench import masks
from attnbench.dispatch import hf_models
from attnbench.dispatch.array_masks import mask_of_keys
from attnbench.errors import Unsupported
from attnbench.masks import AnyMask, Full
from attnbench.masks.base import to_numpy
from attnbench.tracing import constant_when_traced

LEVELS = 4
"""Number of frames searched above a mask function: more than there are up to the model's preparation of its inputs."""


class KeyRangeMask(NamedTuple):
    """A mask over the keys `first:last`; no query sees any other key."""

    mask: AnyMask
    first: int
    last: int
    packed: bool = False
    real: torch.Tensor | None = None
    """Real keys [b, 1, 1, keys], at least one per row; set if there is one query and only padding hides keys."""


class _Step(NamedTuple):
    """Positions of one step: query i is at q_start + i, key j at kv_start + j."""

    q_len: int
    kv_len: int
    q_start: int
    kv_start: int


class MaskArray(torch.Tensor):
    """Transformers' boolean mask, True for visible pairs, which only attention that knows this form may read.

    A model that computes attention by itself expects numbers to add to its scores, or True for hidden pairs. So an
    operation that turns this mask into numbers is refused; an operation that returns a mask (a slice, a copy, `&`)
    returns a MaskArray.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if func in _PROPERTIES or name in _ABOUT or name.startswith(("is_", "_is_")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map(lambda x: x.array() if isinstance(x, DescribedMask) else x, (args, kwargs))
        fills = name in ("masked_fill", "masked_fill_") and isinstance(args[1] if len(args) > 1 else None, MaskArray)
        if not (name in _KEEP or name in _READ) or fills:
            raise Unsupported(_misread(name))
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if name in _READ:
            return out
        if any(x.dtype != torch.bool for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            raise Unsupported(_misread(name))
        return tree_map(lambda x: x.as_subclass(MaskArray) if isinstance(x, torch.Tensor) else x, out)

    def plain(self) -> torch.Tensor:
        """Return the mask as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


class DescribedMask(MaskArray):
    """Description that stands in for Transformers' boolean mask [b, 1, q, kv]: it has the shape, and no storage.

    Its copies, on other devices too, are descriptions. Other operations work on the array that Transformers would
    have made, which is made once.
    """

    described: KeyRangeMask
    evaluate: Callable[[], torch.Tensor]

    @staticmethod
    def make(described: KeyRangeMask, shape: Any, device: Any, evaluate: Callable[[], torch.Tensor]) -> DescribedMask:
        """Return a description with a shape and device; `evaluate` returns the array itself."""
        mask = torch.zeros((), dtype=torch.bool, device=device).expand(shape).as_subclass(DescribedMask)
        mask.described, mask.evaluate = described, cache(evaluate)
        return mask

    def array(self) -> MaskArray:
        """Return the array that Transformers would have made."""
        array = self.evaluate().to(self.device)
        with torch._C.DisableTorchFunctionSubclass():
            return array.as_subclass(MaskArray)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], DescribedMask):
            mask, kwargs = args[0], kwargs or {}
            if func.__name__ in _COPY:
                with torch._C.DisableTorchFunctionSubclass():
                    seems = func(*args, **kwargs)
                if seems is mask:
                    return mask
                if seems.dtype == torch.bool:
                    real = mask.described.real
                    described = mask.described._replace(real=None if real is None else real.to(seems.device))
                    return DescribedMask.make(described, tuple(mask.shape), seems.device, mask.evaluate)
            if func is torch.Tensor.__getitem__ and _everything(args[1], tuple(mask.shape)):
                return mask
        return super().__torch_function__(func, types, args, kwargs)


_COPY = frozenset({"to", "cpu", "cuda", "clone", "detach", "contiguous", "alias", "bool", "pin_memory"})


def _everything(index: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an index of slices selects everything, as it does if layers cut a mask to the present keys."""
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (len(shape) - len(parts) + 1), *parts[at + 1 :])
    return len(parts) <= len(shape) and all(
        isinstance(part, slice) and part.indices(size) == (0, size, 1) for part, size in zip(parts, shape)
    )


_ASKED = (
    "shape", "ndim", "device", "dtype", "layout", "requires_grad", "grad_fn", "grad", "itemsize", "nbytes", "_base",
    "_backward_hooks", "output_nr", "_version",
)  # fmt: skip
_PROPERTIES = {
    getattr(torch.Tensor, name).__get__
    for name in dir(torch.Tensor)
    if (name in _ASKED or name.startswith("is_")) and hasattr(getattr(torch.Tensor, name), "__set__")
} | {torch.Tensor.requires_grad.__set__}  # pyright: ignore[reportAttributeAccessIssue]
_ABOUT = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device",
    "__len__", "untyped_storage", "requires_grad_", "data_ptr", "__hash__", "has_names",
})  # fmt: skip
"""Functions that read no values."""
_KEEP = frozenset({
    "__getitem__", "to", "bool", "cpu", "cuda", "pin_memory", "contiguous", "clone", "detach", "alias", "expand",
    "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile", "reshape", "view", "view_as", "unsqueeze",
    "squeeze", "flatten", "unflatten", "transpose", "permute", "swapaxes", "movedim", "narrow", "select", "split",
    "chunk", "unbind", "cat", "concat", "stack", "pad", "flip", "roll", "index_select", "gather", "take_along_dim",
    "tril", "triu", "__and__", "__rand__", "__iand__", "__or__", "__ror__", "__ior__", "__xor__", "__rxor__",
    "bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor", "masked_fill",
})  # fmt: skip
"""Functions that return a mask for a mask."""
_READ = frozenset({
    "where", "__invert__", "bitwise_not", "logical_not", "any", "all", "equal", "tolist", "item", "numpy", "nonzero",
    "__bool__", "__repr__", "__str__", "__format__", "__array__", "allclose", "zeros_like", "ones_like", "empty_like",
    "full_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "__reduce_ex__", "__deepcopy__",
})  # fmt: skip
"""Functions that read True as visible, or that do not depend on its meaning."""


def _misread(name: str) -> str:
    """Return an error message that names the module and model that read a mask as numbers, found by their frames."""
    modules = [frame.f_locals.get("self") for frame in _frames_from(sys._getframe(2))]
    kinds = [type(module).__name__ for module in modules if isinstance(module, torch.nn.Module)]
    who = f"{kinds[0]} of {kinds[-1]}" if kinds else "the code"
    return (
        f"{who} computes with the mask that was made for attnbench's attention (by {name}): it has its own attention, "
        f"which expects another kind of mask, so its result would be wrong. {hf_models.OTHERWISE}"
    )


def describe(
    batch_size: int, kv_length: int, q_length: int | None = None, q_offset: Any = 0, kv_offset: int = 0,
    cache_position: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, device: Any = None,
    **more: Any,
) -> torch.Tensor | None:  # fmt: skip
    """Return the mask of a step to Transformers; None means plain causal. Older releases pass `cache_position`."""
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    given = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "attention_mask": attention_mask}
    given |= {**more, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if cache_position is None:
        given |= {"q_length": q_length, "q_offset": q_offset, "device": device}
    else:
        given["cache_position"] = cache_position
        q_length, device = len(cache_position), cache_position.device
    assert q_length is not None

    def evaluate() -> Any:
        return sdpa_mask(**given)

    may_skip = more.get("allow_is_causal_skip", True)
    function = more.get("mask_function", causal_mask_function)
    config = more.get("config")
    model = None if torch.compiler.is_compiling() else _calling_module()
    if model is None:
        refused, alone = _attention_of_config(id(config), type(config).__module__, type(config).__name__)
    else:
        attention = hf_models.attention_for(model, config)
        refused = hf_models.refusal(type(model).__name__, attention) if attention.loses_masks else ""
        alone = not attention.own
    if refused:
        raise Unsupported(refused)
    if not alone:  # some module adds the mask to its scores: return the form that serves every module
        return eager_mask(**given)
    if torch.compiler.is_compiling() or (model is not None and hf_models.compiled_layers(model)):
        square = isinstance(q_offset, int) and q_offset == kv_offset and q_length == kv_length
        plain = may_skip and cache_position is None and attention_mask is None and function is causal_mask_function
        return None if plain and square else evaluate()
    if (q_length == 1 and not may_skip) or _made_ahead():
        return evaluate()
    q_start = int(q_offset) if cache_position is None else int(cache_position[0])
    step = _Step(q_length, kv_length, q_start, kv_offset)
    described = _described(function, step, attention_mask)
    if described is None:
        return evaluate().as_subclass(MaskArray)
    return DescribedMask.make(described, (batch_size, 1, q_length, kv_length), device, evaluate)


def _calling_module() -> torch.nn.Module | None:
    """Find the module whose code asks for the mask, a few calls above."""
    modules = (frame.f_locals.get("self") for frame in islice(_frames_from(sys._getframe(2)), LEVELS))
    return next((module for module in modules if isinstance(module, torch.nn.Module)), None)


def _frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, the nearest first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@constant_when_traced
def _attention_of_config(config_id: int, module: str, name: str) -> tuple[str, bool]:
    """Return why the model of a config is refused, and whether all its attention calls the registered function.

    Used in a graph, in which only the config is known.
    """
    attention = hf_models.attention_of_config(config_id, module)
    refused = hf_models.refusal(f"the model of {name}", attention) if attention.loses_masks else ""
    return refused, not attention.own


def _made_ahead() -> bool:
    """Return whether `generate` makes the mask before a forward pass over a static cache, which may be compiled.

    A compiled function takes arrays: it would be compiled anew for each description.
    """
    above = islice(_frames_from(sys._getframe(2)), LEVELS)
    return any(frame.f_code.co_name == "prepare_inputs_for_generation" for frame in above)


def _described(function: Callable[..., Any], step: _Step, padding: torch.Tensor | None) -> KeyRangeMask | None:
    parts = _parts(function)
    if parts is None:
        return None
    shift = step.q_start - step.kv_start
    before = after = unbounded = step.q_len + step.kv_len
    for kind, values in parts:
        if kind == "causal":
            after = 0
        elif kind == "sliding":
            before = min(before, values["sliding_window"] - 1)
        elif kind == "sliding-both":
            before, after = min(before, values["sliding_window"]), min(after, values["sliding_window"])
    # Keys that some query sees. Masks count positions from the last key, which must be the last query's own.
    first, last = max(0, shift - before), min(step.kv_len, shift + step.q_len + after)
    bounded = min(before, after) < unbounded
    if bounded and (after or shift + step.q_len > step.kv_len) and shift + step.q_len != step.kv_len:
        return None
    if first >= last:
        return None
    packed = (part for part in parts if part[0] in ("packed", "chunked"))
    documents = [_documents(*part, step, first, last) for part in packed]
    if None in documents:
        return None
    # Full, causal or a window over keys that end with the last query's own, without bounds that are never reached.
    reaches_back, reaches_on = before >= last - first - 1, after >= step.q_len - 1
    if reaches_back and (reaches_on or after == 0):
        mask: Any = masks.full() if reaches_on else masks.causal()
    else:
        mask = masks.window(None if reaches_back else before, None if reaches_on else after)
    mask = reduce(and_, documents, mask)
    if padding is None:
        return KeyRangeMask(mask, first, last, packed=bool(documents))
    keys = slice(step.kv_start + first, step.kv_start + last)
    real = to_numpy(padding[:, keys], "attention_mask").astype(bool)
    # Positions past the end of the given mask are not real.
    real = np.pad(real, ((0, 0), (0, keys.stop - keys.start - real.shape[1])))
    hiding, array = mask_of_keys(real, len(real)), None
    alone = step.q_len == 1 and isinstance(mask, Full) and not isinstance(hiding, Full)
    if alone and real.any(axis=1).all() and padding.shape[1] >= keys.stop:
        array = padding[:, None, None, keys].to(torch.bool)
    return KeyRangeMask(cast("AnyMask", mask & hiding), first, last, bool(documents), array)


_KINDS = {
    "causal_mask_function": "causal",
    "bidirectional_mask_function": "full",
    "sliding_window_overlay.<locals>.inner_mask": "sliding",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": "sliding-both",
    "chunked_overlay.<locals>.inner_mask": "chunked",
    "packed_sequence_mask_function.<locals>.inner_mask": "packed",
}


def _parts(function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]] | None:
    """Return (kind, closure) of each function joined by `and_masks`; None if one of them is not known."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    values = dict(inspect.getclosurevars(function).nonlocals)
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        found = [_parts(one) for one in values["mask_functions"]]
        return None if None in found else [part for parts in found for part in parts or ()]
    kind = _KINDS.get(function.__qualname__)
    return None if kind is None else [(kind, values)]


def _documents(kind: str, values: dict[str, Any], step: _Step, first: int, last: int) -> AnyMask | None:
    queries = step.q_start + np.arange(step.q_len)
    keys = step.kv_start + np.arange(first, last)
    if kind == "chunked":
        padding = to_numpy(values["left_padding"], "left padding").reshape(-1, 1)
        size: int = values["chunk_size"]
        return masks.documents((keys - padding) // size, (queries - padding) // size)
    ids: np.ndarray = to_numpy(values["packed_sequence_mask"], "packed sequences")
    if max(keys.max(), queries.max()) >= ids.shape[1]:
        return None
    return masks.documents(ids[:, keys], ids[:, queries])
