"""Describe public Python names: kind, signature, members. Annotations stay the text that the source has."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, get_args, get_type_hints

import msgspec

import attnbench

CORE: dict[str, tuple[str, ...] | None] = {
    "attnbench": (*attnbench.__all__, "models"),
    "attnbench.masks": None,
    "attnbench.errors": None,
    "attnbench.dispatch.flax": ("attention_fn",),
    "attnbench.policy": ("checkpoint_context", "forget"),
    "attnbench.models": ("dilated",),
    "attnbench.models.dilated": None,
    "attnbench.impls.conditions": (
        "first_reason", "needs_dtype", "needs_equal_dims", "needs_mask", "needs_no_softcap",
    ),
    "attnbench.kernels.ring.function": ("ring_attention",),
    "attnbench.analyse.summary": ("closing", "format_ratio", "rank"),
}  # fmt: skip
"""Modules that README, docs/ and examples/ tell users to import from, and the names they show; None for all."""
TORCH: dict[str, tuple[str, ...] | None] = {
    "attnbench": ("nn",),
    "attnbench.models": ("gemma_torch",),
    "attnbench.nn": None,
    "attnbench.nn.ring": ("gather", "shard"),
    "attnbench.dispatch.hf": ("check", "register"),
    "attnbench.dispatch.torch_sdpa": ("redirect_sdpa", "scaled_dot_product_attention"),
    "attnbench.models.gemma_torch": ("Block", "Stack", "apply_rope", "rms_norm"),
}
"""Modules that import torch."""
JAX: dict[str, tuple[str, ...] | None] = {
    "attnbench.models": ("gemma", "gemma_fast", "lora", "masks", "pi0", "pi0_fast", "rope"),
    "attnbench.models.gemma": None,
    "attnbench.models.gemma_fast": None,
    "attnbench.models.lora": ("Einsum", "FeedForward", "LoRAConfig", "merge"),
    "attnbench.models.masks": ("TokenMask", "block_causal", "make_attn_mask"),
    "attnbench.models.pi0": ("Observation", "Pi0", "Pi0Config", "random_observation", "sample_actions"),
    "attnbench.models.pi0_fast": ("Observation", "Pi0Fast", "Pi0FastConfig", "sample_tokens"),
    "attnbench.models.rope": ("apply_rope",),
}
"""Modules that import jax and flax."""
RUNNABLE = ("attnbench", "attnbench.run.torchrun")
"""Modules that the pages run with `python -m`."""

OPERATORS = ("__call__", "__enter__", "__exit__", "__and__", "__or__")
BASES = ("Module", "Struct")
"""Bases from elsewhere that users rely on: torch's and flax's modules, msgspec's data."""
OF_FLAX = ("name", "parent", "scope", "setup")
"""Parameters and members that flax adds to every module."""


def describe(modules: dict[str, tuple[str, ...] | None]) -> dict[str, Any]:
    """Return module.name -> description of every public name of the modules."""
    found: dict[str, Any] = {}
    results: set[type] = set()
    for module, names in modules.items():
        home = attnbench.masks if module == "attnbench.masks" else import_module(module)
        for name in sorted(names or _public(home)):
            found[f"{module}.{name}"] = entry(getattr(home, name))
            if module == "attnbench" and inspect.isfunction(getattr(home, name)):
                found |= _results(f"{module}.{name}", getattr(home, name), results)
    return found


def _public(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not name.startswith("_")]
    ours = (inspect.isclass, inspect.isfunction)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and any(test(value) for test in ours) and _is_ours(value)
    ]


def _is_ours(what: Any) -> bool:
    return str(getattr(what, "__module__", "")).partition(".")[0] == "attnbench"


def _results(name: str, function: Callable[..., Any], known: set[type]) -> dict[str, Any]:
    """Return what is known of a function's result, whose class has no public name: `attnbench.measure() ok`."""
    hint = get_type_hints(function).get("return")
    classes = [one for one in (get_args(hint) or (hint,)) if inspect.isclass(one) and _is_ours(one)]
    fresh = [one for one in classes if one not in known and one is not attnbench.Implementation]
    known.update(fresh)
    tags = {one: f" {one.__struct_config__.tag}" if len(classes) > 1 else "" for one in fresh}
    return {f"{name}(){tags[one]}": entry(one) for one in fresh}


def entry(what: Any) -> dict[str, Any]:
    """Return the description of one object."""
    if isinstance(what, ModuleType):
        return {"kind": "module"}
    if inspect.isclass(what):
        made: dict[str, Any] = {"kind": "class", "signature": signature(what), "bases": _bases(what)}
        return made | {"members": dict(sorted(_members(what).items()))}
    if inspect.isroutine(what) or hasattr(what, "__wrapped__"):
        return {"kind": "function", "signature": signature(what)}
    return {"kind": "value"}


def _bases(cls: type) -> list[str]:
    """Return the names of exceptions and well-known classes that it derives from."""
    above = cls.__mro__[1:]
    return sorted(
        {c.__name__ for c in above if (issubclass(c, BaseException) or c.__name__ in BASES) and c.__name__[0] != "_"}
    )


def _members(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for place in reversed(cls.__mro__):
        if not _is_ours(place):
            continue
        for name, annotation in inspect.get_annotations(place).items():
            if not name.startswith("_"):
                found[name] = f"attribute: {_annotation(annotation)}"
        for name, value in vars(place).items():
            if (not name.startswith("_") or name in OPERATORS) and (told := _member(value)):
                found.setdefault(name, told) if told == "attribute" else found.update({name: told})
        if "__init__" in vars(place) and _is_ours(place.__init__):
            set_there = re.findall(r"\bself\.([a-z]\w*)(?:, self\.\w+)* *(?::[^=\n]+)?=[^=]", _source(place.__init__))
            found |= {name: "attribute" for name in set_there if name not in found}
    return {name: told for name, told in found.items() if not (_is_flax(cls) and name in OF_FLAX)}


def _source(function: Any) -> str:
    """Return the source of a function; one that was generated has none."""
    try:
        return inspect.getsource(function)
    except OSError:
        return ""


def _is_flax(cls: type) -> bool:
    return any(place.__module__.startswith("flax.") for place in cls.__mro__)


def _member(value: Any) -> str:
    if inspect.isfunction(value) and not _is_ours(value):
        return ""
    if isinstance(value, property | cached_property):
        return "property"
    if isinstance(value, staticmethod | classmethod):
        return signature(value.__func__, bound=isinstance(value, classmethod))
    if inspect.isfunction(value):
        return signature(value, bound=True)
    return "" if inspect.isclass(value) or inspect.ismemberdescriptor(value) else "attribute"


def signature(what: Any, bound: bool = False) -> str:
    """Return the signature as Python source; `bound` leaves out self. A default without a literal is `...`."""
    if inspect.isclass(what) and not _is_ours(_maker(what)):
        return ""
    try:
        found = inspect.signature(what)
    except ValueError:
        return ""
    annotations = _field_annotations(what) if inspect.isclass(what) and issubclass(what, msgspec.Struct) else {}
    parameters = [
        p.replace(annotation=annotations.get(p.name, p.annotation))
        for p in list(found.parameters.values())[bound:]
        if not (inspect.isclass(what) and _is_flax(what) and p.name in OF_FLAX)
    ]
    words: list[str] = []
    for index, one in enumerate(parameters):
        before = parameters[index - 1].kind if index else None
        if before is one.POSITIONAL_ONLY and one.kind is not one.POSITIONAL_ONLY:
            words.append("/")
        if one.kind is one.KEYWORD_ONLY and before not in (one.KEYWORD_ONLY, one.VAR_POSITIONAL):
            words.append("*")
        words.append(_parameter(one))
    if parameters and parameters[-1].kind is inspect.Parameter.POSITIONAL_ONLY:
        words.append("/")
    empty = found.return_annotation is found.empty or inspect.isclass(what)
    return f"({', '.join(words)})" + ("" if empty else f" -> {_annotation(found.return_annotation)}")


def _maker(cls: type) -> type:
    """Return the class whose constructor is used."""
    if issubclass(cls, msgspec.Struct):
        return cls
    return next(place for place in cls.__mro__ if {"__init__", "__new__"} & vars(place).keys())


def _parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    hint = "" if one.annotation is one.empty else f": {_annotation(one.annotation)}"
    return f"{stars}{one.name}{hint}" + ("" if one.default is one.empty else f" = {_default(one.default)}")


def _field_annotations(cls: type) -> dict[str, str]:
    ours = filter(_is_ours, reversed(cls.__mro__))
    return {name: text for place in ours for name, text in inspect.get_annotations(place).items()}


def _annotation(annotation: Any) -> str:
    """Return the text of an annotation without the modules of its names, which may move."""
    annotation = getattr(annotation, "__forward_arg__", annotation)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", text)


def _default(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple) and all(one is None or isinstance(one, bool | int | float | str) for one in value):
        return repr(value)
    return "..."
