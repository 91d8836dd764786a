"""Masks as people write them: `window:128:0` on the command line, a string or a table in a suite's TOML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from inspect import signature
from operator import and_
from typing import Any

import numpy as np

from attnbench import masks
from attnbench.errors import InvalidWorkload, UnknownName, UsageError
from attnbench.masks import AnyMask, Mask, MaskShape
from attnbench.masks.base import whole_number
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
    "A&B",
)
"""Forms that `parse_mask` reads, for help texts. Window sides may be `all`; sizes are those of consecutive blocks or
documents; PATTERN is local, strided, global_local or random, PERCENT the share of blocks dropped."""

MOST_DIGITS = 50
"""Largest number of digits that is read; longer numbers are too large in any case."""
LARGEST_ARRAY = 1 << 20
"""Largest number of values of a mask that is written to a file."""
_ALIGNMENTS = ("bottom-right", "top-left")


def parse_mask(text: str, shape: MaskShape) -> AnyMask:
    """Return the mask that a text such as `causal`, `prefix:816` or `causal&lengths:512,300` names, fitted to the
    shape."""
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
        raise InvalidWorkload(f"sizes are a list of whole numbers such as [512, 300], not {sizes!r}.")
    numbers = [whole_number(size, "each of sizes") for size in sizes]
    if min(numbers) < 0:
        raise InvalidWorkload(f"each of sizes must be 0 or more, not {min(numbers)}.")
    _check_cover("the list of sizes", sum(numbers), kv_len)
    return np.repeat(np.arange(len(numbers)), numbers)


def ids_of_mask_ar(runs: str, kv_len: int) -> np.ndarray:
    """Return the running sum of openpi's mask_ar, which is given in runs: `0*816 1 1 0*49`."""
    words = [run.partition("*")[::2] for run in runs.split()] if isinstance(runs, str) else []
    if not words or not all(flag in ("0", "1") for flag, _ in words):
        raise InvalidWorkload(f'mask_ar is runs of 0 and 1 such as "0*816 1 1 0*49", not {runs!r}.')
    counts = [_whole(times, "mask_ar run") if times else 1 for _, times in words]
    _check_cover("mask_ar", sum(counts), kv_len)
    return np.cumsum(np.repeat([int(flag) for flag, _ in words], counts))


def _check_cover(what: str, tokens: int, kv_len: int) -> None:
    """Refuse sizes that do not add up to the keys, before an array of that size is made."""
    if tokens != kv_len:
        raise InvalidWorkload(f"{what} covers {tokens} tokens, kv_len is {kv_len}.")


def _parse_part(text: str, shape: MaskShape) -> Mask:
    kind, *arguments = text.split(":")
    reader = _READERS.get(kind)
    if reader is None:
        if kind in _FUNCTIONS:
            raise InvalidWorkload(
                f"a {kind} mask holds an array and has no text form: give it from Python or as a table."
            )
        raise UnknownName("mask", kind, _READERS, "attnbench run --help")
    try:
        return reader(arguments, shape)
    except _WrongForm as error:
        form = next(form for form in FORMS if form.partition(":")[0].partition("[")[0] == kind)
        raise InvalidWorkload(f'mask "{text}" cannot be read: write {form}.') from error


def _aligned(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    if arguments and arguments[-1] in _ALIGNMENTS:
        return arguments[:-1], {"align": arguments[-1]}
    return arguments, {}


def _read_causal(arguments: list[str], shape: MaskShape) -> Mask:
    rest, align = _aligned(arguments)
    _expect(not rest)
    return masks.causal(**align)


def _read_window(arguments: list[str], shape: MaskShape) -> Mask:
    words, align = _aligned(arguments)
    _expect(len(words) in (1, 2))
    sides = [None if word == "all" else _whole(word, "window side") for word in words]
    return masks.window(sides[0], sides[1] if len(sides) == 2 else 0, **align)


def _read_prefix(arguments: list[str], shape: MaskShape) -> Mask:
    words, align = _aligned(arguments)
    _expect(len(words) == 1)
    return masks.prefix(_whole(words[0], "prefix"), **align)


def _read_sizes(make: Callable[[Any], Mask]) -> Callable[[list[str], MaskShape], Mask]:
    return lambda arguments, shape: make(ids_of_sizes(_numbers(arguments, "size"), shape.kv_len))


def _read_lengths(arguments: list[str], shape: MaskShape) -> Mask:
    return masks.lengths(_numbers(arguments, "length"))


def _read_valid(arguments: list[str], shape: MaskShape) -> Mask:
    keys = np.zeros(shape.kv_len, bool)
    _expect(len(arguments) == 1)
    for run in arguments[0].split(","):
        first, _, last = run.partition("-")
        begin, end = _whole(first, "key"), _whole(last or first, "key")
        if not begin <= end < shape.kv_len:
            raise InvalidWorkload(f'valid keys "{run}" do not lie in 0-{shape.kv_len - 1}.')
        keys[begin : end + 1] = True
    return masks.valid(keys)


def _read_dilated(arguments: list[str], shape: MaskShape) -> Mask:
    _expect(len(arguments) in (1, 2))
    branches = [branch.split("r") for branch in arguments[0].split("+")]
    _expect(all(len(branch) == 2 for branch in branches))
    segments, rates = ([_whole(branch[n], "dilated branch") for branch in branches] for n in (0, 1))
    return masks.dilated(segments, rates, *arguments[1:])  # pyright: ignore[reportArgumentType]


def _read_blocks(arguments: list[str], shape: MaskShape) -> Mask:
    is_causal = arguments[-1:] == ["causal"]
    words = arguments[:-1] if is_causal else arguments
    _expect(len(words) in (2, 3))
    size = _whole(words[2], "block size") if len(words) == 3 else BLOCK_SIZE
    _expect(words[1].replace(".", "", 1).isdecimal())
    return sparse_mask(words[0], float(words[1]) / 100, shape, block_size=size, causal=is_causal)


def _read_full(arguments: list[str], shape: MaskShape) -> Mask:
    _expect(not arguments)
    return masks.full()


_READERS: Mapping[str, Callable[[list[str], MaskShape], Mask]] = {
    "full": _read_full,
    "causal": _read_causal,
    "window": _read_window,
    "prefix": _read_prefix,
    "block_causal": _read_sizes(masks.block_causal),
    "documents": _read_sizes(masks.documents),
    "lengths": _read_lengths,
    "valid": _read_valid,
    "dilated": _read_dilated,
    "blocks": _read_blocks,
}
_FUNCTIONS: Mapping[str, Callable[..., Mask]] = {name: getattr(masks, name) for name in (*_READERS, "dense")}


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
        raise InvalidWorkload(f'dtype of a dense mask is "float32" or "float64", not {dtype!r}.')
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError) as error:
        raise InvalidWorkload("a dense mask with a dtype is a rectangular array of numbers.") from error


class _WrongForm(Exception):
    """The mask's text has more or fewer parts than its form."""


def _expect(holds: bool) -> None:
    if not holds:
        raise _WrongForm


def _numbers(arguments: list[str], what: str) -> list[int]:
    _expect(len(arguments) == 1)
    return [_whole(number.strip(), what) for number in arguments[0].split(",")]


def _whole(text: str, what: str) -> int:
    if not text.isdecimal():
        raise InvalidWorkload(f'{what} "{text}" is not a whole number.')
    return whole_number(int(text[:MOST_DIGITS]), what)


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
    if isinstance(mask, masks.Full | masks.Causal):
        return mask.kinds[0] + align
    return _array_table(mask)


def _array_table(mask: Mask) -> dict[str, Any]:
    told: dict[str, str] = {}
    if isinstance(mask, masks.BlockCausal | masks.Documents):
        fields: dict[str, Any] = {"ids": mask.ids.array}
        if mask.q_ids is not None:
            fields["q_ids"] = mask.q_ids.array
    elif isinstance(mask, masks.Valid):
        fields = {"mask_bj": mask.keys.array}
    elif isinstance(mask, masks.Blocks):
        fields = {"block_mask": mask.block_mask.array, "block_size": mask.block_size}
    else:
        assert isinstance(mask, masks.Dense)
        fields = {"array": mask.values.array}
        told = {"dtype": "float32"} if mask.values.dtype == "float32" else {}  # numbers in TOML have 64 bits
    size = max(np.size(value) for value in fields.values())
    if size > LARGEST_ARRAY:
        raise UsageError(
            f"the mask {mask.id} has {size} values, more than the {LARGEST_ARRAY} of a suite file: build it in Python."
        )
    return {"kind": mask.kinds[0], **{name: np.asarray(value).tolist() for name, value in fields.items()}, **told}
