"""Masks as people write them: `window:128:0` on the command line, a string or a table in a suite's TOML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from inspect import signature
from operator import and_
from typing import Any

import numpy as np

from attnbench import masks
from attnbench.errors import InvalidWorkload, UnknownName, UsageError
from attnbench.masks import AnyMask, Mask, MaskShape
from attnbench.masks.base import FrozenArray, whole_number
from attnbench.masks.block_patterns import BLOCK_SIZE, sparse_mask

FORMS = (
    "full",
    "causal[:top-left]",
    "window:LEFT[:RIGHT][:top-left]",
    "prefix:N[:top-left]",
    "block_causal:SIZE,SIZE,...",
    "documents:SIZE,SIZE,...",
    "lengths:N,N,...",
    "valid:FIRST-LAST,...",
    "dilated:WrR+WrR[:group]",
    "blocks:PATTERN:PERCENT[:SIZE][:causal]",
    "alibi[:top-left]",
    "A&B",
)
"""Forms that `parse_mask` reads, for help texts. Window sides may be `all`; sizes are those of consecutive blocks or
documents; PATTERN is local, strided, global_local or random, PERCENT the share of blocks dropped; alibi has the slopes
of the paper for the workload's heads."""

MOST_DIGITS = 50
"""Largest number of digits that is read; longer numbers are too large in any case."""
LARGEST_ARRAY = 1 << 20
"""Largest number of values of a mask that is written to a file."""
_ALIGNMENTS = ("bottom-right", "top-left")


def parse_mask(text: str, shape: MaskShape) -> AnyMask:
    """Return the mask that a text such as `causal`, `prefix:816` or `causal&lengths:512,300` names, for the shape."""
    mask = reduce(and_, [_parse_part(part.strip(), shape) for part in text.split("&")])
    mask.check(shape)
    return mask  # pyright: ignore[reportReturnType]  (every concrete Mask is in the union)


def read_mask(value: str | Mapping[str, Any] | Mask, shape: MaskShape) -> AnyMask:
    """Return a mask that is given as a mask, as text, or as a table `{kind = "window", left = 128}`."""
    if isinstance(value, str):
        return parse_mask(value, shape)
    if isinstance(value, Mapping):
        value = _from_table(dict(value), shape)
    if not isinstance(value, Mask):
        raise InvalidWorkload(f"mask must be text such as {FORMS[1]} or a table with kind = ..., not {value!r}.")
    value.check(shape)
    return value  # pyright: ignore[reportReturnType]


def ids_of_sizes(sizes: Sequence[int], kv_len: int) -> np.ndarray:
    """Return ids of consecutive blocks or documents of these sizes: [3, 2] -> 0 0 0 1 1."""
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
        raise InvalidWorkload(f"sizes must be a list of whole numbers such as [512, 300], not {sizes!r}.")
    numbers = [whole_number(size, "each of sizes") for size in sizes]
    if min(numbers) < 0:
        raise InvalidWorkload(f"each of sizes must be 0 or more, not {min(numbers)}.")
    _check_cover("the list of sizes", sum(numbers), kv_len)
    return np.repeat(np.arange(len(numbers)), numbers)


def ids_of_mask_ar(runs: str, kv_len: int) -> np.ndarray:
    """Return the running sum of openpi's mask_ar, which is given in runs: `0*816 1 1 0*49`."""
    words = [run.partition("*")[::2] for run in runs.split()] if isinstance(runs, str) else []
    if not words or not all(flag in ("0", "1") for flag, _ in words):
        raise InvalidWorkload(f'mask_ar must be runs of 0 and 1 such as "0*816 1 1 0*49", not {runs!r}.')
    counts = [_whole(times, "mask_ar run") if times else 1 for _, times in words]
    _check_cover("mask_ar", sum(counts), kv_len)
    return np.cumsum(np.repeat([int(flag) for flag, _ in words], counts))


def _check_cover(what: str, tokens: int, kv_len: int) -> None:
    """Refuse sizes that do not add up to the keys, before an array of that size is made."""
    if tokens != kv_len:
        raise InvalidWorkload(f"{what} covers {tokens} tokens, kv_len is {kv_len}.")


def _parse_part(text: str, shape: MaskShape) -> Mask:
    kind, *words = text.split(":")
    if kind not in _FORM_OF:
        if kind in _FUNCTIONS:
            raise InvalidWorkload(
                f"a {kind} mask holds an array and has no text form: pass it from Python, or write it as a table."
            )
        raise UnknownName("mask", kind, _FORM_OF, "attnbench run --help")
    form = _FORM_OF[kind]
    align: dict[str, Any] = {}
    if "[:top-left]" in form and words and words[-1] in _ALIGNMENTS:
        align["align"] = words.pop()
    match kind, words:
        case "full", []:
            return masks.full()
        case "causal", []:
            return masks.causal(**align)
        case "alibi", []:
            return masks.alibi(shape.heads, **align)
        case "window", [_] | [_, _]:
            sides = [None if word == "all" else _whole(word, "window side") for word in words]
            return masks.window(sides[0], sides[1] if len(sides) == 2 else 0, **align)
        case "prefix", [size]:
            return masks.prefix(_whole(size, "prefix"), **align)
        case (("block_causal" | "documents"), [sizes]):
            return _FUNCTIONS[kind](ids_of_sizes(_numbers(sizes, "size"), shape.kv_len))
        case "lengths", [lengths]:
            return masks.lengths(_numbers(lengths, "length"))
        case "valid", [ranges]:
            return masks.valid(_keys_in(ranges, shape.kv_len))
        case "dilated", [pattern, *offset] if len(offset) < 2:
            branches = [branch.split("r") for branch in pattern.split("+")]
            if all(len(branch) == 2 for branch in branches):
                segments, rates = ([_whole(branch[n], "dilated branch") for branch in branches] for n in (0, 1))
                return masks.dilated(segments, rates, *offset)  # pyright: ignore[reportArgumentType]
        case "blocks", [pattern, percent, *rest]:
            is_causal = rest[-1:] == ["causal"]
            sizes = rest[:-1] if is_causal else rest
            size = _whole(sizes[0], "block size") if len(sizes) == 1 else BLOCK_SIZE
            if len(sizes) < 2 and percent.replace(".", "", 1).isdecimal():
                return sparse_mask(pattern, float(percent) / 100, shape, block_size=size, causal=is_causal)
    raise InvalidWorkload(f'mask "{text}" cannot be read: write {form}.')


_FORM_OF = {re.split(r"[:\[]", form)[0]: form for form in FORMS if "&" not in form}
_FUNCTIONS: Mapping[str, Callable[..., Mask]] = {name: getattr(masks, name) for name in (*_FORM_OF, "dense")}


def _keys_in(ranges: str, kv_len: int) -> np.ndarray:
    """Return booleans [kv_len] that are true for the keys in ranges such as `0-19,30`."""
    keys = np.zeros(kv_len, bool)
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        begin, end = _whole(first, "key"), _whole(last or first, "key")
        if not begin <= end < kv_len:
            raise InvalidWorkload(f'valid keys "{part}" do not lie in 0-{kv_len - 1}.')
        keys[begin : end + 1] = True
    return keys


def _numbers(text: str, what: str) -> list[int]:
    return [_whole(number.strip(), what) for number in text.split(",")]


def _whole(text: str, what: str) -> int:
    if not text.isdecimal():
        raise InvalidWorkload(f'{what} "{text}" is not a whole number of at least 0.')
    return whole_number(int(text[:MOST_DIGITS]), what)


def _from_table(table: dict[str, Any], shape: MaskShape) -> Mask:
    kind = table.pop("kind", None)
    if kind == "both":
        parts = table.get("parts")
        if not isinstance(parts, list) or not parts:
            raise InvalidWorkload(f'a mask of kind "both" needs parts = [...] with at least one mask, not {parts!r}.')
        return reduce(and_, [read_mask(part, shape) for part in parts])
    if not isinstance(kind, str) or kind not in _FUNCTIONS:
        raise UnknownName("mask", str(kind), _FUNCTIONS, "attnbench run --help")
    if kind in ("block_causal", "documents") and "sizes" in table:
        table["ids"] = ids_of_sizes(table.pop("sizes"), shape.kv_len)
    if kind == "block_causal" and "mask_ar" in table:
        table["ids"] = ids_of_mask_ar(table.pop("mask_ar"), shape.kv_len)
    if kind == "dense" and "dtype" in table:
        table["array"] = _of_dtype(table.get("array"), table.pop("dtype"))
    function = _FUNCTIONS[kind]
    try:
        signature(function).bind(**table)
    except TypeError as error:
        fields = ", ".join(signature(function).parameters) or "no fields"
        raise InvalidWorkload(f"a {kind} mask takes {fields}: {error}.") from error
    return function(**table)


def _of_dtype(values: Any, dtype: Any) -> np.ndarray:
    if dtype not in ("float32", "float64"):
        raise InvalidWorkload(f'dtype of a dense mask must be "float32" or "float64", not {dtype!r}.')
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError) as error:
        raise InvalidWorkload("a dense mask with a dtype is a rectangular array of numbers.") from error


def mask_value(mask: Mask) -> str | dict[str, Any]:
    """Return text such as `window:128:0`, or a table if the mask holds an array that has no text form."""
    if isinstance(mask, masks.Both):
        parts = [mask_value(part) for part in mask.parts]
        texts = [part for part in parts if isinstance(part, str)]
        return "&".join(texts) if len(texts) == len(parts) else {"kind": "both", "parts": parts}
    align = ":top-left" if getattr(mask, "align", "") == "top-left" else ""
    if isinstance(mask, masks.Window):
        sides = ("all" if side is None else str(side) for side in (mask.left, mask.right))
        return f"window:{':'.join(sides)}{align}"
    if isinstance(mask, masks.Prefix):
        return f"prefix:{mask.n}{align}"
    if isinstance(mask, masks.Lengths):
        return "lengths:" + ",".join(str(length) for length in mask.kv_lengths.array)
    if isinstance(mask, masks.Dilated):
        branches = zip(mask.segment_lengths, mask.dilation_rates)
        return "dilated:" + "+".join(f"{w}r{r}" for w, r in branches) + (":group" if mask.offset == "group" else "")
    if isinstance(mask, masks.Full | masks.Causal) or (isinstance(mask, masks.Alibi) and mask.is_usual):
        return mask.kinds[0] + align
    return _array_table(mask)


_PARAMETERS = {"keys": "mask_bj", "values": "array"}
"""Fields of masks that their function calls otherwise."""


def _array_table(mask: Mask) -> dict[str, Any]:
    given = {_PARAMETERS.get(name, name): getattr(mask, name) for name in mask.__struct_fields__}
    fields = {
        name: value.array if isinstance(value, FrozenArray) else value
        for name, value in given.items()
        if value is not None and name != "align"
    }
    size = max(np.size(value) for value in fields.values())
    if size > LARGEST_ARRAY:
        raise UsageError(
            f"the mask {mask.id} has {size} values, more than the {LARGEST_ARRAY} of a suite file: build it in Python."
        )
    table = {"kind": mask.kinds[0], **{name: np.asarray(value).tolist() for name, value in fields.items()}}
    if getattr(mask, "align", "bottom-right") != "bottom-right":
        table["align"] = "top-left"
    if isinstance(mask, masks.Dense) and mask.values.dtype == "float32":
        table["dtype"] = "float32"  # numbers in TOML have 64 bits
    return table
