"""Which attention modules of a Transformers model call the registered function, found from their code.

A model may accept an `attn_implementation`, get its masks from the mask interface of that name, and compute attention
itself, for masks of another form: MPT hides pairs that are True, Bloom adds the array to its scores. So classes are
inspected before anything is computed. A class calls the registered function if its code names an `AttentionInterface`;
it writes its own attention if it uses a softmax instead and has attention in its name, or has an attention mask as a
parameter and multiplies arrays with each other, which routers and quantizers do not.
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
    "torch",
    "transformers.modeling_",
    "transformers.generation",
    "transformers.integrations",
    "transformers.utils",
)
"""Prefixes of modules whose functions belong to no particular model."""
_DEPTH = 3
"""Depth of calls followed from a method: attention is often a function of the model's own module."""
OTHERWISE = (
    'Load it with attn_implementation="eager" (or "sdpa", if Transformers takes that); of a model in parts, name the '
    'parts, as in attn_implementation={"text_config": "attnbench", "vision_config": "eager"}.'
)
"""Advice for a model that writes its own attention."""


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
    found: list[Any] = []
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
                found.append(value)
                if depth < _DEPTH:
                    follow(value, depth + 1)

    for base in kind.__mro__:
        for value in () if base.__module__.startswith(_CORE) else vars(base).values():
            found.append(value)
            follow(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value, 0)
    makers = {name for name in vars(masking_utils) if name.startswith("create_")}
    calls = "ALL_ATTENTION_FUNCTIONS" in names or any(isinstance(value, AttentionInterface) for value in found)
    tables = [one for value in found if isinstance(value, dict) for one in value.values()]
    builds = (one for one in [*found, *tables] if isinstance(one, type) and issubclass(one, torch.nn.Module))
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
    if code.interface or not any(_of_weights(name.lower()) for name in code.names):
        return False
    named = "attention" in kind.__name__.lower() or "attn" in kind.__name__.lower()
    return named or (any(map(_of_attention_mask, code.parameters)) and _multiplies(code))


def _of_weights(name: str) -> bool:
    """Return whether a name in code may be a function that makes attention weights."""
    if "log_softmax" in name or "logsoftmax" in name or "gumbel" in name:
        return False
    return "softmax" in name or name in ("scaled_dot_product_attention", "logsumexp")


def _of_attention_mask(parameter: str) -> bool:
    """Return whether a parameter may be an attention mask, not labels, costs or positions of something masked."""
    return (
        parameter in ("mask", "masks")
        or parameter.endswith(("attention_mask", "attn_mask", "causal_mask"))
        or ("padding_mask" in parameter)
    )


_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "mm", "einsum", "tensordot", "scaled_dot_product_attention"})


def _multiplies(code: _Code) -> bool:
    """Return whether code multiplies arrays with each other, as queries with keys."""
    if code.names & _PRODUCTS:
        return True
    return any(one.argrepr in ("@", "@=") for body in code.bodies for one in dis.get_instructions(body))


@cache
def _pretrained() -> type:
    from transformers import PreTrainedModel

    return PreTrainedModel


class Attention(NamedTuple):
    """Attention modules that share a config: the classes that call what is registered, and those that do not."""

    calling: Counter[str]
    own: Counter[str]
    makes_masks: bool
    torchs: bool
    """Whether one of the `own` classes calls torch's scaled_dot_product_attention."""

    @property
    def loses_masks(self) -> bool:
        """True if the model gets masks from the interface and no attention of it calls the registered function."""
        return self.makes_masks and bool(self.own) and not self.calling


def refusal(model: str, attention: Attention) -> str:
    """Return why a model cannot be used, and what to do."""
    torchs = attention.torchs and (
        " It calls torch's scaled_dot_product_attention, which attnbench.dispatch.torch_sdpa.redirect_sdpa redirects."
    )
    return (
        f"{model} writes its own attention ({', '.join(attention.own)}): it would never call attnbench's, and would "
        f"take the masks made for it for something else. {OTHERWISE}{torchs or ''}"
    )


def attention_of(kinds: Iterator[type]) -> Attention:
    """Count the attention among classes of modules."""
    calling, own, makes_masks, torchs = Counter[str](), Counter[str](), False, False
    for kind in kinds:
        if calls_interface(kind):
            calling[kind.__name__] += 1
        elif own_attention(kind):
            own[kind.__name__] += 1
            torchs |= "scaled_dot_product_attention" in _code(kind).names
        makes_masks |= not kind.__module__.startswith("torch.") and _code(kind).makes_masks
    return Attention(calling, own, makes_masks, torchs)


def by_config(model: torch.nn.Module) -> list[tuple[Any, list[torch.nn.Module]]]:
    """Group the modules of a model by the config of the nearest Transformers model around them, or their own."""
    found: dict[int, tuple[Any, list[torch.nn.Module]]] = {}

    def walk(module: torch.nn.Module, config: Any) -> None:
        if isinstance(module, _pretrained()):
            config = module.config
        found.setdefault(id(config), (config, []))[1].append(module)
        for child in module.children():
            walk(child, config)

    walk(model, None)
    return list(found.values())


_SEEN: WeakKeyDictionary[torch.nn.Module, dict[int, tuple[ref[Any], Attention]]] = WeakKeyDictionary()
_BY_CONFIG: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()
"""Models by the `id` of a config, which has no hash, as in `_SEEN`. An id is used again when its config is gone: so a
reference in `_SEEN` says whether the config is the same, and here the model is checked for the config."""


def remember(model: torch.nn.Module) -> None:
    """Remember which model has which configs, for graphs, in which only the config is known."""
    for config, _ in by_config(model):
        if config is not None:
            _BY_CONFIG[id(config)] = model


def attention_for(model: torch.nn.Module, config: Any) -> Attention:
    """Count the attention under a config in a model, or in all of it if no part has that config; cached."""
    seen = _SEEN.setdefault(model, {})
    of, attention = seen.get(id(config), (None, None))
    if of is None or of() is not config or attention is None:
        attention = _under(model, id(config)) or attention_of(type(one) for one in model.modules())
        if config is not None:
            seen[id(config)] = ref(config), attention
    return attention


def _under(model: torch.nn.Module, config_id: int) -> Attention | None:
    """Count the attention under the config with an `id`; None if the model has no such config."""
    modules = [one for config, some in by_config(model) if id(config) == config_id for one in some]
    return attention_of(type(one) for one in modules) if modules else None


@cache
def attention_in_modules(*names: str) -> Attention:
    """Count the attention among the classes of Python modules."""
    kinds: dict[type, None] = {}
    for name in names:
        for value in list(vars(sys.modules.get(name, ModuleType(name))).values()):
            if isinstance(value, type) and issubclass(value, torch.nn.Module):
                kinds[value] = None
    return attention_of(iter(kinds))


@cache
def attention_of_class(kind: type) -> Attention:
    """Count the attention classes that a model of this class may have, before it is built.

    Classes are followed by name, without models of another config; if none has attention, the classes of the Python
    modules of the model are counted.
    """
    reached: dict[type, None] = {kind: None}
    waiting = [kind]
    while waiting:
        for one in _code(waiting.pop()).builds:
            apart = issubclass(one, _pretrained()) and _config_class(one) is not _config_class(kind)
            if one not in reached and not apart and not one.__module__.startswith(_CORE):
                reached[one] = None
                waiting.append(one)
    found = attention_of(iter(reached))
    if found.calling or found.own:
        return found
    return attention_in_modules(*(base.__module__ for base in kind.__mro__ if not base.__module__.startswith(_CORE)))


def _config_class(kind: Any) -> Any:
    return kind.config_class


def attention_of_config(config_id: int, module: str) -> Attention:
    """Count the attention under a config by its `id`; if no model has it, in modelling modules beside its class."""
    model = _BY_CONFIG.get(config_id)
    found = None if model is None else _under(model, config_id)
    if found is not None:
        return found
    package = module.rpartition(".")[0]
    names = (name for name in list(sys.modules) if name.rpartition(".")[0] == package)
    return attention_in_modules(*sorted(name for name in names if name.rpartition(".")[2].startswith("modeling_")))


def compiled_layers(model: torch.nn.Module) -> bool:
    """Return whether a module of a model is compiled by itself, at any depth: it takes arrays, not descriptions."""
    optimized, waiting = torch._dynamo.OptimizedModule, [model]
    while waiting:  # asked for each mask, so without the names that `modules` makes
        module = waiting.pop()
        own = module.__dict__
        if own.get("_compiled_call_impl") is not None or isinstance(module, optimized):
            return True
        if "forward" in own and hasattr(own["forward"], "_torchdynamo_orig_callable"):
            return True
        waiting.extend([one for one in own["_modules"].values() if one is not None])
    return False
