"""Which attention modules of a Transformers model call the registered function, found from their code.

A model may accept an `attn_implementation`, get its masks from the mask interface of that name, and compute attention
itself, for masks of another form: MPT hides pairs that are True, Bloom adds the array to its scores. So classes are
inspected before anything is computed. A class calls the registered function if its code names an `AttentionInterface`;
it computes attention by itself if it uses a softmax instead and has attention in its name, or has an attention mask
as a parameter and multiplies arrays with each other, which routers and quantizers do not.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch

_CORE = (
    "torch", "transformers.modeling_", "transformers.generation", "transformers.integrations", "transformers.utils",
)  # fmt: skip
"""Prefixes of modules whose functions belong to no particular model."""
_DEPTH = 3
"""Depth of calls followed from a method: attention is often a function of the model's own module."""
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "mm", "einsum", "tensordot", "scaled_dot_product_attention"})
"""Functions that multiply arrays with each other, as queries with keys."""
OTHERWISE = (
    'Load it with attn_implementation="eager" (or "sdpa", if Transformers supports that); if the model has several '
    'parts, name them, as in attn_implementation={"text_config": "attnbench", "vision_config": "eager"}.'
)
"""Advice for a model that computes attention by itself."""


class _Code(NamedTuple):
    """Names and classes that the functions of a class use, including functions they call in the model's modules."""

    names: frozenset[str]
    parameters: frozenset[str]
    interface: bool
    makes_masks: bool
    builds: tuple[type, ...]
    """Classes of modules that the code names, also in a table of classes."""
    bodies: tuple[CodeType, ...]


@cache
def _code(kind: type) -> _Code:
    from transformers import AttentionInterface, masking_utils

    names: set[str] = set()
    parameters: set[str] = set()
    values: list[Any] = []
    followed: set[FunctionType] = set()
    bodies: list[CodeType] = []

    def follow(function: Any, depth: int) -> None:
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or function in followed or function.__module__.startswith(_CORE):
            return
        followed.add(function)
        bodies.extend(_nested(function.__code__))
        for code in _nested(function.__code__):
            names.update(code.co_names)
            if depth == 0:
                parameters.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
            for name in code.co_names:
                value = function.__globals__.get(name)
                values.append(value)
                if depth < _DEPTH:
                    follow(value, depth + 1)

    for base in kind.__mro__:
        for value in () if base.__module__.startswith(_CORE) else vars(base).values():
            values.append(value)
            follow(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value, 0)
    makers = {name for name in vars(masking_utils) if name.startswith("create_")}
    calls = "ALL_ATTENTION_FUNCTIONS" in names or any(isinstance(value, AttentionInterface) for value in values)
    tables = [one for value in values if isinstance(value, dict) for one in value.values()]
    builds = (one for one in [*values, *tables] if isinstance(one, type) and issubclass(one, torch.nn.Module))
    builds = tuple(dict.fromkeys(builds))
    return _Code(frozenset(names), frozenset(parameters), calls, bool(makers & names), builds, tuple(bodies))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def calls_interface(kind: type) -> bool:
    """Return whether modules of this class call the function that is registered with Transformers."""
    return not issubclass(kind, _pretrained()) and _code(kind).interface


def own_attention(kind: type) -> bool:
    """Return whether modules of this class compute attention themselves."""
    if issubclass(kind, torch.nn.MultiheadAttention):
        return True
    if issubclass(kind, _pretrained()) or kind.__module__.startswith("torch."):
        return False
    code = _code(kind)
    if code.interface or not any(_makes_weights(name.lower()) for name in code.names):
        return False
    if "attention" in kind.__name__.lower() or "attn" in kind.__name__.lower():
        return True
    multiplies = code.names & _PRODUCTS or any(
        one.argrepr in ("@", "@=") for body in code.bodies for one in dis.get_instructions(body)
    )
    return bool(multiplies) and any(map(_is_attention_mask, code.parameters))


def _makes_weights(name: str) -> bool:
    """Return whether a name in code may be a function that makes attention weights."""
    if "log_softmax" in name or "logsoftmax" in name or "gumbel" in name:
        return False
    return "softmax" in name or name in ("scaled_dot_product_attention", "logsumexp")


def _is_attention_mask(parameter: str) -> bool:
    """Return whether a parameter may be an attention mask, not labels, costs or positions of something masked."""
    ends = parameter.endswith(("attention_mask", "attn_mask", "causal_mask"))
    return ends or parameter in ("mask", "masks") or "padding_mask" in parameter


@cache
def _pretrained() -> type:
    from transformers import PreTrainedModel

    return PreTrainedModel


class AttentionGroup(NamedTuple):
    """Attention modules that share a config: classes that call the registered function, and classes that do not."""

    calling: Counter[str]
    own: Counter[str]
    makes_masks: bool
    torchs: bool
    """Whether one of the `own` classes calls torch's scaled_dot_product_attention."""

    @property
    def loses_masks(self) -> bool:
        """True if the model gets masks from the interface, but none of its attention calls the registered function."""
        return self.makes_masks and bool(self.own) and not self.calling


def refusal(model: str, attention: AttentionGroup) -> str:
    """Return why a model cannot be used, and what to do."""
    torchs = attention.torchs and (
        " It calls torch's scaled_dot_product_attention, which attnbench.dispatch.torch_sdpa.redirect_sdpa redirects."
    )
    return (
        f"{model} computes attention by itself ({', '.join(attention.own)}): it would never call attnbench, and would "
        f"misread the masks that are made for attnbench. {OTHERWISE}{torchs or ''}"
    )


def attention_of(kinds: Iterator[type]) -> AttentionGroup:
    """Count the attention among classes of modules."""
    calling, own, makes_masks, torchs = Counter[str](), Counter[str](), False, False
    for kind in kinds:
        if calls_interface(kind):
            calling[kind.__name__] += 1
        elif own_attention(kind):
            own[kind.__name__] += 1
            torchs |= "scaled_dot_product_attention" in _code(kind).names
        makes_masks |= not kind.__module__.startswith("torch.") and _code(kind).makes_masks
    return AttentionGroup(calling, own, makes_masks, torchs)


def by_config(model: torch.nn.Module) -> list[tuple[Any, list[torch.nn.Module]]]:
    """Group the modules of a model by the config of the nearest Transformers model around them, or their own."""
    groups: dict[int, tuple[Any, list[torch.nn.Module]]] = {}

    def walk(module: torch.nn.Module, config: Any) -> None:
        if isinstance(module, _pretrained()):
            config = module.config
        groups.setdefault(id(config), (config, []))[1].append(module)
        for child in module.children():
            walk(child, config)

    walk(model, None)
    return list(groups.values())


_SEEN: WeakKeyDictionary[torch.nn.Module, dict[int, tuple[ref[Any], AttentionGroup]]] = WeakKeyDictionary()
_BY_CONFIG: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()
"""Models by the `id` of a config, which has no hash, as in `_SEEN`. An id is used again when its config is gone: so a
reference in `_SEEN` says whether the config is the same, and here the model is checked for the config."""


def remember(model: torch.nn.Module) -> None:
    """Remember which model has which configs, for graphs, in which only the config is known."""
    for config, _ in by_config(model):
        if config is not None:
            _BY_CONFIG[id(config)] = model


def attention_for(model: torch.nn.Module, config: Any) -> AttentionGroup:
    """Count the attention under a config in a model, or in the whole model if no part has that config; cached."""
    cached = _SEEN.setdefault(model, {})
    config_ref, attention = cached.get(id(config), (None, None))
    if config_ref is None or config_ref() is not config or attention is None:
        attention = _under(model, id(config)) or attention_of(type(one) for one in model.modules())
        if config is not None:
            cached[id(config)] = ref(config), attention
    return attention


def _under(model: torch.nn.Module, config_id: int) -> AttentionGroup | None:
    """Count the attention under the config with an `id`; None if the model has no such config."""
    modules = [one for config, some in by_config(model) if id(config) == config_id for one in some]
    return attention_of(type(one) for one in modules) if modules else None


@cache
def attention_in_modules(*names: str) -> AttentionGroup:
    """Count the attention among the classes of Python modules."""
    kinds: dict[type, None] = {}
    for name in names:
        for value in list(vars(sys.modules.get(name, ModuleType(name))).values()):
            if isinstance(value, type) and issubclass(value, torch.nn.Module):
                kinds[value] = None
    return attention_of(iter(kinds))


@cache
def attention_of_class(kind: Any) -> AttentionGroup:
    """Count the attention classes that a model of this class may have, before it is built.

    Classes are followed by name, without models of another config; if none has attention, the classes of the Python
    modules of the model are counted.
    """
    reached: dict[Any, None] = {kind: None}
    waiting: list[Any] = [kind]
    while waiting:
        builds: tuple[Any, ...] = _code(waiting.pop()).builds
        for one in builds:
            apart = issubclass(one, _pretrained()) and one.config_class is not kind.config_class
            if one not in reached and not apart and not one.__module__.startswith(_CORE):
                reached[one] = None
                waiting.append(one)
    attention = attention_of(iter(reached))
    if attention.calling or attention.own:
        return attention
    return attention_in_modules(*(base.__module__ for base in kind.__mro__ if not base.__module__.startswith(_CORE)))


def attention_of_config(config_id: int, module: str) -> AttentionGroup:
    """Count the attention under a config by its `id`; if no model has it, in modelling modules beside its class."""
    model = _BY_CONFIG.get(config_id)
    attention = None if model is None else _under(model, config_id)
    if attention is not None:
        return attention
    package = module.rpartition(".")[0]
    names = (name for name in list(sys.modules) if name.rpartition(".")[0] == package)
    return attention_in_modules(*sorted(name for name in names if name.rpartition(".")[2].startswith("modeling_")))


def compiled_layers(model: torch.nn.Module) -> bool:
    """Return whether a module of a model is compiled by itself, at any depth: it takes arrays, not descriptions."""
    optimized, waiting = torch._dynamo.OptimizedModule, [model]
    while waiting:  # asked for each mask, so without the names that `modules` makes
        module = waiting.pop()
        attributes = module.__dict__
        if attributes.get("_compiled_call_impl") is not None or isinstance(module, optimized):
            return True
        if "forward" in attributes and hasattr(attributes["forward"], "_torchdynamo_orig_callable"):
            return True
        waiting.extend([one for one in attributes["_modules"].values() if one is not None])
    return False
